"""What a running aggregator refuses: invalid signatures, unenrolled and revoked devices, and what is over a quota."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aggregator.security.enrollment import enroll, revoke
from aggregator.storage.open_store import open_store
from protocol.enrollment import read_enrollment
from protocol.errors import ConfigError
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRequest, Receipt, Submission
from protocol.wire.signing import public_key, sign_frame
from protocol.wire.topics import device_topic, fleet_topic
from protocol.wire.transfer import Ranges, frames_of
from tests.support.fleets.aggregator_process import (
    FLEET,
    PATIENT,
    Daemon,
    Device,
    aggregator,
    key_of,
    running_fleet,
    write_task,
)
from tests.support.messages.manifests import signed_manifest
from tests.support.messages.submissions import device_info, evaluation, submission


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


LABELS = (0, 1, 2) * 2000
"""Of a submission that is larger than a frame."""


@contextmanager
def _fleet(
    broker: BrokerAddress, folder: Path, limits: str, *names: str
) -> Iterator[tuple[Daemon, list[Device], bytes]]:
    """Run a fleet with these limits; yields it with its devices and its task."""
    task = write_task(folder, f"{PATIENT}\n[limits]\n{limits}")
    with running_fleet(task, broker, *names) as (daemon, devices):
        yield daemon, devices, digest_of(devices[0].task())


def _large(task: bytes, sequence: int = 1, *, seed: int = 0) -> Submission:
    return submission(task=task, sequence=sequence, labels=LABELS, seed=seed)


def _query(device: Device, message: Submission) -> Receipt:
    """Ask what is missing of a submission, of which nothing was sent."""
    payload = encode(message)
    device.send_payload(payload, ranges=((len(payload) - 256, len(payload)),))
    return device.receipt(digest_of(payload))


def _refused(receipt: Receipt) -> str:
    """Return the reason's detail of a receipt that refuses for a quota; empty for any other."""
    return receipt.detail if (receipt.status, receipt.reason) == ("refused", "quota") else ""


def test_device_above_the_quota_is_refused_until_another_one_leaves(
    amqtt_broker: BrokerAddress, tmp_path: Path
) -> None:
    """The devices that are known stay, and upload; `enroll` keeps to the quota as well."""
    with _fleet(amqtt_broker, tmp_path, "max_devices = 2", "a", "b", "c") as (daemon, (a, b, c), task):
        assert a.upload(submission(task=task)).status == "received"
        assert b.upload(submission(task=task)).status == "received"
        assert "raise the quota, or revoke one" in _refused(c.upload(submission(task=task)))
        assert a.upload(submission(task=task, sequence=2, seed=2)).status == "received"
        summary = daemon.until(lambda summary: summary["quotas"]["devices"]["used"] == 2)
        assert summary["quotas"]["devices"]["limit"] == 2
        assert [(row["device"], row["reason"]) for row in summary["refusals"]] == [("c", "quota")]
        operator = open_store(daemon.state)
        with pytest.raises(ConfigError, match=r"2 of 2 devices \(limits\.max_devices\)"):
            enroll(operator, "d", fleet="barn", out=tmp_path / "d", max_devices=2)
        enroll(operator, "a", fleet="barn", out=tmp_path / "a", max_devices=2)
        operator.keys.revoke("b", now_s=0.0)
        enroll(operator, "d", fleet="barn", out=tmp_path / "d", max_devices=2)
        operator.close()


def test_submissions_above_the_quota_of_bytes_are_refused_before_they_are_sent(
    amqtt_broker: BrokerAddress, tmp_path: Path
) -> None:
    """A device may replace its own, and evaluations are stored; what was accepted stays."""
    size = len(encode(_large(bytes(32))))
    with _fleet(amqtt_broker, tmp_path, f"max_storage_mb = {1.5 * size / 2**20}", "a", "b") as (
        daemon,
        (a, b),
        task,
    ):
        assert _query(a, _large(task)).status == "missing"
        assert a.upload(_large(task)).status == "received"
        assert "forget devices" in _refused(_query(b, _large(task)))
        assert _refused(b.upload(_large(task)))
        assert a.upload(_large(task, 2, seed=2)).status == "received"
        assert _query(a, _large(task, 2, seed=2)).status == "received"
        assert b.upload(submission(task=task)).status == "received"
        assert b.upload(evaluation(task=task)).reason == "unknown_head"
        used = daemon.until(lambda summary: summary["submissions"] == 2)["quotas"]["storage_bytes"]
        assert size < used["used"] <= used["limit"] < 2 * size
