"""The parts of MQTT 3.1.1 and 5 packets that the network proxy reads and writes."""

import asyncio
from dataclasses import dataclass

CONNECT, PUBLISH = 1, 3
DUPLICATE = 0b1000
"""Flag in a publication's first byte: it was sent before."""

UNACCEPTABLE_VERSION = bytes((0x20, 2, 0, 1))
"""CONNACK of a broker without MQTT 5."""


@dataclass(frozen=True)
class Connect:
    version: int
    """4 is MQTT 3.1.1, 5 is MQTT 5."""
    client_id: str


@dataclass(frozen=True)
class Publish:
    topic: str
    qos: int
    identifier: int
    """0 with QoS 0."""
    payload: bytes


def kind(packet: bytes) -> int:
    return packet[0] >> 4


async def read_packet(reader: asyncio.StreamReader) -> bytes:
    """Read one whole packet; `asyncio.IncompleteReadError` if the connection ends before."""
    head = await reader.readexactly(2)
    while head[-1] & 0x80:
        head += await reader.readexactly(1)
    length, _ = _varint(head, 1)
    return head + await reader.readexactly(length)


def parse_connect(packet: bytes) -> Connect:
    _, at = _varint(packet, 1)
    name, at = _text(packet, at)
    if name != "MQTT":
        raise ValueError(f"expected MQTT 3.1.1 or 5, got {name!r}")
    version = packet[at]
    at += 4
    if version >= 5:
        length, at = _varint(packet, at)
        at += length
    client_id, _ = _text(packet, at)
    return Connect(version, client_id)


def parse_publish(packet: bytes, *, version: int) -> Publish:
    qos = packet[0] >> 1 & 3
    _, at = _varint(packet, 1)
    topic, at = _text(packet, at)
    identifier = 0
    if qos:
        identifier = int.from_bytes(packet[at : at + 2], "big")
        at += 2
    if version >= 5:
        length, at = _varint(packet, at)
        at += length
    return Publish(topic, qos, identifier, packet[at:])


def puback(identifier: int) -> bytes:
    """Return the acknowledgement of a publication with QoS 1."""
    return bytes((0x40, 2)) + identifier.to_bytes(2, "big")


def _varint(packet: bytes, at: int) -> tuple[int, int]:
    """Return a length of one to four bytes, and where it ends."""
    value = shift = 0
    while True:
        byte = packet[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def _text(packet: bytes, at: int) -> tuple[str, int]:
    end = at + 2 + int.from_bytes(packet[at : at + 2], "big")
    return packet[at + 2 : end].decode(), end
