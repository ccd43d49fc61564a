"""Payloads split into frames and reassembled: in any order, for many devices at once, bounded and independent."""

import contextlib
import functools
from collections.abc import Iterable

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.intake.assembly import MAX_PIECES, MAX_STRETCHES, Assembly
from aggregator.intake.reassembly import MAX_RANGES, PIECE_BYTES, STRETCH_BYTES, Complete, Reassembly
from aggregator.intake.validation import Refused
from protocol.errors import TransferError
from protocol.mqtt.publisher import packet_bytes
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import MAX_CHUNK_BYTES, Frame, Receipt
from protocol.wire.topics import device_topic
from protocol.wire.transfer import ENVELOPE_BYTES, SMALLEST_CHUNK_BYTES, chunk_bytes, frames_of
from tests.fuzz.transfers import Disk

PAYLOAD = bytes(range(100))
DIGEST = digest_of(PAYLOAD)
FRAMES = list(frames_of(PAYLOAD, digest=DIGEST, chunk_bytes=30))
"""Four: 0, 30, 60 and 90."""

_reassembly = functools.partial(Reassembly, max_bytes=1000, holds=lambda *_: False)


def _frame(offset: int, data: bytes = b"x", *, digest: bytes = DIGEST, size_bytes: int = 100) -> Frame:
    return Frame(v=1, digest=digest, size_bytes=size_bytes, offset=offset, data=data)


@given(st.permutations(FRAMES), st.data())
def test_any_order_completes_a_transfer(frames: list[Frame], data: st.DataObject) -> None:
    """The frame that closes the last gap returns the payload; the last bytes return the gaps until then."""
    reassembly = _reassembly()
    arrived: list[Frame] = []
    for frame in frames:
        outcome = reassembly.take("a", frame)
        arrived.append(frame)
        if len(arrived) == len(FRAMES):
            assert outcome == Complete(DIGEST, PAYLOAD)
        elif frame is FRAMES[-1]:
            assert isinstance(outcome, Receipt)
            assert outcome.status == "missing"
            asked = list(frames_of(PAYLOAD, digest=DIGEST, ranges=outcome.missing, chunk_bytes=30))
            assert {frame.offset for frame in asked} == {frame.offset for frame in FRAMES} - {
                frame.offset for frame in arrived
            }
        else:
            assert outcome is None
        if data.draw(st.booleans()) and len(arrived) < len(FRAMES):
            reassembly.take("a", data.draw(st.sampled_from(arrived)))


def test_oversized_transfer_is_refused_at_its_first_frame() -> None:
    reassembly = _reassembly(max_bytes=99)
    with pytest.raises(Refused, match="expected at most 99 bytes, got 100") as caught:
        reassembly.take("a", FRAMES[0])
    assert caught.value.reason == "oversized"
    assert reassembly._transfers == {}


@pytest.mark.parametrize(
    "wrong",
    [_frame(30, size_bytes=101), _frame(99, b"xy"), _frame(101, b""), _frame(50, b"")],
    ids=["other size", "past the end", "beyond the end", "empty"],
)
def test_contradicting_frame_ends_its_transfer(wrong: Frame) -> None:
    """It is refused and dropped, and can begin anew."""
    reassembly = _reassembly()
    reassembly.take("a", FRAMES[0])
    with pytest.raises(Refused) as caught:
        reassembly.take("a", wrong)
    assert caught.value.reason == "digest"
    assert reassembly._transfers == {}
    outcomes = [reassembly.take("a", frame) for frame in FRAMES]
    assert outcomes[-1] == Complete(DIGEST, PAYLOAD)


@pytest.mark.parametrize(
    ("sent", "left"), [("one two three", "two three"), ("one two one three", "one three")]
)
def test_transfers_of_a_device_are_bounded(sent: str, left: str) -> None:
    """A third one replaces the one without frames for longest; other devices keep theirs."""
    reassembly = _reassembly(per_device=2)
    reassembly.take("b", FRAMES[0])
    for name in sent.split():
        reassembly.take("a", _frame(0, digest=digest_of(name.encode())))
    own = [("a", digest_of(name.encode())) for name in left.split()]
    assert list(reassembly._transfers) == [("b", DIGEST), *own]


def test_receipt_lists_the_first_gaps() -> None:
    """It is a small, valid message however many there are."""
    size_bytes = 1000
    reassembly = _reassembly()
    for offset in range(0, size_bytes - 2, 2):
        reassembly.take("a", _frame(offset, size_bytes=size_bytes))
    receipt = reassembly.take("a", _frame(size_bytes - 1, size_bytes=size_bytes))
    assert isinstance(receipt, Receipt)
    assert receipt.missing == tuple((offset + 1, offset + 2) for offset in range(0, 2 * MAX_RANGES, 2))
    assert decode(encode(receipt), Receipt, max_bytes=MAX_CHUNK_BYTES) == receipt


