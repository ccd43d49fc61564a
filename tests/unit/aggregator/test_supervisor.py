"""The supervisor of `aggregator run`: real programs that end, hang, and are killed."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from protocol.mqtt.tls import BrokerAddress
from protocol.retry_delay import FIRST_DELAY_S, MAX_DELAY_S, RestartDelay
from protocol.storage.folder_lock import FolderLock
from protocol.wire.codec import digest_of
from tests.support.fleets.aggregator_process import Device, aggregator, write_task
from tests.support.fleets.fleet import Fleet, wait_until, with_startup_code
from tests.support.messages.submissions import submission
from tests.support.network.brokers import free_address
from tests.unit.aggregator.http.servers import Client, own_token

PROGRAM = """
import sys, time
from pathlib import Path
import msgspec
from aggregator.supervised import run_program
from protocol.errors import ConfigError, StateError
from protocol.service_manager import ServiceManager

class Settings(msgspec.Struct):
    name: str
    text: str
    folder: Path

    def note(self, text):
        with (self.folder / "notes").open("a") as file:
            file.write(f"{self.name} {text}\\n")

    def starts(self):
        self.note("started")
        return (self.folder / "notes").read_text().count(f"{self.name} started")

def run(settings, _pipe):
    manager = ServiceManager()
    try:
        exec(settings.text)
    finally:
        settings.note("ended")

if __name__ == "__main__":
    run_program(Settings, run)
"""
"""A program that runs the text in its settings."""

SUPERVISOR = """
import sys
from pathlib import Path
import click
from aggregator.supervisor import Program, Supervisor
from program_of_test import Settings
from protocol import retry_delay, service_manager
from protocol.cli import run, start_logging

@click.command()
@click.argument("folder")
@click.argument("texts", nargs=-1)
def supervise(folder, texts):
    retry_delay.FIRST_DELAY_S = 0.01
    service_manager.INTERVAL_S = 0.01
    service_manager.stop_on_terminate()
    start_logging(verbose=True)
    named = [each.partition(": ") for each in texts]
    Supervisor([
        Program(name=name, module="program_of_test", settings=Settings(name, text, Path(folder)))
        for name, _, text in named
    ]).run()

