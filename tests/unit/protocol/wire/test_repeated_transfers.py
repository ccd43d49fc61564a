"""Frames of any content in any order: what is returned has its digest, and memory is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.wire.codec import digest_of
from protocol.wire.messages import Frame
from protocol.wire.repeated_transfers import MAX_TRANSFERS, Transfers
from protocol.wire.transfer import frames_of

PAYLOAD = bytes(range(100))
FRAMES = list(frames_of(PAYLOAD, digest=digest_of(PAYLOAD), chunk_bytes=30))


def taken(transfers: Transfers, *frames: Frame) -> list[bytes]:
    return [payload for frame in frames if (payload := transfers.take(frame)) is not None]


def test_lost_frame_comes_with_the_repetition() -> None:
    """Also in other frames, after a connection to a broker with another packet limit."""
    smaller = frames_of(PAYLOAD, digest=digest_of(PAYLOAD), chunk_bytes=7)
    for repeated in (FRAMES, smaller):
        transfers = Transfers(max_bytes=10_000)
        assert taken(transfers, FRAMES[0], FRAMES[2], FRAMES[3]) == []
        assert transfers.held_bytes == 30
        assert taken(transfers, *repeated, *FRAMES) == [PAYLOAD, PAYLOAD]
        assert transfers.held_bytes == 0
    assert taken(Transfers(max_bytes=10_000), *FRAMES[1:], *FRAMES) == [PAYLOAD], "joined amid a transfer"


@pytest.mark.parametrize(
    "bad",
    [
        replace(FRAMES[0], data=bytes(30)),
        replace(FRAMES[1], size_bytes=101),
        replace(FRAMES[1], data=bytes(71)),
        replace(FRAMES[3], offset=2**31 - 1),
        replace(FRAMES[2], data=bytes(40)),  # the digest
    ],
)
def test_contradiction_discards_the_transfer(bad: Frame) -> None:
    transfers = Transfers(max_bytes=10_000)
    assert taken(transfers, *FRAMES[:2], bad) == []
    assert transfers.held_bytes == 0
    assert taken(transfers, *FRAMES[2:], *FRAMES) == [PAYLOAD]


@pytest.mark.parametrize("size_bytes", [0, 101, 10_001])
def test_size_is_bounded_before_bytes_are_held(size_bytes: int) -> None:
    transfers = Transfers(max_bytes=100)
    assert taken(transfers, replace(FRAMES[0], size_bytes=size_bytes)) == []
    assert transfers.held_bytes == 0


def test_unfinished_transfers_are_bounded() -> None:
    """The one without frames for longest is dropped, by number and by bytes."""
    many = [replace(FRAMES[0], digest=bytes([each]) * 32) for each in range(MAX_TRANSFERS)]
    transfers, small = Transfers(max_bytes=10_000), Transfers(max_bytes=100)
    assert taken(transfers, FRAMES[0], *many[1:], FRAMES[1], many[0], *FRAMES[2:]) == [PAYLOAD]
    assert transfers.held_bytes == 30 * (MAX_TRANSFERS - 1)
    assert taken(small, *many[:3], FRAMES[0]) == []
    assert small.held_bytes == 90


FIELDS = st.tuples(st.integers(0, 120), st.integers(0, 40), st.booleans(), st.sampled_from([99, 100, 101]))


@given(st.lists(FIELDS))
def test_any_frames_give_nothing_but_the_payload(frames: list[tuple[int, int, bool, int]]) -> None:
    transfers = Transfers(max_bytes=10_000)
    for offset, length, is_correct, size_bytes in frames:
        data = PAYLOAD[offset : offset + length] if is_correct else bytes(length)
        frame = Frame(v=1, digest=digest_of(PAYLOAD), size_bytes=size_bytes, offset=offset, data=data)
        assert transfers.take(frame) in (None, PAYLOAD)
        assert transfers.held_bytes <= size_bytes + 1
    assert PAYLOAD in taken(transfers, *FRAMES, *FRAMES)
