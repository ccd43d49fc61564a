"""Graphs of algorithms of rounds, each exported once in a run of pytest, whose processes share them."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.config.schema import Client, TaskFile
from aggregator.config.task_file import load_task
from aggregator.graphs.program_export import Graphs, build
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import CompiledGraphs
from aggregator.tasks import graph_cache
from aggregator.tasks.task_preparation import checked_backbone
from protocol.storage.folder_lock import FolderLock
from protocol.wire.messages import BlobRef

EXPORT_TIMEOUT_S = 600.0

shared_folder: Path | None = None
"""Set by `tests/conftest.py`."""


def exported(algorithm: RoundAlgorithm, *, feature_size: int, num_classes: int, seed: int) -> Graphs:
    """Return the graphs that `build` returns for these arguments."""
    classes = tuple(map(str, range(num_classes)))
    task = TaskFile(classes=classes, backbones=("b",), algorithm=algorithm.name, client=Client(seed=seed))
    task = msgspec.structs.replace(task, **{algorithm.name: algorithm})
    with _graphs_of(task, feature_size) as (store, compiled):
        (references,) = compiled.graphs.values()
        return Graphs(**{role: store.blobs.read(graph.digest) for role, graph in references.items()})


def provide(task_file: Path, state: Path) -> None:
    """Store the graphs of a task in a state folder, where an aggregator finds them when it starts."""
    task, backbones = load_task(task_file)
    feature_size = sum(checked_backbone(path).feature_size for path in backbones)
    with closing(open_store(state)) as given, _graphs_of(task, feature_size) as (store, compiled):
        for graph in next(iter(compiled.graphs.values())).values():
            given.blobs.put(store.blobs.read(graph.digest))
        given.facts.put(CompiledGraphs({**graph_cache.known_graphs(given), **compiled.graphs}))


@contextmanager
def _graphs_of(task: TaskFile, feature_size: int) -> Iterator[tuple[Store, CompiledGraphs]]:
    """Lock the store of a task's graphs, export them if none has before, and return both."""
    assert shared_folder is not None
    key = graph_cache.graphs_key(task, feature_size)
    folder = shared_folder / "graphs" / key
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder, "export.lock")
    assert lock.take(wait_s=EXPORT_TIMEOUT_S)
    try:
        with closing(open_store(folder / "state")) as store:
            if (compiled := store.facts.get(CompiledGraphs)) is None:
                compiled = CompiledGraphs({key: _export(task, feature_size, store)})
                store.facts.put(compiled)
            yield store, compiled
    finally:
        lock.release()


def _export(task: TaskFile, feature_size: int, store: Store) -> dict[str, BlobRef]:
    """Export graphs in this process, which takes half as long as in one that has not imported torch."""
    from tests.support.graphs.torch_networks import listed_operators

    assert task.learning is not None
    classes, seed = len(task.classes), task.client.seed
    with listed_operators():
        graphs = build(task.learning, feature_size=feature_size, num_classes=classes, seed=seed)
    return {role: store.put_blob(data, f"{role}.onnx") for role, data in vars(graphs).items()}
