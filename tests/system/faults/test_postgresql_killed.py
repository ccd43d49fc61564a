"""The aggregator on PostgreSQL, which is killed during an upload and started again."""

import contextlib
from pathlib import Path

from aggregator.storage.store import Store
from protocol.mqtt.tls import BrokerAddress
from protocol.wire.codec import digest_of, encode
from tests.support.databases.postgresql import PostgreSQL, needs_postgresql
from tests.support.fleets.aggregator_process import PATIENT, Device, aggregator, write_task
from tests.support.messages.submissions import submission


@needs_postgresql
def test_uploads_survive_a_killed_postgresql(broker: BrokerAddress, tmp_path: Path) -> None:
    """An acknowledged submission is kept; what arrives meanwhile is sent again and counts once; a person sees why."""
    server = PostgreSQL()
    try:
        server.start()
        task = write_task(tmp_path, PATIENT)
        with (
            aggregator(task, broker, "--store", server.url) as daemon,
            Device(broker, "a") as a,
            Device(broker, "b") as b,
        ):
            a.aggregator_is("online")
            first = submission(task=digest_of(a.task()))
            assert a.upload(first).status == "received"
            server.kill()
            b.send_payload(encode(first))
            daemon.until_logged("intake stopped")
            server.start()
            daemon.until_logged("intake resumed")
            assert b.upload(first).status == "received"
            assert a.upload(first).status == "received"
            with contextlib.closing(Store(daemon.state, read_only=True)) as store:
                assert set(store.submissions.all(first.task)) == {"a", "b"}
                assert set(store.entries(first.task)) == {"a", "b"}
    finally:
        server.close()
