"""Exports the ONNX graphs of a task with rounds, once, as a job with torch.

The aggregator stores them as blobs under a digest of everything that they depend on.
"""

import hashlib
import logging
import queue
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from aggregator.config.schema import TaskFile
from aggregator.job_processes import JobEnded, JobEvent, JobRunner
from aggregator.storage.store import Store
from aggregator.storage.stored_values import CompiledGraphs, TaskPreparation
from aggregator.training.jobs import CompileJob, Result, Workspace
from aggregator.training.trainer import Finished, finished, start
from protocol.errors import ConfigError
from protocol.log import event
from protocol.retry_delay import retry_delay_s
from protocol.storage.blobstore import write_atomically
from protocol.wire.messages import BlobRef

log = logging.getLogger(__name__)

MAX_EXPORTS = 4
"""Exports that are killed before the program ends with an error, and its service starts it again."""

ROLES = ("init", "step", "project", "head")

_NOT_IN_GRAPHS = {"rounds", "epochs", "batch_size", "max_sets"}


def run(job: CompileJob, workspace: Workspace) -> Result:
    """Export the graphs of a job to files; raises ProtofleetError if a graph differs from PyTorch."""
    from aggregator.graphs.program_export import build

    begun_s = time.perf_counter()
    graphs = build(job.method, feature_size=job.feature_size, num_classes=job.num_classes, seed=job.seed)
    for role in ROLES:
        write_atomically(workspace.folder / f"{role}.onnx", getattr(graphs, role))
    return Result(metrics={"seconds": time.perf_counter() - begun_s})


def cached_graphs(task: TaskFile, *, feature_size: int, store: Store) -> dict[str, BlobRef]:
    """Return the graphs of a task with rounds by role, exported if they are not stored yet.

    `feature_size` is L, the sum over all backbones. Raises ConfigError if the export failed.
    """
    key = graphs_key(task, feature_size)
    compiled = known_graphs(store)
    known = compiled.get(key)
    if known is not None and all(store.blobs.is_whole(graph.digest) for graph in known.values()):
        return dict(known)
    sizes = {"features": feature_size, "classes": len(task.classes)}
    event(log, logging.INFO, "exporting graphs, once for this task", algorithm=task.algorithm, **sizes)
    job = CompileJob(
        algorithm=task.algorithm,
        settings=msgspec.to_builtins(task.method),
        feature_size=feature_size,
        num_classes=len(task.classes),
        seed=task.client.seed,
    )
    store.facts.put(TaskPreparation(task.algorithm))
    try:
        result = _run_job(job, store, timeout_s=task.training.timeout_s)
    finally:
        store.facts.delete(TaskPreparation)
    made = {role: store.put_file(_folder_of(store) / job.name / f"{role}.onnx") for role in ROLES}
    store.facts.put(CompiledGraphs({**compiled, key: made}))
    size_bytes = sum(graph.size_bytes for graph in made.values())
    event(log, logging.INFO, "exported graphs", seconds=result.metrics["seconds"], bytes=size_bytes)
    return made


def known_graphs(store: Store) -> Mapping[str, Mapping[str, BlobRef]]:
    compiled = store.facts.get(CompiledGraphs)
    return compiled.graphs if compiled is not None else {}


def _folder_of(store: Store) -> Path:
    return store.folder / "graphs"  # a training may run in the other folder


def _run_job(job: CompileJob, store: Store, *, timeout_s: float) -> Result:
    """Wait for a job's result, and repeat a job that was killed; an interrupt ends the job as well."""
    for failures in range(MAX_EXPORTS):
        if (outcome := _run_once(job, store, timeout_s)).result is not None:
            return outcome.result
        if not outcome.is_killed or failures + 1 == MAX_EXPORTS:
            break
        delay_s = retry_delay_s(failures)
        event(log, logging.ERROR, "exporting graphs failed", reason=outcome.reason, retry=f"in {delay_s:g} s")
        time.sleep(delay_s)
    folder = _folder_of(store) / job.name
    raise ConfigError(f"cannot export the graphs of {job.algorithm}: {outcome.reason}; see {folder}")


def _run_once(job: CompileJob, store: Store, timeout_s: float) -> Finished:
    events: queue.SimpleQueue[JobEvent] = queue.SimpleQueue()
    runner = JobRunner(events.put)
    try:
        start(runner, job, _folder_of(store), blobs=store.blobs.location, timeout_s=timeout_s)
        while not isinstance(ended := events.get(), JobEnded):
            pass
    finally:
        runner.stop()
    return finished(ended)


def graphs_key(task: TaskFile, feature_size: int) -> str:
    """Return a digest of the algorithm and its version, and of the settings and sizes that the graphs contain.

    Settings of the rounds are left out, and so are the versions of libraries, with which the stored graphs stay valid.
    """
    algorithm = task.learning
    settings: dict[str, str | float | None] = msgspec.to_builtins(algorithm)
    entering = (
        task.algorithm,
        0 if algorithm is None else algorithm.version,
        sorted((name, value) for name, value in settings.items() if name not in _NOT_IN_GRAPHS),
        feature_size,
        len(task.classes),
        task.client.seed,
    )
    return hashlib.sha256(msgspec.msgpack.encode(entering)).hexdigest()
