"""The closed fleet that all attacks share: a broker with two listeners, an aggregator, and honest devices with a head.

One listener is as `aggregator enroll-broker` makes it: certificates, and an access list. The other one has neither:
clients there are the broker's own operator, or have got past it. Both lead to the same topics.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from aggregator.security.enrollment import revoke
from aggregator.storage.store import Store
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import Heads
from protocol.errors import StateError
from protocol.storage.keyfile import read_key
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import MAX_FRAME_BYTES, Frame, HeadManifest, Signed, Submission
from protocol.wire.signing import open_manifest, sign_frame
from protocol.wire.topics import DeviceChannel, FleetChannel, device_topic, fleet_topic
from protocol.wire.transfer import Assembly, frames_of
from tests.support.brokers import free_address
from tests.support.closed_fleet import FLEET, ClosedFleet
from tests.support.fleet import Fleet
from tests.system.attacks.hostile import Client, Witness

HONEST = ("shed-1", "shed-2")
"""Devices that have uploaded, and use the head."""
HOSTILE = "mallory"
"""A device that is enrolled, and not honest."""
REVOKED = "eve"
FRESH, LATE = "fresh", "late"
"""Honest devices that begin later."""
MAX_MEMORY_BYTES = 1024**3
"""Of the aggregator, torch's libraries included."""
MAX_STATE_BYTES = 160 * 1024**2
"""Of its folder."""


@dataclass(frozen=True)
class Snapshot:
    """State that no attack may change."""

    head: str
    submissions: dict[str, str]
    used: dict[str, str]
    """The head that each honest device has in use."""


