"""Two aggregators of a fleet on PostgreSQL: a standby takes over from a leader that is paused or killed."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.storage.open_store import open_store
from protocol.mqtt.tls import BrokerAddress
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import Presence, Submission
from protocol.wire.signing import open_manifest
from protocol.wire.topics import FleetChannel, fleet_topic
from tests.support.databases.postgresql import PostgreSQL, needs_postgresql
from tests.support.fleets.aggregator_process import FLEET, MAX_BYTES, Device, write_task
from tests.support.fleets.fleet import Fleet, accepted_submissions
from tests.support.messages.submissions import submission
from tests.support.network.brokers import mosquitto, needs_mosquitto

LEADS = "connected to the broker"
WAITS = "standby: another aggregator leads the fleet"
TRAINED = "head trained"


class TwoAggregators(Fleet):
    """Two aggregators with state directories of their own, and one folder of blobs."""

    aggregator_program = "tests.support.fleets.fast_aggregator"

    def __init__(self, root: Path, broker: BrokerAddress, database: str) -> None:
        super().__init__(root, broker)
        self.aggregator_state = root / "first"
        self._task = write_task(root, "quorum = 4\ndeadline_s = 1000\n")
        self._database = database

    def run(self, name: str) -> None:
        self.start_aggregator(self._task, "--store", self._database, name=name, state=self.root / name)

    def run_both(self) -> None:
        self.run("first")
        self.wait_for_log("first", LEADS)
        (self.root / "second").mkdir()
        shutil.copytree(self.root / "first" / "identity", self.root / "second" / "identity")
        (self.root / "second" / "blobs").symlink_to(self.root / "first" / "blobs")
        self.run("second")
        self.wait_for_log("second", WAITS)
        assert LEADS not in self.log("second")

    def count(self, text: str) -> int:
        """Count the lines of both aggregators' logs with a text."""
        return sum(self.log(name).count(text) for name in ("first", "second"))


@pytest.fixture
def fleet(address: BrokerAddress, tmp_path: Path) -> Iterator[TwoAggregators]:
    with (
        PostgreSQL() as server,
        mosquitto(address, tmp_path),
        TwoAggregators(tmp_path, address, server.url) as both,
    ):
        yield both


@needs_mosquitto
@needs_postgresql
def test_a_standby_takes_over_from_a_paused_leader(fleet: TwoAggregators, address: BrokerAddress) -> None:
    """When it goes on, it publishes and stores nothing, and becomes a standby, which takes over again."""
    with contextlib.ExitStack() as running:
        a, b, c, d = (running.enter_context(Device(address, name)) for name in "abcd")
        fleet.run_both()
        upload = submission(task=digest_of(a.task()))
        assert a.upload(upload).status == "received"
        _send_half(b, upload)
        assert b.receipt(digest_of(encode(upload))).status == "missing"
        fleet.pause("first")
        c.send_payload(encode(upload))
        fleet.wait_for_log("second", LEADS)
        fleet.resume("first")
        fleet.wait_for_log("first", WAITS)
        assert fleet.log("first").count(LEADS) == 1
        for device in (b, c):
            assert device.upload(upload).status == "received"
        fleet.kill("second")
        fleet.wait_for_log("first", LEADS, times=2)
        assert d.upload(upload).status == "received"
        _check_head(fleet, a, terms=3)


@needs_mosquitto
@needs_postgresql
def test_a_standby_takes_over_from_a_killed_leader(fleet: TwoAggregators, address: BrokerAddress) -> None:
    """During the training, which the new leader repeats; what was killed is a standby when it is started again."""
    with contextlib.ExitStack() as running:
        devices = [running.enter_context(Device(address, name)) for name in "abcd"]
        fleet.run_both()
        upload = submission(task=digest_of(devices[0].task()))
        for device in devices:
            assert device.upload(upload).status == "received"
        fleet.wait_until("a training", lambda: any((fleet.root / "first" / "training").glob("head-1-1-*")))
        fleet.kill("first")
        fleet.wait_for_log("second", LEADS)
        fleet.run("first")
        fleet.wait_for_log("first", WAITS)
        _check_head(fleet, devices[0], terms=2)
        assert fleet.log("first").count(LEADS) == 1


def _send_half(device: Device, upload: Submission) -> None:
    payload = encode(upload)
    device.send_payload(payload, ranges=((len(payload) // 2, len(payload)),))


def _check_head(fleet: TwoAggregators, device: Device, *, terms: int) -> None:
    """Wait for the head, and check that each submission counts once, and what all leaders have published."""
    head = device.head()
    with contextlib.closing(open_store(fleet.aggregator_state)) as store:
        (stored,) = store.heads.all(store.served_task().digest)
        assert (stored.version, set(store.members(stored))) == (1, set("abcd"))
        assert head.version == 1
        assert set(store.submissions.all(store.served_task().digest)) == set("abcd")
    accepted = [*accepted_submissions(fleet.log("first")), *accepted_submissions(fleet.log("second"))]
    assert sorted(name for name, _ in accepted) == sorted("abcd")
    assert fleet.count(TRAINED) == 1
    online = [each for each in _presences(device) if each.state == "online"]
    epochs = [each.epoch for each in online]
    assert epochs == sorted(epochs)
    assert len({each.instance for each in online}) == terms
    for channel in ("task", "head"):
        releases = _releases(device, channel)
        assert releases == sorted(releases)


def _payloads(device: Device, channel: FleetChannel) -> list[bytes]:
    topic = fleet_topic(FLEET, channel)
    return [event.payload for event in device.received(topic) if event.payload]


def _presences(device: Device) -> list[Presence]:
    return [decode(payload, Presence, max_bytes=MAX_BYTES) for payload in _payloads(device, "state")]


def _releases(device: Device, channel: FleetChannel) -> list[int]:
    payloads = _payloads(device, channel)
    return [open_manifest(payload, fleet=FLEET, channel=channel).release for payload in payloads]
