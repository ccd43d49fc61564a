"""The closed fleet that all attacks share: a broker with two listeners, an aggregator, and honest devices with a head.

One listener is configured by `aggregator enroll-broker`: certificates and an access list. The other one has neither; it
stands for an attacker who has passed the broker, or operates it. Both serve the same topics.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from aggregator.intake.upload import Upload
from aggregator.storage.open_store import open_store
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import Heads
from protocol.errors import StateError
from protocol.storage.keyfile import read_key
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import MAX_FRAME_BYTES, Frame, HeadManifest, Signed, Submission
from protocol.wire.signing import open_manifest, sign_frame
from protocol.wire.topics import DeviceChannel, FleetChannel, device_topic, fleet_topic
from protocol.wire.transfer import frames_of
from tests.support.devices.marked_images import mark_images, write_bomb
from tests.support.fleets.closed_fleet import FLEET, ClosedFleet
from tests.support.fleets.fleet import Fleet, folder_bytes, write_digits
from tests.support.network.brokers import free_address
from tests.system.attacks.attacker_client import AttackerClient, TrafficMonitor

HONEST = ("shed-1", "shed-2")
"""Devices that have uploaded, and use the head."""
MALLORY = "mallory"
"""A malicious enrolled device."""
REVOKED = "revoked-1"
NEW, LATE = "new-1", "late-1"
"""Honest devices that start during an attack."""
MAX_MEMORY_BYTES = 1024**3
"""Of the aggregator, torch's libraries included."""
MAX_STATE_BYTES = 160 * 1024**2
"""Of its folder."""


@dataclass(frozen=True)
class Snapshot:
    """State that no attack may change: digests of the head, of the submissions, and of each device's head."""

    head: str
    submissions: dict[str, str]
    used: dict[str, str]