class AttackedFleet(Fleet):
    """The fleet.

    Args:
        root: a folder of its own.
        task: the task file.
        data: a folder of images for each honest device.
    """

    def __init__(self, root: Path, task: Path, data: dict[str, Path]) -> None:
        self.open = free_address()
        self.closed = ClosedFleet(root, free_address(), open_address=self.open)
        super().__init__(root, self.closed.broker, enrolled=True)
        self.data = data
        self.mosquitto = self.closed.mosquitto()
        self.early: list[tuple[str, bytes]] = []
        """Messages published until the fleet had its head and the aggregator had restarted once."""
        self._task = task
        for device in (*HONEST, HOSTILE, REVOKED, FRESH, LATE):
            self.closed.enroll(device)
        revoke(self.closed.store, REVOKED)

    # How it begins and ends.

    def __enter__(self) -> Self:
        self.closed.publish_revocations()
        self.mosquitto.start()
        with Witness(self.open) as witness:
            self.run_aggregator()
            for name in HONEST:
                self.run_device(name, data=self.data[name])
            self.wait_until("a head in use", self.is_settled)
            witness.settle()
            self.stop("aggregator")
            self.run_aggregator()
            self.wait_for_log("aggregator", "connected to the broker", times=2)
            self.wait_until("the head, published again", lambda: len(witness.said(shared("head"))) > 2)
            witness.settle()
            self.early = [(heard.topic, heard.payload) for heard in witness.heard if not heard.retained]
        self.before = self.snapshot()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.mosquitto.stop()
        self.closed.store.close()

    def run_aggregator(self) -> None:
        """Start the aggregator."""
        self.start_aggregator(self._task, "--verbose")

    def run_device(self, name: str, *, data: Path) -> None:
        """Start an enrolled device."""
        self.start_device(name, data, "--rescan-s", "0.5", "--verbose")

    # Clients and keys.

    def mallory(self, **options: Any) -> Client:
        """The dishonest device, at the listener with certificates."""
        return Client(self.broker, self.closed.access(HOSTILE), **options)

    def client_of(self, device: str) -> Client:
        """An attacker who has a device's folder."""
        return Client(self.broker, self.closed.access(device))

    def inside(self, **options: Any) -> Client:
        """An attacker who has got past the broker, or runs it."""
        return Client(self.open, **options)

    def key(self, device: str) -> bytes:
        """A device's private key."""
        return read_key(self.root / device / "signing.key")

    def aggregator_key(self) -> bytes:
        """The aggregator's private key."""
        return read_key(self.aggregator_state / "identity" / "signing.key")

    # What was published.

    def published(self, channel: FleetChannel) -> list[bytes]:
        """The aggregator's signed manifests on a channel, the oldest first."""
        topic = fleet_topic(FLEET, channel)
        return [payload for said, payload in self.early if said == topic and payload]

    def frames(self, device: str = HONEST[0]) -> list[bytes]:
        """The frames with which a device has uploaded its submission."""
        said = [payload for topic, payload in self.early if topic == device_topic(FLEET, device, "up")]
        digest = bytes.fromhex(self.before.submissions[device])
        return [payload for payload in said if frame_of(payload).digest == digest]

    def submission(self, device: str = HONEST[0]) -> Submission:
        """Return a device's submission."""
        frames = [frame_of(payload) for payload in self.frames(device)]
        assembly = Assembly(frames[0].digest, frames[0].size_bytes)
        for frame in frames:
            assembly.add(frame)
        return decode(assembly.payload(), Submission, max_bytes=2**24)

    def forged_frame(self, device: str, *, signer: str, data: bytes = b"forged") -> bytes:
        """A whole transfer of one frame under a device's name, signed with another device's key."""
        frame = next(frames_of(data, digest=digest_of(data)))
        return encode(sign_frame(frame, key=self.key(signer), fleet=FLEET, device=device))

    def refused_inside(self, said: Iterable[tuple[str, bytes]], *, reason: str) -> Iterator[bool]:
        """Send frames under names past the broker, and wait until each was refused."""
        with self.inside() as operator:
            for device, payload in said:
                with self.counted(reason, device):
                    assert operator.publish(own(device, "up"), payload)
                yield False

    def head_manifest(self) -> tuple[Signed, HeadManifest]:
        """The newest head's manifest: the envelope, and what is in it."""
        signed = open_manifest(self.published("head")[-1], fleet=FLEET, channel="head")
        return signed, decode(signed.body, HeadManifest, max_bytes=2**17)

    def restore(self, channel: FleetChannel) -> None:
        """Publish the aggregator's newest manifest again, or clear the topic if there is none."""
        with self.inside() as operator:
            published = self.published(channel)
            operator.publish(shared(channel), published[-1] if published else b"", retain=True)

    # What is seen from outside.

    def refusals(self) -> Counter[tuple[str, str]]:
        """Refusals in the broker's log and in status, by reason and name; `by NAME` for what a device has refused."""
        summary = self.status()
        counts: Counter[tuple[str, str]] = Counter()
        for row in summary.get("refusals", []):
            counts[row["reason"], row["device"]] += row["count"]
        for device in summary.get("devices", []):
            for reason, count in device["refused_messages"].items():
                counts[reason, f"by {device['device']}"] += count
        log = self.mosquitto.log()
        counts["denied", HOSTILE] = log.count(f"Denied PUBLISH from {HOSTILE}")
        counts["no certificate", "?"] = log.count("SSL routines::")
        return counts

    def names(self) -> set[str]:
        """The devices that the aggregator knows."""
        return {row["device"] for row in self.status()["devices"]}

    @contextmanager
    def counted(self, reason: str, name: str) -> Iterator[None]:
        """Do something, and wait until status has counted one more refusal."""
        before = self.refusals()[reason, name]
        yield
        self.wait_until(f"{reason} of {name}", lambda: self.refusals()[reason, name] > before)

    def ignored(self, device: str) -> int:
        """Count the messages that a device has logged as ignored."""
        return self.log(device).count("message refused topic=")

    def memory_bytes(self) -> int:
        """Resident memory of the aggregator."""
        return int(psutil.Process(self.processes["aggregator"].pid).memory_info().rss)

    def state_bytes(self) -> int:
        """Bytes of the aggregator's folder."""
        return sum(_size(file) for file in self.aggregator_state.rglob("*") if file.is_file())

    def stores(self, part: bytes) -> bool:
        """Return whether a file of the aggregator contains some bytes."""
        files = [file for file in self.aggregator_state.rglob("*") if file.is_file()]
        return any(part in file.read_bytes() for file in files)

    def is_settled(self) -> bool:
        """Return whether all honest devices have evaluated the head."""
        heads = self.status().get("heads", [])
        return bool(heads) and heads[-1]["held_out"]["devices"] == len(HONEST)

    def snapshot(self) -> Snapshot:
        """Return the state that no attack may change."""
        with closing(Store(self.aggregator_state, read_only=True)) as store:
            head = store.heads.all(store.served_task().digest)[-1].digest.hex()
        return Snapshot(
            head,
            {name: self.submitted(name) for name in HONEST},
            {name: self.uses(name) for name in HONEST},
        )

    def uses(self, device: str) -> str:
        """Hex digest of the head that a device has in use; empty if it has none."""
        try:
            installed = DeviceState(self.device_state(device), read_only=True).get(Heads).installed
        except StateError:
            return ""
        return "" if installed is None else installed.head.hex()

    def submitted(self, device: str) -> str:
        """Hex digest of a device's submission; empty if there is none."""
        with closing(Store(self.aggregator_state, read_only=True)) as store:
            rows = store.submissions.all(store.served_task().digest)
            return rows[device].entry.digest.hex() if device in rows else ""

    def check_unharmed(self) -> None:
        """Check that nothing has changed, that every program runs, and that nothing grows without bound."""
        assert self.snapshot() == self.before
        assert set(self.before.used.values()) == {self.before.head}
        for name, process in self.processes.items():
            expected = {None} if name in ("aggregator", *HONEST) else {None, 0, 1, -9, -15}
            assert process.poll() in expected, f"{name}: {process.returncode}\n{self.diagnostics()}"
        online = {row["device"]: row["state"] for row in self.status()["devices"]}
        assert all(online[name] == "online" for name in HONEST), self.diagnostics()
        assert self.memory_bytes() < MAX_MEMORY_BYTES
        assert self.state_bytes() < MAX_STATE_BYTES


def own(device: str, channel: DeviceChannel) -> str:
    """Return a device's topic in this fleet."""
    return device_topic(FLEET, device, channel)


def shared(channel: FleetChannel) -> str:
    """Return a topic of the whole fleet."""
    return fleet_topic(FLEET, channel)


def frame_of(payload: bytes) -> Frame:
    """Return the frame in a payload."""
    return decode(payload, Frame, max_bytes=MAX_FRAME_BYTES)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
