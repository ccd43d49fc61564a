"""A real aggregator process, and a client that can send it anything under a device's name."""

import contextlib
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from protocol.mqtt.reconnecting_session import (
    BrokerAddress,
    Connected,
    Drained,
    Event,
    Outgoing,
    Received,
    Session,
)
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import (
    BlobRef,
    BlobRequest,
    Evaluation,
    Frame,
    HeadManifest,
    HeadRef,
    Presence,
    Receipt,
    RoundManifest,
    Signed,
    Submission,
)
from protocol.wire.signing import open_manifest, sign_frame
from protocol.wire.topics import DeviceChannel, FleetChannel, device_topic, fleet_topic
from protocol.wire.transfer import Assembly, frames_of
from tests.support.fleet import aggregator_status, wait_until
from tests.support.graphs import tiny_backbone

TIMEOUT_S = 300.0
MAX_BYTES = 2**20
FLEET = "barn"
PATIENT = "quorum = 100\ndeadline_s = 1000"
"""Task settings with which nothing is trained."""
IN_ROUNDS = """
algorithm = "fpl"
quorum = 2
deadline_s = 1000
[rounds]
grace_s = 0
staleness = 1
[fpl]
rounds = 3
projection_size = 4
"""
"""Task settings of three rounds, each closed by two devices."""
E = TypeVar("E", bound=Event)
M = TypeVar("M", HeadManifest, RoundManifest, Presence, Receipt, Frame)


def write_task(folder: Path, added: str = "") -> Path:
    """Write a task of three classes on the tiny backbone, with further settings."""
    (folder / "tiny.onnx").write_bytes(tiny_backbone())
    path = folder / "task.toml"
    path.write_text(
        f'fleet = "{FLEET}"\nclasses = ["cat", "dog", "fox"]\nbackbones = ["tiny.onnx"]\n{added}\n',
        encoding="utf-8",
    )
    return path


@dataclass(frozen=True)
class Daemon:
    """A running `aggregator run`."""

    process: subprocess.Popen[bytes]
    state: Path
    log_file: Path

    def log(self) -> str:
        """Its log so far."""
        return self.log_file.read_text(encoding="utf-8")

    def status(self) -> dict[str, Any]:
        """Return what `aggregator status --json` prints; empty before there is a state."""
        return aggregator_status(self.state)

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the status meets a condition; returns that status."""
        summary: dict[str, Any] = {}

        def met() -> bool:
            assert self.process.poll() is None, self.log()
            summary.clear()
            summary.update(self.status())
            return bool(summary and holds(summary))

        wait_until("a status", met, diagnostics=lambda: f"{self.status()}\n{self.log()}")
        return summary

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it by a signal; returns its exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=TIMEOUT_S)


@contextmanager
def aggregator(task: Path, broker: BrokerAddress, *options: str) -> Iterator[Daemon]:
    """Run the aggregator on a task file, with its state and log beside that."""
    state, log_file = task.parent / "state", task.parent / "aggregator.log"
    arguments = ["run", "--task", str(task), "--state", str(state), "--broker", str(broker), *options]
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "aggregator.cli", *arguments], stdout=log, stderr=log
        )
    daemon = Daemon(process, state, log_file)
    try:
        yield daemon
    finally:
        if process.poll() is None:
            daemon.stop()


def key_of(device: str) -> bytes:
    """Return a device's private key, always the same."""
    return digest_of(f"the key of {device}".encode())


def signed(frame: Frame, device: str = "dev") -> bytes:
    """Return an encoded frame with a device's signature."""
    return encode(sign_frame(frame, key=key_of(device), fleet=FLEET, device=device))


