"""The device's command line: whose options count for `predict` and `status`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_client.cli import cli
from edge_client.storage.device_state import DeviceState
from edge_client.storage.facts import DeviceName, Heads, InstalledHead, SubmissionReport, UploadProblem


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the states of two devices, and a configuration file that names the first."""
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
def test_options_before_the_command_count_for_it(here: Path, arguments: list[str], device: str) -> None:
    """What stands before `status` is not lost, and what stands behind it goes before."""
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, (done.output, here)
    assert done.output.startswith(f"device     {device}, ")


@pytest.mark.usefixtures("here")
def test_options_before_the_command_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment counts only where neither place says anything."""
    monkeypatch.setenv("PROTOFLEET_STATE", "two")
    assert CliRunner().invoke(cli, ["status"]).output.startswith("device     two, ")
    assert CliRunner().invoke(cli, ["--state", "one", "status"]).output.startswith("device     one, ")


def test_status_says_what_became_of_the_submission(here: Path) -> None:
    """Whether it was received, and what keeps it from it."""
    state = DeviceState(here / "one")
    report = SubmissionReport(size_bytes=10)
    item = state.outbox.keep("submission", b"submission", task=b"t" * 32, about="", facts=(report,))
    state.set(UploadProblem("the aggregator has no space"))
    status = ["status", "--state", "one"]
    said = CliRunner().invoke(cli, status).output
    assert "submission 10 bytes, not received yet" in said
    assert "problem    the aggregator has no space" in said
    state.outbox.receive(item.digest)
    state.set(UploadProblem())
    said = json.loads(CliRunner().invoke(cli, [*status, "--json"]).output)
    assert (said["submission"], said["received"], said["problem"]) == (item.digest.hex(), True, "")


@pytest.mark.parametrize("several", [False, True])
def test_a_file_may_name_one_backbone_or_several(tmp_path: Path, *, several: bool) -> None:
    """An option that may be repeated takes a value or a list of them from a TOML file."""
    file = tmp_path / "backbone.onnx"
    file.touch()
    value = f'["{file}", "{file}"]' if several else f'"{file}"'
    (tmp_path / "settings.toml").write_text(f"backbone = {value}\n")
    context = cli.make_context("edge-client", ["--config", str(tmp_path / "settings.toml"), "status"])
    assert context.params["backbone"] == (file,) * (1 + several)


def test_a_head_that_was_not_evaluated_has_no_figures(here: Path) -> None:
    """As under differential privacy: nothing of nothing would look like a head that fails."""
    state = DeviceState(here / "one")
    installed = InstalledHead(head=b"", version=3, backbones=(), classes=())
    state.set(Heads(installed))
    said = CliRunner().invoke(cli, ["status", "--state", "one"]).output
    assert "head       version 3\n" in said
