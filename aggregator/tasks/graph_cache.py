"""The graphs that devices run, made once for a task: by `python -m aggregator.tasks.graph_cache JOB.json`, with torch.

The daemon keeps them as blobs, and their names under a key of all that enters, so that a restart makes no others.
"""

import hashlib
import logging
import queue
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from aggregator.config.schema import TaskFile
from aggregator.storage.facts import CompiledGraphs
from aggregator.storage.store import Store
from aggregator.training.jobs import CompileJob, Result, run_as_program
from aggregator.training.runner import Finished, Progress, Trainer
from protocol.errors import ConfigError, ProtofleetError
from protocol.storage.blobstore import state_errors, write_atomically
from protocol.wire.messages import BlobRef

log = logging.getLogger(__name__)

ROLES = ("init", "step", "project", "head")

_NOT_IN_GRAPHS = {"rounds", "epochs", "max_sets", "sets"}


def run(job: CompileJob) -> Result:
    """Make the graphs, and write them.

    Raises:
        ProtofleetError: the task has no rounds, or a graph differs from torch.
    """
    from aggregator.graphs.program_export import build

    if job.task_file.learning is None:
        raise ProtofleetError(f"{job.task_file.algorithm} has no graphs")
    begun_s = time.perf_counter()
    graphs = build(
        job.task_file.learning,
        feature_size=job.feature_size,
        num_classes=len(job.task_file.classes),
        seed=job.task_file.client.seed,
    )
    for role in ROLES:
        write_atomically(Path(job.folder) / f"{role}.onnx", getattr(graphs, role))
    return Result(metrics={"seconds": time.perf_counter() - begun_s})


def graphs_of(task: TaskFile, *, feature_size: int, store: Store) -> dict[str, BlobRef]:
    """The graphs of a task, by role: those in the store, or else new ones.

    Args:
        task: one that is learned in rounds.
        feature_size: L, of all backbones together.
        store: gets them.

    Raises:
        ConfigError: they cannot be made.
        StateError: they cannot be kept.
    """
    key = _key(task, feature_size)
    compiled = known_graphs(store)
    known = compiled.get(key)
    if known is not None and all(graph.digest in store.blobs for graph in known.values()):
        return dict(known)
    log.info(
        "making the graphs of %s for %d features and %d classes; this takes a while, once",
        *(task.algorithm, feature_size, len(task.classes)),
    )
    job = CompileJob(
        task_file=task, feature_size=feature_size, folder=str(store.folder / "training" / "graphs")
    )
    result = _done(job, store.folder / "training")
    made = {role: _kept(Path(job.folder) / f"{role}.onnx", store) for role in ROLES}
    store.facts.put(CompiledGraphs({**compiled, key: made}))
    size_kb = sum(graph.size_bytes for graph in made.values()) / 1000
    log.info("made the graphs in %.1f s: %.0f kB together", result.metrics["seconds"], size_kb)
    return made


def known_graphs(store: Store) -> Mapping[str, Mapping[str, BlobRef]]:
    """All graphs that the store knows, of whatever task."""
    compiled = store.facts.get(CompiledGraphs)
    return compiled.graphs if compiled is not None else {}


def _done(job: CompileJob, folder: Path) -> Result:
    """The result of a job, once it is there; when interrupted, the job ends as well."""
    events: queue.SimpleQueue[Progress | Finished] = queue.SimpleQueue()
    trainer = Trainer(folder, on_event=events.put)
    try:
        trainer.start(job)
        while not isinstance(event := events.get(), Finished):
            log.debug("%s", event.figures)
    finally:
        trainer.stop()
    if event.result is None:
        raise ConfigError(
            f"cannot make the graphs of {job.task_file.algorithm}: {event.reason}; more in {job.folder}"
        )
    return event.result


def _kept(file: Path, store: Store) -> BlobRef:
    with state_errors(file):
        data = file.read_bytes()
    return BlobRef(digest=store.blobs.put(data), size_bytes=len(data), name=file.name)


def _key(task: TaskFile, feature_size: int) -> str:
    """A digest of all that makes the graphs what they are: settings, sizes, and the code that writes them.

    What says how often, how long and with whom is learned is in no graph: the fleet goes on where it was.
    """
    here = Path(__file__).parents[1]
    code = sorted(file for room in ("graphs", "algorithms") for file in (here / room).glob("*.py"))
    settings: dict[str, str | float | None] = msgspec.to_builtins(task.learning)
    entering = (
        task.algorithm,
        sorted((name, value) for name, value in settings.items() if name not in _NOT_IN_GRAPHS),
        feature_size,
        len(task.classes),
        task.client.seed,
        *(hashlib.sha256(file.read_bytes()).digest() for file in code),
    )
    return hashlib.sha256(msgspec.msgpack.encode(entering)).hexdigest()


if __name__ == "__main__":
    run_as_program(CompileJob, run)
