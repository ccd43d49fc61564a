"""Under every fault, each submission counts exactly once, and the head equals that of a fleet without faults."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.databases.postgresql import PostgreSQL
from tests.support.network.brokers import Mosquitto, free_address
from tests.support.stores.object_store import BUCKET, moto_server, object_store
from tests.system.faults.fleet import DEVICES, Fault, FaultyFleet, write_inputs
from tests.system.faults.networks import WITHOUT_UPLOADS
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


ON_OTHER_STORES = os.environ.get("PROTOFLEET_TEST_STORES", "") == "cluster"
"""Run the suite with PostgreSQL and an object store, and not with SQLite and a folder."""

STORE_FAULTS = ("a head damaged in transit, and on the aggregator's disk",)
"""Faults of a folder of blobs."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[str, ...]]]:
    """Return options of each fleet's aggregator: nothing, or a database and a prefix of its own."""
    if not ON_OTHER_STORES:
        yield lambda _: ()
        return
    with (
        PostgreSQL() as server,
        moto_server(tmp_path_factory.mktemp("moto")) as objects,
        pytest.MonkeyPatch.context() as monkeypatch,
        object_store(objects, monkeypatch),
    ):

        def options(name: str) -> tuple[str, ...]:
            server.execute(f"CREATE DATABASE {name}")
            return ("--store", server.url_of(name), "--blobs", f"s3://{BUCKET}/{name}")

        yield options


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task and images."""
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
    stores: Callable[[str], tuple[str, ...]],
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
        options_of_stores = stores(f"fault_{folder.name}")
        with FaultyFleet(
            folder,
            inputs,
            broker,
            reference,
            mqtt5=mqtt5,
            abandoned=abandoned,
            stores=options_of_stores,
        ) as fleet:
            provoked = fault.provoke(fleet)
            fleet.settle()
            row = fleet.account(fault.name, provoked)
            fleet.compare(row)
            return row

    with ThreadPoolExecutor(PARALLEL_FLEETS) as pool:
        here = [item for item in request.session.items if item.parent is request.node]
        names = [item.callspec.params["fault"] for item in here if isinstance(item, pytest.Function)]
        names = [name for name in names if not (ON_OTHER_STORES and name in STORE_FAULTS)]
        yield {str(name): pool.submit(provoke, FAULTS[str(name)]) for name in names}
        abandoned.set()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_no_submission_is_lost(
    rows: dict[str, Future[FaultRow]], fault: str, record_property: Callable[[str, object], None]
) -> None:
    """Each fault is provoked as often as stated; then nothing is lost, nothing counts twice, no head differs."""
    if ON_OTHER_STORES and fault in STORE_FAULTS:
        pytest.skip("a fault of a folder of blobs")
    row = rows[fault].result()
    record_property("faults", asdict(row))
    assert row.provoked >= FAULTS[fault].least
