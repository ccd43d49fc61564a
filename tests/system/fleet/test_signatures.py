"""A real device, a real aggregator, and a neighbor who writes on the fleet's topics: the device believes only one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.mqtt.session import BrokerAddress, Outgoing, Received, Session
from protocol.wire.codec import decode, encode
from protocol.wire.messages import MAX_MANIFEST_BYTES, HeadManifest, Signed
from protocol.wire.signing import open_manifest, sign_manifest
from protocol.wire.topics import fleet_topic
from tests.support.brokers import amqtt
from tests.support.fleet_processes import Fleet, write_digits
from tests.support.sessions import Ear, running
from tests.system.fleet.test_fleet import write_task

TOPIC = fleet_topic("default", "head")


@pytest.fixture
def fleet(tmp_path: Path, address: BrokerAddress) -> Iterator[Fleet]:
    """A fleet that is taken down at the end."""
    with amqtt(address):
        fleet = Fleet(tmp_path, address)
        yield fleet
        fleet.stop()


def _head(ear: Ear, version: int) -> tuple[bytes, HeadManifest, Signed]:
    """What is retained once the fleet is told of a head: as it travels, what it says, and its envelope."""
    while True:
        received = ear.wait(Received)
        if received.payload:
            signed = open_manifest(received.payload, fleet="default", channel="head")
            manifest = decode(signed.body, HeadManifest, max_bytes=MAX_MANIFEST_BYTES)
            if manifest.current.version == version:
                return received.payload, manifest, signed


def _forge(session: Session, payload: bytes) -> None:
    session.send(Outgoing(TOPIC, payload, retain=True))


def _told(summary: dict[str, Any], reason: str) -> int:
    """How often the device was told what it did not believe."""
    return sum(int(row["refusals"].get(reason, 0)) for row in summary["devices"])


def test_a_device_believes_one_aggregator_and_nothing_old(fleet: Fleet, tmp_path: Path) -> None:
    """Not another key's word, nor a changed or an older one, whether it runs or starts anew; the operator sees it."""
    fleet.aggregator(write_task(tmp_path, quorum=1, retrain_after=1))
    data = write_digits(tmp_path / "data", classes=[0, 1])
    device = fleet.device("device", data, "--rescan-s", "0.5")
    with running(fleet.broker, "neighbor", TOPIC) as (session, ear):
        old, _, _ = _head(ear, 1)
        fleet.wait_for("the first head in use", lambda s: s["devices"][0]["head"] == 1)
        write_digits(data, classes=[2])
        newest, manifest, signed = _head(ear, 2)
        fleet.wait_for("the second head in use", lambda s: s["devices"][0]["head"] == 2)
        body = encode(
            msgspec.structs.replace(manifest, current=msgspec.structs.replace(manifest.current, version=99))
        )
        _forge(
            session,
            sign_manifest(
                body, key=b"m" * 32, fleet="default", channel="head", release=signed.release + 10**9
            ),
        )
        fleet.wait_for("another key's head", lambda s: _told(s, "signature") == 1)
        _forge(session, encode(msgspec.structs.replace(signed, body=body)))
        fleet.wait_for("a changed head", lambda s: _told(s, "signature") == 2)
        _forge(session, body)
        fleet.wait_for("an unsigned head", lambda s: _told(s, "malformed") == 1)
        _forge(session, old)
        fleet.wait_for("an older head", lambda s: _told(s, "replayed") == 1)
        device.kill()
        device.wait()
        log = tmp_path / "device.log"
        fleet.device("device", data)
        fleet.wait_for("the second start", lambda _: log.read_text().count("connected to") == 2)
        _forge(session, old)  # the aggregator has said its own again meanwhile
        fleet.wait_for("the older head again", lambda _: log.read_text().count("was seen before") == 2)
        summary = fleet.wait_for("the device's word", lambda s: _told(s, "replayed") == 1)
        assert (summary["devices"][0]["head"], summary["devices"][0]["problem"]) == (2, "")
        _forge(session, newest)
        said = log.read_text()
        assert said.count("taking the first aggregator that was heard") == 1
        assert said.count("was seen before") == 2
        assert "Traceback" not in said
