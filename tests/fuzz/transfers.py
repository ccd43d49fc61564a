"""Frames of any content in any order, from several devices at once, compared with a model that stores single bytes."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from aggregator.intake.assembly import Assembly
from aggregator.intake.reassembly import (
    MAX_RANGES,
    PIECE_BYTES,
    STRETCH_BYTES,
    Complete,
    Key,
    Reassembly,
    Transfer,
)
from aggregator.intake.validation import Refused
from protocol.errors import TransferError
from protocol.wire.codec import digest_of
from protocol.wire.messages import PROTOCOL_VERSION, Frame, Receipt
from protocol.wire.transfer import Ranges
from tests.fuzz.target import Target

PAYLOADS = {size: bytes(at * 7 % 251 for at in range(size)) for size in range(256)}
DIGESTS = {size: digest_of(payload) for size, payload in PAYLOADS.items()}


def _operations(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data) - size + 1, size))


def _ranges(there: set[int]) -> Ranges:
    found: list[tuple[int, int]] = []
    for at in sorted(there):
        if found and found[-1][1] == at:
            found[-1] = (found[-1][0], at + 1)
        else:
            found.append((at, at + 1))
    return tuple(found)


def _frame(size: int, offset: int, length: int, kind: int) -> Frame:
    """Return a frame of a payload; bits of `kind` make data, digest or size incorrect."""
    data = PAYLOADS[size][offset : offset + length] if kind & 7 else bytes(length)
    digest = DIGESTS[size] if kind & 24 else bytes(32)
    announced = size if kind & 96 else size + 1
    return Frame(v=PROTOCOL_VERSION, digest=digest, size_bytes=announced, offset=offset, data=data)


def assemble(data: bytes) -> None:
    """Add any frames to an assembly: it holds the same bytes as the model, and returns the payload or refuses it."""
    if not data:
        return
    size = data[0]
    assembly = Assembly(DIGESTS[size], size)
    there: dict[int, int] = {}
    stored: list[tuple[int, bytes]] = []
    for kind, offset, length in _operations(data[1:], 3):
        if kind == 0xFF:
            stored += assembly.fresh
            assembly.settle()
            continue
        frame = _frame(size, offset, length, kind)
        try:
            assembly.add(frame)
        except TransferError:
            continue
        assert offset + len(frame.data) <= size
        for at, value in enumerate(frame.data, offset):
            there.setdefault(at, value)
    assert assembly.held_bytes == len(there)
    assert assembly.missing() == _ranges(set(range(size)) - there.keys())
    assert sum(len(piece) for _, piece in (*stored, *assembly.fresh)) == len(there)
    try:
        payload = assembly.payload(stored)
    except TransferError:
        assert bytes(there.get(at, -1) % 256 for at in range(size)) != PAYLOADS[size] or len(there) < size
    else:
        assert payload == PAYLOADS[size]


@dataclass
class Disk:
    """The stored transfers of a reassembly."""

    files: dict[Key, dict[int, bytes]] = field(default_factory=dict)
    sizes: dict[Key, int] = field(default_factory=dict)

    def commit(self, reassembly: Reassembly) -> None:
        """Store what is pending; every byte comes once."""
        for key in reassembly.ended:
            del self.files[key], self.sizes[key]
        for transfer in reassembly.pending():
            file = self.files.setdefault(transfer.key, {})
            for offset, piece in transfer.assembly.fresh:
                assert all(
                    offset + len(piece) <= other or other + len(held) <= offset
                    for other, held in file.items()
                )
                file[offset] = piece
            self.sizes[transfer.key] = transfer.assembly.size_bytes
        reassembly.settle()

    def read(self, key: Key, ranges: Ranges) -> list[tuple[int, bytes]]:
        found = sorted(self.files[key].items()) if ranges else []
        assert sum(len(piece) for _, piece in found) == sum(stop - start for start, stop in ranges)
        return found

    def start(self, complete: set[Key]) -> Reassembly:
        """Return the reassembly of an aggregator that starts with these files."""
        transfers = []
        for key, file in self.files.items():
            ranges = tuple((start, start + len(data)) for start, data in sorted(file.items()))
            assembly = Assembly(key[1], self.sizes[key], stored=ranges)
            transfers.append(Transfer(key, assembly, 0.0, ranges))
        return Reassembly(**QUOTAS, holds=lambda *key: key in complete, transfers=transfers, read=self.read)


QUOTAS = {"max_bytes": 200, "per_device": 2, "max_held_bytes": 30_000}


def receive(data: bytes) -> None:
    """Receive any frames: quotas hold, a payload is the announced one, and nothing but `Refused` is raised."""
    disk = Disk()
    complete: set[Key] = set()
    reassembly = disk.start(complete)
    for now, (kind, number, size, offset, length) in enumerate(_operations(data, 5)):
        device = f"device-{number % 8}"
        if kind == 0xFF:
            reassembly = disk.start(complete)
        elif kind >= 0xF8:
            disk.commit(reassembly)
        elif kind >= 0xF0:
            reassembly.expire(now - 20.0)
        if kind >= 0xF0:
            continue
        frame = _frame(size, offset, length, kind)
        with contextlib.suppress(Refused):
            answer = reassembly.take(device, frame, now_s=float(now))
            if isinstance(answer, Complete):
                assert answer.payload == PAYLOADS[frame.size_bytes]
                complete.add((device, answer.digest))
            elif isinstance(answer, Receipt):
                assert len(answer.missing) <= MAX_RANGES
                assert all(0 <= start < stop <= frame.size_bytes for start, stop in answer.missing)
        _check_quotas(reassembly)


def _check_quotas(reassembly: Reassembly) -> None:
    held = [transfer.assembly for transfer in reassembly._transfers.values()]
    takes = [
        assembly.held_bytes + (1 + assembly.pieces) * PIECE_BYTES + assembly.stretches * STRETCH_BYTES
        for assembly in held
    ]
    assert reassembly._held_bytes == sum(takes)
    assert sum(takes) <= QUOTAS["max_held_bytes"] or len(takes) == 1
    assert all(assembly.size_bytes <= QUOTAS["max_bytes"] for assembly in held)
    owners = [device for device, _ in reassembly._transfers]
    assert all(owners.count(device) <= QUOTAS["per_device"] for device in owners)


ASSEMBLY = Target(
    "assembly",
    assemble,
    lambda: (
        bytes([90, *(byte for at in range(0, 90, 30) for byte in (0x7F, at, 30))]),
        bytes([90, *(byte for at in range(80, -1, -10) for byte in (0x7F, at, 25)), 0xFF, 0, 0, 0x60, 5, 9]),
        bytes([0, 0x7F, 0, 0]),
    ),
    max_bytes=256,
    bytes_per_byte=512,
    share=3,
)
REASSEMBLY = Target(
    "reassembly",
    receive,
    lambda: (
        bytes(byte for n in range(3) for at in range(0, 150, 30) for byte in (0x7F, n, 150, at, 30)),
        bytes(byte for n in range(8) for size in (80, 90, 100) for byte in (0x7F, n, size, 0, 70))
        + bytes([0xF8, 0, 0, 0, 0, 0xFF, 0, 0, 0, 0, 0x7F, 1, 100, 70, 30, 0xF0, 0, 0, 0, 0]),
    ),
    max_bytes=512,
    bytes_per_byte=512,
    share=2,
)
