"""The quotas of a fleet: what is over one is refused with a way out, and nothing else is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aggregator.security.enrollment import enroll
from aggregator.storage.open_store import open_store
from protocol.errors import ConfigError
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import Receipt, Submission
from tests.support.fleets.aggregator_process import PATIENT, Daemon, Device, running_fleet, write_task
from tests.support.messages.submissions import evaluation, submission

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


def test_uploads_above_the_quota_of_an_hour_are_refused_by_their_number_also_after_a_restart(
    amqtt_broker: BrokerAddress, tmp_path: Path
) -> None:
    """Whatever device they are of; those that are refused do not count."""
    limits = "uploads_per_hour = 3"
    with _fleet(amqtt_broker, tmp_path, limits, "a", "b") as (daemon, (a, b), task):
        for sequence in (1, 2):
            assert a.upload(submission(task=task, sequence=sequence, seed=sequence)).status == "received"
        assert a.upload(submission(task=task, sequence=1, seed=9)).reason == "superseded"
        assert b.upload(submission(task=task)).status == "received"
        for device in (a, b):
            assert "the next one is accepted in" in _refused(
                device.upload(submission(task=task, sequence=3, seed=3))
            )
            assert _refused(_query(device, _large(task, 4)))
        assert 2.9 < daemon.until(bool)["quotas"]["uploads"]["used"] <= 3
    with _fleet(amqtt_broker, tmp_path, limits, "a") as (_, (a,), task):
        assert _refused(a.upload(submission(task=task, sequence=3, seed=3)))
