"""Uploads from their frames: in any order, for many devices at once, bounded and independent."""

import contextlib
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.intake.open_uploads import MAX_RANGES, OpenUploads
from aggregator.intake.upload import MAX_STRETCHES, PIECE_BYTES, STRETCH_BYTES, UPLOAD_BYTES, Upload
from aggregator.intake.validation import Refused
from protocol.errors import StateError, TransferError
from protocol.mqtt.publisher import packet_bytes
from protocol.wire.codec import FrameView, decode, digest_of, encode
from protocol.wire.messages import MAX_CHUNK_BYTES, Frame, Receipt
from protocol.wire.topics import device_topic
from protocol.wire.transfer import ENVELOPE_BYTES, chunk_bytes, frames_of
from tests.fuzz.transfers import check_limits
from tests.support.machine_faults import full_disk

PAYLOAD = bytes(range(100))
DIGEST = digest_of(PAYLOAD)
FRAMES = list(frames_of(PAYLOAD, digest=DIGEST, chunk_bytes=30))
"""Four: 0, 30, 60 and 90."""

_any = functools.partial(OpenUploads, max_bytes=1000, holds=lambda *_: False, room=lambda: math.inf)
_in_memory = functools.partial(_any, folder=Path(os.devnull))
"""It cannot write a file."""


@pytest.fixture
def in_files(tmp_path: Path) -> Callable[..., OpenUploads]:
    """Return a function that makes open uploads which move each frame to a file."""
    return functools.partial(_any, folder=tmp_path, max_upload_memory_bytes=UPLOAD_BYTES)


def _frame(offset: int, data: bytes = b"x", *, digest: bytes = DIGEST, size_bytes: int = 100) -> Frame:
    return Frame(v=1, digest=digest, size_bytes=size_bytes, offset=offset, data=data)


@given(st.permutations(FRAMES), st.data())
def test_any_order_completes_an_upload(frames: list[Frame], data: st.DataObject) -> None:
    """The frame that closes the last gap returns the payload; the last bytes return the gaps until then."""
    uploads = _in_memory()
    arrived: list[Frame] = []
    for frame in frames:
        outcome = uploads.take("a", frame)
        arrived.append(frame)
        if len(arrived) == len(FRAMES):
            assert outcome == PAYLOAD
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
            uploads.take("a", data.draw(st.sampled_from(arrived)))


def test_oversized_transfer_is_refused_at_its_first_frame() -> None:
    uploads = _in_memory(max_bytes=99)
    with pytest.raises(Refused, match="expected at most 99 bytes, got 100") as caught:
        uploads.take("a", FRAMES[0])
    assert caught.value.reason == "oversized"
    assert uploads._uploads == {}


@pytest.mark.parametrize(
    "wrong",
    [_frame(30, size_bytes=101), _frame(99, b"xy"), _frame(101, b""), _frame(50, b"")],
    ids=["other size", "past the end", "beyond the end", "empty"],
)
def test_contradicting_frame_ends_its_upload(wrong: Frame) -> None:
    """It is refused and dropped, and can begin anew."""
    uploads = _in_memory()
    uploads.take("a", FRAMES[0])
    with pytest.raises(Refused) as caught:
        uploads.take("a", wrong)
    assert caught.value.reason == "digest"
    assert uploads._uploads == {}
    outcomes = [uploads.take("a", frame) for frame in FRAMES]
    assert outcomes[-1] == PAYLOAD


@pytest.mark.parametrize(
    ("sent", "left"), [("one two three", "two three"), ("one two one three", "one three")]
)
def test_uploads_of_a_device_are_bounded(sent: str, left: str) -> None:
    """A third one replaces the one without frames for longest; other devices keep theirs."""
    uploads = _in_memory(per_device=2)
    uploads.take("b", FRAMES[0])
    for name in sent.split():
        uploads.take("a", _frame(0, digest=digest_of(name.encode())))
    own = [("a", digest_of(name.encode())) for name in left.split()]
    assert list(uploads._uploads) == [("b", DIGEST), *own]


def test_receipt_lists_the_first_gaps() -> None:
    """It is a small, valid message however many there are."""
    size_bytes = 1000
    uploads = _in_memory()
    for offset in range(0, size_bytes - 2, 2):
        uploads.take("a", _frame(offset, size_bytes=size_bytes))
    receipt = uploads.take("a", _frame(size_bytes - 1, size_bytes=size_bytes))
    assert isinstance(receipt, Receipt)
    assert receipt.missing == tuple((offset + 1, offset + 2) for offset in range(0, 2 * MAX_RANGES, 2))
    assert decode(encode(receipt), Receipt, max_bytes=MAX_CHUNK_BYTES) == receipt


