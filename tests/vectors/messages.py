"""Vectors of messages: bytes with their fields, bytes that are refused, and topics."""

from typing import Any

import msgspec
import numpy as np

from protocol.errors import MalformedMessage, VersionMismatch
from protocol.wire.arrays import to_tensor
from protocol.wire.codec import decode, encode
from protocol.wire.messages import (
    BlobRef,
    Confused,
    Evaluation,
    Frame,
    HeadManifest,
    HeadRef,
    Message,
    Presence,
    Receipt,
    Submission,
    TaskManifest,
    Tensors,
)
from protocol.wire.quantization import prototype_fields
from protocol.wire.topics import DeviceChannel, device_filters, device_topic, fleet_topic
from tests.support.messages.every_type import SAMPLES

MAX_BYTES = 2**20
DIGEST = bytes(range(32))
_TEXT = "Wäschekorb 🧺"

TYPICAL: tuple[Message | Frame, ...] = (
    TaskManifest(
        fleet="shed",
        algorithm="fedtc",
        classes=("bee", "Schwebfliege", _TEXT),
        backbones=(BlobRef(digest=DIGEST, size_bytes=4_123_456, name="mobilenetv3_small_100.onnx"),),
        alpha=0.99,
        batch_size=5,
        min_images=5,
        seed=0,
        prototypes="auto",
        continues=(DIGEST[::-1],),
    ),
    HeadManifest(
        task=DIGEST,
        current=HeadRef(
            version=1,
            head=BlobRef(digest=DIGEST, size_bytes=12_345, name="head.onnx"),
            devices=3,
            prototypes=40,
            metrics={"loss": 0.125},
        ),
    ),
    Submission(
        task=DIGEST,
        sequence=1_700_000_000,
        labels=to_tensor(np.array([0, 0, 2], np.uint8)),
        counts=to_tensor(np.array([5, 6, 5], np.uint8)),
        images=21,
        omitted_classes=(1,),
        **prototype_fields(np.array([[0.5, -1, 2], [0.25, -1, 8], [1, -1, 4]], np.float16)),
    ),
    Evaluation(
        task=DIGEST,
        head_version=3,
        correct=(3, 0, 2),
        incorrect=(0, 1, 1),
        correct_with_prior=5,
        confidence_correct=tuple(int(bin_ in {12, 20, 31}) * (1 + (bin_ == 31) * 2) for bin_ in range(32)),
        confidence_images=tuple(
            int(bin_ in {9, 12, 13, 20, 31}) * (1 + (bin_ == 31) * 2) for bin_ in range(32)
        ),
        novelty_images=tuple(7 * (bin_ == 4) for bin_ in range(32)),
        confused=(Confused(1, 0, 1), Confused(2, 1, 1)),
    ),
    Receipt(digest=DIGEST, status="received"),
    Receipt(digest=DIGEST, status="missing", missing=((0, 61_440), (122_880, 200_000))),
    Receipt(digest=DIGEST, status="refused", reason="superseded", sequence=2**62),
    Presence(state="offline", epoch=2**32, instance=DIGEST[:16], key=DIGEST, signature=bytes(64)),
    Tensors(
        values={
            "half": to_tensor(np.array([[1, -2.5], [65504, 2**-24]], np.float16)),
            "integers": to_tensor(np.array([-1, 2**31 - 1, -(2**31)], np.int32)),
            "none": to_tensor(np.zeros((0, 3), np.uint8)),
            "single": to_tensor(np.array([0.1, -0.0, 1e-45], np.float32)),
            "words": to_tensor(np.array([1, 65535], np.uint16)),
        }
    ),
)


def vectors() -> dict[str, Any]:
    """Return messages with their fields, other bytes of some of them, and bytes that are no message."""
    return {
        "about": "Decode `bytes` to `fields`; your own bytes of `fields` must decode to them, and may differ. "
        "`tolerated` are other bytes of the same fields. `refused` bytes are no message of their type.",
        "messages": [_case(each) for each in (*SAMPLES, *TYPICAL)],
        "tolerated": _tolerated(),
        "refused": _refused(),
    }


def _case(message: Message | Frame) -> dict[str, Any]:
    return {"type": message.__struct_config__.tag, "bytes": encode(message).hex(), "fields": message}


