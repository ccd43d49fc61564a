"""A device program that hears anything: manifests well and badly signed, blobs, receipts, presences, in any order."""

import contextlib
import functools
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import msgspec

import edge_client.service.publisher
from edge_client.agent import events, state_machine
from edge_client.agent.downloads import MAX_AHEAD, MAX_AHEAD_BYTES
from edge_client.agent.manifest_trust import ManifestTrust
from edge_client.agent.state import Mode, State
from edge_client.service.device import Device
from edge_client.storage.device_state import DeviceState
from protocol.errors import ProtofleetError
from protocol.mqtt.events import Connected, Disconnected, Drained, Received
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import Message
from protocol.wire.signing import sign_manifest
from protocol.wire.topics import DeviceChannel, FleetChannel, device_topic, fleet_topic
from tests.fuzz.mutations import of_message
from tests.fuzz.target import MIB, Target
from tests.support.device_factory import make_settings
from tests.support.messages import SAMPLES

FLEET, NAME, KEY = "f", "device", bytes(range(32))
SHARED: tuple[FleetChannel, ...] = ("task", "round", "head")
HEARD: tuple[DeviceChannel, ...] = ("blk", "ack", "state")
PAYLOAD = bytes(range(256)) * 300
ITEM = digest_of(PAYLOAD)

