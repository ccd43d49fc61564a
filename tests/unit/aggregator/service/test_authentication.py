"""Authentication by a running aggregator: impersonation, replays, enrollment and revocation."""

from pathlib import Path
from typing import Any

from aggregator.security.enrollment import enroll, revoke
from aggregator.storage.store import Store
from protocol.enrollment import read_enrollment
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRequest, Evaluation, Receipt, Submission
from protocol.wire.signing import public_key, sign_frame, sign_manifest
from protocol.wire.topics import device_topic, fleet_topic
from protocol.wire.transfer import Ranges, frames_of
from tests.support.aggregator_process import FLEET, PATIENT, Daemon, Device, aggregator, key_of, write_task
from tests.support.submissions import device_info, evaluation, submission


def captured(
    message: Submission | Evaluation, name: str, *, key: bytes | None = None, ranges: Ranges | None = None
) -> tuple[bytes, list[bytes]]:
    """Return the digest and the frames of an upload, signed with the device's key or another one."""
    payload = encode(message)
    frames = frames_of(payload, digest=digest_of(payload), ranges=ranges)
    signed = (sign_frame(frame, key=key or key_of(name), fleet=FLEET, device=name) for frame in frames)
    return digest_of(payload), [encode(frame) for frame in signed]


def publish(device: Device, name: str, caught: tuple[bytes, list[bytes]]) -> None:
    """Publish captured frames on a device's topic."""
    for payload in caught[1]:
        device.say(device_topic(FLEET, name, "up"), payload)


