"""The command line of edge-client: precedence of options, and `status`."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from edge_client.cli import cli
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import (
    CurrentTask,
    DeviceName,
    ExtractionProgress,
    Heads,
    InstalledHead,
    LeftOut,
    Problems,
    SubmissionReport,
)
from tests.support.devices.device_factory import write_images
from tests.support.graphs.backbones import tiny_backbone


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the state of two devices, and a configuration file that names the first."""
    for name in ("one", "two"):
        DeviceState(tmp_path / name).set(DeviceName(name))
    (tmp_path / "settings.toml").write_text('state = "one"\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PROTOFLEET_STATE", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        (["status", "--state", "one"], "one"),
        (["--state", "one", "status"], "one"),
        (["--config", "settings.toml", "status"], "one"),
        (["--state", "one", "status", "--state", "two"], "two"),
        (["--config", "settings.toml", "status", "--state", "two"], "two"),
    ],
)
def test_options_before_the_command_apply_to_it(here: Path, arguments: list[str], device: str) -> None:
    """Options after it take precedence."""
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, (done.output, here)
    assert done.output.startswith(f"device     {device}, ")


@pytest.mark.usefixtures("here")
def test_options_take_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds before and after the command's name."""
    monkeypatch.setenv("PROTOFLEET_STATE", "two")
    assert CliRunner().invoke(cli, ["status"]).output.startswith("device     two, ")
    assert CliRunner().invoke(cli, ["--state", "one", "status"]).output.startswith("device     one, ")


def _status(*options: str) -> str:
    return CliRunner().invoke(cli, ["status", "--state", "one", *options]).output


def test_status_shows_whether_the_submission_was_received(here: Path) -> None:
    """If it was not, the status shows what prevents it."""
    state = DeviceState(here / "one")
    report = SubmissionReport(size_bytes=10)
    item = state.outbox.keep("submission", b"submission", task=b"t" * 32, about="", facts=(report,))
    state.set(Problems({"upload": "the aggregator has no space"}))
    output = _status()
    assert "submission 10 bytes, not received yet" in output
    assert "problem    the aggregator has no space" in output
    state.outbox.receive(item.digest)
    state.set(Problems())
    output = json.loads(_status("--json"))
    assert (output["submission"], output["received"], output["problem"]) == (item.digest.hex(), True, "")


@pytest.mark.parametrize(
    ("progress", "running", "shown"),
    [
        (ExtractionProgress(120, 300, 41.25), True, "120 of 300 images, 41.2 images/s, 0:00:05 left\n"),
        (ExtractionProgress(120, 300, 41.25), False, "120 of 300 images\n"),
        (ExtractionProgress(0, 300), True, "0 of 300 images\n"),
    ],
)
def test_status_shows_the_progress_of_features(
    here: Path, progress: ExtractionProgress, shown: str, *, running: bool
) -> None:
    state = DeviceState(here / "one", lock=running)
    state.set(progress)
    assert f"features   {shown}" in _status()
    output = json.loads(_status("--json"))
    assert output["extraction"]["done"] == progress.done
    state.set(ExtractionProgress())
    assert "features" not in _status()


def test_json_has_no_infinity(here: Path) -> None:
    """Strict parsers refuse NaN and Infinity."""
    DeviceState(here / "one").set(ExtractionProgress(0, 300, 5e-324))
    output = _status("--json")
    shown = msgspec.json.decode(output)
    assert (shown["extraction"]["total"], shown["extraction"]["left_s"]) == (300, None)


def test_status_shows_what_was_left_out(here: Path) -> None:
    unusable = tuple((f"/data/{number}.jpg", "the file is empty") for number in range(22))
    left_out = LeftOut(("'wasps' (did you mean 'wasp'?)",), {"suffix .heic": 12, "no suffix": 1}, unusable)
    DeviceState(here / "one").set(left_out)
    output = _status()
    assert "left out   'wasps' (did you mean 'wasp'?): no class of the task\n" in output
    assert "skipped    12 files: suffix .heic\nskipped    1 file: no suffix\n" in output
    assert output.count(".jpg: the file is empty\n") == 20
    assert "unusable   2 images more: see --json\n" in output
    shown = json.loads(_status("--json"))
    assert shown["unusable_images"] == [list(each) for each in unusable]
    assert shown["unknown_classes"] == list(left_out.unknown)
    assert shown["skipped_files"] == left_out.skipped


@pytest.mark.parametrize("several", [False, True])
def test_a_repeatable_option_takes_a_value_or_a_list_from_a_file(tmp_path: Path, *, several: bool) -> None:
    """Such an option is `backbone`."""
    file = tmp_path / "backbone.onnx"
    file.touch()
    value = f'["{file}", "{file}"]' if several else f'"{file}"'
    (tmp_path / "settings.toml").write_text(f"backbone = {value}\n")
    context = cli.make_context("edge-client", ["--config", str(tmp_path / "settings.toml"), "status"])
    assert context.params["backbone"] == (file,) * (1 + several)


@pytest.mark.parametrize(
    ("correct", "total", "shown"), [(0, 0, "version 3"), (26, 27, "version 3, accuracy 96.3% (26/27)")]
)
def test_status_shows_a_heads_accuracy(here: Path, correct: int, total: int, shown: str) -> None:
    """Only if it was evaluated: under differential privacy it is not."""
    installed = InstalledHead(head=b"", version=3, backbones=(), classes=(), correct=correct, total=total)
    DeviceState(here / "one").set(Heads(installed))
    assert f"head       {shown}\n" in _status()


def test_status_says_that_a_head_is_an_earlier_tasks(here: Path) -> None:
    """Its version says nothing then: each task begins with 1."""
    installed = InstalledHead(head=b"", version=3, task=b"a" * 32, backbones=(), classes=())
    state = DeviceState(here / "one")
    state.set(Heads(installed), CurrentTask(b"a" * 32))
    assert "head       version 3\n" in _status()
    state.set(CurrentTask(b"b" * 32))
    assert "head       version 3 of the earlier task 616161616161\n" in _status()


def test_status_shows_a_heads_accuracy_over_all_classes(here: Path) -> None:
    installed = InstalledHead(
        head=b"", version=3, backbones=(), classes=(), correct=49, total=50, balanced=0.49, known=2
    )
    DeviceState(here / "one").set(Heads(installed))
    output = _status()
    assert "head       version 3, accuracy 98.0% (49/50), at least 49.0% over all 2 classes\n" in output


def test_cost_of_a_backbone_is_measured_without_a_fleet(here: Path) -> None:
    """Neither a broker nor a state directory is needed, and nothing is left behind."""
    write_images(here / "data", count=6)
    (here / "tiny.onnx").write_bytes(tiny_backbone())
    options = ["--dry-run", "--json", "--backbone", str(here / "tiny.onnx"), "--data", str(here / "data")]
    before = set(here.iterdir())
    done = CliRunner().invoke(cli, [*options, "--provider", "cpu"])
    assert done.exit_code == 0, done.output
    cost = json.loads(done.output.splitlines()[-1])
    assert cost["images"] == 12
    assert cost["seconds_per_image"] > 0
    assert 10 < cost["memory_mb"] < 100_000
    assert 0 < cost["upload_bytes"] < 2000
    assert set(here.iterdir()) == before
    refused = CliRunner().invoke(cli, ["--json", "--data", str(here / "data")])
    assert "--json needs --dry-run and --backbone" in refused.output