run(supervise, program="supervise")
"""

WORK = "settings.starts(); manager.ready(); time.sleep(1000)"


class Supervised:
    """A supervisor of programs, each `NAME: TEXT`, and what it logs."""

    def __init__(self, folder: Path, *programs: str) -> None:
        (folder / "program_of_test.py").write_text(PROGRAM)
        self._log, self._notes = folder / "log", folder / "notes"
        path = os.pathsep.join([str(folder), *sys.path])
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR, folder, *programs],
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
            )

    def log(self) -> str:
        return self._log.read_text()

    def notes(self) -> list[str]:
        return self._notes.read_text().splitlines() if self._notes.exists() else []

    def wait_for(self, *notes: str) -> None:
        wait_until(str(notes), lambda: set(notes) <= set(self.notes()), diagnostics=self.log)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@contextlib.contextmanager
def supervised(folder: Path, *programs: str) -> Iterator[Supervised]:
    running = Supervised(folder, *programs)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def test_the_delay_grows_and_falls_again() -> None:
    """A run that has lasted begins it anew."""
    delay = RestartDelay()
    delays = [delay.next_s(ran_s=1.0) for _ in range(8)]
    assert delays[:3] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert delays[-1] == MAX_DELAY_S
    assert delay.next_s(ran_s=MAX_DELAY_S) == FIRST_DELAY_S


def test_a_program_that_has_failed_is_started_again(tmp_path: Path) -> None:
    """Its reason is logged once, however often it fails for it; so is that it runs again."""
    failing = 'one: if settings.starts() < 4: raise StateError("the disk is full")\nmanager.ready(); time.sleep(1000)'
    with supervised(tmp_path, failing, f"two: {WORK}") as running:
        running.wait_for("two started")
        wait_until("its work", lambda: "runs again" in running.log(), diagnostics=running.log)
        log = running.log()
        reasons = [line for line in log.splitlines() if "program ended" in line]
        assert [" ERROR " in line for line in reasons] == [True, False, False]
        assert 'program=one reason="the disk is full" retry_s=0.01' in reasons[0]
        assert running.notes().count("two started") == 1
        assert "Traceback" not in log


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", '"it was killed (SIGKILL), as Linux does when memory runs out"'),
        ("sys.exit(3)", '"exit status 3"'),
        ('raise KeyError("x")', "\"KeyError: 'x'\""),
        ("raise MemoryError", '"out of memory: stop other programs, or raise the limit of this one"'),
    ],
)  # fmt: skip
def test_every_end_has_a_reason(tmp_path: Path, text: str, reason: str) -> None:
    """A signal, an exit status, an error of the program, which logs its stack trace, and one of the system."""
    failing = f"one: import os, signal\nif settings.starts() == 1: {text}\n{WORK}"
    with supervised(tmp_path, failing) as running:
        wait_until("its work", lambda: "runs again" in running.log(), diagnostics=running.log)
        assert f"program=one reason={reason} " in running.log()
        assert ("Traceback" in running.log()) == ("KeyError" in reason)


def test_an_error_that_a_restart_cannot_mend_ends_all(tmp_path: Path) -> None:
    """As one line and with the exit status of a command; the other programs end in order."""
    wrong = 'two: settings.starts(); raise ConfigError("expected a task file")'
    with supervised(tmp_path, f"one: {WORK}", wrong) as running:
        assert running.process.wait(60) == 1
        assert running.log().splitlines()[-1] == "error: expected a task file"
        assert running.notes() == ["one started", "two started", "two ended", "one ended"]


def test_a_signal_ends_the_programs_in_order(tmp_path: Path) -> None:
    """The last one first, which may need the others for its end."""
    slow = "two: settings.starts(); manager.ready()\ntry: time.sleep(1000)\nfinally: time.sleep(0.2)"
    for number, status in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        (tmp_path / number.name).mkdir()
        with supervised(tmp_path / number.name, f"one: {WORK}", slow) as running:
            running.wait_for("two started")
            assert running.end(number) == status
            assert running.notes()[-2:] == ["two ended", "one ended"]


def test_a_killed_supervisor_leaves_no_program(tmp_path: Path) -> None:
    """However busy it is: it holds the state directory, a port or the broker."""
    busy = "two: settings.starts(); manager.ready()\nwhile True: pass"
    with supervised(tmp_path, f"one: {WORK}", busy) as running:
        running.wait_for("one started", "two started")
        programs = psutil.Process(running.process.pid).children()
        running.end(signal.SIGKILL)
        assert not psutil.wait_procs(programs, timeout=60)[1]


def test_the_service_manager_hears_of_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told that all is started, gets signs of life, and none any more once a program hangs."""
    text = """one: from protocol import service_manager
service_manager.INTERVAL_S = 0.01
settings.starts(); manager.ready()
while not (settings.folder / "hang").exists(): manager.alive(); time.sleep(0.01)
time.sleep(1000)"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with supervised(tmp_path, text):
            for state in (b"READY=1", b"WATCHDOG=1"):
                while receiver.recv(100) != state:
                    pass
            (tmp_path / "hang").touch()
            receiver.settimeout(3)
            with contextlib.suppress(TimeoutError):
                for _ in range(10_000):
                    receiver.recv(100)
                pytest.fail("signs of life without end")


@pytest.fixture
def fleet(tmp_path: Path, address: BrokerAddress) -> Iterator[Fleet]:
    with Fleet(tmp_path, address) as fleet:
        fleet.forks = False
        yield fleet


def test_the_fleet_stays_connected_while_serve_restarts(
    fleet: Fleet, address: BrokerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve` is killed: its will says offline. Then all is killed: the next start gets folder, broker and port."""
    short = with_startup_code(
        fleet.root / "short", "from protocol import retry_delay as r\nr.FIRST_DELAY_S = 0.5"
    )
    monkeypatch.setenv("PYTHONPATH", short["PYTHONPATH"])
    task, http = write_task(fleet.root), free_address()
    options = ("--embedded-broker", "--http", str(http))
    fleet.start_aggregator(task, *options)
    with Device(address) as device:
        first = device.aggregator_is("online")
        _serve(fleet).kill()
        assert device.aggregator_is("offline").epoch == first.epoch
        second = device.aggregator_is("online")
        assert second.epoch > first.epoch
    assert 'program ended program=serve reason="it was killed (SIGKILL)' in fleet.log("aggregator")
    assert fleet.log("aggregator").count("program ended") == 1
    fleet.kill("aggregator")
    fleet.start_aggregator(task, *options)
    with Device(address) as device:
        assert device.aggregator_is("online").epoch > second.epoch
    client = Client(http.port)
    fleet.wait_until("readiness", lambda: client.get("/readyz").status == 200)
    assert own_token(fleet.aggregator_state)
    fleet.stop("aggregator")


