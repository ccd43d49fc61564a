"""The key of a task's graphs changes with what changes the graphs."""

import contextlib
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from aggregator.algorithms.fedpcl import FedPCL
from aggregator.config.schema import Client, TaskFile
from aggregator.status.collect import collect_status
from aggregator.storage.open_store import open_store
from aggregator.tasks import graph_cache
from aggregator.training.jobs import CompileJob, Result
from aggregator.training.runner import Finished
from protocol.errors import ConfigError
from tests.support.messages.submissions import SERVED
from tests.unit.aggregator.status.stores import rendered

FILE = TaskFile(classes=("a", "b"), backbones=("b",), algorithm="fedpcl")


def key(task: TaskFile = FILE) -> str:
    return graph_cache.graphs_key(task, 16)


def test_version_of_the_algorithm_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    before, of_fpl = key(), key(replace(FILE, algorithm="fpl"))
    monkeypatch.setattr(FedPCL, "version", FedPCL.version + 1)
    assert key() != before
    assert key(replace(FILE, algorithm="fpl")) == of_fpl


def test_settings_and_sizes_enter() -> None:
    """Except for those that no graph contains."""
    others = [
        FILE,
        replace(FILE, classes=("a", "b", "c")),
        replace(FILE, client=Client(seed=1)),
        replace(FILE, fedpcl=FedPCL(projection_size=8)),
        replace(FILE, algorithm="fpl"),
    ]
    assert len({key(task) for task in others}) == len(others)
    assert key(replace(FILE, fedpcl=FedPCL(rounds=7, epochs=3, batch_size=8))) == key()


def test_killed_export_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is repeated a few times with growing delays; one that fails by itself is not."""
    job, waited = CompileJob(task_file=FILE, feature_size=16, folder=str(tmp_path)), list[float]()
    monkeypatch.setattr(time, "sleep", waited.append)
    killed, made = Finished(job, None, "killed", is_killed=True), Finished(job, Result(metrics={}))

    def play(*outcomes: Finished) -> Result:
        left = list(outcomes)
        monkeypatch.setattr(graph_cache, "_run_once", lambda *_: left.pop(0))
        return graph_cache._run_job(job, tmp_path)

    assert play(killed, killed, made) == made.result
    assert waited == [10.0, 20.0]
    with pytest.raises(ConfigError, match="cannot export the graphs of fedpcl: killed"):
        play(*[killed] * 4)
    with pytest.raises(ConfigError, match="differs"):
        play(Finished(job, None, "a graph differs"))


def test_status_names_the_task_whose_graphs_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it shows the task before; no longer after an export that fails."""
    with contextlib.closing(open_store(tmp_path, lock=True)) as store:
        store.facts.put(SERVED)

        def export(*_: object) -> Result:
            status = collect_status(store)
            assert (status.algorithm, status.preparing) == (SERVED.algorithm, "fedpcl")
            assert "a task with fedpcl: its graphs are exported" in rendered(status)
            raise ConfigError("cannot export")

        monkeypatch.setattr(graph_cache, "_run_job", export)
        with pytest.raises(ConfigError, match="cannot export"):
            graph_cache.cached_graphs(FILE, feature_size=16, store=store)
        assert collect_status(store).preparing == ""
