"""Fleets that endure the catalogue's faults, several at a time, and the table at the end."""

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.brokers import free_address, mosquitto_program
from tests.system.faults.broker import Mosquitto
from tests.system.faults.brokers import WITHOUT_UP
from tests.system.faults.catalogue import Fault
from tests.system.faults.fleet import DEVICES, Fleet, write_world
from tests.system.faults.suite import FAULTS
from tests.system.faults.table import Reference, Row, markdown

OUT = "PROTOFLEET_FAULTS_OUT"
"""Environment variable that names a file: the table is written to it as JSON, and as Markdown beside it."""

SEED = 20261121

AT_ONCE = 4
"""Fleets that run at the same time: most of the time they wait."""

ROW = "row of the table"
"""The property under which a test's report carries what it came to, also from a process of pytest-xdist."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table, and write it where the environment says."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    found = {
        row["fault"]: Row(**row) for report in reports for key, row in report.user_properties if key == ROW
    }
    rows = [found[name] for name in FAULTS if name in found]
    if not rows:
        return
    terminalreporter.section("faults")
    terminalreporter.write_line(markdown(rows))
    if out := os.environ.get(OUT):
        Path(out).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        Path(out).with_suffix(".md").write_text(markdown(rows) + "\n")


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task and images; skips where there is no mosquitto."""
    if mosquitto_program() is None:
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    return folder


@pytest.fixture(scope="session")
def reference(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What the fleet comes to when nothing happens to it."""
    root = tmp_path_factory.mktemp("reference")
    unknown = Reference((), dict.fromkeys(DEVICES, 0))
    broker = Mosquitto(free_address(), root)
    with Fleet(root, world, broker, say=lambda _: None, seed=SEED, reference=unknown) as fleet:
        fleet.start()
        fleet.settle()
        summary = fleet.status()
        prototypes = {device["device"]: device["prototypes"] for device in summary["devices"]}
        assert list(prototypes) == list(DEVICES)
        assert [fleet.times_taken(name) for name in DEVICES] == [1, 1, 1]
        return Reference((summary["heads"][0]["sha256"],), prototypes)


class Runs:
    """The faults that were asked for, under way one after the other on several threads.

    Attributes:
        rows: what each has come to, as soon as it has.
    """

    def __init__(self, world: Path, reference: Reference, root: Path, config: pytest.Config) -> None:
        self._world = world
        self._reference = reference
        self._root = root
        self.rows: dict[str, Row] = {}
        self._capture = config.pluginmanager.getplugin("capturemanager")
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._begun_s = time.monotonic()
        self._abandoned = threading.Event()
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._futures: dict[str, Future[None]] = {}

    def begin(self, name: str) -> None:
        """Have a fault provoked when its turn comes."""
        self._futures[name] = self._pool.submit(self._endure, FAULTS[name])

    def wait(self, name: str) -> None:
        """Wait for the outcome, and print meanwhile what is going on in all fleets."""
        future = self._futures[name]
        while not future.done() or not self._said.empty():
            try:
                line = self._said.get(timeout=0.1)
            except queue.Empty:
                continue
            with self._capture.global_and_fixture_disabled():
                print(f"\n{line}", end=" ", flush=True)  # noqa: T201
        future.result()

    def end(self) -> None:
        """Leave nothing behind."""
        self._abandoned.set()
        self._pool.shutdown(cancel_futures=True)

    def _endure(self, fault: Fault) -> None:
        say = self._teller(fault.name)
        folder = self._root / str(list(FAULTS).index(fault.name))
        folder.mkdir()
        broker = Mosquitto(free_address(), folder, options=fault.options, access=WITHOUT_UP)
        with Fleet(
            folder,
            self._world,
            broker,
            say=say,
            seed=SEED,
            reference=self._reference,
            without_mqtt5=fault.without_mqtt5,
            abandoned=self._abandoned,
        ) as fleet:
            say("begins")
            provoked = fault.provoke(fleet)
            say(f"provoked {provoked:,} times")
            fleet.settle()
            row = self.rows[fault.name] = fleet.account(fault.name, provoked)
            fleet.check(row)
            assert provoked >= fault.least, f"provoked only {provoked} times"
            say("nothing is lost")

    def _teller(self, name: str) -> Callable[[str], None]:
        def say(text: str) -> None:
            self._said.put(f"  {time.monotonic() - self._begun_s:5.1f} s  {name}: {text}")

        return say


@pytest.fixture(scope="session")
def runs(
    world: Path,
    reference: Reference,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Runs]:
    """Begin with all the faults that this run of pytest was asked for."""
    runs = Runs(world, reference, tmp_path_factory.mktemp("faults"), request.config)
    for item in request.session.items:
        if isinstance(item, pytest.Function) and "runs" in item.fixturenames:
            runs.begin(str(item.callspec.params["fault"]))
    yield runs
    runs.end()
