"""Downloads: frames ahead of their turn are held, and only gaps are requested again."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.core import downloads
from edge_client.core.downloads import MAX_AHEAD, MAX_AHEAD_BYTES, MAX_REQUESTS, PROBE_BYTES, WINDOW_BYTES
from edge_client.core.events import AppendBlob, RequestBlob
from edge_client.core.state import SLOW_LINK, Download, Mode, State
from protocol.retry_delay import retry_delay_s
from protocol.wire.messages import MAX_CHUNK_BYTES, BlobRef, Frame, Reason, Receipt
from protocol.wire.transfer import frames_of
from tests.support.simulation.fleet import reference

BLOB = random.Random(0).randbytes(3 * WINDOW_BYTES + 12_345)
REFERENCE = reference(BLOB, "blob")


def frame(start: int, stop: int) -> Frame:
    return Frame(v=1, digest=REFERENCE.digest, size_bytes=len(BLOB), offset=start, data=BLOB[start:stop])


def answer(request: RequestBlob, *, chunk_bytes: int = MAX_CHUNK_BYTES) -> list[Frame]:
    """Return the frames that answer a request."""
    ranges = ((request.offset, request.offset + request.length),)
    return list(frames_of(BLOB, digest=REFERENCE.digest, ranges=ranges, chunk_bytes=chunk_bytes))


def in_chunks(requests: list[RequestBlob]) -> list[tuple[int, int]]:
    """Return the offsets and lengths of requests, in full frames."""
    return [(each.offset // MAX_CHUNK_BYTES, each.length // MAX_CHUNK_BYTES) for each in requests]


class Receiver:
    """A device with one download, and the file that it is written to."""

    def __init__(self, offset: int = 0, blob: BlobRef = REFERENCE, **fields: Any) -> None:
        download = Download(blob, offset, **fields)
        self.state = State(mode=Mode.SERVICE, connected=True, download=download)
        self.file = BLOB[:offset]
        self.now_s = 0.0

    @property
    def download(self) -> Download:
        assert self.state.download is not None
        return self.state.download

    def ask(self) -> list[RequestBlob]:
        """Return the requests that are due."""
        self.state, requests = downloads.request_due(self.state, self.now_s)
        return [each for each in requests if isinstance(each, RequestBlob)]

    def take(self, *frames: Frame) -> None:
        """Receive frames, and write the next bytes."""
        for each in frames:
            self.state, actions = downloads.receive(self.state, each, self.now_s)
            self.file += b"".join(each.data for each in actions if isinstance(each, AppendBlob))
            assert len(self.file) == self.download.offset
            assert all(offset > self.download.offset for offset, _ in self.download.ahead)


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    loss=st.sampled_from([0.0, 0.1, 0.5]),
    shuffled=st.booleans(),
    chunks=st.lists(st.sampled_from([MAX_CHUNK_BYTES, 20_000, 7_777]), min_size=1, max_size=3),
)
def test_any_order_and_loss_gives_the_blob(
    seed: int, loss: float, chunks: list[int], *, shuffled: bool
) -> None:
    """Frames of any size are lost, duplicated or reordered; every byte is written once, in order."""
    chance = random.Random(seed)
    receiver = Receiver()
    for _ in range(100_000):  # half of the frames may be lost, and delays grow to five minutes
        if receiver.download.offset == len(BLOB):
            break
        requests = receiver.ask()
        chunk = chance.choice(chunks)
        frames = [each for request in requests for each in answer(request, chunk_bytes=chunk)]
        came = [each for each in frames for _ in range(chance.choice([1, 1, 2])) if chance.random() >= loss]
        if shuffled:
            chance.shuffle(came)
        receiver.take(*came)
        receiver.now_s += 1.0
    assert receiver.file == BLOB


def test_a_gap_is_requested_at_once(receiver: Receiver) -> None:
    """After the last requested frame, frames that are missing before it will not arrive.

    The request for the gaps includes the next frames, so that never more than a window is in flight.
    """
    (request,) = receiver.ask()
    assert (request.offset, request.length) == (0, WINDOW_BYTES)
    frames = answer(request)
    for number, each in enumerate(frames):
        if number not in {3, 4, 9}:
            assert receiver.ask() == []
            receiver.take(each)
    assert receiver.download.offset == 3 * MAX_CHUNK_BYTES
    gaps = receiver.ask()
    assert in_chunks(gaps) == [(3, 2), (9, 1), (16, 3)]
    for gap in gaps:
        receiver.take(*answer(gap))
    assert receiver.file == BLOB[: 19 * MAX_CHUNK_BYTES]
    (following,) = receiver.ask()
    assert following.offset == 19 * MAX_CHUNK_BYTES


def test_a_lost_end_is_requested_after_the_delay(receiver: Receiver) -> None:
    """A few bytes show that it is lost; nothing before it is requested again."""
    frames = answer(receiver.ask()[0])
    receiver.take(*frames[:2], *frames[3:-1])
    assert receiver.ask() == []
    receiver.now_s = retry_delay_s(0)
    (probe,) = receiver.ask()
    assert probe.length == PROBE_BYTES
    receiver.take(*answer(probe))
    assert in_chunks(receiver.ask()) == [(2, 1), (15, 2)]


def test_a_slow_link_carries_each_frame_once(receiver: Receiver) -> None:
    """Frames that take longer than the delay are under way: nothing but probes is requested until they have arrived."""
    queue, asked, requests = list[Frame](), 0, 0
    while receiver.download.offset < len(BLOB):
        if receiver.now_s % 77 == 76 and queue:  # one frame in 77 s
            receiver.take(queue.pop(0))
        while queue and len(queue[0].data) <= PROBE_BYTES:
            receiver.take(queue.pop(0))
        for request in receiver.ask():
            asked, requests = asked + request.length, requests + 1
            queue += answer(request)
        receiver.now_s += 1.0
    assert receiver.file == BLOB
    assert asked <= len(BLOB) + requests * PROBE_BYTES


def test_refused_requests_back_off_although_probes_are_answered(receiver: Receiver) -> None:
    """A device that has downloaded too often asks less and less."""
    asked_s = list[float]()
    while receiver.now_s < 3600:
        for request in receiver.ask():
            if request.length > PROBE_BYTES:
                asked_s.append(receiver.now_s)
                receipt = Receipt(digest=REFERENCE.digest, status="refused", reason="rate_limited")
                receiver.state, _ = downloads.refused(receiver.state, receipt, receiver.now_s)
            else:
                receiver.take(*answer(request))
        receiver.now_s += 1.0
    assert len(asked_s) < 20


@pytest.mark.parametrize("reason", ["rate_limited", "revoked"])
def test_a_refusal_without_a_request_is_ignored(receiver: Receiver, reason: Reason) -> None:
    """Neither before the first request nor between two windows."""
    refusal = Receipt(digest=REFERENCE.digest, status="refused", reason=reason)
    assert downloads.refused(receiver.state, refusal, 0.0) == (receiver.state, ())
    for request in receiver.ask():
        receiver.take(*answer(request))
    assert downloads.refused(receiver.state, refusal, 0.0) == (receiver.state, ())
    receiver.ask()
    assert downloads.refused(receiver.state, refusal, 0.0) != (receiver.state, ())


@pytest.mark.parametrize("carries_bytes", [70_000, 20_000, 6_000])
def test_requests_shrink_until_frames_arrive_before_the_connection_ends(carries_bytes: int) -> None:
    """Down to 4 KiB, and the device reports it."""
    receiver = Receiver(offset=len(BLOB) - 200_000)
    for _ in range(70):
        carried = 0
        for each in (frame for request in receiver.ask() for frame in answer(request)):
            carried += len(each.data)
            if carried <= carries_bytes:
                receiver.take(each)
        receiver.state = downloads.restart(downloads.cut(receiver.state))
        if receiver.download.offset == len(BLOB):
            break
    assert receiver.file == BLOB
    assert receiver.state.link_problem == SLOW_LINK


@pytest.mark.parametrize("limit_bytes", [40_000, 20_000, 6_000])
def test_requests_shrink_until_frames_are_not_dropped(receiver: Receiver, limit_bytes: int) -> None:
    """A broker or a bridge drops larger packets in silence; what is refused with a reason says nothing of size."""
    refusal = Receipt(digest=REFERENCE.digest, status="refused", reason="rate_limited")
    while receiver.download.offset < len(BLOB):
        for each in (frame for request in receiver.ask() for frame in answer(request)):
            if receiver.now_s < 3600:
                receiver.state, _ = downloads.refused(receiver.state, refusal, receiver.now_s)
                assert not receiver.state.download_frames.is_reduced
            if len(each.data) <= (limit_bytes if receiver.now_s >= 3600 else PROBE_BYTES):
                receiver.take(each)
        receiver.now_s += 10.0
        assert receiver.now_s < 24 * 3600
    assert receiver.state.link_problem == SLOW_LINK


def test_only_gaps_of_a_broadcast_are_requested() -> None:
    """Its last frame ends the wait; more than a window is held."""
    receiver = Receiver(until=len(BLOB), due_s=3.0)
    frames = list(frames_of(BLOB, digest=REFERENCE.digest))
    lost = {0, 20, len(frames) - 2}
    receiver.take(*(each for number, each in enumerate(frames) if number not in lost))
    asked: list[RequestBlob] = []
    while requests := receiver.ask():
        asked += requests
        for request in requests:
            receiver.take(*answer(request))
    assert receiver.file == BLOB
    assert [request.offset // MAX_CHUNK_BYTES for request in asked] == sorted(lost)
    assert sum(request.length for request in asked) == 3 * MAX_CHUNK_BYTES


@pytest.mark.parametrize("size", [MAX_CHUNK_BYTES, 256])
def test_held_frames_are_limited(size: int) -> None:
    """Their bytes and their number are limited; the rest is requested later."""
    huge = reference(bytes(2 * MAX_AHEAD_BYTES), "huge")
    receiver = Receiver(blob=huge, until=huge.size_bytes, due_s=3.0)
    for start in range(size, huge.size_bytes, size):
        data = bytes(min(size, huge.size_bytes - start))
        piece = Frame(v=1, digest=huge.digest, size_bytes=huge.size_bytes, offset=start, data=data)
        receiver.state, _ = downloads.receive(receiver.state, piece, 0)
    held = [len(data) for _, data in receiver.download.ahead]
    assert len(held) <= MAX_AHEAD
    assert sum(held) <= MAX_AHEAD_BYTES
    assert len(held) == MAX_AHEAD or sum(held) > MAX_AHEAD_BYTES - size


def test_requests_for_gaps_are_limited(receiver: Receiver) -> None:
    """One bad window does not cause a flood."""
    (request,) = receiver.ask()
    receiver.take(*answer(request, chunk_bytes=5_000)[1::2])
    receiver.now_s = retry_delay_s(0)
    receiver.take(*answer(receiver.ask()[0]))
    assert len(receiver.ask()) == MAX_REQUESTS


@pytest.mark.parametrize(
    "wrong",
    [
        Frame(v=1, digest=b"o" * 32, size_bytes=len(BLOB), offset=0, data=b"x"),
        Frame(v=1, digest=REFERENCE.digest, size_bytes=9, offset=0, data=b"x"),
        Frame(v=1, digest=REFERENCE.digest, size_bytes=len(BLOB), offset=len(BLOB) - 1, data=b"xx"),
        Frame(v=1, digest=REFERENCE.digest, size_bytes=len(BLOB), offset=7, data=b""),
    ],
)
def test_foreign_frames_are_ignored(receiver: Receiver, wrong: Frame) -> None:
    """They are of another blob, of another size, past the end, or empty."""
    receiver.ask()
    before = receiver.download
    receiver.take(wrong)
    assert receiver.download == before
