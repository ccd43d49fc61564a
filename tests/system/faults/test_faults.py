"""Under every fault, each submission counts exactly once, and the head equals that of a fleet without faults."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.network.brokers import Mosquitto, free_address, mosquitto_program
from tests.system.faults.brokers import WITHOUT_UPLOADS
from tests.system.faults.catalogue import Fault
from tests.system.faults.fleet import DEVICES, FaultyFleet, write_inputs
from tests.system.suites import FAULTS
from tests.system.tables import FaultRow, Reference

PARALLEL_FLEETS = 4
"""Most of the time they wait."""

BROKER = """
allow_anonymous true
persistence true
persistence_location {folder}/
autosave_interval 2
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task and images; skips without mosquitto."""
    if mosquitto_program() is None:
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def reference(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Result of a fleet without faults."""
    root = tmp_path_factory.mktemp("reference")
    unknown = Reference((), dict.fromkeys(DEVICES, 0))
    with FaultyFleet(root, inputs, Mosquitto(free_address(), root, options=BROKER), unknown) as fleet:
        fleet.run()
        fleet.settle()
        summary = fleet.status()
        prototypes = {device["device"]: device["prototypes"] for device in summary["devices"]}
        assert list(prototypes) == list(DEVICES)
        assert [fleet.times_accepted(name) for name in DEVICES] == [1, 1, 1]
        return Reference((summary["heads"][0]["sha256"],), prototypes)


@pytest.fixture(scope="module")
def rows(
    inputs: Path,
    reference: Reference,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[FaultRow]]]:
    """The outcome of each fault that this run of pytest has selected; several fleets run at a time."""
    root, abandoned = tmp_path_factory.mktemp("faults"), threading.Event()

    def provoke(fault: Fault) -> FaultRow:
        folder = root / str(list(FAULTS).index(fault.name))
        folder.mkdir()
        options = BROKER + fault.options
        broker = Mosquitto(free_address(), folder, options=options, access_list=WITHOUT_UPLOADS)
        mqtt5 = not fault.without_mqtt5
        with FaultyFleet(folder, inputs, broker, reference, mqtt5=mqtt5, abandoned=abandoned) as fleet:
            provoked = fault.provoke(fleet)
            fleet.settle()
            row = fleet.account(fault.name, provoked)
            fleet.compare(row)
            return row

    with ThreadPoolExecutor(PARALLEL_FLEETS) as pool:
        here = [item for item in request.session.items if item.parent is request.node]
        names = [item.callspec.params["fault"] for item in here if isinstance(item, pytest.Function)]
        yield {str(name): pool.submit(provoke, FAULTS[str(name)]) for name in names}
        abandoned.set()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_no_submission_is_lost(
    rows: dict[str, Future[FaultRow]], fault: str, record_property: Callable[[str, object], None]
) -> None:
    """Each fault is provoked as often as stated; then nothing is lost, nothing counts twice, no head differs."""
    row = rows[fault].result()
    record_property("faults", asdict(row))
    assert row.provoked >= FAULTS[fault].least
