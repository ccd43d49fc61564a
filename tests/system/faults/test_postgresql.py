"""Aggregators on PostgreSQL under faults: during uploads, at the start, and with a standby."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from aggregator.storage.open_store import open_store
from protocol.mqtt.tls import BrokerAddress
from protocol.wire.codec import digest_of, encode
from tests.support.databases.postgresql import DatabaseProxy, PostgreSQL, needs_postgresql
from tests.support.fleets.aggregator_process import PATIENT, Device, aggregator, write_task
from tests.support.fleets.fleet import Fleet, write_digits
from tests.support.fleets.fleet import write_task as write_digits_task
from tests.support.messages.submissions import submission
from tests.support.network.brokers import mosquitto, needs_mosquitto
from tests.support.stores.object_store import BUCKET, moto_server, object_store

ENDED = "program ended program=serve"

END_SESSIONS = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"

Faults = dict[str, tuple[Callable[[], object], Callable[[], object]]]
"""How to provoke each fault, and how to end it."""


def faults_of(server: PostgreSQL, proxy: DatabaseProxy) -> Faults:
    def read_only(setting: str) -> None:
        server.execute(f"ALTER SYSTEM {setting}", "SELECT pg_reload_conf()", END_SESSIONS)

    def nothing() -> None:
        pass

    return {
        "cut within a transaction": (
            lambda: proxy.provoke("request lost", "BEGIN", "INSERT INTO submissions"),
            nothing,
        ),
        "cut after a COMMIT": (
            lambda: proxy.provoke("answer lost", "INSERT INTO submissions", "COMMIT"),
            nothing,
        ),
        "read-only": (
            lambda: read_only("SET default_transaction_read_only = on"),
            lambda: read_only("RESET default_transaction_read_only"),
        ),
        "killed": (server.kill, server.start),
    }


@needs_postgresql
@needs_mosquitto
def test_each_submission_counts_once(address: BrokerAddress, tmp_path: Path) -> None:
    """An acknowledged submission is kept; what a fault interrupts is sent again; a person sees why."""
    with (
        PostgreSQL() as server,
        contextlib.closing(DatabaseProxy(server.port)) as proxy,
        mosquitto(address, tmp_path),
    ):
        task = write_task(tmp_path, PATIENT)
        restarting = "tests.support.fleets.restarting_aggregator"
        daemon_of = aggregator(task, address, "--store", proxy.url, program=restarting)
        with daemon_of as daemon, Device(address, "first") as first:
            first.aggregator_is("online")
            message = submission(task=digest_of(first.task()))
            assert first.upload(message).status == "received"
            faults = faults_of(server, proxy)
            devices = {f"device-{number}": fault for number, fault in enumerate(faults)}
            for times, (name, fault) in enumerate(devices.items(), start=1):
                provoke, heal = faults[fault]
                ended = daemon.log().count(ENDED)
                with Device(address, name) as device:
                    provoke()
                    device.send_payload(encode(message))
                    daemon.until_logged(ENDED, times=ended + 1)
                    heal()
                    daemon.until_logged("connected to the broker", times=times + 1)
                    while device.upload(message).status != "received":
                        pass  # the first receipt may say that it was not stored
            assert proxy.faults == 2
            assert first.upload(message).status == "received"
            with contextlib.closing(open_store(daemon.state, read_only=True)) as store:
                assert set(store.submissions.all(message.task)) == {"first", *devices}
                assert {each.reason for each in store.refusals.all()} <= {"not_stored"}


@needs_postgresql
@needs_mosquitto
@pytest.mark.timeout(600)
def test_devices_upload_again_what_a_restored_backup_lacks(address: BrokerAddress, tmp_path: Path) -> None:
    """Also if the aggregator runs meanwhile: it begins again, and so do devices."""
    with (
        PostgreSQL() as server,
        mosquitto(address, tmp_path),
        Fleet(tmp_path, address) as fleet,
    ):
        fleet.start_aggregator(write_digits_task(tmp_path), "--store", server.url)
        fleet.wait_for_log("aggregator", "connected to the broker")
        backup = server.dump("fleet_default")
        fleet.start_device("a", write_digits(tmp_path / "data", classes=[0, 1]))
        fleet.wait_for_log("aggregator", "submission accepted device=a")
        server.restore(backup)
        fleet.wait_for_log("aggregator", "repeat each `revoke` and `forget` since")
        fleet.wait_for_log("aggregator", "submission accepted device=a", times=2)
        assert fleet.status()["submissions"] == 1


@needs_mosquitto
@needs_postgresql
def test_programs_wait_for_postgresql_and_the_object_store(
    tmp_path: Path, address: BrokerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve` is started again until both answer; SIGTERM ends a program that waits for it."""
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
            fleet.start(name, "tests.support.fleets.restarting_aggregator", *command, *places)

        task = write_task(tmp_path, PATIENT)
        run = ("run", "--task", task, "--broker", str(address), *blobs)
        start("first", *run)
        start("second", *run)
        for name in ("first", "second"):
            fleet.wait_for_log(name, f'{ENDED} reason="cannot use postgresql://')
        fleet.stop("second")
        remote.status = 503
        server.start()
        fleet.wait_for_log("first", f'{ENDED} reason="cannot use s3://')
        remote.heal()
        fleet.wait_for_log("first", "connected to the broker")
        start("second", *run, database=server.url_of("other"))
        fleet.wait_for_log("second", "does not exist")
