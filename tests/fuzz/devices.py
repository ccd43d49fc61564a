"""The device program with any messages in any order: signed and forged manifests, blobs, receipts, presences."""

import contextlib
import functools
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from edge_client.core import events, state_machine
from edge_client.core.downloads import MAX_AHEAD, MAX_AHEAD_BYTES
from edge_client.core.manifest_trust import ManifestTrust
from edge_client.core.state import Mode, State
from edge_client.service.device import Device
from edge_client.store.device_state import DeviceState
from protocol.errors import ProtofleetError
from protocol.mqtt.events import Connected, Disconnected, Drained, Received
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import (
    Frame,
    HeadManifest,
    Presence,
    Receipt,
    RoundManifest,
    Signed,
    TaskManifest,
)
from protocol.wire.topics import DeviceChannel, FleetChannel, device_topic, fleet_topic
from tests.fuzz.mutations import of_message
from tests.fuzz.target import MIB, Target
from tests.support.devices.device_factory import make_settings
from tests.support.devices.job_states import keep_item
from tests.support.messages.every_type import SAMPLES
from tests.support.messages.manifests import signed_manifest

FLEET, NAME, KEY = "f", "device", bytes(range(32))
MANIFESTS: tuple[FleetChannel, ...] = ("task", "round", "head")
RECEIVED: tuple[DeviceChannel, ...] = ("blk", "ack", "state")
PAYLOAD = bytes(range(256)) * 300
ITEM = digest_of(PAYLOAD)

# An operation is a number, the length of its body in two bytes, and the body.
SIGNED, FORGED, CAST, AGGREGATOR, OWN, LOCAL = 0, 3, 6, 7, 8, 11
CONSISTENT, OLD = 16, 32
"""Flags of an operation: references in the body fit the device's state; the release is not new."""


@functools.cache
def state_folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of all states: in memory if possible."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)  # noqa: S108


@functools.cache
def _device() -> Device:
    folder = Path(state_folder().name) / "device"
    folder.mkdir()
    return Device(make_settings(folder), DeviceState(folder / "state"))


def _restarted() -> Device:
    """Return the device as if it had just started on an empty state folder."""
    device = _device()
    device._state, device._exit = State(mode=Mode.SERVICE, device=NAME), None
    inbox = device._inbox
    inbox.refused.clear()
    inbox._trust, inbox._aggregator_start = ManifestTrust(), b""
    device._store.blobs.keep_only(())
    take_all(device._events)
    device._jobs.cancel("build", "install")
    take_all(device._jobs._data._orders)
    return device


def take_all(items: "queue.SimpleQueue[Any] | queue.Queue[Any]") -> list[Any]:
    found = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(items.get_nowait())
    return found


def parsed(data: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at + 3 <= len(data):
        size = int.from_bytes(data[at + 1 : at + 3], "big")
        found.append((data[at], data[at + 3 : at + 3 + size]))
        at += 3 + size
    return found


def written(operations: Iterable[tuple[int, bytes]]) -> bytes:
    return b"".join(
        bytes([number]) + len(body[:65535]).to_bytes(2, "big") + body[:65535] for number, body in operations
    )


def handle(data: bytes) -> None:
    """Handle any messages: the device continues or ends with an error, trusts nothing unsigned, and holds little."""
    device = _restarted()
    for release, (number, body) in enumerate(parsed(data), 1):
        try:
            _perform(device, number, body, release=release)
            while device._exit is None and not device._events.empty():
                device._handle(device._events.get_nowait())
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


def _perform(device: Device, number: int, body: bytes, *, release: int) -> None:
    kind = number % 16
    if number & CONSISTENT:
        body = _consistent(device._state, kind, body)
    if kind < FORGED:
        channel = MANIFESTS[kind]
        number_of_release = 1 if number & OLD else release
        signed = signed_manifest(body, key=KEY, fleet=FLEET, channel=channel, release=number_of_release)
        device._handle(Received(fleet_topic(FLEET, channel), signed, retained=True))
    elif kind < CAST:
        before = device._state.task, device._state.round, device._state.head
        device._handle(Received(fleet_topic(FLEET, MANIFESTS[kind - FORGED]), body, retained=True))
        assert before == (device._state.task, device._state.round, device._state.head)
    elif kind in {CAST, AGGREGATOR}:
        topic = fleet_topic(FLEET, "cast" if kind == CAST else "state")
        device._handle(Received(topic, body, retained=bool(number & OLD)))
    elif kind < LOCAL:
        device._handle(Received(device_topic(FLEET, NAME, RECEIVED[kind - OWN]), body))
    else:
        _perform_local(device, kind - LOCAL, body)


def _perform_local(device: Device, kind: int, body: bytes) -> None:
    """Let something happen that is not a message."""
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
            item = keep_item(device._store, PAYLOAD, task=device._state.task, about="images")
            device._handle(events.SubmissionBuilt(item.task, item, round=device._state.joined_round))


def _consistent(state: State, kind: int, body: bytes) -> bytes:
    """Return a message that refers to the device's task, download or upload."""
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


def _mutate(data: bytes, random: Random) -> bytes:
    return mutate_operations(data, random, flags=(CONSISTENT, OLD, 1, 2, 4, 8))


def _seeds() -> Iterable[bytes]:
    messages = {type(each): encode(each) for each in SAMPLES}
    task, receipt = (each for each in SAMPLES if isinstance(each, TaskManifest | Receipt))
    without_program = encode(msgspec.structs.replace(task, program=None))
    begin = [(LOCAL, b""), (AGGREGATOR, messages[Presence])]
    for first in (messages[TaskManifest], without_program):
        yield written([*begin, (SIGNED, first), (1 + CONSISTENT, messages[RoundManifest]),
                       (2 + CONSISTENT, messages[HeadManifest]), (LOCAL + 3, b""),
                       (CAST + CONSISTENT, messages[Frame]), (OWN + CONSISTENT, messages[Frame]),
                       (OWN + 1 + CONSISTENT, messages[Receipt])])  # fmt: skip
    answers = (("missing", None), ("received", None), ("refused", "superseded"), ("refused", "no_space"))
    for status, reason in answers:
        answer = encode(msgspec.structs.replace(receipt, status=status, reason=reason))
        yield written([*begin, (SIGNED, without_program), (LOCAL + 4, b""), (LOCAL + 3, b""),
                       (OWN + 1 + CONSISTENT, answer), (LOCAL + 2, b""), (LOCAL + 1, b"")])  # fmt: skip
    yield written([(FORGED, messages[Signed]), (OWN + 2, messages[Presence])])


DEVICE = Target(
    "device", handle, _seeds, _mutate, max_bytes=8192, at_least_bytes=2 * MIB, bytes_per_byte=64, share=0.25
)