def counts(summary: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Return the refused messages per device and reason."""
    return {(row["device"], row["reason"]): row["count"] for row in summary["refusals"]}


def refused(receipt: Receipt) -> str | None:
    """Return the reason of a refusal."""
    return receipt.reason if receipt.status == "refused" else None


def test_impersonation_is_refused(amqtt_broker: BrokerAddress, tmp_path: Path) -> None:
    """With another key, or with frames that another device has signed: it is counted and changes nothing."""
    with (
        aggregator(write_task(tmp_path, PATIENT), amqtt_broker) as daemon,
        Device(amqtt_broker, "a") as a,
        Device(amqtt_broker, "b") as b,
    ):
        task = digest_of(a.task())
        good = submission(task=task)
        assert a.upload(good).status == "received"
        assert b.upload(submission(task=task, seed=1)).status == "received"
        forged = captured(submission(task=task, sequence=9, seed=2), "a", key=key_of("b"))
        publish(b, "a", forged)
        assert refused(a.receipt(forged[0])) == "signature"
        lied = captured(evaluation(task=task), "a", key=key_of("b"))
        publish(b, "a", lied)
        assert refused(a.receipt(lied[0])) == "signature"
        stolen = captured(submission(task=task, sequence=9, seed=3), "a")
        publish(b, "b", stolen)
        assert refused(b.receipt(stolen[0])) == "signature"
        daemon.until(lambda summary: counts(summary) == {("a", "signature"): 2, ("b", "signature"): 1})
        standing = Store(daemon.state, read_only=True).submissions.all(task)
        assert [row.entry.sequence for row in standing.values()] == [1, 1]
        assert standing["a"].entry.digest == digest_of(encode(good))
        log = daemon.log()
        assert log.count("message refused device=a reason=signature ") == log.count("refused device=b") == 1


def test_replayed_submission_replaces_nothing(amqtt_broker: BrokerAddress, tmp_path: Path) -> None:
    """An old submission is superseded, the newest one is acknowledged again, also after a restart."""
    task_file = write_task(tmp_path, PATIENT)
    with Device(amqtt_broker, "a") as a, Device(amqtt_broker, "mallory") as mallory:
        with aggregator(task_file, amqtt_broker) as daemon:
            a.aggregator_is("online")
            task = digest_of(a.task())
            caught = [captured(submission(task=task, sequence=n, seed=n), "a") for n in (1, 2, 3)]
            for one in caught[1:]:
                publish(a, "a", one)
                assert a.receipt(one[0]).status == "received"
            _replay(mallory, a, caught)
            assert _standing(daemon, task) == (3, caught[-1][0])
        with aggregator(task_file, amqtt_broker) as daemon:
            a.aggregator_is("online")
            _replay(mallory, a, caught)
            assert _standing(daemon, task) == (3, caught[-1][0])


def _replay(mallory: Device, a: Device, caught: list[tuple[bytes, list[bytes]]]) -> None:
    for one, reason in zip(caught, ("superseded", "superseded", None), strict=True):
        publish(mallory, "a", one)
        assert refused(a.receipt(one[0])) == reason


def _standing(daemon: Daemon, task: bytes) -> tuple[int, bytes]:
    entry = Store(daemon.state, read_only=True).submissions.all(task)["a"].entry
    return entry.sequence, entry.digest


def test_resumed_transfer_accepts_only_its_device(amqtt_broker: BrokerAddress, tmp_path: Path) -> None:
    """Frames of another device are refused and damage nothing."""
    task_file = write_task(tmp_path, PATIENT)
    with Device(amqtt_broker, "a") as a, Device(amqtt_broker, "mallory") as mallory:
        with aggregator(task_file, amqtt_broker) as daemon:
            a.aggregator_is("online")
            task = digest_of(a.task())
            good = submission(task=task, labels=(0, 1, 2) * 20)
            size = len(encode(good))
            publish(a, "a", captured(good, "a", ranges=((size - 9, size),)))
            assert a.receipt(digest_of(encode(good))).missing == ((0, size - 9),)
            daemon.process.kill()
            daemon.process.wait()
        with aggregator(task_file, amqtt_broker):
            a.aggregator_is("online")
            publish(mallory, "a", captured(good, "a", key=key_of("mallory"), ranges=((0, 5),)))
            assert refused(a.receipt(digest_of(encode(good)))) == "signature"
            publish(a, "a", captured(good, "a", ranges=((0, size - 9),)))
            assert a.receipt(digest_of(encode(good))).status == "received"


def test_closing_and_revoking_apply_to_a_running_aggregator(
    amqtt_broker: BrokerAddress, tmp_path: Path
) -> None:
    """By another process: devices that are not enrolled or revoked are refused on every channel."""
    with aggregator(write_task(tmp_path, PATIENT), amqtt_broker) as daemon, Device(amqtt_broker, "a") as a:
        task = digest_of(a.task())
        assert a.upload(submission(task=task)).status == "received"
        operator = Store(daemon.state)
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
        assert Store(daemon.state, read_only=True).submissions.all(task)["a"].entry.sequence == 3
        operator.close()


def test_overwritten_fleet_topic_is_restored(amqtt_broker: BrokerAddress, tmp_path: Path) -> None:
    """Without an access list: devices that connect later find the aggregator's task, and it is counted."""
    forged = sign_manifest(b"x", key=key_of("a"), fleet=FLEET, channel="task", release=2**62)
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
    """What was uploaded under its name before is replaced, even with the greatest sequence number."""
    with aggregator(write_task(tmp_path, PATIENT), amqtt_broker) as daemon, Device(amqtt_broker, "a") as a:
        task = digest_of(a.task())
        assert a.upload(submission(task=task, sequence=2**63 - 1)).status == "received"
        store = Store(daemon.state)
        enroll(store, "a", fleet=FLEET, out=tmp_path / "a")
        own = captured(submission(task=task, sequence=5, seed=5), "a", key=_signing_key(tmp_path / "a"))
        publish(a, "a", own)
        assert a.receipt(own[0]).status == "received"
        assert _standing(daemon, task) == (5, own[0])
        revoke(store, "a")
        enroll(store, "a", renew=True, fleet=FLEET, out=tmp_path / "again")
        assert store.submissions.all(task) == {}
        again = captured(submission(task=task, sequence=4, seed=6), "a", key=_signing_key(tmp_path / "again"))
        publish(a, "a", again)
        assert a.receipt(again[0]).status == "received"
        store.close()


def _signing_key(folder: Path) -> bytes:
    return read_enrollment(folder).signing_key