def test_empty_payload_is_complete_at_once() -> None:
    (frame,) = frames_of(b"", digest=digest_of(b""))
    assert _reassembly().take("a", frame) == Complete(digest_of(b""), b"")


def test_all_transfers_together_are_bounded() -> None:
    """Many unfinished transfers replace the oldest, never the one of the current frame."""
    reassembly = _reassembly(max_bytes=100, max_held_bytes=2 * (90 + 4 * PIECE_BYTES + STRETCH_BYTES) + 50)
    for number in range(20):
        for frame in FRAMES[:3]:
            reassembly.take(f"device-{number}", frame)
        held = sum(transfer.weight for transfer in reassembly._transfers.values())
        assert reassembly._held_bytes == held <= 2 * (90 + 4 * PIECE_BYTES + STRETCH_BYTES) + 50
    assert reassembly.take("device-19", FRAMES[3]) == Complete(DIGEST, PAYLOAD)
    outcome = reassembly.take("device-0", FRAMES[3])
    assert isinstance(outcome, Receipt)
    assert outcome.missing == ((0, 90),)


def test_tiny_transfers_count_against_the_quota() -> None:
    """Each counts with its overhead: a transfer of one byte is not free."""
    reassembly = _reassembly(max_bytes=10**6, max_held_bytes=100 * (2 * PIECE_BYTES + STRETCH_BYTES + 1))
    for number in range(1000):
        frame = _frame(0, digest=digest_of(b"%d" % number), size_bytes=10**6)
        reassembly.take(f"device-{number}", frame)
    assert len(reassembly._transfers) == 100


def test_gaps_count_against_the_quota() -> None:
    """Ranges apart from each other take a block of the disk each, until the gap is closed."""
    reassembly = _reassembly()
    for offset in (0, 2, 4):
        reassembly.take("a", _frame(offset))
    assert reassembly._held_bytes == 3 + 4 * PIECE_BYTES + 3 * STRETCH_BYTES
    for offset in (1, 3):
        reassembly.take("a", _frame(offset))
    assert reassembly._held_bytes == 5 + 6 * PIECE_BYTES + STRETCH_BYTES


def test_single_transfer_may_exceed_the_quota() -> None:
    """The transfer of the current frame is never dropped."""
    reassembly = _reassembly(max_bytes=1000, max_held_bytes=1000)
    frames = list(frames_of(PAYLOAD, digest=DIGEST, chunk_bytes=1))
    assert [reassembly.take("a", frame) for frame in frames][-1] == Complete(DIGEST, PAYLOAD)
    assert reassembly._held_bytes == 0


@hypothesis.settings(max_examples=200)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_frames_commits_and_restarts_complete_a_transfer(payload: bytes, data: st.DataObject) -> None:
    """Overlapping, repeated and lost frames of any size, and kills: stored ranges are not requested again."""
    digest, disk = digest_of(payload), Disk()
    reassembly = disk.start(set())
    outcome: Complete | Receipt | None = None
    for _ in range(data.draw(st.integers(0, 20))):
        match data.draw(st.sampled_from(["frame", "commit", "kill"])):
            case "commit":
                disk.commit(reassembly)
            case "kill":
                reassembly = disk.start(set())
            case _:
                start = data.draw(st.integers(0, len(payload) - 1))
                stop = data.draw(st.integers(start + 1, len(payload)))
                outcome = reassembly.take("a", _part(payload, start, stop))
                if isinstance(outcome, Complete):
                    break
    while not isinstance(outcome, Complete):
        stored = {
            byte
            for offset, piece in disk.files.get(("a", digest), {}).items()
            for byte in range(offset, offset + len(piece))
        }
        outcome = reassembly.take("a", _part(payload, len(payload) - 1, len(payload)))
        if isinstance(outcome, Receipt):
            assert not stored & {byte for start, stop in outcome.missing for byte in range(start, stop)}
            for start, stop in outcome.missing:
                outcome = reassembly.take("a", _part(payload, start, stop))
            if data.draw(st.booleans()):
                disk.commit(reassembly)
    assert outcome == Complete(digest, payload)
    disk.commit(reassembly)
    assert disk.files == {}


def _part(payload: bytes, start: int, stop: int) -> Frame:
    return _frame(start, payload[start:stop], digest=digest_of(payload), size_bytes=len(payload))


def test_committed_bytes_are_released_from_memory() -> None:
    """Only their ranges are kept."""
    disk = Disk()
    reassembly = disk.start(set())
    for frame in FRAMES[:3]:
        reassembly.take("a", frame)
        disk.commit(reassembly)
        assert reassembly.pending() == []
    assert reassembly.take("a", FRAMES[3]) == Complete(DIGEST, PAYLOAD)


