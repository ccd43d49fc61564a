"""The key of a task's graphs changes with what changes the graphs."""

import contextlib
import gc
import shutil
import time
from collections.abc import Callable, Iterator
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


@pytest.fixture(autouse=True)
def no_finalizers() -> Iterator[None]:
    """Let no garbage of earlier tests be collected: formatting a warning about it parses code while code is parsed.

    Python 3.11 raises SystemError then.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the aggregator's code, which the key is derived from."""
    for room in ("algorithms", "graphs"):
        shutil.copytree(graph_cache.PACKAGE / room, tmp_path / room)
    monkeypatch.setattr(graph_cache, "PACKAGE", tmp_path)
    return tmp_path


def key(task: TaskFile = FILE) -> str:
    return graph_cache._key(task, 16)


def edit(file: Path, change: Callable[[str], str]) -> None:
    before = file.read_text(encoding="utf-8")
    assert change(before) != before
    file.write_text(change(before), encoding="utf-8")


def test_comments_docstrings_and_formatting_are_left_out(package: Path) -> None:
    """An edit of them would restart the rounds of a fleet."""
    before = key()
    edit(package / "algorithms" / "fedpcl_step.py", lambda text: f"# A comment.\n{text}\n\n# Another one.\n")
    edit(package / "graphs" / "tracing.py", lambda text: text.replace('"""Traces an', '"""Writes an'))
    edit(package / "algorithms" / "layers.py", lambda text: text.replace("(", "(  ").replace("(  )", "()"))
    assert key() == before


@pytest.mark.parametrize(
    "file",
    ["algorithms/fedtc/train_head.py", "algorithms/fpl.py", "graphs/head_export.py", "graphs/parity.py"],
)
def test_code_that_makes_no_graph_of_the_task_is_left_out(package: Path, file: str) -> None:
    before = key()
    edit(package / file, lambda text: f"{text}\nUNUSED = 1\n")
    assert key() == before


@pytest.mark.parametrize(
    "file",
    ["algorithms/fedpcl.py", "algorithms/fedpcl_step.py", "algorithms/layers.py", "graphs/tracing.py",
     "graphs/program_export.py", "graphs/optimizer_tiling.py"],
)  # fmt: skip
def test_code_of_the_graphs_enters(package: Path, file: str) -> None:
    """Code that a function imports enters too."""
    before = key()
    edit(package / file, lambda text: f"{text}\nENTERS = 1\n")
    assert key() != before


def test_code_of_imported_packages_enters(package: Path) -> None:
    """Of a package that is imported itself, what its `__init__.py` has."""
    task = replace(FILE, algorithm="fpl")
    keys, folder = [key(task)], package / "algorithms"
    for file in ("clustering/finch.py", "fpl.py", "clustering/__init__.py"):
        edit(folder / file, lambda text: f"{text}\nfrom aggregator.algorithms import clustering\n")
        keys.append(key(task))
    assert len(set(keys)) == len(keys)


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
