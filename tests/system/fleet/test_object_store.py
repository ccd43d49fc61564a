"""An aggregator with its blobs in an object store, over a real broker, with devices as processes."""

from pathlib import Path

import pytest

from aggregator.storage.object_blobs import ObjectBlobs
from protocol.mqtt.reconnecting_session import BrokerAddress
from tests.support.fleets.fleet import Fleet, accepted_submissions, write_digits, write_task
from tests.support.network.brokers import mosquitto, needs_mosquitto
from tests.support.stores.object_store import BUCKET, moto_server, object_store


@needs_mosquitto
def test_head_is_trained_of_blobs_in_an_object_store(
    tmp_path: Path, address: BrokerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store answers nothing but 503, the intake is stopped; then each submission is counted once.

    A restart needs no option, since the database says where the blobs are.
    """
    location = f"s3://{BUCKET}/herd"
    with (
        moto_server(tmp_path) as server,
        object_store(server, monkeypatch) as store,
        mosquitto(address, tmp_path),
        Fleet(tmp_path, address) as fleet,
    ):
        task = write_task(tmp_path)
        fleet.start_aggregator(task, "--blobs", location)
        fleet.wait_for_log("aggregator", "connected to the broker")
        store.status = 503
        names = [f"device-{number}" for number in range(3)]
        for name, share in zip(names, ([0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]), strict=True):
            fleet.start_device(name, write_digits(tmp_path / f"data-{name}", classes=share), "--once")
        fleet.wait_for_log("aggregator", "intake stopped")
        assert f"cannot use {location}" in fleet.log("aggregator")
        assert accepted_submissions(fleet.log("aggregator")) == []
        store.heal()
        for name in names:
            fleet.wait_exit(name)
        summary = fleet.wait_for("the head", lambda s: s["heads"] and s["head_path"])
        assert summary["submissions"] == 3
        assert summary["heads"][0]["devices"] == 3
        assert sorted(name for name, _ in accepted_submissions(fleet.log("aggregator"))) == names
        assert not list((fleet.aggregator_state / "blobs").glob("*"))
        fleet.stop("aggregator")
        fleet.start_aggregator(task)
        fleet.wait_for_log("aggregator", "connected to the broker", times=2)
        assert fleet.status()["submissions"] == 3
        fleet.stop("aggregator")
        assert "do-not-log-this" not in fleet.log("aggregator")
        assert len(set(ObjectBlobs(location).digests())) >= 5