@pytest.mark.parametrize("delay_s", [0.1, FIRST_DELAY_S], ids=["running", "ended"])
def test_a_training_outlives_serve(
    fleet: Fleet, address: BrokerAddress, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    """The next run of `serve` takes it over, or its result, and counts no failure; none is started a second time."""
    short = with_startup_code(
        fleet.root / "short", f"from protocol import retry_delay as r\nr.FIRST_DELAY_S = {delay_s}"
    )
    monkeypatch.setenv("PYTHONPATH", short["PYTHONPATH"])
    fleet.aggregator_program = "tests.support.fleets.fast_aggregator"
    fleet.start_aggregator(write_task(fleet.root, "quorum = 1"), "--embedded-broker")
    jobs = fleet.aggregator_state / "training"
    with Device(address) as device:
        assert device.upload(submission(task=digest_of(device.task()))).status == "received"
        fleet.wait_until("its job", lambda: any(jobs.glob("head-1-1-*/training.log")))
        (job,) = fleet.jobs("aggregator")
        job.suspend()  # it has not ended before `serve`
        _serve(fleet).kill()
        fleet.wait_for_log("aggregator", "program ended program=serve")
        job.resume()
        fleet.wait_for_log("aggregator", "training goes on version=1")
        assert device.head().version == 1
    assert len(list(jobs.iterdir())) == 1
    assert "failed" not in fleet.log("aggregator")
    fleet.stop("aggregator")


def test_a_training_that_is_killed_while_serve_is_down_has_failed(
    fleet: Fleet, address: BrokerAddress
) -> None:
    """The next run of `serve` hears how it has ended."""
    fleet.aggregator_program = "tests.support.fleets.fast_aggregator"
    fleet.start_aggregator(write_task(fleet.root, "quorum = 1"), "--embedded-broker")
    jobs = fleet.aggregator_state / "training"
    with Device(address) as device:
        fleet.wait_until("the aggregator", lambda: "connected to the broker" in fleet.log("aggregator"))
        assert device.upload(submission(task=digest_of(device.task()))).status == "received"
        fleet.wait_until("its job", lambda: any(jobs.glob("head-1-1-*/training.log")))
        (job,) = fleet.jobs("aggregator")
        job.suspend()
        _serve(fleet).kill()
        fleet.wait_for_log("aggregator", "program ended program=serve")
        job.kill()
        fleet.wait_for_log("aggregator", 'failures=1 reason="killed (SIGKILL)')
    fleet.stop("aggregator")


def _serve(fleet: Fleet) -> psutil.Process:
    services = fleet.services("aggregator")
    (serve,) = (each for each in services if "aggregator.server.program" in each.cmdline())
    return serve


def test_a_start_waits_for_the_program_that_ends(tmp_path: Path) -> None:
    """It says so, and serves once the lock on the state directory is released."""
    task = write_task(tmp_path)
    (tmp_path / "state").mkdir()
    lock = FolderLock(tmp_path / "state")
    assert lock.take()
    with aggregator(task, free_address()) as daemon:
        daemon.until_logged("waiting for another program to release the state directory")
        lock.release()
        daemon.until(lambda status: status["running"])
