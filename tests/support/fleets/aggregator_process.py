"""The aggregator as a process, and a client that can send it anything under a device's name."""

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from aggregator.intake.upload import Upload
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Drained, Outgoing, Received, Session
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import (
    BlobRef,
    BlobRequest,
    Evaluation,
    Frame,
    HeadManifest,
    HeadRef,
    Presence,
    PresenceState,
    Receipt,
    RoundManifest,
    Signed,
    Submission,
)
from protocol.wire.signing import open_manifest, sign_frame, sign_presence
from protocol.wire.topics import DeviceChannel, FleetChannel, device_topic, fleet_topic
from protocol.wire.transfer import frames_of
from tests.support.fleets.fleet import Fleet
from tests.support.fleets.fork_server import run_command
from tests.support.graphs.backbones import tiny_backbone
from tests.support.network.sessions import E, EventLog

TIMEOUT_S = 240.0
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


def without(*packages: str) -> str:
    """Return code that hides packages, as on a machine that lacks them.

    `None` in `sys.modules` would not do: SciPy takes the entry for the package.
    """
    return f"""
import sys
from importlib.machinery import PathFinder

class Lacking(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {packages!r} else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Lacking if each is PathFinder else each for each in sys.meta_path]
"""


PROGRAM = """\
import aggregator.config.task_file, aggregator.security.enrollment, aggregator.storage.open_store
from aggregator.cli import main
"""
WITHOUT_TORCH = without("torch", "onnx", "onnxscript", "amqtt") + PROGRAM
"""The program on a machine that lacks the large packages."""
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


def run_aggregator(*arguments: str, program: str = WITHOUT_TORCH) -> subprocess.CompletedProcess[str]:
    """Run a command of `aggregator`, which the program imports as `main`."""
    return run_command(program, *arguments)


class Daemon:
    def __init__(self, fleet: Fleet) -> None:
        self.process = fleet.processes["aggregator"]
        self.state = fleet.aggregator_state
        self.status = fleet.status
        self._fleet = fleet

    def log(self) -> str:
        return self._fleet.log("aggregator")

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the status meets a condition; returns that status."""
        return self._fleet.wait_for("a status", holds)

    def until_logged(self, text: str, *, times: int = 1) -> None:
        """Wait until the log contains a text at least `times` times."""
        self._fleet.wait_for_log("aggregator", text, times=times)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it by a signal; returns its exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=TIMEOUT_S)


@contextmanager
def aggregator(
    task: Path, broker: BrokerAddress, *options: str, program: str = Fleet.aggregator_program
) -> Iterator[Daemon]:
    """Run the aggregator on a task file, with its state and log beside that."""
    with Fleet(task.parent, broker) as fleet:
        fleet.aggregator_program = program
        fleet.aggregator_state = task.parent / "state"
        fleet.start_aggregator(task, *options)
        yield Daemon(fleet)


def key_of(device: str) -> bytes:
    """Return a device's private key, always the same."""
    return digest_of(f"the key of {device}".encode())


def signed(frame: Frame, device: str = "dev") -> bytes:
    """Return an encoded frame with a device's signature."""
    return encode(sign_frame(frame, key=key_of(device), fleet=FLEET, device=device))


def presence_of(
    device: str = "dev", state: PresenceState = "online", *, signer: str = "", epoch: int = 1
) -> bytes:
    """Return an encoded presence of a device, signed with its key or another device's."""
    topic, key = device_topic(FLEET, device, "state"), key_of(signer or device)
    return encode(sign_presence(Presence(state=state, epoch=epoch), key=key, topic=topic))