class Device:
    """A device's side of the wire, one call at a time.

    Args:
        broker: the fleet's.
        name: its id.
    """

    def __init__(self, broker: BrokerAddress, name: str = "dev") -> None:
        self.name = name
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._unread: list[Received] = []
        self._session = Session(
            broker,
            client_id=f"test-{name}",
            subscriptions=[
                *(fleet_topic(FLEET, channel) for channel in ("task", "round", "head", "state", "cast")),
                *(device_topic(FLEET, name, channel) for channel in ("ack", "blk")),
            ],
            on_event=self._events.put,
        )

    def __enter__(self) -> Self:
        self._session.start()
        self._event(Connected)
        return self

    def __exit__(self, *_: object) -> None:
        self._session.stop()

    def _event(self, kind: type[E]) -> E:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            event = self._events.get(timeout=max(0.01, deadline - time.monotonic()))
            if isinstance(event, kind):
                return event
            if isinstance(event, Received):
                self._unread.append(event)

    def wait(self, topic: str, message_type: type[M], *, when: Callable[[M], bool] = lambda _: True) -> M:
        """Wait for a message on a topic that meets a condition; others on that topic are dropped."""
        while True:
            unread = [event for event in self._unread if event.topic == topic]
            for event in unread:
                self._unread.remove(event)
                if not event.payload:
                    continue  # a retained message that was cleared
                message = decode(_body(event), message_type, max_bytes=MAX_BYTES)
                if when(message):
                    return message
            self._unread.append(self._event(Received))

    def signed(self, channel: FleetChannel) -> Signed:
        """Wait for the next signed manifest of a channel."""
        topic = fleet_topic(FLEET, channel)
        while not (found := [event for event in self._unread if event.topic == topic and event.payload]):
            self._unread.append(self._event(Received))
        self._unread.remove(found[0])
        return open_manifest(found[0].payload, fleet=FLEET, channel=channel)

    def task(self) -> bytes:
        """Wait for the task manifest; returns its bytes."""
        topic = fleet_topic(FLEET, "task")
        while not (found := [event for event in self._unread if event.topic == topic]):
            self._unread.append(self._event(Received))
        return _body(found[-1])

    def aggregator_is(self, state: str) -> Presence:
        """Wait for a state of the aggregator's presence."""
        return self.wait(fleet_topic(FLEET, "state"), Presence, when=lambda presence: presence.state == state)

    def head(self, version: int = 1) -> HeadRef:
        """Wait until the fleet uses a head of at least this version."""
        topic = fleet_topic(FLEET, "head")
        return self.wait(topic, HeadManifest, when=lambda head: head.current.version >= version).current

    def round(self, number: int = 0) -> RoundManifest:
        """Wait for a round of at least this number."""
        topic = fleet_topic(FLEET, "round")
        return self.wait(topic, RoundManifest, when=lambda manifest: manifest.number >= number)

    def catch(self, blob: BlobRef) -> bytes:
        """Receive a blob that is sent to all devices."""
        assembly = Assembly(blob.digest, blob.size_bytes)
        while assembly.missing():
            topic = fleet_topic(FLEET, "cast")
            assembly.add(self.wait(topic, Frame, when=lambda frame: frame.digest == blob.digest))
        return assembly.payload()

    def casts(self) -> list[Frame]:
        """Return frames that were sent to all devices and not read yet."""
        topic = fleet_topic(FLEET, "cast")
        payloads = [event.payload for event in self._unread if event.topic == topic]
        return [decode(payload, Frame, max_bytes=MAX_BYTES) for payload in payloads]

    def topics(self) -> set[str]:
        """Return the topics of messages that were not read yet."""
        return {event.topic for event in self._unread}

    def say(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Publish anything anywhere, and wait for the broker's acknowledgement."""
        self._session.send(Outgoing(topic, payload, retain))
        self._event(Drained)

    def send(self, channel: DeviceChannel, payload: bytes) -> None:
        """Publish on a channel of this device."""
        self.say(device_topic(FLEET, self.name, channel), payload)

    def send_payload(self, payload: bytes, *, ranges: tuple[tuple[int, int], ...] | None = None) -> bytes:
        """Send frames of a payload; returns its digest."""
        digest = digest_of(payload)
        for frame in frames_of(payload, digest=digest, ranges=ranges):
            self.send("up", signed(frame, self.name))
        return digest

    def receipt(self, digest: bytes) -> Receipt:
        """Wait for the next receipt of a transfer."""
        topic = device_topic(FLEET, self.name, "ack")
        return self.wait(topic, Receipt, when=lambda receipt: receipt.digest == digest)

    def upload(self, message: Submission | Evaluation) -> Receipt:
        """Send a whole message; returns its receipt."""
        return self.receipt(self.send_payload(encode(message)))

    def fetch(self, blob: BlobRef) -> bytes:
        """Download a blob."""
        assembly = Assembly(blob.digest, blob.size_bytes)
        while missing := assembly.missing():
            request = BlobRequest(digest=blob.digest, offset=missing[0][0], length=60 * 1024)
            self.send("get", encode(request))
            wanted = min(missing[0][0] + request.length, blob.size_bytes)
            while assembly.missing() and assembly.missing()[0][0] < wanted:
                assembly.add(self.wait(device_topic(FLEET, self.name, "blk"), Frame))
        return assembly.payload()


def _body(event: Received) -> bytes:
    """Return the payload, without the envelope if it is signed."""
    channels: tuple[FleetChannel, ...] = ("task", "round", "head")
    for channel in channels:
        if event.topic == fleet_topic(FLEET, channel):
            return open_manifest(event.payload, fleet=FLEET, channel=channel).body
    return event.payload


def spoil(message: msgspec.Struct, **fields: Any) -> bytes:
    """Return a message's bytes with fields replaced, valid or not."""
    envelope = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    with contextlib.suppress(TypeError):
        envelope = {**envelope, **fields}
    return msgspec.msgpack.encode(envelope)