def _tolerated() -> list[dict[str, Any]]:
    receipt: Any = Receipt(digest=DIGEST, status="missing", missing=((0, 5),), sequence=300)
    frame = Frame(v=1, digest=DIGEST, size_bytes=3, offset=0, data=b"abc")
    task = msgspec.structs.replace(TYPICAL[0], alpha=1.0)
    fields = _map(receipt)
    short = {name: fields[name] for name in ("type", "v", "digest", "status", "missing", "sequence")}
    start = ["frame", 1, DIGEST, 3, 0, b"abc"]
    wide = encode(receipt).replace(b"\xcd\x01\x2c", b"\xcf" + (300).to_bytes(8, "big"))
    cases = [
        ("keys in another order", receipt, _packed(dict(reversed(fields.items())))),
        ("unknown keys", receipt, _packed({**fields, "hint": [{"deep": b"x"}, None, 1.5]})),
        ("defaults left out", receipt, _packed(short)),
        ("an integer in more bytes than it needs", receipt, wide),
        ("a float as an integer", task, _packed({**_map(task), "alpha": 1})),
        ("a frame without key and signature", frame, _packed(start)),
        ("a frame with unknown items", frame, _packed([*start, b"", b"", 1, {"new": 2}])),
    ]
    found = []
    for name, message, data in cases:
        assert isinstance(message, Message | Frame)
        assert decode(data, type(message), max_bytes=MAX_BYTES) == message
        found.append({"name": name, **_case(message), "bytes": data.hex()})
    return found


def _refused() -> list[dict[str, Any]]:
    receipt = Receipt(digest=DIGEST, status="missing", missing=((0, 5),), sequence=300)
    presence = Presence(state="online", epoch=7)
    fields, online, frame = _map(receipt), _map(presence), ["frame", 1, DIGEST, 3, 0, b"abc"]
    data = encode(receipt)
    cases: list[tuple[str, type[Message | Frame], bytes]] = [
        ("no bytes", Receipt, b""),
        ("the last byte is missing", Receipt, data[:-1]),
        ("a byte behind it", Receipt, data + b"\xc0"),
        ("another type", Receipt, encode(presence)),
        ("a map in place of an array", Frame, data),
        ("no required field", Receipt, _packed(_without(fields, "status"))),
        ("no version", Receipt, _packed(_without(fields, "v"))),
        ("another version", Receipt, _packed({**fields, "v": 2})),
        ("a frame of another version", Frame, _packed(["frame", 2, "?"])),
        ("an integer as a float", Receipt, _packed({**fields, "sequence": 300.0})),
        ("nil for a default", Receipt, _packed({**fields, "missing": None})),
        ("text for bytes", Receipt, _packed({**fields, "digest": "d" * 32})),
        ("bytes for text", Receipt, _packed({**fields, "status": b"missing"})),
        (
            "text that is not UTF-8",
            Presence,
            _packed({**online, "address": "shed"}).replace(b"shed", b"\xffhed"),
        ),
        ("31 bytes of a digest", Receipt, _packed({**fields, "digest": bytes(31)})),
        ("an unknown status", Receipt, _packed({**fields, "status": "lost"})),
        ("65 ranges", Receipt, _packed({**fields, "missing": [[0, 1]] * 65})),
        ("a range of one number", Receipt, _packed({**fields, "missing": [[0]]})),
        ("a negative integer", Presence, _packed({**online, "epoch": -1})),
        ("an integer of 2^63", Presence, _packed({**online, "epoch": 2**63})),
        ("257 characters", Presence, _packed({**online, "address": "x" * 257})),
        ("an offset before the payload", Frame, _packed([*frame[:4], -1, b"abc"])),
        ("a payload above the limit", Frame, _packed([*frame[:3], 2**31 + 1, 0, b"abc"])),
        ("nested too deep", Presence, b"\x83\xa4type\xa8presence\xa1v\x01\xa1z" + b"\x91" * 3000),
    ]
    return [
        {"name": name, "type": kind.__struct_config__.tag, "bytes": each.hex(), "reason": refusal(each, kind)}
        for name, kind, each in cases
    ]


def refusal(data: bytes, kind: type[Message | Frame]) -> str:
    """Return why bytes are refused; empty if they are a message of the type."""
    try:
        decode(data, kind, max_bytes=MAX_BYTES)
    except VersionMismatch:
        return "version"
    except MalformedMessage:
        return "malformed"
    return ""


def topics() -> dict[str, Any]:
    """Return the topics of some devices, whose shards are CRC-32."""
    names = ("shed-1", "door-cam", "a", "Z_9", "x" * 64, "phone-7f3a")
    channels: tuple[DeviceChannel, ...] = ("state", "info", "up", "ack", "get", "blk")
    return {
        "about": "The topics of a fleet, of devices, and what the aggregator subscribes to.",
        "fleet": "shed",
        "fleet_topics": {
            each: fleet_topic("shed", each) for each in ("task", "round", "head", "state", "cast")
        },
        "device_topics": [
            {"device": name, "topics": {each: device_topic("shed", name, each) for each in channels}}
            for name in names
        ],
        "aggregator_subscribes": list(device_filters("shed")),
    }


def _map(message: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.msgpack.decode(encode(message))
    return fields


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def _packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)
