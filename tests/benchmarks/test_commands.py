"""Every command of `python -m benchmarks` runs on small data and writes its figures."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from aggregator.http.page_folders import page_folder
from benchmarks.__main__ import GROUPS, cli, loaded
from benchmarks.cost.train import OURS, Head, reached
from benchmarks.cost.uploads import databases
from benchmarks.device import features, predict, start, wasm
from benchmarks.device.features import ARRAYS, COLUMNS, _rows
from benchmarks.device.features import OURS as DRY_RUN
from benchmarks.device.measurement import Command, Cost, in_turns, median, ratio
from benchmarks.device.measurement import run as run_once
from benchmarks.fleets import calibration_error
from protocol.errors import ProtofleetError
from tests.benchmarks.feature_factory import domain, features_of_digits, fill_cache, report_of
from tests.support.databases.postgresql import PostgreSQL, needs_postgresql
from tests.support.network.brokers import needs_mosquitto
from tests.support.programs import find_program

NODE = find_program("node")
SMALL = ("--image-size", "32", "--repetitions", "1")


needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel's record of a process is read as on Linux"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "figures.json"


@pytest.fixture
def postgresql() -> Iterator[PostgreSQL]:
    with PostgreSQL() as server:
        yield server


def run(file: Path, *arguments: str) -> dict[str, Any]:
    """Run a command, and return what it wrote."""
    return report_of(cli, file, *arguments)


def test_help_lists_what_a_user_compares_first_without_importing_it() -> None:
    text = CliRunner().invoke(cli, ["--help"]).output
    for group, (_, entries) in GROUPS.items():
        for name, entry in entries.items():
            assert (f"{group} {name} " in text) == entry.is_first
            assert name in CliRunner().invoke(cli, [group, "--help"]).output


@pytest.mark.parametrize("group", GROUPS)
def test_quick_sets_parameters_that_commands_have(group: str) -> None:
    for name, entry in GROUPS[group][1].items():
        command = loaded(group, name)
        assert entry.quick.keys() <= {parameter.name for parameter in command.params}
        assert any(parameter.name == "quick" for parameter in command.params) == bool(entry.quick)


@needs_mosquitto
def test_start(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A started device takes less memory than all of its libraries: only its jobs import those that compute."""
    bare = "bare libraries"
    monkeypatch.setattr(
        start, "RIVALS", {bare: start.RIVALS[bare]}
    )  # PyTorch would take a gigabyte of memory
    report = run(file, "device", "start", "--repetitions", "1")
    ours, rival = (report["runs"][name][0] for name in ("edge-client", bare))
    assert 0.3 < ours["memory_bytes"] / rival["memory_bytes"] <= 1
    sizes = report["installed_bytes"]
    assert sizes[bare] < sizes["edge-client"] < sizes["PyTorch and timm"] / 8


def once(programs: dict[str, Callable[[], Command]], **_: Any) -> dict[str, list[Cost]]:
    """Run the programs that start fast, without a warm-up."""
    few = {name: make for name, make in programs.items() if "PyTorch" not in name}
    return in_turns(few, repetitions=1, warm_up=False)


def test_predict(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "in_turns", once)
    report = run(file, "device", "predict", "--model", "test_resnet", "--images", "3", *SMALL)
    assert [row[0] for row in report["tables"][0]["rows"]] == ["edge-client predict", "ONNX Runtime"]


def test_features(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "in_turns", once)
    report = run(file, "device", "features", "--model", "test_resnet", "--images", "20", "30", *SMALL)
    assert {name: len(each) for name, each in report["runs"]["test_resnet"]["30"].items()} == {
        "edge-client dry-run": 1,
        "ONNX Runtime, arrays in memory": 1,
        "ONNX Runtime, a loop": 1,
    }


def test_rates_of_features_are_without_the_start() -> None:
    """The arrays are no whole program."""
    few = {DRY_RUN: [Cost(1.0, 2.0, 10**8)], ARRAYS: [Cost(0.5, 0.5, 10**8)]}
    many = {DRY_RUN: [Cost(10.0, 20.0, 10**8)], ARRAYS: [Cost(5.0, 9.5, 10**8)]}
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in _rows({100: few, 1000: many})]
    assert [row["images/s"] for row in rows] == [100, 200]
    assert [row["rate, ours to this"] for row in rows] == [1, 0.5]
    assert [row["CPU ms an image"] for row in rows] == [20, 10]
    assert [row["seconds, times ours"] for row in rows] == [1, None]