def test_transfer_without_frames_expires() -> None:
    """The time of its last frame counts, after a restart too."""
    disk = Disk()
    reassembly = disk.start(set())
    reassembly.take("a", FRAMES[0], now_s=1.0)
    reassembly.take("b", FRAMES[0], now_s=1.0)
    disk.commit(reassembly)
    reassembly.take("a", FRAMES[1], now_s=2.0)
    assert reassembly.expire(before_s=2.0) == [("b", DIGEST)]
    disk.commit(reassembly)
    assert list(disk.files) == [("a", DIGEST)]


def test_contradicting_overlaps_fail_the_digest() -> None:
    """The first bytes are kept; the payload is refused and dropped, and can begin anew."""
    disk = Disk()
    reassembly = disk.start(set())
    reassembly.take("a", _frame(0, bytes(60)))
    disk.commit(reassembly)
    with pytest.raises(Refused, match="expected sha256"):
        reassembly.take("a", _frame(30, PAYLOAD[30:]))
    disk.commit(reassembly)
    assert disk.files == {}
    assert [reassembly.take("a", frame) for frame in FRAMES][-1] == Complete(DIGEST, PAYLOAD)


def test_one_device_does_not_displace_the_uploads_of_others() -> None:
    """Whatever it sends, and however slow they are: beyond the quota it loses its own."""
    reassembly = _reassembly(max_bytes=10**6, max_held_bytes=20 * STRETCH_BYTES)
    slow = list(frames_of(bytes(300), digest=digest_of(bytes(300)), chunk_bytes=100))
    assert reassembly.take("slow", slow[0]) is None
    for number in range(200):
        digest = bytes([number // 20]) * 32
        frame = Frame(v=1, digest=digest, size_bytes=10**6, offset=2 * number, data=b"x")
        reassembly.take("mallory", frame)
    assert reassembly._held_bytes <= 20 * STRETCH_BYTES
    reassembly.take("slow", slow[1])
    assert isinstance(reassembly.take("slow", slow[2]), Complete)


TEN_BYTES = bytes(range(10))
TEN_DIGEST = digest_of(TEN_BYTES)


def _assembly_of(payload: bytes) -> Assembly:
    return Assembly(digest_of(payload), len(payload))


def _piece(offset: int, data: bytes, *, size_bytes: int = 10, digest: bytes = TEN_DIGEST) -> Frame:
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
    assembly = Assembly(TEN_DIGEST, size_bytes)
    for offset, data in pieces:
        with contextlib.suppress(TransferError):
            assembly.add(_piece(offset, data, size_bytes=size_bytes))
        held = sum(len(piece) for _, piece in assembly.fresh)
        assert held == assembly.held_bytes <= size_bytes
        assert held + sum(stop - start for start, stop in assembly.missing()) == size_bytes


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 30))))
def test_every_byte_is_new_once(pieces: list[tuple[int, int]]) -> None:
    assembly, covered = Assembly(TEN_DIGEST, 130), set[int]()

    def listed(ranges: Iterable[tuple[int, int]]) -> list[int]:
        return [byte for start, stop in ranges for byte in range(start, stop)]

    for start, length in pieces:
        assembly.settle()
        assembly.add(_piece(start, bytes(length), size_bytes=130))
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
        assembly.add(_piece(start, payload[start:stop], size_bytes=len(payload), digest=assembly.digest))
        if data.draw(st.booleans()):
            elsewhere += assembly.fresh
            assembly.settle()
    assert assembly.payload(elsewhere) == payload


def test_announced_size_allocates_nothing() -> None:
    assembly = Assembly(TEN_DIGEST, 2 * 1024**3)
    assembly.add(_piece(5, b"x", size_bytes=2 * 1024**3))
    assert assembly.held_bytes == 1
    assert assembly.missing() == ((0, 5), (6, 2 * 1024**3))


def test_frames_of_a_payload_fit_a_packet() -> None:
    payload = bytes(2 * MAX_CHUNK_BYTES + 1)
    frames = list(frames_of(payload, digest=TEN_DIGEST))
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
    frame = Frame(v=1, digest=TEN_DIGEST, size_bytes=2**31, offset=2**31 - len(data), data=data)
    topic = device_topic("f" * 64, "d" * 64, "up")
    assert packet_bytes(topic, len(encode(frame))) <= limit


def test_ranges_are_clipped_to_the_payload() -> None:
    assert [
        (each.offset, each.data)
        for each in frames_of(TEN_BYTES, digest=TEN_DIGEST, ranges=((8, 99), (50, 60)))
    ] == [(8, b"\x08\x09")]


def test_too_many_pieces_are_refused() -> None:
    size_bytes = 3 * MAX_PIECES
    most = MAX_PIECES + size_bytes // SMALLEST_CHUNK_BYTES
    assembly = Assembly(TEN_DIGEST, size_bytes)
    for index in range(most + 1):
        assembly.add(_piece(index, b"x", size_bytes=size_bytes))
    with pytest.raises(TransferError, match="send larger frames"):
        assembly.add(_piece(most + 1, b"x", size_bytes=size_bytes))


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
