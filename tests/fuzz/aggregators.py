"""An aggregator that hears anything, under any name: what it answers can be read, and what it shows can be shown."""

import contextlib
import functools
import io
import queue
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
from rich.console import Console

from aggregator.config.task_file import load_task
from aggregator.service.aggregator import Aggregator
from aggregator.status.collect import collect_status
from aggregator.status.render import render_status
from aggregator.storage.store import Store
from aggregator.tasks.task import Task, prepare_task
from protocol.errors import ConfigError, MalformedMessage
from protocol.mqtt.events import Outgoing, Received
from protocol.mqtt.tls import BrokerAddress
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import MAX_FRAME_BYTES, BlobRequest, DeviceInfo, Frame, Presence, Receipt
from protocol.wire.signing import sign_frame
from protocol.wire.topics import device_topic, fleet_topic
from protocol.wire.transfer import frames_of
from tests.fuzz.devices import folder, mutate_operations, parsed, written
from tests.fuzz.target import MIB, Target
from tests.support.aggregator_process import FLEET, PATIENT, write_task
from tests.support.messages import SAMPLES
from tests.support.submissions import evaluation, submission

# An operation is a number, the length of its body in two bytes, and the body.
STATE, INFO, GET, UP, SIGNED, WHOLE, TOPIC, OWN_STATE = range(8)
NAMES, KEYS = ("a", "b", "c", "d"), tuple(bytes([number]) * 32 for number in range(4))
"""Of four devices; bits 3 and 4 of an operation say which of them it comes from."""
LOOK = 32
"""Added to an operation: somebody asks for the status afterwards."""


@dataclass(frozen=True)
class _Made:
    task: Task
    store: Store
    aggregator: Aggregator


@functools.cache
def _made() -> _Made:
    place = Path(folder().name) / "aggregator"
    place.mkdir()
    store = Store(place / "state")
    store.lock()
    file, backbones = load_task(write_task(place, PATIENT + "\nmax_submission_mb = 0.1"))
    task = prepare_task(file, backbones, store=store)
    return _Made(task, store, Aggregator(task, store, broker=BrokerAddress("localhost", 1)))


def serve(data: bytes) -> None:
    """Whatever devices say, the aggregator goes on, but for another one of its fleet; its answers are receipts."""
    made = _made()
    aggregator = made.aggregator
    heard: list[Received] = []
    looks = False
    for number, body in parsed(data):
        heard += _heard(number % 8, number >> 3 & 3, body)
        looks = looks or bool(number & LOOK)
    try:
        aggregator.handle(list(heard))
    except ConfigError:
        assert any(received.topic == fleet_topic(FLEET, "state") for received in heard)
    for outgoing in _said(aggregator):
        if outgoing.topic.endswith("/ack"):
            decode(outgoing.payload, Receipt, max_bytes=MAX_FRAME_BYTES)
    if looks:
        _look(made.store)


def _heard(kind: int, who: int, body: bytes) -> list[Received]:
    """What a broker hands out of an operation."""
    name, key = NAMES[who], KEYS[who]
    match kind:
        case 0 | 1 | 2:
            channel = ("state", "info", "get")[kind]
            return [Received(f"pf/1/{FLEET}/d/{name}/{channel}", body)]
        case 4:
            with contextlib.suppress(MalformedMessage):
                body = encode(
                    sign_frame(
                        decode(body, Frame, max_bytes=MAX_FRAME_BYTES), key=key, fleet=FLEET, device=name
                    )
                )
        case 5:
            frames = frames_of(body, digest=digest_of(body))
            signed = [sign_frame(frame, key=key, fleet=FLEET, device=name) for frame in frames]
            return [Received(device_topic(FLEET, name, "up"), encode(frame)) for frame in signed]
        case 6:
            return [Received(body.decode(errors="replace"), b"x")]
        case 7:
            return [Received(fleet_topic(FLEET, "state"), body)]
    return [Received(device_topic(FLEET, name, "up"), body)]


def _said(aggregator: Aggregator) -> list[Outgoing]:
    """What it wants to be sent, which is taken away."""
    inbox, found = aggregator._publisher._session._inbox, []
    with contextlib.suppress(queue.Empty):
        while True:
            command = inbox.get_nowait()
            if isinstance(command, Outgoing):
                found.append(command)
    return found


def _look(store: Store) -> None:
    status, text = collect_status(store), io.StringIO()
    msgspec.json.encode(status)
    render_status(status, Console(file=text, width=100))
    assert all(line.isprintable() for line in text.getvalue().split("\n"))


def mutate(data: bytes, random: Random) -> bytes:
    """Change an operation, or their order."""
    return mutate_operations(data, random, flags=(1, 2, 4, 8, 16, 32))


def _seeds() -> Iterable[bytes]:
    task = _made().task
    messages = {type(each): encode(each) for each in SAMPLES}
    yield written(
        [(STATE, messages[Presence]), (INFO + LOOK, messages[DeviceInfo]), (GET, messages[BlobRequest])]
    )
    backbone = task.manifest.backbones[0].digest
    yield written([(GET, encode(BlobRequest(digest=backbone, offset=0, length=100)))])
    good = submission(task=task.digest)
    judged = evaluation(task=task.digest)
    yield written(
        [(WHOLE, encode(good)), (WHOLE + 8 + LOOK, encode(msgspec.structs.replace(good, sequence=2)))]
    )
    yield written([(WHOLE, encode(judged)), (WHOLE + 16, b"noise"), (TOPIC, b"pf/1/barn/d/x\x1b/up/1")])
    yield written([(UP, messages[Frame]), (SIGNED, messages[Frame]), (OWN_STATE, messages[Presence])])


AGGREGATOR = Target(
    "aggregator", serve, _seeds, mutate, max_bytes=4096, at_least_bytes=4 * MIB, bytes_per_byte=256, share=0.1
)
