"""Programs that start while PostgreSQL or the object store does not answer wait for it."""

import contextlib
from pathlib import Path

import pytest

from protocol.mqtt.tls import BrokerAddress
from tests.support.databases.postgresql import PostgreSQL, needs_postgresql
from tests.support.fleets.aggregator_process import FLEET, PATIENT, write_task
from tests.support.fleets.fleet import Fleet
from tests.support.network.brokers import mosquitto, needs_mosquitto
from tests.support.stores.object_store import BUCKET, moto_server, object_store

WAITS = "cannot start: retrying"


@needs_mosquitto
@needs_postgresql
def test_programs_wait_for_postgresql_and_the_object_store(
    tmp_path: Path, address: BrokerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They start once both answer, and SIGTERM ends them meanwhile; a database that does not exist is an error."""
    with (
        contextlib.closing(PostgreSQL()) as server,
        moto_server(tmp_path) as objects,
        object_store(objects, monkeypatch) as remote,
        mosquitto(address, tmp_path),
        Fleet(tmp_path, address) as fleet,
    ):
        blobs = ("--blobs", f"s3://{BUCKET}/barn")

        def start(name: str, *command: str | Path, database: str = server.url) -> None:
            places = ("--state", tmp_path / name, "--store", database)
            fleet.start(name, "aggregator.cli", *command, *places)

        task = write_task(tmp_path, PATIENT)
        coordinate = ("coordinate", "--task", task, "--broker", str(address), *blobs)
        start("first", *coordinate)
        start("second", *coordinate)
        for name in ("first", "second"):
            fleet.wait_for_log(name, WAITS)
        fleet.stop("second")
        remote.status = 503
        server.start()
        fleet.wait_for_log("first", f'{WAITS} reason="cannot use s3://')
        remote.heal()
        fleet.wait_for_log("first", "connected to the broker")
        start("second", *coordinate, database=server.url_of("other"))
        fleet.wait_exit("second", 1)
        assert '"other" does not exist' in fleet.log("second")
        server.kill()
        start("far", "receive", "--fleet", FLEET, "--broker", str(address))
        start("gpu", "train", "--fleet", FLEET)
        for name in ("far", "gpu"):
            fleet.wait_for_log(name, WAITS)
        server.start()
        fleet.wait_for_log("far", "connected to the broker")
        fleet.wait_for_log("gpu", "worker ready")
