"""The aggregator with any messages under any device's name; its answers and its status stay valid."""

import contextlib
import functools
import io
import queue
from collections.abc import Iterable
from pathlib import Path
from random import Random

import msgspec
from rich.console import Console

from aggregator.config.task_file import load_task
from aggregator.server.aggregator import Aggregator
from aggregator.status.collect import collect_status
from aggregator.status.render import render_status
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.tasks.task_preparation import Task, prepare_task
from protocol.errors import ConfigError, MalformedMessage
from protocol.mqtt.events import Outgoing, Received
from protocol.mqtt.tls import BrokerAddress
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import MAX_FRAME_BYTES, BlobRequest, DeviceInfo, Frame, Presence, Receipt
from protocol.wire.signing import sign_frame, sign_presence
from protocol.wire.topics import device_topic, fleet_topic
from protocol.wire.transfer import frames_of
from tests.fuzz.devices import mutate_operations, parsed, state_folder, take_all, written
from tests.fuzz.target import MIB, Target
from tests.support.fleets.aggregator_process import FLEET, PATIENT, write_task
from tests.support.messages.every_type import SAMPLES
from tests.support.messages.jobs import NoJobs
from tests.support.messages.submissions import evaluation, submission

# An operation is a number, the length of its body in two bytes, and the body.
STATE, INFO, GET, UP, SIGNED, WHOLE, TOPIC, OWN_STATE = range(8)
NAMES, KEYS = ("a", "b", "c", "d"), tuple(bytes([number]) * 32 for number in range(4))
"""Of four devices; bits 3 and 4 of an operation select one."""
STATUS = 32
"""Flag of an operation: render the status afterwards."""


@functools.cache
def _aggregator() -> tuple[Task, Store, Aggregator]:
    folder = Path(state_folder().name) / "aggregator"
    folder.mkdir()
    store = open_store(folder / "state", lock=True)
    file, backbones = load_task(write_task(folder, PATIENT + "\nmax_submission_mb = 0.1"))
    task = prepare_task(file, backbones, store=store)
    return (
        task,
        store,
        Aggregator(
            task, store, broker=BrokerAddress("localhost", 1), events=queue.SimpleQueue(), jobs=NoJobs()
        ),
    )


def handle(data: bytes) -> None:
    """Handle any messages: the aggregator continues, unless another one of its fleet is online; it sends receipts."""
    _, store, aggregator = _aggregator()
    operations = parsed(data)
    received = [
        message for number, body in operations for message in _received(number % 8, number >> 3 & 3, body)
    ]
    try:
        aggregator.handle([*received])
    except ConfigError:
        assert any(message.topic == fleet_topic(FLEET, "state") for message in received)
    for _, outgoing in take_all(aggregator._publisher._session._inbox):
        if isinstance(outgoing, Outgoing) and outgoing.topic.endswith("/ack"):
            decode(outgoing.payload, Receipt, max_bytes=MAX_FRAME_BYTES)
    if any(number & STATUS for number, _ in operations):
        _check_status(store)


def _received(kind: int, device: int, body: bytes) -> list[Received]:
    """Return the messages that a broker delivers for an operation."""
    name, key = NAMES[device], KEYS[device]
    match kind:
        case 0:
            topic = device_topic(FLEET, name, "state")
            with contextlib.suppress(MalformedMessage):
                presence = decode(body, Presence, max_bytes=1024)
                if presence.signature:
                    body = encode(sign_presence(presence, key=key, topic=topic))
            return [Received(topic, body)]
        case 1 | 2:
            channel = ("info", "get")[kind - 1]
            return [Received(f"pf/1/{FLEET}/d/{name}/{channel}", body)]
        case 4:
            with contextlib.suppress(MalformedMessage):
                frame = decode(body, Frame, max_bytes=MAX_FRAME_BYTES)
                body = encode(sign_frame(frame, key=key, fleet=FLEET, device=name))
        case 5:
            frames = frames_of(body, digest=digest_of(body))
            signed = [sign_frame(frame, key=key, fleet=FLEET, device=name) for frame in frames]
            return [Received(device_topic(FLEET, name, "up"), encode(frame)) for frame in signed]
        case 6:
            return [Received(body.decode(errors="replace"), b"x")]
        case 7:
            return [Received(fleet_topic(FLEET, "state"), body)]
    return [Received(device_topic(FLEET, name, "up"), body)]


def _check_status(store: Store) -> None:
    status, text = collect_status(store), io.StringIO()
    msgspec.json.encode(status)
    render_status(status, Console(file=text, width=100))
    assert all(line.isprintable() for line in text.getvalue().split("\n"))


def _mutate(data: bytes, random: Random) -> bytes:
    return mutate_operations(data, random, flags=(1, 2, 4, 8, 16, 32))


def _seeds() -> Iterable[bytes]:
    task, _, _ = _aggregator()
    messages = {type(each): encode(each) for each in SAMPLES}
    info = (INFO + STATUS, messages[DeviceInfo])
    yield written([(STATE, messages[Presence]), info, (GET, messages[BlobRequest])])
    backbone = task.manifest.backbones[0].digest
    yield written([(GET, encode(BlobRequest(digest=backbone, offset=0, length=100)))])
    first = submission(task=task.digest)
    second = msgspec.structs.replace(first, sequence=2)
    yield written([(WHOLE, encode(first)), (WHOLE + 8 + STATUS, encode(second))])
    yield written(
        [
            (WHOLE, encode(evaluation(task=task.digest))),
            (WHOLE + 16, b"noise"),
            (TOPIC, b"pf/1/barn/d/x\x1b/up/1"),
        ]
    )
    yield written([(UP, messages[Frame]), (SIGNED, messages[Frame]), (OWN_STATE, messages[Presence])])


AGGREGATOR = Target(
    "aggregator",
    handle,
    _seeds,
    _mutate,
    max_bytes=4096,
    at_least_bytes=4 * MIB,
    bytes_per_byte=256,
    share=0.1,
)
