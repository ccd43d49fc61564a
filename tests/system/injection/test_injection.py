"""After a fault in a system call, each program loses nothing: a seeded sample of `python -m tests.system.injection`."""

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from tests.support.network import brokers
from tests.support.network.brokers import free_address, needs_mosquitto
from tests.system.injection.programs import PROGRAMS, Calls, Programs, count_calls, plan, rows_of, run_all
from tests.system.injection.strace import (
    JOBS,
    KILLED_IN_JOB,
    Injection,
    faults_of,
    injected,
    is_below,
    unavailable,
)

SEED = 20261122
LIVES = {
    "edge-client": 9,
    JOBS: 6,
    KILLED_IN_JOB: 6,
    "edge-client predict": 2,
    "aggregator run": 6,
    "aggregator enroll": 4,
    "aggregator status": 2,
}
"""Lives of each program; all of them together take 18 s of processor time."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Programs and a fleet; skips where nothing can be injected."""
    if reason := unavailable():
        pytest.skip(reason)
    with Programs(tmp_path_factory.mktemp("injection")) as programs:
        yield programs


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_fault_of_a_call_loses_anything(
    programs: Programs, program: str, record_property: Callable[[str, object], None]
) -> None:
    """The program fails with one line or not at all; started again, it completes, and everything counts once."""
    calls = count_calls(programs, [program])
    sample = plan(calls, seed=SEED)[: LIVES[program]]
    outcomes = list(run_all(programs, sample))
    record_property("injections", [asdict(row) for row in rows_of(calls, outcomes)])
    assert {str(each): outcome.violations for each, outcome in outcomes if outcome.violations} == {}
    assert any(outcome.injected for _, outcome in outcomes)


def test_sigterm_ends_a_run_as_ctrl_c_does() -> None:
    """`timeout` and service managers send it: fixtures end their brokers, where the default would end pytest alone."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("pytest runs tests in another thread, which gets no signals")
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


@needs_mosquitto
def test_a_broker_ends_that_is_interrupted_as_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def interrupt(_: object, process: subprocess.Popen[bytes]) -> None:
        started.append(process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(brokers, "_wait_for", interrupt)
    with pytest.raises(KeyboardInterrupt):
        brokers.mosquitto(free_address(), tmp_path).start()
    assert not psutil.pid_exists(started[0])


def test_plan_is_of_the_seed() -> None:
    """A seed gives one order, whose beginning has each call and fault once."""
    calls: Calls = {"edge-client": {"fsync": [1, 2, 3], "pwrite64": [1, 4]}}
    planned = plan(calls, seed=1)
    assert planned == plan(calls, seed=1) != plan(calls, seed=2)
    kinds = [(call, fault) for call in ("fsync", "pwrite64") for fault in faults_of(call)]
    assert {(each.call, each.fault) for each in planned[: len(kinds)]} == set(kinds)
    assert len(planned) == len(set(planned)) == 3 * len(faults_of("fsync")) + 2 * len(faults_of("pwrite64"))
    assert Injection("edge-client", "pwrite64", "ENOSPC", 4) in planned


def test_faults_are_found_in_the_log_of_strace(tmp_path: Path) -> None:
    """A fault counts where its file is below the folder; one that is resumed counts by the call that began it."""
    log = tmp_path / "strace"
    log.write_text(
        f'7 openat(AT_FDCWD</x>, "{tmp_path}/a", O_RDONLY) = -1 EIO (Input/output error) (INJECTED)\n'
        f"8 fsync(3<{tmp_path}/state> <unfinished ...>\n"
        "7 write(2</x/log>, ..., 5) = -1 EIO (Input/output error) (INJECTED)\n"
        "8 <... fsync resumed>) = -1 EIO (Input/output error) (INJECTED)\n"
    )
    assert injected(log, tmp_path) == (2, 1)
    assert not is_below("2</x/log>, ...", tmp_path)
    log.write_text(
        f"7 fsync(3<{tmp_path}/x> <unfinished ...>\n7 +++ killed by SIGKILL +++\n8 +++ killed by SIGKILL +++\n"
    )
    assert injected(log, tmp_path) == (1, 0)
    log.write_text(f"7 fsync(3<{tmp_path}/x>) = 0\n7 +++ killed by SIGKILL +++\n")  # by its service
    assert injected(log, tmp_path) == (0, 0)