class AttackedFleet(Fleet):
    """The fleet; `data` has a folder of images for each honest device."""

    def __init__(self, root: Path, task: Path, data: dict[str, Path]) -> None:
        self.open = free_address()
        self.closed = ClosedFleet(root, free_address(), open_address=self.open)
        super().__init__(root, self.closed.broker, enrolled=True)
        self.data = data
        self.mosquitto = self.closed.mosquitto()
        self.early: list[tuple[str, bytes]] = []
        """Messages published until the fleet had its head and the aggregator had restarted once."""
        self._task = task
        for device in (*HONEST, MALLORY, REVOKED, NEW, LATE):
            self.closed.enroll(device)
        self.closed.revoke(REVOKED)

    def __enter__(self) -> Self:
        self.closed.publish_revocations()
        self.mosquitto.start()
        with TrafficMonitor(self.open) as monitor:
            self.start_aggregator(self._task, "--verbose")
            for name in HONEST:
                self.run_device(name, data=self.data[name])
            self.wait_until("a head in use", lambda: self.is_evaluated_by(len(HONEST)))
            monitor.settle()
            self.stop("aggregator")
            monitor.settle()
            before = {topic: monitor.payloads(topic)[-1] for topic in (shared("task"), shared("head"))}
            self.start_aggregator(self._task, "--verbose")
            self.wait_until(
                "task and head published again",
                lambda: all(monitor.payloads(topic)[-1] not in (old, b"") for topic, old in before.items()),
            )
            monitor.settle()
            self.early = [(one.topic, one.payload) for one in monitor.received if not one.retained]
        self.before = self.snapshot()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.mosquitto.stop()

    def run_device(self, name: str, *, data: Path) -> None:
        self.start_device(name, data, "--rescan-s", "0.5", "--verbose")

    # Clients and keys.

    def client_of(self, device: str = MALLORY, **options: Any) -> AttackerClient:
        """Return a client with a device's certificate."""
        return AttackerClient(self.broker, self.closed.access(device), **options)

    def inside(self, **options: Any) -> AttackerClient:
        """Return a client at the open listener."""
        return AttackerClient(self.open, **options)

    def aggregator_key(self) -> bytes:
        return read_key(self.aggregator_state / "identity" / "signing.key")

    def key(self, device: str) -> bytes:
        return read_key(self.root / device / "signing.key")

    def signed(self, frame: Frame, device: str = MALLORY, *, signer: str = "") -> bytes:
        """Return an encoded frame of a device, signed with its key or another device's."""
        return encode(sign_frame(frame, key=self.key(signer or device), fleet=FLEET, device=device))

    def upload_of(
        self, payload: bytes | Submission, device: str = MALLORY, *, signer: str = ""
    ) -> list[bytes]:
        """Return the signed frames of a payload."""
        data = payload if isinstance(payload, bytes) else encode(payload)
        return [
            self.signed(frame, device, signer=signer) for frame in frames_of(data, digest=digest_of(data))
        ]

    # Published messages.

    def published(self, channel: FleetChannel) -> list[bytes]:
        """Return the aggregator's signed manifests on a channel, the oldest first."""
        return [payload for topic, payload in self.early if topic == shared(channel) and payload]

    def frames(self, device: str = HONEST[0]) -> list[bytes]:
        """Return the frames with which a device has uploaded its submission."""
        digest = bytes.fromhex(self.before.submissions[device])
        uploaded = [payload for topic, payload in self.early if topic == own(device, "up")]
        return [payload for payload in uploaded if frame_of(payload).digest == digest]

    def submission(self, device: str = HONEST[0]) -> Submission:
        frames = [frame_of(payload) for payload in self.frames(device)]
        assembly = Upload(frames[0].digest, frames[0].size_bytes)
        for frame in frames:
            assembly.add(frame)
        return decode(assembly.payload(), Submission, max_bytes=2**24)

    def head_manifest(self) -> tuple[Signed, HeadManifest]:
        """Return the newest head's manifest: the envelope and its content."""
        signed = open_manifest(self.published("head")[-1], fleet=FLEET, channel="head")
        return signed, decode(signed.body, HeadManifest, max_bytes=2**17)

    def restore(self, channel: FleetChannel) -> None:
        """Publish the aggregator's newest manifest again, or clear the topic if there is none."""
        with self.inside() as client:
            published = self.published(channel)
            client.publish(shared(channel), published[-1] if published else b"", retain=True)

    def refused_by_aggregator(self, frames: Iterable[bytes], device: str, *, reason: str) -> Iterator[bool]:
        """Send a device's frames to the open listener, and wait until the aggregator has refused each."""
        with self.inside() as client:
            for payload in frames:
                with self.counted(reason, device):
                    assert client.publish(own(device, "up"), payload)
                yield False

    # State of the fleet.

    def refusals(self) -> Counter[tuple[str, str]]:
        """Count the refusals in status and in the broker's log."""
        counts, log = super().refusals(), self.mosquitto.log()
        counts["denied", MALLORY] = log.count(f"Denied PUBLISH from {MALLORY}")
        counts["no certificate", "?"] = log.count("SSL routines::")
        return counts

    @contextmanager
    def ignored_by_devices(self) -> Iterator[None]:
        """Publish something, and wait until each honest device has logged that it refuses a message."""

        def counts() -> list[int]:
            return [self.log(name).count("message refused topic=") for name in HONEST]

        before = counts()
        yield
        self.wait_until(
            "refusals in logs", lambda: all(now > old for now, old in zip(counts(), before, strict=True))
        )

    def states(self) -> dict[str, str]:
        """Return each device's state, as the aggregator shows it."""
        return {row["device"]: row["state"] for row in self.status()["devices"]}

    def names(self) -> set[str]:
        return {row["device"] for row in self.status()["devices"]}

    def memory_bytes(self) -> int:
        return sum(int(each.memory_info().rss) for each in self.services("aggregator"))

    def stores(self, part: bytes) -> bool:
        """Return whether a file of the aggregator contains some bytes."""
        files = [file for file in self.aggregator_state.rglob("*") if file.is_file()]
        return any(part in file.read_bytes() for file in files)

    def snapshot(self) -> Snapshot:
        with closing(open_store(self.aggregator_state, read_only=True)) as store:
            head = store.heads.all(store.served_task().digest)[-1].digest.hex()
        submissions = {name: self.submitted(name) for name in HONEST}
        return Snapshot(head, submissions, {name: self.used_head(name) for name in HONEST})

    def used_head(self, device: str) -> str:
        """Return the hex digest of the head that a device uses; empty if it has none."""
        try:
            installed = DeviceState(self.device_state(device), read_only=True).get(Heads).installed
        except StateError:
            return ""
        return "" if installed is None else installed.head.hex()

    def submitted(self, device: str) -> str:
        """Return the hex digest of a device's submission; empty if there is none."""
        with closing(open_store(self.aggregator_state, read_only=True)) as store:
            rows = store.submissions.all(store.served_task().digest)
            return rows[device].entry.digest.hex() if device in rows else ""

    def check_unharmed(self) -> None:
        """Check that nothing has changed, that every program runs, and that memory and disk are bounded."""
        assert self.snapshot() == self.before
        assert set(self.before.used.values()) == {self.before.head}
        for name, process in self.processes.items():
            expected = {None} if name in ("aggregator", *HONEST) else {None, 0, 1, -9, -15}
            assert process.poll() in expected, f"{name}: {process.returncode}\n{self.diagnostics()}"
        states = self.states()
        assert all(states[name] == "online" for name in HONEST), self.diagnostics()
        assert self.memory_bytes() < MAX_MEMORY_BYTES
        assert folder_bytes(self.aggregator_state) < MAX_STATE_BYTES


