"""Programs beside the service: real child processes that end, are ended, or whose service is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge_client.service import programs
from edge_client.service.programs import running
from tests.support.fleets.fleet import wait_until

PROGRAM = """\
import os, signal, sys, time
name, folder, kind = sys.argv[1:]
if kind == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(f"{folder}/{name}", "a") as file:
    file.write(f"{os.getpid()}\\n")
sys.exit(3) if kind == "failing" else time.sleep(600)
"""
"""Notes its process id in a file of its name, and sleeps."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "noting_program.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(programs, "TICK_S", 0.02)
    return tmp_path


def _run(folder: Path, kind: str = "", *, names: tuple[str, ...] = ("serve",), **options: Any) -> Any:
    given = {name: [str(folder), kind] for name in names}
    return running(given, module="noting_program", delay_s=lambda _: 0.0, **options)


def _starts(folder: Path, name: str = "serve") -> list[int]:
    file = folder / name
    return list(map(int, file.read_text().splitlines())) if file.exists() else []


def _wait(what: str, holds: Callable[[], Any]) -> None:
    wait_until(what, holds, diagnostics=lambda: "")


def test_programs_run_as_long_as_the_service(folder: Path) -> None:
    names = ("serve", "watch")
    with _run(folder, names=names):
        _wait("both programs", lambda: all(_starts(folder, name) for name in names))
        pids = [pid for name in names for pid in _starts(folder, name)]
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert len(pids) == 2


def test_a_program_that_ends_is_started_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a crash, and after an error of its own; the log has both."""
    with _run(folder):
        _wait("the program", lambda: _starts(folder))
        os.kill(_starts(folder)[0], signal.SIGKILL)
        _wait("its second start", lambda: len(_starts(folder)) == 2)
    assert (
        "program ended: it was killed (SIGKILL), as Linux does when memory runs out program=serve"
        in caplog.text
    )
    with _run(folder, "failing", names=("watch",)):
        _wait("its third start", lambda: len(_starts(folder, "watch")) >= 3)
    assert "program ended: exit status 3 program=watch" in caplog.text


def test_delays_grow_while_a_program_fails(folder: Path) -> None:
    asked: list[int] = []

    def delay_s(failures: int) -> float:
        asked.append(failures)
        return 0.0

    with running({"serve": [str(folder), "failing"]}, module="noting_program", delay_s=delay_s):
        _wait("four ends", lambda: len(asked) >= 4)
    assert asked[:4] == [0, 1, 2, 3]


def test_a_program_that_ignores_sigterm_is_killed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _run(folder, "stubborn", grace_s=0.1):
        _wait("the program", lambda: _starts(folder))
    assert not psutil.pid_exists(_starts(folder)[0])
    assert "program killed" in caplog.text


def test_programs_end_if_their_service_is_killed(folder: Path) -> None:
    service = (
        "import time; from edge_client.service.programs import running\n"
        f"with running({{'serve': [{str(folder)!r}, '']}}, module='noting_program'): time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", service]) as process:
        _wait("the program", lambda: _starts(folder))
        process.kill()
    _wait("its end", lambda: not psutil.pid_exists(_starts(folder)[0]))
