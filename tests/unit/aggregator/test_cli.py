"""The aggregator's command line: quick to answer, and clear about what it cannot do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aggregator.storage.store import Store
from tests.support.aggregator_process import write_task
from tests.support.submissions import SERVED

LIGHT = """\
import sys
for heavy in ("torch", "onnx", "onnxscript", "amqtt"):
    sys.modules[heavy] = None
from aggregator.cli import main
main()
"""
"""The program, on a machine that has none of the heavy packages."""


def _run(*arguments: str, program: str = LIGHT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["status", "--help"], ["--version"]])
def test_help_needs_nothing_heavy(arguments: list[str]) -> None:
    """It answers without torch, onnx or a broker installed, on stdout."""
    done = _run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_every_option_of_run_can_come_from_the_environment() -> None:
    """The help names the variables."""
    text = _run("run", "--help").stdout
    for variable in (
        "PROTOFLEET_TASK",
        "PROTOFLEET_STATE",
        "PROTOFLEET_BROKER",
        "PROTOFLEET_EMBEDDED_BROKER",
    ):
        assert variable in text


def test_status_needs_nothing_heavy(tmp_path: Path) -> None:
    """It prints JSON or a table of a state directory, and leaves nothing in it."""
    store = Store(tmp_path)
    store.facts.put(SERVED)
    store.close()
    done = _run("status", "--state", str(tmp_path), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["fleet"] == "f"
    done = _run("status", "--state", str(tmp_path))
    assert "0 submissions" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["status", "--state", "{folder}/none"], 1, "error: no aggregator state in {folder}/none"),
        (["run"], 2, "Missing option '--task'"),
        (["run", "--task", "{folder}/none.toml"], 1, "error: cannot read the task file {folder}/none.toml"),
        (["run", "--task", "{folder}/task.toml", "--embedded-broker", "--tls"], 2, "run mosquitto for them"),
        (
            ["run", "--task", "{folder}/task.toml", "--broker", "a:b:c"],
            1,
            "error: expected the broker as HOST",
        ),
        (["run", "--task", "{folder}/wrong.toml"], 1, "error: {folder}/wrong.toml:1: unknown setting `x`"),
        (["run", "--task", "{folder}/task.toml", "--state", "{folder}/task.toml"], 2, "is a file"),
        (
            ["run", "--task", "{folder}/task.toml", "--state", "{folder}/task.toml/x"],
            1,
            "error: cannot use {folder}/task.toml/x: Not a directory",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    """Exit 1 for what is wrong with the world, 2 for wrong usage; never a stack trace."""
    write_task(tmp_path)
    (tmp_path / "wrong.toml").write_text("x = 1\n")
    done = _run(
        *(argument.format(folder=tmp_path) for argument in arguments),
        program="from aggregator.cli import main; main()",
    )
    assert done.returncode == code
    assert said.format(folder=tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    if code == 1:
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [["run", "--task", "task.toml"], ["status"]])
def test_without_its_packages_one_line_says_what_to_install(arguments: list[str]) -> None:
    """Where the extra is not installed, nothing but a line that names it."""
    program = (
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name in {'onnx', 'rich'} else found(name, *rest)\n"
        "from aggregator import cli\n"
        "sys.argv[0] = 'aggregator'\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "pip install 'protofleet[aggregator,cpu]'" in line
