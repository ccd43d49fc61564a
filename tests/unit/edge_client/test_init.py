"""`edge-client init`: a settings file that `run` reads, with what protects people."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edge_client.cli import cli
from edge_client.graphs import forked_runs
from protocol.errors import ConfigError
from tests.docs.command_lines import parse
from tests.support.graphs.backbones import tiny_backbone

PLACE = ("--broker", "broker.example", "--data", "images")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which the command runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine be one on which every image has the least budget."""
    monkeypatch.setattr(forked_runs, "BUDGET_FACTOR", 0)


def _init(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["init", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def _read() -> dict[str, Any]:
    return parse("edge-client run --config edge-client.toml").params


def test_run_reads_what_was_given(folder: Path) -> None:
    """A service has another working directory: paths are absolute."""
    (folder / "tiny.onnx").write_bytes(tiny_backbone())
    _init(*PLACE, "--fleet", "orchard", "--backbone", "tiny.onnx", "--second-operator", "0A" * 32)
    read = _read()
    assert (read["broker"], read["fleet"], read["data"]) == ("broker.example", "orchard", folder / "images")
    assert read["backbone"] == (folder / "tiny.onnx",)
    assert (read["second_operator"], read["max_epsilon"], read["upload_period_s"]) == (b"\n" * 32, None, None)


@pytest.mark.usefixtures("quick")
def test_a_private_device_gets_a_budget_and_a_period_that_holds_its_images() -> None:
    """An image may take 2 s by the clock with any quick backbone: 2,000 of them fit into two hours."""
    shown = _init(*PLACE, "--private", "--images", "2000")
    read = _read()
    assert (read["max_epsilon"], read["privacy_unit"], read["upload_period_s"]) == (4.0, "image", 7200.0)
    assert "images     2000, each of which may take 2 s\nuploads    2 h after their builds began\n" in shown
    assert "--privacy-unit person refuses those" in shown


@pytest.mark.usefixtures("quick")
def test_what_the_owner_has_given_stays(folder: Path) -> None:
    """A limit of files bounds a build, too. The time of an image is measured on the owner's copy of a backbone."""
    (folder / "tiny.onnx").write_bytes(tiny_backbone())
    given = (
        "--max-epsilon",
        "1",
        "--privacy-unit",
        "person",
        "--max-images",
        "3601",
        "--backbone",
        "tiny.onnx",
    )
    _init(*PLACE, "--private", *given)
    read = _read()
    assert (read["max_epsilon"], read["privacy_unit"], read["max_images"]) == (1.0, "person", 3601)
    assert read["upload_period_s"] == 3 * 3600
    (folder / "edge-client.toml").unlink()
    _init(*PLACE, "--private", "--upload-period-s", "600")
    assert _read()["upload_period_s"] == 600


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--data", "images"], "missing --broker"),
        ([*PLACE, "--private"], "missing --images"),
        ([*PLACE, "--images", "5"], "--images needs --private"),
        ([*PLACE, "--images", "0", "--private"], "0 is not in the range x>=1"),
    ],
)
def test_an_error_says_what_is_missing(folder: Path, arguments: list[str], error: str) -> None:
    """No file is written."""
    done = CliRunner().invoke(cli, ["init", *arguments])
    assert (done.exit_code, error in done.output) == (2, True), done.output
    assert not (folder / "edge-client.toml").exists()


def test_a_file_that_exists_is_kept(folder: Path) -> None:
    (folder / "edge-client.toml").write_text("mine")
    with pytest.raises(
        ConfigError, match=r"edge-client.toml exists already: delete it, or give another name"
    ):
        _init(*PLACE)
    assert (folder / "edge-client.toml").read_text() == "mine"
