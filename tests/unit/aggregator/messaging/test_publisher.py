"""Messages over real brokers and the embedded one, blobs within bounds, and signed, numbered manifests."""

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
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
from aggregator.messaging.embedded_broker import EmbeddedBroker
from aggregator.messaging.manifest_signer import REFRESH_S, VALIDITY_S, ManifestSigner, identity_of
from aggregator.messaging.publisher import MAX_BACKLOG, Publisher
from aggregator.security.identity import locked_identity
from aggregator.storage.blobs import FolderBlobs
from aggregator.storage.open_store import open_store
from edge_client.core.manifest_trust import ManifestTrust, verify
from protocol.errors import ConfigError, ThreadFailed
from protocol.mqtt.own_presence import OwnPresence
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Received
from protocol.storage.keyfile import read_or_make_key
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_CHUNK_BYTES, MAX_FRAME_BYTES, BlobRequest, Frame, Signed
from protocol.wire.signing import open_manifest, public_key
from protocol.wire.topics import FleetChannel, device_filters, fleet_topic
from tests.support.messages.manifests import signed_manifest
from tests.support.network.sessions import EventLog, running


def _publisher(broker: BrokerAddress, on_event: Callable[[Any], None]) -> Publisher:
    presence = OwnPresence(epoch=1, topic=fleet_topic("f", "state"), key=b"k" * 32)
    return Publisher(
        broker, fleet="f", presence=presence, subscriptions=device_filters("f"), on_event=on_event
    )


def test_broadcast_frames_have_the_set_size(broker: BrokerAddress) -> None:
    payload = bytes(range(250))
    ear = EventLog()
    publisher = _publisher(broker, ear.put)
    with running(broker, "device", fleet_topic("f", "cast")) as (_, hears):
        hears.wait(Connected)
        publisher.start()
        try:
            ear.wait(Connected)
            publisher.chunk_bytes = 100
            publisher.broadcast(payload)
            frames = [
                decode(hears.wait(Received).payload, Frame, max_bytes=MAX_FRAME_BYTES) for _ in range(3)
            ]
        finally:
            publisher.stop()
    assert [(frame.offset, len(frame.data)) for frame in frames] == [(0, 100), (100, 100), (200, 50)]
    assert b"".join(frame.data for frame in frames) == payload


def test_messages_stay_unacknowledged_while_the_broker_takes_no_answers() -> None:
    """The broker then sends no more of them, so that the answers do not fill the memory; until all have left."""
    acknowledged: list[Received] = []
    publisher = _publisher(BrokerAddress("nowhere", 1), lambda _: None)
    session: Any = SimpleNamespace(backlog=0, acknowledge=acknowledged.append)
    publisher._session = session
    messages = [Received(f"topic-{number}", b"payload") for number in range(4)]
    for backlog, message, count in (
        (MAX_BACKLOG, messages[0], 1),
        (MAX_BACKLOG + 1, messages[1], 1),
        (1, messages[2], 1),
        (0, messages[3], 4),
    ):
        session.backlog = backlog
        publisher.acknowledge([message])
        assert acknowledged == [replace(each, payload=b"") for each in messages[:count]]


TIMEOUT_S = 60.0


def test_unexpected_end_is_reported(address: BrokerAddress) -> None:
    """The aggregator would otherwise try for ever to connect to it."""
    failures: queue.SimpleQueue[ThreadFailed] = queue.SimpleQueue()
    broker = EmbeddedBroker(address, on_failure=failures.put)
    broker.start()
    broker._loop.call_soon_threadsafe(broker._loop.stop)
    assert "the thread embedded-broker has ended unexpectedly" in str(failures.get(timeout=TIMEOUT_S))


def test_stop_and_address_in_use_are_no_unexpected_end(address: BrokerAddress) -> None:
    failures: list[ThreadFailed] = []
    broker = EmbeddedBroker(address, on_failure=failures.append)
    broker.start()
    with pytest.raises(ConfigError, match="cannot listen on"):
        EmbeddedBroker(address, on_failure=failures.append).start()
    broker.stop()
    assert failures == []


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
            blobs, cast("Any", self.recorder), downloads_per_hour=HOURLY, is_verified=lambda _: True
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
    bench, verified = Bench(blobs), set[bytes]()
    bench.sender._is_verified = verified.__contains__
    for device in ("a", "b"):
        bench.request(device)
    assert bench.send() == []
    bench.sender.verified(bench.digest, is_readable=False)
    assert bench.send() == []
    bench.request("a")
    assert bench.send() == []
    later_s = time.monotonic() + RETRY_S
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    for device in ("a", "b"):
        bench.request(device)
    assert bench.send() == []
    verified.add(bench.digest)
    bench.sender.verified(bench.digest, is_readable=True)
    assert bench.send() == [("a", 0), ("b", 0)]


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