def test_empty_payload_is_complete_at_once() -> None:
    (frame,) = frames_of(b"", digest=digest_of(b""))
    assert _in_memory().take("a", frame) == b""


def test_upload_moves_to_a_file_beyond_its_share_of_memory(tmp_path: Path) -> None:
    """Its file has each byte at its position, and ends with it."""
    limit = UPLOAD_BYTES + 60 + 2 * PIECE_BYTES
    uploads = _in_memory(folder=tmp_path, max_upload_memory_bytes=limit)
    for number in (3, 1):
        uploads.take("a", FRAMES[number])
    assert list(tmp_path.iterdir()) == []
    uploads.take("a", FRAMES[2])
    (file,) = tmp_path.iterdir()
    assert file.read_bytes() == bytes(30) + PAYLOAD[30:]
    assert uploads.take("b", FRAMES[0]) is None
    assert list(tmp_path.iterdir()) == [file]
    assert uploads.take("a", FRAMES[0]) == PAYLOAD
    assert list(tmp_path.iterdir()) == []


def test_memory_is_bounded_and_no_upload_is_lost(tmp_path: Path) -> None:
    """Those without a frame for longest move to files, and continue there."""
    limit = 5 * (UPLOAD_BYTES + 90 + 3 * PIECE_BYTES)
    uploads = _in_memory(folder=tmp_path, max_memory_bytes=limit)
    devices = [f"device-{number}" for number in range(7)]
    for frame in FRAMES[:3]:
        for device in devices:
            assert uploads.take(device, frame) is None
            check_limits(uploads)
    assert {file.name.partition("-")[0] for file in tmp_path.iterdir()} == {"device"}
    assert [uploads.take(device, FRAMES[3]) for device in devices] == [PAYLOAD] * len(devices)
    assert (uploads._memory_bytes, uploads._all_file_bytes) == (0, 0)


