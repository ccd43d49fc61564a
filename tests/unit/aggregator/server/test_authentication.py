"""Authentication by a running aggregator: signatures, enrollment and revocation."""

from pathlib import Path
from typing import Any

from aggregator.security.enrollment import enroll, revoke
from aggregator.storage.open_store import open_store
from protocol.enrollment import read_enrollment
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRequest, Receipt, Submission
from protocol.wire.signing import public_key, sign_frame
from protocol.wire.topics import device_topic, fleet_topic
from protocol.wire.transfer import Ranges, frames_of
from tests.support.fleets.aggregator_process import FLEET, PATIENT, Device, aggregator, key_of, write_task
from tests.support.messages.manifests import signed_manifest
from tests.support.messages.submissions import device_info, submission


def upload(
    sender: Device,
    name: str,
    message: Submission,
    *,
    key: bytes | None = None,
    ranges: Ranges | None = None,
) -> bytes:
    """Publish frames on a device's topic, signed with its key or another one; return the transfer's digest."""
    payload = encode(message)
    digest = digest_of(payload)
    for frame in frames_of(payload, digest=digest, ranges=ranges):
        signed = sign_frame(frame, key=key or key_of(name), fleet=FLEET, device=name)
        sender.say(device_topic(FLEET, name, "up"), encode(signed))
    return digest


def counts(summary: dict[str, Any]) -> dict[tuple[str, str], int]:
    return {(row["device"], row["reason"]): row["count"] for row in summary["refusals"]}


def refused(receipt: Receipt) -> str | None:
    return receipt.reason if receipt.status == "refused" else None


def test_resumed_transfer_accepts_only_its_device(amqtt_broker: BrokerAddress, tmp_path: Path) -> None:
    """Frames of another device are refused and damage nothing."""
    task_file = write_task(tmp_path, PATIENT)
    with Device(amqtt_broker, "a") as a, Device(amqtt_broker, "mallory") as mallory:
        with aggregator(task_file, amqtt_broker) as daemon:
            a.aggregator_is("online")
            task = digest_of(a.task())
            good = submission(task=task, labels=(0, 1, 2) * 20)
            size = len(encode(good))
            digest = upload(a, "a", good, ranges=((size - 9, size),))
            assert a.receipt(digest).missing == ((0, size - 9),)
            daemon.process.kill()
            daemon.process.wait()
        with aggregator(task_file, amqtt_broker):
            a.aggregator_is("online")
            upload(mallory, "a", good, key=key_of("mallory"), ranges=((0, 5),))
            assert refused(a.receipt(digest)) == "signature"
            upload(a, "a", good, ranges=((0, size - 9),))
            assert a.receipt(digest).status == "received"


def test_closing_and_revoking_apply_to_a_running_aggregator(
    amqtt_broker: BrokerAddress, tmp_path: Path
) -> None:
    """By another process: devices that are not enrolled or revoked are refused on every channel."""
    with aggregator(write_task(tmp_path, PATIENT), amqtt_broker) as daemon, Device(amqtt_broker, "a") as a:
        task = digest_of(a.task())
        assert a.upload(submission(task=task)).status == "received"
        operator = open_store(daemon.state)
        operator.keys.close_fleet()
        assert refused(a.upload(submission(task=task, sequence=2))) == "unknown_device"
        a.send("get", encode(BlobRequest(digest=task, offset=0, length=1)))
        assert refused(a.receipt(task)) == "unknown_device"
        a.send("info", encode(device_info()))
        summary = daemon.until(lambda summary: counts(summary).get(("a", "unknown_device")) == 3)
        assert summary["devices"][0]["seen_s"] is None
        assert summary["enrollment"] == {"closed": True, "enrolled": 0, "first_use": 1, "revoked": 0}
        operator.keys.enroll("a", public_key(key_of("a")), now_s=0.0)
        assert a.upload(submission(task=task, sequence=3)).status == "received"
        large = submission(task=task, sequence=4, labels=(0, 1, 2) * 20)
        size = len(encode(large))
        a.send_payload(encode(large), ranges=((size - 9, size),))
        assert a.receipt(digest_of(encode(large))).status == "missing"
        operator.keys.revoke("a", now_s=0.0)
        a.send_payload(encode(large), ranges=((0, size - 9),))
        assert refused(a.receipt(digest_of(encode(large)))) == "revoked"
        assert open_store(daemon.state, read_only=True).submissions.all(task)["a"].entry.sequence == 3
        operator.close()


def test_overwritten_fleet_topic_is_restored(amqtt_broker: BrokerAddress, tmp_path: Path) -> None:
    """Without an access list: devices that connect later find the aggregator's task, and it is counted."""
    forged = signed_manifest(b"x", key=key_of("a"), fleet=FLEET, channel="task", release=2**62)
    with aggregator(write_task(tmp_path, PATIENT), amqtt_broker) as daemon, Device(amqtt_broker, "a") as a:
        genuine = a.signed("task")
        for written in (forged, b""):
            a.say(fleet_topic(FLEET, "task"), written, retain=True)
            while a.signed("task") != genuine:
                pass  # the overwriting message arrives first
        daemon.until(lambda summary: counts(summary) == {("?", "signature"): 1})
        with Device(amqtt_broker, "b") as late:
            assert late.signed("task") == genuine


def test_enrolled_device_starts_over(amqtt_broker: BrokerAddress, tmp_path: Path) -> None:
    """An earlier upload under its name is replaced, even with the greatest sequence number."""
    with aggregator(write_task(tmp_path, PATIENT), amqtt_broker) as daemon, Device(amqtt_broker, "a") as a:
        task = digest_of(a.task())
        assert a.upload(submission(task=task, sequence=2**63 - 1)).status == "received"
        store = open_store(daemon.state)
        enroll(store, "a", fleet=FLEET, out=tmp_path / "a")
        key = read_enrollment(tmp_path / "a").signing_key
        digest = upload(a, "a", submission(task=task, sequence=5, seed=5), key=key)
        assert a.receipt(digest).status == "received"
        entry = store.submissions.all(task)["a"].entry
        assert (entry.sequence, entry.digest) == (5, digest)
        revoke(store, "a")
        enroll(store, "a", renew=True, fleet=FLEET, out=tmp_path / "again")
        assert store.submissions.all(task) == {}
        key = read_enrollment(tmp_path / "again").signing_key
        digest = upload(a, "a", submission(task=task, sequence=4, seed=6), key=key)
        assert a.receipt(digest).status == "received"
        store.close()