KEY = b"k" * 32


def manifest(signer: ManifestSigner, body: bytes, *, channel: FleetChannel = "head") -> Signed:
    payload = signer.sign(channel, body)
    signer.keep()
    return open_manifest(payload, fleet="barn", channel=channel)


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, *, at_s: float) -> ManifestSigner:
    monkeypatch.setattr(time, "time", lambda: at_s)
    return ManifestSigner(open_store(folder), key=KEY, fleet="barn")


def test_new_manifest_has_a_greater_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged one is repeated byte by byte; each channel has its own numbers."""
    signer = start(tmp_path, monkeypatch, at_s=1000.0)
    first, second = manifest(signer, b"one"), manifest(signer, b"two")
    assert (first.release, second.release) == (1000, 1001)
    assert (first.key, second.body) == (public_key(KEY), b"two")
    assert signer.sign("head", b"two") == signer.sign("head", b"two")
    assert manifest(signer, b"two") == second
    assert manifest(signer, b"one").release == 1002
    assert manifest(signer, b"one", channel="task").release == 1000


@pytest.mark.parametrize("at_s", [500.0, 1000.0, 5000.0])
def test_every_start_signs_with_a_greater_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_s: float
) -> None:
    """This holds if nothing has changed, and if the clock was set back."""
    manifest(start(tmp_path, monkeypatch, at_s=1000.0), b"one")
    after = manifest(start(tmp_path, monkeypatch, at_s=at_s), b"one")
    assert after.release == max(1001, int(at_s))


def test_a_manifest_is_signed_again_long_before_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every day, for a month each time; at once if the clock was ahead when it was signed."""
    signer = start(tmp_path, monkeypatch, at_s=10_000.0)
    first = manifest(signer, b"one")
    assert (first.issued_s, first.expires_s) == (10_000, 10_000 + VALIDITY_S)
    monkeypatch.setattr(time, "time", lambda: 10_000 + REFRESH_S - 1)
    assert signer.due() == []
    assert manifest(signer, b"one") == first
    monkeypatch.setattr(time, "time", lambda: 10_000 + REFRESH_S)
    assert signer.due() == ["head"]
    assert manifest(signer, b"one").issued_s == 10_000 + REFRESH_S
    assert signer.due() == []
    monkeypatch.setattr(time, "time", lambda: 500)
    assert signer.due() == ["head"]
    again = manifest(signer, b"one")
    assert again.issued_s == 500
    assert again.release > 10_000 + REFRESH_S


def test_manifests_after_a_clock_that_was_ahead_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restored state that finds its own newer manifest on the broker continues after its number."""
    before = start(tmp_path / "state", monkeypatch, at_s=1e10)
    payload = before.sign("head", b"one")
    device = verify(ManifestTrust(), "head", open_manifest(payload, fleet="barn", channel="head"))
    restored = start(tmp_path / "backup", monkeypatch, at_s=2000.0)
    manifest(restored, b"one")
    assert restored.has_signed("head", payload)
    again = manifest(restored, b"one")
    assert verify(device, "head", again).seen["head"][0] == int(1e10) + 1
    assert restored.has_signed("head", restored.sign("head", b"one"))
    assert manifest(restored, b"one") == again
    assert not restored.has_signed(
        "head", signed_manifest(b"x", key=b"o" * 32, fleet="barn", channel="head", release=2**40)
    )
    assert manifest(restored, b"two").release == int(1e10) + 2


def test_concurrent_starts_create_one_key(tmp_path: Path) -> None:
    """A first start waits for the first enrollment, which gives the device the same key."""
    made: list[bytes] = []
    with locked_identity(tmp_path):
        start = threading.Thread(target=lambda: made.append(identity_of(tmp_path)))
        start.start()
        start.join(0.3)
        own = read_or_make_key(tmp_path / "identity" / "signing.key")
    start.join()
    assert made == [own]


def test_changed_key_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The line names the key that devices trust; the first start logs none."""
    ManifestSigner(open_store(tmp_path), key=KEY, fleet="barn")
    ManifestSigner(open_store(tmp_path), key=KEY, fleet="barn")
    assert not caplog.messages
    ManifestSigner(open_store(tmp_path), key=b"l" * 32, fleet="barn")
    (line,) = caplog.messages
    assert "is not the key that devices trust: restore it from a backup" in line
    assert f"trusted={public_key(KEY).hex()}" in line
