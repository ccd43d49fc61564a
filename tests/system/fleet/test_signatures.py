"""A device trusts one aggregator's key, whatever an attacker publishes on the fleet's topics."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.mqtt.reconnecting_session import BrokerAddress, Outgoing, Received, Session
from protocol.wire.codec import decode, encode
from protocol.wire.messages import MAX_MANIFEST_BYTES, HeadManifest, Signed
from protocol.wire.signing import open_manifest
from protocol.wire.topics import fleet_topic
from tests.support.fleets.fleet import Fleet, write_digits, write_task
from tests.support.messages.manifests import signed_manifest
from tests.support.network.brokers import amqtt
from tests.support.network.sessions import EventLog, running

TOPIC = fleet_topic("default", "head")


@pytest.fixture
def fleet(tmp_path: Path, address: BrokerAddress) -> Iterator[Fleet]:
    with amqtt(address), Fleet(tmp_path, address) as fleet:
        yield fleet


def _head(log: EventLog, version: int) -> tuple[bytes, HeadManifest, Signed]:
    """Return the retained message of a head: its payload, the manifest in it, and the envelope."""
    while True:
        received = log.wait(Received)
        if received.payload:
            signed = open_manifest(received.payload, fleet="default", channel="head")
            manifest = decode(signed.body, HeadManifest, max_bytes=MAX_MANIFEST_BYTES)
            if manifest.current.version == version:
                return received.payload, manifest, signed


def _forge(session: Session, payload: bytes) -> None:
    session.send(Outgoing(TOPIC, payload, retain=True))


def _refused(summary: dict[str, Any], reason: str) -> int:
    """Return how many manifests the device has refused for a reason."""
    return sum(int(row["refused_messages"].get(reason, 0)) for row in summary["devices"])


def test_forged_and_replayed_heads_are_refused(fleet: Fleet, tmp_path: Path) -> None:
    """Another key's, a changed, an unsigned and an older head, before and after a restart; status counts them."""
    fleet.start_aggregator(write_task(tmp_path, quorum=1, retrain_after=1))
    data = write_digits(tmp_path / "data", classes=[0, 1])
    fleet.start_device("device", data, "--rescan-s", "0.5")
    with running(fleet.broker, "attacker", TOPIC) as (session, log):
        old, _, _ = _head(log, 1)
        fleet.wait_for("the first head in use", lambda s: s["devices"][0]["head"] == 1)
        write_digits(data, classes=[2])
        newest, manifest, signed = _head(log, 2)
        summary = fleet.wait_for("the second head in use", lambda s: s["devices"][0]["head"] == 2)
        assert summary["submissions"] == 1, "the newer submission replaces the older"
        assert summary["heads"][1]["prototypes"] > summary["heads"][0]["prototypes"]
        current = msgspec.structs.replace(manifest.current, version=99)
        body = encode(msgspec.structs.replace(manifest, current=current))
        release = signed.release + 10**9
        _forge(
            session, signed_manifest(body, key=b"m" * 32, fleet="default", channel="head", release=release)
        )
        fleet.wait_for("another key's head", lambda s: _refused(s, "signature") == 1)
        _forge(session, encode(msgspec.structs.replace(signed, body=body)))
        fleet.wait_for("a changed head", lambda s: _refused(s, "signature") == 2)
        _forge(session, body)
        fleet.wait_for("an unsigned head", lambda s: _refused(s, "malformed") == 1)
        _forge(session, old)
        fleet.wait_for("an older head", lambda s: _refused(s, "replayed") == 1)
        fleet.kill("device")
        fleet.start_device("device", data)
        fleet.wait_for_log("device", "connected to the broker", times=2)
        _forge(session, old)  # the aggregator has published its own again, earlier or later
        fleet.wait_for_log("device", "was seen before", times=2)
        summary = fleet.wait_for(
            "the report since the restart", lambda s: not _refused(s, "signature") and _refused(s, "replayed")
        )
        assert (summary["devices"][0]["head"], summary["devices"][0]["problem"]) == (2, "")
        _forge(session, newest)
        log_text = fleet.log("device")
        assert log_text.count("trusting the first aggregator key received") == 1
        assert log_text.count("was seen before") == 2
        assert "Traceback" not in log_text