class Device:
    """A device's side of the protocol, one call at a time."""

    def __init__(self, broker: BrokerAddress, name: str = "dev") -> None:
        self.name = name
        self._events = EventLog()
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
        """Wait for an event; messages that arrive before it become unread."""
        start = len(self._events.seen)
        event = self._events.wait(kind)
        self._unread += [each for each in self._events.seen[start:-1] if isinstance(each, Received)]
        return event

    def _any(self, topic: str) -> Received:
        """Remove and return the next unread message on a topic."""
        while (event := next((each for each in self._unread if each.topic == topic), None)) is None:
            self._unread.append(self._event(Received))
        self._unread.remove(event)
        return event

    def _next(self, topic: str) -> Received:
        """Remove and return the next unread message on a topic, without those that clear a retained one."""
        while not (event := self._any(topic)).payload:
            pass
        return event

    def wait(self, topic: str, message_type: type[M], *, when: Callable[[M], bool] = lambda _: True) -> M:
        """Wait for a message on a topic that meets a condition; others on that topic are dropped."""
        while not when(message := decode(_body(self._next(topic)), message_type, max_bytes=MAX_BYTES)):
            pass
        return message

    def until(self, topic: str, payload: bytes) -> None:
        """Wait for these bytes on a topic; others on that topic are dropped."""
        while self._any(topic).payload != payload:
            pass

    def signed(self, channel: FleetChannel) -> Signed:
        """Wait for the next signed manifest of a channel."""
        return open_manifest(self._next(fleet_topic(FLEET, channel)).payload, fleet=FLEET, channel=channel)

    def task(self, *, before: bytes = b"") -> bytes:
        """Wait for a task manifest other than the one before; returns its bytes."""
        topic = fleet_topic(FLEET, "task")
        while not (found := [each for each in self._unread if each.topic == topic and _body(each) != before]):
            self._unread.append(self._event(Received))
        return _body(found[-1])

    def aggregator_is(self, state: str) -> Presence:
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
        assembly = Upload(blob.digest, blob.size_bytes)
        while assembly.missing():
            topic = fleet_topic(FLEET, "cast")
            assembly.add(self.wait(topic, Frame, when=lambda frame: frame.digest == blob.digest))
        return assembly.payload()

    def casts(self) -> list[Frame]:
        """Return the unread frames that were sent to all devices."""
        topic = fleet_topic(FLEET, "cast")
        payloads = [event.payload for event in self._unread if event.topic == topic]
        return [decode(payload, Frame, max_bytes=MAX_BYTES) for payload in payloads]

    def wait_cleared(self, topic: str) -> None:
        """Wait until a retained message is cleared."""
        while not any(event.topic == topic and not event.payload for event in self._unread):
            self._unread.append(self._event(Received))

    def topics(self) -> set[str]:
        return {event.topic for event in self._unread}

    def received(self, topic: str) -> list[Received]:
        """Return all messages on a topic so far, read or not."""
        return [event for event in self._events.seen if isinstance(event, Received) and event.topic == topic]

    def say(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Publish anything anywhere, and wait for the broker's acknowledgement."""
        self._session.send(Outgoing(topic, payload, retain))
        self._event(Drained)

    def send(self, channel: DeviceChannel, payload: bytes) -> None:
        self.say(device_topic(FLEET, self.name, channel), payload)

    def send_payload(self, payload: bytes, *, ranges: tuple[tuple[int, int], ...] | None = None) -> bytes:
        """Send frames of a payload; returns its digest."""
        digest = digest_of(payload)
        for frame in frames_of(payload, digest=digest, ranges=ranges):
            self.send("up", signed(frame, self.name))
        return digest

    def receipt(self, digest: bytes) -> Receipt:
        topic = device_topic(FLEET, self.name, "ack")
        return self.wait(topic, Receipt, when=lambda receipt: receipt.digest == digest)

    def upload(self, message: Submission | Evaluation) -> Receipt:
        return self.receipt(self.send_payload(encode(message)))

    def fetch(self, blob: BlobRef) -> bytes:
        assembly = Upload(blob.digest, blob.size_bytes)
        while missing := assembly.missing():
            request = BlobRequest(digest=blob.digest, offset=missing[0][0], length=60 * 1024)
            self.send("get", encode(request))
            wanted = min(missing[0][0] + request.length, blob.size_bytes)
            while assembly.missing() and assembly.missing()[0][0] < wanted:
                assembly.add(self.wait(device_topic(FLEET, self.name, "blk"), Frame))
        return assembly.payload()


@contextmanager
def running_fleet(task: Path, broker: BrokerAddress, *names: str) -> Iterator[tuple[Daemon, list[Device]]]:
    """Run the aggregator, and a client for each name, all of which have its presence."""
    with contextlib.ExitStack() as running:
        daemon = running.enter_context(aggregator(task, broker))
        devices = [running.enter_context(Device(broker, name)) for name in names]
        for device in devices:
            device.aggregator_is("online")
        yield daemon, devices


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
