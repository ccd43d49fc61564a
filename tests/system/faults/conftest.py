"""Fleets under the catalogue's faults, several at a time."""

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.brokers import Mosquitto, free_address, mosquitto_program
from tests.system.faults.brokers import WITHOUT_UP
from tests.system.faults.catalogue import Fault
from tests.system.faults.fleet import DEVICES, FaultyFleet, write_world
from tests.system.faults.suite import FAULTS
from tests.system.tables import FaultRow, Reference

SEED = 20261121

AT_ONCE = 4
"""Fleets that run at the same time: most of the time they wait."""

BROKER = """
allow_anonymous true
persistence true
persistence_location {folder}/
autosave_interval 2
"""


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
    """Result of a fleet without faults."""
    root = tmp_path_factory.mktemp("reference")
    unknown = Reference((), dict.fromkeys(DEVICES, 0))
    broker = Mosquitto(free_address(), root, options=BROKER)
    with FaultyFleet(root, world, broker, log_progress=lambda _: None, seed=SEED, reference=unknown) as fleet:
        fleet.run()
        fleet.settle()
        summary = fleet.status()
        prototypes = {device["device"]: device["prototypes"] for device in summary["devices"]}
        assert list(prototypes) == list(DEVICES)
        assert [fleet.times_accepted(name) for name in DEVICES] == [1, 1, 1]
        return Reference((summary["heads"][0]["sha256"],), prototypes)


class Runs:
    """The selected faults, provoked one after the other on several threads.

    Attributes:
        rows: the outcome of each, as soon as there is one.
    """

    def __init__(self, world: Path, reference: Reference, root: Path, config: pytest.Config) -> None:
        self._world = world
        self._reference = reference
        self._root = root
        self.rows: dict[str, FaultRow] = {}
        self._capture = config.pluginmanager.getplugin("capturemanager")
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._started_s = time.monotonic()
        self._abandoned = threading.Event()
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._futures: dict[str, Future[None]] = {}

    def begin(self, name: str) -> None:
        """Schedule a fault."""
        self._futures[name] = self._pool.submit(self._provoke, FAULTS[name])

    def wait(self, name: str) -> None:
        """Wait for the outcome; print the progress of all fleets meanwhile."""
        future = self._futures[name]
        while not future.done() or not self._lines.empty():
            try:
                line = self._lines.get(timeout=0.1)
            except queue.Empty:
                continue
            with self._capture.global_and_fixture_disabled():
                print(f"\n{line}", end=" ", flush=True)  # noqa: T201
        future.result()

    def end(self) -> None:
        """End all fleets."""
        self._abandoned.set()
        self._pool.shutdown(cancel_futures=True)

    def _provoke(self, fault: Fault) -> None:
        def log_progress(text: str) -> None:
            self._lines.put(f"  {time.monotonic() - self._started_s:5.1f} s  {fault.name}: {text}")

        folder = self._root / str(list(FAULTS).index(fault.name))
        folder.mkdir()
        broker = Mosquitto(free_address(), folder, options=BROKER + fault.options, access_list=WITHOUT_UP)
        with FaultyFleet(
            folder,
            self._world,
            broker,
            log_progress=log_progress,
            seed=SEED,
            reference=self._reference,
            without_mqtt5=fault.without_mqtt5,
            abandoned=self._abandoned,
        ) as fleet:
            log_progress("begins")
            provoked = fault.provoke(fleet)
            log_progress(f"provoked {provoked:,} times")
            fleet.settle()
            row = self.rows[fault.name] = fleet.account(fault.name, provoked)
            fleet.compare(row)
            assert provoked >= fault.least, f"provoked only {provoked} times"
            log_progress("nothing is lost")


@pytest.fixture(scope="session")
def runs(
    world: Path,
    reference: Reference,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Runs]:
    """Schedule all faults that this run of pytest has selected."""
    runs = Runs(world, reference, tmp_path_factory.mktemp("faults"), request.config)
    for item in request.session.items:
        if isinstance(item, pytest.Function) and "runs" in item.fixturenames:
            runs.begin(str(item.callspec.params["fault"]))
    yield runs
    runs.end()
