"""Blobs are sent in order, each request once, and a bounded amount at a time."""

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.messaging import blob_sender
from aggregator.messaging.blob_sender import (
    BURST_BYTES,
    MAX_DEVICE_BYTES,
    MAX_DEVICE_REQUESTS,
    RETRY_S,
    BlobSender,
    read_frames,
)
from aggregator.storage.blobs import FolderBlobs
from protocol.errors import BlobLost
from protocol.wire.messages import MAX_CHUNK_BYTES, BlobRequest, Frame

WINDOW = 16 * MAX_CHUNK_BYTES
BLOB = bytes(range(100)) * 20_000
HOURLY = 4


class Recorder:
    chunk_bytes = WINDOW

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []

    def publish_to_device(self, device: str, _channel: str, frame: Frame) -> None:
        self.sent.append((device, frame.offset))


class Bench:
    """A sender of one blob, with what it has sent."""

    def __init__(self, blobs: FolderBlobs) -> None:
        self.digest = blobs.put(BLOB)
        self.recorder = Recorder()
        self.sender = BlobSender(
            blobs, cast("Any", self.recorder), downloads_per_hour=HOURLY, verify=lambda _: None
        )

    def request(self, device: str, offset: int = 0, length: int = WINDOW) -> float:
        return self.sender.request(device, BlobRequest(digest=self.digest, offset=offset, length=length))

    def send(self) -> list[tuple[str, int]]:
        self.recorder.sent.clear()
        self.sender.send()
        return list(self.recorder.sent)


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> FolderBlobs:
    return FolderBlobs(tmp_path_factory.mktemp("blobs"))


def test_next_burst_waits_for_the_broker(blobs: FolderBlobs) -> None:
    """However many devices request, a burst is little more than its bound."""
    bench = Bench(blobs)
    for number in range(1000):
        bench.request(f"device-{number}")
    first = bench.send()
    assert BURST_BYTES <= len(first) * WINDOW < BURST_BYTES + WINDOW
    assert bench.send() == []
    bench.sender.drained()
    assert bench.send()[0] == (f"device-{len(first)}", 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=30), st.data())
def test_every_request_is_sent_once(
    blobs: FolderBlobs, requests: list[tuple[str, int]], data: st.DataObject
) -> None:
    bench, sent = Bench(blobs), []
    for device, offset in requests:
        bench.request(device, offset, length=1)
        if data.draw(st.booleans()):
            sent += bench.send()
        if data.draw(st.booleans()):
            bench.sender.drained()
    for _ in requests:
        bench.sender.drained()
        sent += bench.send()
    assert set(sent) == set(requests)
    assert len(sent) <= len(requests)


def test_lost_connection_drops_all_requests(blobs: FolderBlobs) -> None:
    bench = Bench(blobs)
    bench.request("a")
    bench.send()
    bench.request("b")
    bench.sender.forget()
    assert bench.send() == []
    bench.request("a")
    assert bench.send() == [("a", 0)]


def test_request_for_nothing_delays_no_other(blobs: FolderBlobs, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is sent of a deleted blob, which is logged, or past a blob's end."""
    bench = Bench(blobs)
    bench.request("a", len(BLOB))
    bench.sender.request("a", BlobRequest(digest=bytes(32), offset=0, length=1))
    assert bench.send() == []
    assert f"{bytes(32).hex()}: No such file" in caplog.text
    bench.request("b")
    assert bench.send() == [("b", 0)]


def test_unreadable_blob_is_read_once_for_all_requests(
    blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object store takes half a second to miss a blob; after a pause it is read again, which is sent then."""
    bench, reads = Bench(blobs), list[bytes]()

    def verify(digests: list[bytes]) -> None:
        reads.extend(digests)
        if len(reads) == 1:
            raise BlobLost(digests[0], "missing")

    bench.sender._verify = verify
    for device in ("a", "b"):
        bench.request(device)
    assert bench.send() == []
    assert reads == [bench.digest]
    bench.request("a")
    later_s = time.monotonic() + RETRY_S
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert bench.send() == [("a", 0)]


def test_greedy_device_delays_no_other(blobs: FolderBlobs) -> None:
    """A bounded number of a device's requests waits; it can request again once they are sent."""
    bench = Bench(blobs)
    for offset in range(1000):
        bench.request("greedy", offset, length=1)
    bench.request("honest", length=1)
    assert bench.send() == [*(("greedy", offset) for offset in range(MAX_DEVICE_REQUESTS)), ("honest", 0)]
    bench.sender.drained()
    bench.request("greedy", 1000, length=1)
    assert bench.send() == [("greedy", 1000)]


def test_waiting_bytes_of_a_device_are_bounded(blobs: FolderBlobs) -> None:
    bench = Bench(blobs)
    for offset in range(10):
        bench.request("greedy", offset)
    assert len(bench.send()) * WINDOW == MAX_DEVICE_BYTES


def test_downloads_of_a_device_are_bounded(blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per blob and hour; others are served, and after a while the device again."""
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(blob_sender, "time", clock)
    bench, sent = Bench(blobs), 0

    def download(device: str) -> float:
        """Request a blob in windows until one is refused; returns the seconds to wait."""
        nonlocal sent
        for offset in range(0, len(BLOB), WINDOW):
            if wait_s := bench.request(device, offset):
                return wait_s
            bench.sender.drained()
            sent += len(bench.send())
        return 0.0

    waits = [download("greedy") for _ in range(100)]
    assert [bool(wait_s) for wait_s in waits] == [False] * HOURLY + [True] * (100 - HOURLY)
    assert sent == HOURLY * math.ceil(len(BLOB) / WINDOW)
    assert download("honest") == 0.0
    clock.monotonic = lambda: max(waits) + 1.0
    bench.sender.drained()
    assert (bench.request("greedy"), len(bench.send())) == (0.0, 1)


def test_request_of_a_small_blob_can_be_repeated(blobs: FolderBlobs) -> None:
    """For a connection that is lost before the frames arrive, more often than a large one."""
    bench = Bench(blobs)
    small = BlobRequest(digest=blobs.put(b"small"), offset=0, length=WINDOW)
    for _ in range(1000):
        assert bench.sender.request("a", small) == 0.0
        bench.sender.drained()
        bench.send()


def test_frames_are_clipped_to_the_blob(tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(bytes(range(100)))

    def frames(offset: int, length: int) -> list[tuple[int, int, int]]:
        request = BlobRequest(digest=bytes(32), offset=offset, length=length)
        found = read_frames(blob, request, chunk_bytes=7)
        return [(frame.offset, len(frame.data), frame.size_bytes) for frame in found]

    assert frames(90, 50) == [(90, 7, 100), (97, 3, 100)]
    assert frames(100, 50) == []


def test_bytes_that_are_waiting_are_not_queued_again(blobs: FolderBlobs) -> None:
    """A device that waits long asks for the last bytes of what it has requested; each device gets every byte once."""
    bench = Bench(blobs)
    bench.request("a", 0, 1000)
    bench.request("a", 900, 100)
    bench.request("b", 900, 100)
    bench.request("a", 900, 200)
    assert bench.send() == [("a", 0), ("b", 900), ("a", 900)]