def test_one_device_does_not_displace_the_uploads_of_others(in_files: Callable[..., OpenUploads]) -> None:
    """Whatever it sends, and however slow they are: beyond the limit of files, it loses its own."""
    uploads = in_files(max_bytes=10**6, max_file_bytes=20 * STRETCH_BYTES)
    uploads.max_file_bytes = 20 * STRETCH_BYTES
    slow = list(frames_of(bytes(300), digest=digest_of(bytes(300)), chunk_bytes=100))
    assert uploads.take("slow", slow[0]) is None
    for number in range(200):
        digest = bytes([number // 20]) * 32
        uploads.take("mallory", _frame(2 * number, digest=digest, size_bytes=10**6))
        check_limits(uploads)
    uploads.take("slow", slow[1])
    assert uploads.take("slow", slow[2]) == bytes(300)


def test_upload_that_the_disk_has_no_room_for_is_refused(in_files: Callable[..., OpenUploads]) -> None:
    """The sizes of other uploads count, less what is written of them; the end of one makes room."""
    disk, written = 25_000, 0
    uploads = in_files(max_bytes=10**6, room=lambda: disk - written)
    contents = [bytes([number]) * 10_000 for number in range(3)]
    a, b, c = ([*frames_of(each, digest=digest_of(each), chunk_bytes=5000)] for each in contents)
    assert uploads.take("a", a[0]) is None
    written = 5000
    assert uploads.take("b", b[0]) is None
    expected = "not enough disk space: 0.0 MB needed, 0.0 MB available"
    for frame in c:
        with pytest.raises(Refused, match=expected) as refused:
            uploads.take("c", frame)
        assert refused.value.reason == "no_space"
    assert uploads.take("c", _frame(0, PAYLOAD)) == PAYLOAD  # whole at once
    assert uploads.take("a", a[1]) == contents[0]
    written = 5000
    assert uploads.take("c", c[0]) is None
    check_limits(uploads)


def test_small_uploads_are_refused_once_they_may_move_to_files() -> None:
    """As long as all of them fit the memory, the disk may be full."""
    uploads = _in_memory(room=lambda: -1.0, max_memory_bytes=2 * (UPLOAD_BYTES + 100 + PIECE_BYTES))
    for device in ("a", "b"):
        uploads.take(device, FRAMES[0])
    with pytest.raises(Refused, match="not enough disk space"):
        uploads.take("c", FRAMES[0])


def test_no_more_room_is_needed_than_files_may_take() -> None:
    """However much a client announces, without sending it."""
    uploads = _in_memory(max_bytes=2**30, max_file_bytes=2**31, room=lambda: 2.0**31)
    for number in range(100):
        uploads.take(f"device-{number}", _frame(0, size_bytes=2**30))
    check_limits(uploads)


def test_two_uploads_of_the_greatest_size_have_room() -> None:
    """Otherwise two devices could displace each other's for ever."""
    assert _in_memory(max_bytes=2**30).max_file_bytes == 2**31


def test_uploads_in_files_are_bounded_by_their_blocks(in_files: Callable[..., OpenUploads]) -> None:
    """Each file and each range apart from the others takes a block of the disk: a single byte is not free."""
    uploads = in_files(max_bytes=10**6)
    uploads.max_file_bytes = 100 * (STRETCH_BYTES + 1)
    for number in range(300):
        uploads.take(f"device-{number}", _frame(0, size_bytes=10**6))
    assert len(uploads._uploads) == 100
    for offset in (2, 4, 3):
        uploads.take("device-299", _frame(offset, size_bytes=10**6))
    check_limits(uploads)


@pytest.mark.parametrize("moves_to_files", [False, True])
@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@given(payload=st.binary(min_size=1, max_size=200), data=st.data())
def test_any_frames_complete_an_upload(
    in_files: Callable[..., OpenUploads], payload: bytes, data: st.DataObject, *, moves_to_files: bool
) -> None:
    """Overlapping, repeated and lost frames of any size; what has arrived is not requested again."""
    uploads = (in_files if moves_to_files else _in_memory)()
    there = {len(payload) - 1}
    for start in data.draw(st.lists(st.integers(0, len(payload) - 1), max_size=8)):
        stop = data.draw(st.integers(start + 1, len(payload)))
        there.update(range(start, stop))
        if uploads.take("a", _part(payload, start, stop)) == payload:
            return
    outcome = uploads.take("a", _part(payload, len(payload) - 1, len(payload)))
    if isinstance(outcome, Receipt):
        asked = [byte for start, stop in outcome.missing for byte in range(start, stop)]
        assert asked == [byte for byte in range(len(payload)) if byte not in there]
        outcome = [uploads.take("a", _part(payload, *each)) for each in outcome.missing][-1]
    assert outcome == payload
    assert not uploads._uploads


def _part(payload: bytes, start: int, stop: int) -> Frame:
    return _frame(start, payload[start:stop], digest=digest_of(payload), size_bytes=len(payload))


def test_upload_without_frames_expires(in_files: Callable[..., OpenUploads]) -> None:
    uploads = in_files()
    for device, now_s in (("a", 1.0), ("b", 1.0), ("a", 2.0)):
        uploads.take(device, FRAMES[0], now_s=now_s)
    assert uploads.expire(before_s=2.0) == [("b", DIGEST)]
    assert [file.name for file in uploads.folder.iterdir()] == [f"a-{DIGEST.hex()}"]


@pytest.mark.parametrize("moves_to_files", [False, True])
def test_contradicting_overlaps_fail_the_digest(
    in_files: Callable[..., OpenUploads], *, moves_to_files: bool
) -> None:
    """The first bytes are kept; the payload is refused and dropped, and can begin anew."""
    uploads = (in_files if moves_to_files else _in_memory)()
    uploads.take("a", _frame(0, bytes(60)))
    with pytest.raises(Refused, match="expected sha256"):
        uploads.take("a", _frame(30, PAYLOAD[30:]))
    assert not moves_to_files or list(uploads.folder.iterdir()) == []
    assert [uploads.take("a", frame) for frame in FRAMES][-1] == PAYLOAD


@pytest.mark.parametrize("damage", ["deleted", "shortened", "longer"])
def test_damaged_file_costs_its_upload(in_files: Callable[..., OpenUploads], damage: str) -> None:
    """It fails the digest, and the device sends it again."""
    uploads = in_files()
    uploads.take("a", FRAMES[0])
    (file,) = uploads.folder.iterdir()
    if damage == "deleted":
        file.unlink()
    else:
        os.truncate(file, 1 if damage == "shortened" else 200)
    with pytest.raises(Refused, match="expected sha256"):
        [uploads.take("a", frame) for frame in FRAMES]
    file.write_bytes(bytes(200))  # as if it could not be deleted
    assert [uploads.take("a", frame) for frame in FRAMES][-1] == PAYLOAD


def test_full_disk_loses_no_bytes(in_files: Callable[..., OpenUploads]) -> None:
    """The bytes stay in memory, and move to the file with the next frame."""
    uploads = in_files()
    uploads.take("a", FRAMES[0])
    with full_disk(after_bytes=40), pytest.raises(StateError, match="cannot use"):
        uploads.take("a", FRAMES[1])
    assert uploads.take("a", FRAMES[2]) is None
    assert uploads.take("a", FRAMES[3]) == PAYLOAD


TEN_BYTES = bytes(range(10))
TEN_DIGEST = digest_of(TEN_BYTES)


def _upload_of(payload: bytes, *, path: Path | None = None) -> Upload:
    return Upload(digest_of(payload), len(payload), path=path)


def _piece(offset: int, data: bytes, *, size_bytes: int = 10, digest: bytes = TEN_DIGEST) -> Frame:
    return Frame(v=1, digest=digest, size_bytes=size_bytes, offset=offset, data=data)


@given(st.binary(max_size=400), st.integers(1, 64), st.data())
def test_any_order_with_duplicates_gives_the_payload(
    payload: bytes, chunk_bytes: int, data: st.DataObject
) -> None:
    frames = list(frames_of(payload, digest=digest_of(payload), chunk_bytes=chunk_bytes))
    upload = _upload_of(payload)
    repeated = data.draw(st.lists(st.sampled_from(frames)))
    for each in data.draw(st.permutations(frames + repeated)):
        upload.add(each)
        assert upload.received_bytes <= len(payload)
    assert upload.missing() == ()
    assert upload.payload() == payload


@given(st.binary(min_size=1, max_size=400), st.integers(1, 64), st.data())
def test_missing_ranges_are_named_and_resent(payload: bytes, chunk_bytes: int, data: st.DataObject) -> None:
    upload = _upload_of(payload)
    while ranges := upload.missing():
        sent = list(frames_of(payload, digest=upload.digest, ranges=ranges, chunk_bytes=chunk_bytes))
        assert sum(len(each.data) for each in sent) == len(payload) - upload.received_bytes
        arrived = data.draw(st.lists(st.sampled_from(sent), min_size=1, unique_by=id))
        for each in arrived:
            upload.add(each)
    assert upload.payload() == payload


@given(st.lists(st.tuples(st.integers(0, 60), st.binary(max_size=30)), max_size=30), st.integers(0, 60))
def test_upload_never_holds_more_than_the_payload(pieces: list[tuple[int, bytes]], size_bytes: int) -> None:
    upload = Upload(TEN_DIGEST, size_bytes)
    for offset, data in pieces:
        with contextlib.suppress(TransferError):
            upload.add(_piece(offset, data, size_bytes=size_bytes))
        held = sum(len(piece) for _, piece in upload._pieces)
        assert held == upload.received_bytes <= size_bytes
        assert held + sum(stop - start for start, stop in upload.missing()) == size_bytes


def test_packet_is_not_kept_in_memory() -> None:
    """A client may put anything behind the bytes of a frame."""
    view = memoryview(TEN_BYTES + bytes(60_000))[:10]
    upload = _upload_of(TEN_BYTES)
    upload.add(FrameView(v=1, digest=TEN_DIGEST, size_bytes=10, offset=0, data=view))
    assert [type(data) for _, data in upload._pieces] == [bytes]
    assert upload.payload() == TEN_BYTES


def test_announced_size_allocates_nothing() -> None:
    upload = Upload(TEN_DIGEST, 2 * 1024**3)
    upload.add(_piece(5, b"x", size_bytes=2 * 1024**3))
    assert upload.received_bytes == 1
    assert upload.missing() == ((0, 5), (6, 2 * 1024**3))


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


def test_number_of_gaps_is_bounded() -> None:
    """Frames with gaps between them cost memory, and time at each query; those beyond the bound count as lost."""
    payload = bytes(2 * MAX_STRETCHES + 20)
    frames = list(frames_of(payload, digest=digest_of(payload), chunk_bytes=1))
    upload = _upload_of(payload)
    for frame in frames[1::2]:
        upload.add(frame)
    assert len(upload._starts) == MAX_STRETCHES
    assert upload.missing(2) == ((0, 1), (2, 3))
    for frame in frames:
        upload.add(frame)
    assert upload.payload() == payload