# An operation is a number, the length of its body in two bytes, and the body.
SAID, FORGED, CAST, AGGREGATOR, OWN, LIFE = 0, 3, 6, 7, 8, 11
FITTING, OLD = 16, 32
"""Added to an operation: what the body refers to is put right; the release is not a new one."""


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """Where state is kept: in memory, if that is possible."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)  # noqa: S108


@functools.cache
def _device() -> Device:
    place = Path(folder().name) / "device"
    place.mkdir()
    edge_client.service.publisher.version = functools.cache(version)  # type: ignore[attr-defined]  # else half of the time goes there
    return Device(make_settings(place), DeviceState(place / "state"))


def _begun() -> Device:
    """The device as if it had just started on an empty state directory."""
    device = _device()
    device._state, device._exit, device._problem = State(mode=Mode.SERVICE, device=NAME), None, ""
    receiver = device._receiver
    receiver._trust, receiver._aggregator_epoch = ManifestTrust(), 0
    receiver._task, receiver._round = None, None
    receiver.refused.clear()
    device._store.blobs.keep_only(())
    for waiting in (device._inbox, device._worker._jobs):
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.get_nowait()
    return device


def parsed(data: bytes) -> list[tuple[int, bytes]]:
    """The operations in an input."""
    found, at = [], 0
    while at + 3 <= len(data):
        size = int.from_bytes(data[at + 1 : at + 3], "big")
        found.append((data[at], data[at + 3 : at + 3 + size]))
        at += 3 + size
    return found


def written(operations: Iterable[tuple[int, bytes]]) -> bytes:
    """Operations as an input."""
    return b"".join(
        bytes([number]) + len(body[:65535]).to_bytes(2, "big") + body[:65535] for number, body in operations
    )


def live(data: bytes) -> None:
    """Whatever it hears, a device goes on or ends in one line; it believes nothing unsigned, and holds little."""
    device = _begun()
    for release, (number, body) in enumerate(parsed(data), 1):
        try:
            _hear(device, number, body, release=release)
            while device._exit is None and not device._inbox.empty():
                device._handle(device._inbox.get_nowait())
        except ProtofleetError:
            return
        if device._exit is not None:
            return
        _check(device._state)


def _check(state: State) -> None:
    for upload in state.uploads:
        assert all(0 <= start < stop <= upload.item.size_bytes for start, stop in upload.ranges)
    download = state.download
    if download is not None:
        assert 0 <= download.offset <= download.blob.size_bytes
        assert len(download.ahead) <= MAX_AHEAD
        assert sum(len(data) for _, data in download.ahead) <= MAX_AHEAD_BYTES


def _hear(device: Device, number: int, body: bytes, *, release: int) -> None:
    kind = number % 16
    if number & FITTING:
        body = _fitting(device._state, kind, body)
    if kind < FORGED:
        channel = SHARED[kind]
        said = 1 if number & OLD else release
        signed = sign_manifest(body, key=KEY, fleet=FLEET, channel=channel, release=said)
        device._handle(Received(fleet_topic(FLEET, channel), signed, retained=True))
    elif kind < CAST:
        before = device._state.task, device._state.round, device._state.head
        device._handle(Received(fleet_topic(FLEET, SHARED[kind - FORGED]), body, retained=True))
        assert before == (device._state.task, device._state.round, device._state.head)
    elif kind in {CAST, AGGREGATOR}:
        topic = fleet_topic(FLEET, "cast" if kind == CAST else "state")
        device._handle(Received(topic, body, retained=bool(number & OLD)))
    elif kind < LIFE:
        device._handle(Received(device_topic(FLEET, NAME, HEARD[kind - OWN]), body))
    else:
        _lives_on(device, kind - LIFE, body)


def _lives_on(device: Device, kind: int, body: bytes) -> None:
    """Something happens that nobody has said."""
    match kind:
        case 0:
            device._handle(Connected(int.from_bytes(body[:4], "big") or None))
        case 1:
            device._handle(Disconnected("cut", 1.0))
        case 2:
            device._handle(Drained())
        case 3:
            state, actions = state_machine.step(device._state, events.Ticked(), now_s=time.monotonic() + 1e4)
            device._state = state
            for action in actions:
                device._perform(action)
        case _ if device._state.task is not None:
            item = device._store.outbox.keep("submission", PAYLOAD, task=device._state.task, about="images")
            device._handle(events.SubmissionBuilt(item.task, item, round=device._state.joined_round))


def _fitting(state: State, kind: int, body: bytes) -> bytes:
    """A message about what the device is at: its task, its download, its upload."""
    try:
        fields: Any = msgspec.msgpack.decode(body)
        if kind in {1, 2}:
            fields["task"] = state.task
        elif kind in {CAST, OWN} and state.download is not None:
            fields[2], fields[3] = state.download.blob.digest, state.download.blob.size_bytes
        elif kind == OWN + 1:
            is_download = state.download is not None and fields["status"] == "refused"
            fields["digest"] = state.download.blob.digest if state.download and is_download else ITEM
        return msgspec.msgpack.encode(fields)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
        return body


_change: Callable[[bytes, Random], bytes] = of_message()


def mutate_operations(data: bytes, random: Random, *, flags: tuple[int, ...]) -> bytes:
    """Change an operation, one of its flags, or the order of all."""
    operations = parsed(data)
    if not operations:
        return data
    at = random.randrange(len(operations))
    number, body = operations[at]
    match random.randrange(6):
        case 0:
            del operations[at]
        case 1:
            operations.insert(random.randrange(len(operations) + 1), operations[at])
        case 2:
            operations[at] = (number ^ random.choice(flags), body)
        case _:
            operations[at] = (number, _change(body, random))
    return written(operations)


def mutate(data: bytes, random: Random) -> bytes:
    """Change an operation, or their order."""
    return mutate_operations(data, random, flags=(FITTING, OLD, 1, 2, 4, 8))


def _seeds() -> Iterable[bytes]:
    messages: dict[str, Message] = {
        type(each).__name__: each for each in SAMPLES if isinstance(each, Message)
    }
    frame = next(each for each in SAMPLES if not isinstance(each, Message))
    task = encode(messages["TaskManifest"])
    without = encode(msgspec.structs.replace(messages["TaskManifest"], program=None))
    begin = [(LIFE, b""), (AGGREGATOR, encode(messages["Presence"]))]
    for first in (task, without):
        yield written([*begin, (SAID, first), (1 + FITTING, encode(messages["RoundManifest"])),
                       (2 + FITTING, encode(messages["HeadManifest"])), (LIFE + 3, b""),
                       (CAST + FITTING, encode(frame)), (OWN + FITTING, encode(frame)),
                       (OWN + 1 + FITTING, encode(messages["Receipt"]))])  # fmt: skip
    receipt = messages["Receipt"]
    for status, reason in (
        ("missing", None),
        ("received", None),
        ("refused", "superseded"),
        ("refused", "no_space"),
    ):
        answer = encode(msgspec.structs.replace(receipt, status=status, reason=reason))
        yield written([*begin, (SAID, without), (LIFE + 4, b""), (LIFE + 3, b""), (OWN + 1 + FITTING, answer),
                       (LIFE + 2, b""), (LIFE + 1, b"")])  # fmt: skip
    yield written([(FORGED, encode(messages["Signed"])), (OWN + 2, encode(messages["Presence"]))])


DEVICE = Target(
    "device", live, _seeds, mutate, max_bytes=8192, at_least_bytes=2 * MIB, bytes_per_byte=64, share=0.25
)