def own(device: str, channel: DeviceChannel) -> str:
    return device_topic(FLEET, device, channel)


def shared(channel: FleetChannel) -> str:
    return fleet_topic(FLEET, channel)


def frame_of(payload: bytes) -> Frame:
    return decode(payload, Frame, max_bytes=MAX_FRAME_BYTES)


Attempt = Callable[[AttackedFleet], Iterator[bool]]
"""Attacks a fleet; yields for each attempt whether it has succeeded."""

Count = tuple[str, str]
"""A reason and the sender's name, or `by NAME` for messages that device NAME has refused. Reasons in `BROKER_LOG` are
counted in the broker's log, all others in `aggregator status`."""

BROKER_LOG = {"denied": "`Denied PUBLISH`", "no certificate": "`SSL routines`"}
"""Texts in the broker's log."""


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        name: as in the table.
        stopped_by: in order.
        counted: what has increased when it is over.
        otherwise: where an operator sees it if nothing is counted.
    """

    name: str
    attempt: Attempt
    stopped_by: str
    counted: tuple[Count, ...]
    otherwise: str

    @property
    def visible_in(self) -> str:
        """Return where an operator sees it, in words."""
        places = [
            f"broker's log, {BROKER_LOG[reason]}{'' if name == '?' else f' from {name}'}"
            if reason in BROKER_LOG
            else f"`{reason}` {name if name.startswith('by ') else f'from {name}'}"
            for reason, name in self.counted
        ]
        return ", ".join(places) or self.otherwise


def attack(
    name: str, *, stopped_by: str, counted: tuple[Count, ...] = (), otherwise: str = ""
) -> Callable[[Attempt], Attack]:
    """Make an attack of a function."""
    return lambda attempt: Attack(name, attempt, stopped_by, counted, otherwise)


def write_images(root: Path) -> dict[str, Path]:
    """Write each honest device's images, half of the classes each, and a bomb among those of the first."""
    folders = {}
    for number, name in enumerate(HONEST):
        folder = write_digits(root / f"images-{name}", classes=list(range(5 * number, 5 * number + 5)))
        mark_images(folder)
        folders[name] = folder
    write_bomb(folders[HONEST[0]] / "0")
    return folders