def write_photos(folder: Path) -> str:
    """Write ten photos to calibrate 8 bits on; return the folder."""
    folder.mkdir()
    for number in range(10):
        grid = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        image = Image.fromarray(grid).resize((48, 48), Image.Resampling.BICUBIC)
        image.save(folder / f"{number}.png")
    return str(folder)


def test_int8(file: Path, tmp_path: Path) -> None:
    network = (
        "--network",
        "test_resnet",
        "--image-size",
        "48",
        "--photos",
        write_photos(tmp_path / "photos"),
    )
    report = run(file, "device", "int8", *network, "--repetitions", "2")
    ((row,),) = (table["rows"] for table in report["tables"])
    cells = dict(zip(report["tables"][0]["columns"], row, strict=True))
    assert 0.9 < float(cells["worst cosine"]) <= float(cells["median"])
    assert [len(turns) for turns in report["seconds_of_a_batch"]["test_resnet-48"].values()] == [2, 2]


@pytest.mark.skipif(NODE is None, reason="node is not installed: apt-get install nodejs npm")
@pytest.mark.skipif(
    page_folder() is None, reason="the page's libraries are missing: python -m dashboard.vendor"
)
def test_wasm(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node and Chromium run the same jobs; Chromium decodes JPEG, too."""
    monkeypatch.setattr(wasm, "PHOTOS", {"a": (64, 48)})
    network = (
        "--network",
        "test_resnet",
        "--image-size",
        "48",
        "--photos",
        write_photos(tmp_path / "photos"),
    )
    report = run(file, "device", "wasm", *network, "--repetitions", "2")
    runs = report["milliseconds"]
    assert {len(turns) for jobs in runs.values() for turns in jobs.values()} == {2}
    assert "test_resnet, a: features" in runs["Node"]
    if find_program("chromium"):
        assert runs["Chromium"].keys() - runs["Node"].keys() == {"test_resnet, a: JPEG"}
    assert [len(table["rows"]) for table in report["tables"]] == [len(runs)] * 3


@needs_mosquitto
def test_every_device_of_a_fleet_has_the_head(file: Path) -> None:
    """The command fails if a submission or an evaluation is lost."""
    (one,) = run(file, "fleet", "size", "--devices", "4")["runs"]
    assert one["devices"] == 4
    assert one["aggregator_peak_bytes"] >= one["before_bytes"] > 0


@needs_mosquitto
def test_idle_connections_come_back_after_a_restart_of_the_broker(file: Path) -> None:
    phases = run(file, "fleet", "size", "--idle", "3", "--minutes", "0.01")["runs"]
    assert [phase["connected"] for phase in phases] == [0, 3, 3, 3, 3]
    assert phases[3]["attempts"] >= 3


@needs_mosquitto
def test_all_devices_are_served_after_each_storm(file: Path) -> None:
    """After a kill of the broker a device connects again; after one of the aggregator it only asks again."""
    uploads, aggregator, rest = run(file, "fleet", "storm", "--devices", "4", "--processes", "1")["runs"]
    assert uploads["frames"] >= 4 <= aggregator["frames"]
    assert (aggregator["attempts"], rest["attempts"] >= 4) == (0, True)


@needs_linux
def test_memory_of_the_programs_at_rest(file: Path) -> None:
    """Each program is found, and those beside `serve` are smaller than it."""
    (one,) = run(file, "fleet", "memory", "--rest", "0", "--repetitions", "1")["runs"]["aggregator"]
    assert one.keys() == {"serve", "http", "embedded broker", "supervisor", "all"}
    assert one["all"] == sum(size for name, size in one.items() if name != "all")
    assert one["serve"] == sorted(one.values())[-2]


def test_few(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For two and for all classes, balanced and not, for each size that the data has."""
    fill_cache(tmp_path, monkeypatch, {"mnist": features_of_digits(train=800, test=200)})
    sizes = ("--images", "1", "--images", "8", "--images", "5000")
    runs = run(file, "accuracy", "few", "--data", "mnist", "--seed", "0", *sizes)["runs"]
    assert [(each["classes"], each["images"], each["rare"]) for each in runs] == [
        (2, 1, 1), (2, 1, 1), (2, 8, 8), (2, 8, 2), (10, 1, 1), (10, 1, 1), (10, 8, 8), (10, 8, 2),
    ]  # fmt: skip
    assert all(0 <= each["head"] <= 1 for each in runs)


def test_calibration_error_is_the_gap_of_confidence_and_accuracy() -> None:
    """Three of four answers at 73.1 % are correct."""
    logits = np.array([[1, 0]] * 4, dtype=np.float32)
    assert calibration_error(logits, np.array([0, 0, 0, 1])) == pytest.approx(0.75 - 0.7311, abs=1e-4)


def test_train(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's epochs are divided among the turns."""
    fill_cache(tmp_path, monkeypatch, {"mnist": domain(0, classes=4, images=400)})
    (one,) = run(file, "cost", "train", "--data", "mnist", "--epochs", "3", "--turns", "2")["runs"]
    assert len(one["recipe"]) == 3
    assert [head["wall_s"] for head in one["recipe"]] == sorted(head["wall_s"] for head in one["recipe"])
    assert {name: len(heads) for name, heads in one["ours"].items()} == dict.fromkeys(OURS, 2)
    assert min(heads[0]["accuracy"] for heads in one["ours"].values()) > 0.9


def test_the_recipe_has_reached_its_accuracy_at_its_first_head_that_is_as_accurate() -> None:
    heads = [
        Head(accuracy=accuracy, wall_s=float(second), cpu_s=float(second))
        for second, accuracy in enumerate((0.5, 0.8, 0.7, 0.75))
    ]
    assert reached(heads).wall_s == 1


@needs_mosquitto
def test_ingest(file: Path) -> None:
    """The aggregator accepts every submission."""
    arguments = ("--devices", "2", "--megabytes", "0.2", "--load", "0.8", "--repetitions", "1")
    written = run(file, "cost", "ingest", *arguments)
    (one,) = written["runs"]["0.2"]
    assert one["submissions"] == 4
    assert one["bytes"] == pytest.approx(0.8e6, rel=0.05)
    assert min(one["wall_s"], one["cpu_s"]) > 0
    assert [row[0] for row in written["tables"][0]["rows"]] == ["0.2"]


def test_stored(file: Path) -> None:
    """Each call is timed, and every transaction."""
    written = run(file, "cost", "stored", "--submissions", "20")
    assert {"start, without the connection", "plan and start a head of all", "transactions"} <= set(
        written["runs"]["20"]
    )


@needs_postgresql
def test_databases(file: Path, postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    """It deletes what it has written."""
    monkeypatch.setattr(databases, "ENOUGH_S", 0.01)
    written = run(file, "cost", "databases", "--store", postgresql.url, "--devices", "20")
    assert postgresql.execute("SELECT 1 FROM pg_namespace WHERE nspname LIKE 'fleet%'") == []
    assert len(written["tables"][0]["rows"]) == len(written["runs"]["20"]) == 6


@needs_linux
def test_programs_run_in_turns_and_their_first_run_does_not_count() -> None:
    order: list[str] = []

    def program(name: str, text: str) -> list[str]:
        order.append(name)
        return ["-c", text]

    runs = in_turns(
        {"small": lambda: program("small", "pass"), "large": lambda: program("large", "x = b'x' * 10**8")},
        repetitions=2,
    )

    assert order == ["small", "large"] * 3
    assert [len(each) for each in runs.values()] == [2, 2]
    assert median(runs["large"], "memory_bytes") - median(runs["small"], "memory_bytes") > 0.9e8
    assert ratio(runs["large"], runs["small"], "memory_bytes") > 2


@needs_linux
def test_a_program_that_fails_is_reported_with_its_last_lines() -> None:
    with pytest.raises(ProtofleetError, match="no such backbone"):
        run_once(["-c", "raise SystemExit('no such backbone')"])
