"""A load of submissions, written once as the MQTT packets that carry it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aggregator.config.task_file import load_task
from aggregator.storage.open_store import open_store
from aggregator.tasks.task_preparation import Task, prepare_task
from protocol.wire.codec import digest_of, encode, to_unsigned
from protocol.wire.messages import Submission
from protocol.wire.quantization import prototype_fields
from protocol.wire.signing import sign_frame
from protocol.wire.topics import device_topic
from protocol.wire.transfer import frames_of


@dataclass(frozen=True)
class Load:
    """Submissions to publish."""

    packets: Path
    """A file of whole MQTT packets, one after the other."""
    messages: int
    size_bytes: int
    devices: tuple[str, ...]
    submissions: int


def write_load(folder: Path, task: Path, *, devices: int, submissions: int, size_bytes: int) -> Load:
    """Write the packets of so many submissions of each device, each of random prototypes of so many bytes."""
    store = open_store(folder / "preparation")
    prepared = prepare_task(*load_task(task), store=store)
    store.close()
    names = tuple(f"device-{number}" for number in range(devices))
    random = np.random.default_rng(0)
    path, messages, total_bytes = folder / "packets", 0, 0
    with path.open("wb") as file:
        for sequence in range(1, submissions + 1):
            payloads = [_payload(prepared, sequence, size_bytes, random) for _ in names]
            total_bytes += sum(map(len, payloads))
            for packet in _mixed(prepared.file.fleet, dict(zip(names, payloads, strict=True)), messages):
                file.write(packet)
                messages += 1
    return Load(path, messages, total_bytes, names, submissions * devices)


def _payload(task: Task, sequence: int, size_bytes: int, random: np.random.Generator) -> bytes:
    rows = max(1, size_bytes // task.feature_size)
    values = random.normal(size=(rows, task.feature_size)).astype(np.float16)
    return encode(
        Submission(
            task=task.digest,
            sequence=sequence,
            **prototype_fields(values),
            labels=to_unsigned(np.arange(rows) % len(task.file.classes)),
            counts=to_unsigned(np.ones(rows, dtype=np.int64)),
            images=rows,
        )
    )


def _mixed(fleet: str, payloads: dict[str, bytes], sent: int) -> Iterator[bytes]:
    """Yield the packets of one payload of each device, a frame of each in turn."""
    frames = [frames_of(payload, digest=digest_of(payload)) for payload in payloads.values()]
    for turn in zip(*frames, strict=True):
        for name, frame in zip(payloads, turn, strict=True):
            sent += 1
            signed = sign_frame(frame, key=digest_of(name.encode()), fleet=fleet, device=name)
            yield _publish(device_topic(fleet, name, "up"), encode(signed), identifier=sent % 65535 + 1)


def _publish(topic: str, payload: bytes, *, identifier: int) -> bytes:
    """Write a publication at QoS 1, MQTT 3.1.1."""
    name = topic.encode()
    rest = len(name).to_bytes(2, "big") + name + identifier.to_bytes(2, "big") + payload
    length, left = bytearray(), len(rest)
    while left >= 128:
        length.append(left & 127 | 128)
        left >>= 7
    return bytes((0x32, *length, left)) + rest
