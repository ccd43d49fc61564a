"""What devices ask for goes out in turn, each request once, and a bounded amount at a time."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from aggregator.messaging.blob_sender import BURST_BYTES, MAX_OF_ONE, Downlink, read_frames
from protocol.wire.messages import MAX_CHUNK_BYTES, BlobRequest

WINDOW = 16 * MAX_CHUNK_BYTES


def _request(offset: int = 0, length: int = WINDOW) -> BlobRequest:
    return BlobRequest(digest=bytes(32), offset=offset, length=length)


def _send(downlink: Downlink) -> list[tuple[str, int]]:
    """What goes out at once, by the number of its block."""
    burst = downlink.burst()
    if burst:
        downlink.sent()
    return [(device, request.offset // WINDOW) for device, request in burst]


def test_nothing_more_goes_out_before_the_broker_has_taken_it() -> None:
    """However many ask, a burst is little more than its bound, and the next waits for the broker."""
    downlink = Downlink()
    for number in range(1000):
        downlink.ask(f"device-{number}", _request())
    first = downlink.burst()
    downlink.sent()
    assert BURST_BYTES <= sum(request.length for _, request in first) < BURST_BYTES + WINDOW
    assert downlink.burst() == []
    downlink.drained()
    assert downlink.burst()[0][0] == f"device-{len(first)}"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=30), st.data())
def test_every_request_goes_out_once(asked: list[tuple[str, int]], data: st.DataObject) -> None:
    """In the order in which they came, with those that are asked again while they wait sent once."""
    downlink, sent = Downlink(), []
    for device, block in asked:
        downlink.ask(device, _request(block * WINDOW))
        if data.draw(st.booleans()):
            sent += _send(downlink)
        if data.draw(st.booleans()):
            downlink.drained()
    for _ in asked:
        downlink.drained()
        sent += _send(downlink)
    assert set(sent) == set(asked)
    assert len(sent) <= len(asked)


def test_a_lost_connection_forgets_all_of_it() -> None:
    """Devices ask again over the new one."""
    downlink = Downlink()
    downlink.ask("a", _request())
    _send(downlink)
    downlink.ask("b", _request())
    downlink.forget()
    assert downlink.burst() == []
    downlink.ask("a", _request())
    assert [device for device, _ in downlink.burst()] == ["a"]


def test_a_request_for_nothing_holds_up_nobody() -> None:
    """Past a blob's end there is nothing to send, and nothing to wait for."""
    downlink = Downlink()
    downlink.ask("a", _request())
    assert len(downlink.burst()) == 1
    downlink.ask("b", _request())
    assert len(downlink.burst()) == 1


def test_frames_are_clipped_to_the_blob(tmp_path: Path) -> None:
    """Bytes past the end are not there, and a request past it gets nothing."""
    blob = tmp_path / "blob"
    blob.write_bytes(bytes(range(100)))
    frames = list(read_frames(blob, _request(90, 50), chunk_bytes=7))
    assert [(frame.offset, len(frame.data), frame.size_bytes) for frame in frames] == [
        (90, 7, 100),
        (97, 3, 100),
    ]
    assert list(read_frames(blob, _request(100), chunk_bytes=7)) == []


def test_nobody_waits_for_all_that_one_asks_for() -> None:
    """Of a device that asks without end only a bounded number waits, and it can ask again once that is sent."""
    downlink = Downlink()
    for block in range(10_000):
        downlink.ask("greedy", _request(block * WINDOW))
    downlink.ask("honest", _request())
    sent: list[tuple[str, int]] = []
    while burst := _send(downlink):
        sent += burst
        downlink.drained()
    assert sent == [*(("greedy", block) for block in range(MAX_OF_ONE)), ("honest", 0)]
    downlink.ask("greedy", _request(MAX_OF_ONE * WINDOW))
    assert _send(downlink) == [("greedy", MAX_OF_ONE)]
