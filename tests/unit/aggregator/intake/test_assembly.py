"""Payloads split into frames and reassembled, in any order, with repetitions and losses."""

import contextlib
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.intake.assembly import MAX_PIECES, MAX_STRETCHES, Assembly
from protocol.errors import TransferError
from protocol.mqtt.publisher import packet_bytes
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import MAX_CHUNK_BYTES, Frame
from protocol.wire.topics import device_topic
from protocol.wire.transfer import ENVELOPE_BYTES, SMALLEST_CHUNK_BYTES, chunk_bytes, frames_of

PAYLOAD = bytes(range(10))
DIGEST = digest_of(PAYLOAD)


def _assembly_of(payload: bytes) -> Assembly:
    return Assembly(digest_of(payload), len(payload))


def _frame(offset: int, data: bytes, *, size_bytes: int = 10, digest: bytes = DIGEST) -> Frame:
    return Frame(v=1, digest=digest, size_bytes=size_bytes, offset=offset, data=data)


@given(st.binary(max_size=400), st.integers(1, 64), st.data())
def test_any_order_with_duplicates_gives_the_payload(
    payload: bytes, chunk_bytes: int, data: st.DataObject
) -> None:
    frames = list(frames_of(payload, digest=digest_of(payload), chunk_bytes=chunk_bytes))
    assembly = _assembly_of(payload)
    repeated = data.draw(st.lists(st.sampled_from(frames)))
    for each in data.draw(st.permutations(frames + repeated)):
        assembly.add(each)
        assert assembly.held_bytes <= len(payload)
    assert assembly.missing() == ()
    assert assembly.payload() == payload


@given(st.binary(min_size=1, max_size=400), st.integers(1, 64), st.data())
def test_missing_ranges_are_named_and_resent(payload: bytes, chunk_bytes: int, data: st.DataObject) -> None:
    assembly = _assembly_of(payload)
    while ranges := assembly.missing():
        sent = list(frames_of(payload, digest=assembly.digest, ranges=ranges, chunk_bytes=chunk_bytes))
        assert sum(len(each.data) for each in sent) == len(payload) - assembly.held_bytes
        arrived = data.draw(st.lists(st.sampled_from(sent), min_size=1, unique_by=id))
        for each in arrived:
            assembly.add(each)
    assert assembly.payload() == payload


@given(st.lists(st.tuples(st.integers(0, 60), st.binary(max_size=30)), max_size=30), st.integers(0, 60))
def test_assembly_never_holds_more_than_the_payload(pieces: list[tuple[int, bytes]], size_bytes: int) -> None:
    assembly = Assembly(DIGEST, size_bytes)
    for offset, data in pieces:
        with contextlib.suppress(TransferError):
            assembly.add(_frame(offset, data, size_bytes=size_bytes))
        held = sum(len(piece) for _, piece in assembly.fresh)
        assert held == assembly.held_bytes <= size_bytes
        assert held + sum(stop - start for start, stop in assembly.missing()) == size_bytes


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 30))))
def test_every_byte_is_new_once(pieces: list[tuple[int, int]]) -> None:
    assembly, covered = Assembly(DIGEST, 130), set[int]()

    def listed(ranges: Iterable[tuple[int, int]]) -> list[int]:
        return [byte for start, stop in ranges for byte in range(start, stop)]

    for start, length in pieces:
        assembly.settle()
        assembly.add(_frame(start, bytes(length), size_bytes=130))
        new = listed((offset, offset + len(data)) for offset, data in assembly.fresh)
        assert new == [byte for byte in range(start, start + length) if byte not in covered]
        covered.update(new)
        assert listed(assembly.ranges()) == sorted(covered)
        assert listed(assembly.missing()) == [byte for byte in range(130) if byte not in covered]
        assert assembly.held_bytes == len(covered)
    ends = [end for begin_end in assembly.ranges() for end in begin_end]
    assert ends == sorted(set(ends))


@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_sizes_and_overlaps_give_the_payload(payload: bytes, data: st.DataObject) -> None:
    assembly, elsewhere = _assembly_of(payload), list[tuple[int, bytes]]()
    while ranges := assembly.missing():
        start = data.draw(st.integers(0, ranges[0][0]))
        stop = data.draw(st.integers(ranges[0][0] + 1, len(payload)))
        assembly.add(_frame(start, payload[start:stop], size_bytes=len(payload), digest=assembly.digest))
        if data.draw(st.booleans()):
            elsewhere += assembly.fresh
            assembly.settle()
    assert assembly.payload(elsewhere) == payload


def test_announced_size_allocates_nothing() -> None:
    assembly = Assembly(DIGEST, 2 * 1024**3)
    assembly.add(_frame(5, b"x", size_bytes=2 * 1024**3))
    assert assembly.held_bytes == 1
    assert assembly.missing() == ((0, 5), (6, 2 * 1024**3))


def test_frames_of_a_payload_fit_a_packet() -> None:
    payload = bytes(2 * MAX_CHUNK_BYTES + 1)
    frames = list(frames_of(payload, digest=DIGEST))
    assert [len(each.data) for each in frames] == [MAX_CHUNK_BYTES, MAX_CHUNK_BYTES, 1]
    assert max(len(encode(each)) for each in frames) < 64 * 1024


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, MAX_CHUNK_BYTES), (10**6, MAX_CHUNK_BYTES), (4096, 4096 - ENVELOPE_BYTES), (300, 256)],
)
def test_chunk_size_follows_the_packet_limit(limit: int | None, expected: int) -> None:
    assert chunk_bytes(limit) == expected


@given(st.integers(512, 70000))
def test_frame_fits_the_packet_limit(limit: int) -> None:
    data = bytes(chunk_bytes(limit))
    frame = Frame(v=1, digest=DIGEST, size_bytes=2**31, offset=2**31 - len(data), data=data)
    topic = device_topic("f" * 64, "d" * 64, "up")
    assert packet_bytes(topic, len(encode(frame))) <= limit


def test_ranges_are_clipped_to_the_payload() -> None:
    assert [
        (each.offset, each.data) for each in frames_of(PAYLOAD, digest=DIGEST, ranges=((8, 99), (50, 60)))
    ] == [(8, b"\x08\x09")]


def test_too_many_pieces_are_refused() -> None:
    size_bytes = 3 * MAX_PIECES
    most = MAX_PIECES + size_bytes // SMALLEST_CHUNK_BYTES
    assembly = Assembly(DIGEST, size_bytes)
    for index in range(most + 1):
        assembly.add(_frame(index, b"x", size_bytes=size_bytes))
    with pytest.raises(TransferError, match="send larger frames"):
        assembly.add(_frame(most + 1, b"x", size_bytes=size_bytes))


def test_number_of_gaps_is_bounded() -> None:
    """Frames with gaps between them cost memory, and time at each query; those beyond the bound count as lost."""
    payload = bytes(2 * MAX_STRETCHES + 20)
    frames = list(frames_of(payload, digest=digest_of(payload), chunk_bytes=1))
    assembly = _assembly_of(payload)
    for frame in frames[1::2]:
        assembly.add(frame)
    assert assembly.stretches == len(assembly.ranges()) == MAX_STRETCHES
    assert assembly.missing(2) == ((0, 1), (2, 3))
    for frame in frames:
        assembly.add(frame)
    assert assembly.payload() == payload
