"""Transfers from many devices at once: bounded, answered when asked, and each for itself."""

import contextlib
from collections import Counter

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.intake import Refused
from aggregator.uplink import MAX_RANGES, Complete, Uplink
from protocol.codec import decode, digest_of, encode
from protocol.messages import MAX_CHUNK_BYTES, Frame, Receipt
from protocol.transfer import frames_of

PAYLOAD = bytes(range(100))
DIGEST = digest_of(PAYLOAD)
FRAMES = list(frames_of(PAYLOAD, digest=DIGEST, chunk_bytes=30))
"""Four: 0, 30, 60 and 90."""


def _new(_device: str, _digest: bytes) -> bool:
    return False


def _known(_device: str, _digest: bytes) -> bool:
    return True


def _uplink(**options: int) -> Uplink:
    return Uplink(**{"max_bytes": 1000, **options})


@given(st.permutations(FRAMES), st.data())
def test_any_order_completes_a_transfer(frames: list[Frame], data: st.DataObject) -> None:
    """Whichever frame closes the last gap brings the payload; the last bytes before are answered with the gaps."""
    uplink = _uplink()
    arrived: list[Frame] = []
    for frame in frames:
        outcome = uplink.take("a", frame, holds=_new)
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
            uplink.take("a", data.draw(st.sampled_from(arrived)), holds=_new)


def test_what_was_taken_before_gets_its_receipt_again() -> None:
    """A device that lost a receipt asks with the last bytes, and nothing is kept of it."""
    uplink = _uplink()
    assert [uplink.take("a", frame, holds=_known) for frame in FRAMES] == [
        None,
        None,
        None,
        Receipt(digest=DIGEST, status="received"),
    ]
    assert uplink._assemblies == {}


def test_devices_do_not_mix() -> None:
    """The same payload from two devices is two transfers."""
    uplink = _uplink()
    for frame in FRAMES[:3]:
        uplink.take("a", frame, holds=_new)
    outcome = uplink.take("b", FRAMES[3], holds=_new)
    assert isinstance(outcome, Receipt)
    assert outcome.missing == ((0, 90),)
    assert uplink.take("a", FRAMES[3], holds=_new) == Complete(DIGEST, PAYLOAD)


def test_an_oversized_transfer_is_refused_at_its_first_frame() -> None:
    """Nothing of it is kept."""
    uplink = _uplink(max_bytes=99)
    with pytest.raises(Refused, match="expected at most 99 bytes, got 100") as caught:
        uplink.take("a", FRAMES[0], holds=_new)
    assert caught.value.reason == "oversized"
    assert uplink._assemblies == {}


@pytest.mark.parametrize(
    "wrong",
    [
        Frame(v=1, digest=DIGEST, size_bytes=101, offset=30, data=b"x"),
        Frame(v=1, digest=DIGEST, size_bytes=100, offset=99, data=b"xy"),
        Frame(v=1, digest=DIGEST, size_bytes=100, offset=50, data=b""),
        Frame(v=1, digest=DIGEST, size_bytes=100, offset=1, data=bytes(99)),
    ],
    ids=["other size", "past the end", "empty", "overlap"],
)
def test_a_contradiction_ends_a_transfer(wrong: Frame) -> None:
    """It is refused by its digest, forgotten, and can begin anew."""
    uplink = _uplink()
    uplink.take("a", FRAMES[0], holds=_new)
    with pytest.raises(Refused) as caught:
        uplink.take("a", wrong, holds=_new)
    assert caught.value.reason == "digest"
    assert uplink._assemblies == {}
    outcomes = [uplink.take("a", frame, holds=_new) for frame in FRAMES]
    assert outcomes[-1] == Complete(DIGEST, PAYLOAD)


def test_other_bytes_than_announced_are_refused() -> None:
    """The whole arrives, but is not what its digest says."""
    uplink = _uplink()
    with pytest.raises(Refused, match="expected sha256") as caught:
        uplink.take("a", Frame(v=1, digest=DIGEST, size_bytes=3, offset=0, data=b"abc"), holds=_new)
    assert caught.value.reason == "digest"
    assert uplink._assemblies == {}


def test_a_device_has_few_transfers_at_a_time() -> None:
    """A third one pushes out the oldest, so that a device cannot fill the memory; others keep theirs."""
    uplink = _uplink(per_device=2)
    uplink.take("b", FRAMES[0], holds=_new)
    for name in (b"one", b"two", b"three"):
        uplink.take("a", Frame(v=1, digest=digest_of(name), size_bytes=100, offset=0, data=b"x"), holds=_new)
    assert list(uplink._assemblies) == [("b", DIGEST), ("a", digest_of(b"two")), ("a", digest_of(b"three"))]


def test_a_receipt_names_the_first_gaps_only() -> None:
    """However many there are, it stays a valid, small message."""
    size_bytes = 1000
    uplink = _uplink()
    for offset in range(0, size_bytes - 2, 2):
        uplink.take(
            "a", Frame(v=1, digest=DIGEST, size_bytes=size_bytes, offset=offset, data=b"x"), holds=_new
        )
    receipt = uplink.take(
        "a", Frame(v=1, digest=DIGEST, size_bytes=size_bytes, offset=size_bytes - 1, data=b"x"), holds=_new
    )
    assert isinstance(receipt, Receipt)
    assert receipt.missing == tuple((offset + 1, offset + 2) for offset in range(0, 2 * MAX_RANGES, 2))
    assert decode(encode(receipt), Receipt, max_bytes=MAX_CHUNK_BYTES) == receipt


def test_an_empty_payload_is_a_transfer_too() -> None:
    """It is complete at once."""
    (frame,) = frames_of(b"", digest=digest_of(b""))
    assert _uplink().take("a", frame, holds=_new) == Complete(digest_of(b""), b"")


_frame = st.builds(
    Frame,
    v=st.just(1),
    digest=st.sampled_from([bytes([n]) * 32 for n in range(4)]),
    size_bytes=st.integers(0, 60),
    offset=st.integers(0, 60),
    data=st.binary(max_size=20),
)


@hypothesis.settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("ab"), _frame), max_size=40))
def test_memory_is_bounded_whatever_comes(frames: list[tuple[str, Frame]]) -> None:
    """No device ever has more unfinished bytes than transfers times the largest transfer."""
    uplink = Uplink(max_bytes=50, per_device=2)
    for device, frame in frames:
        with contextlib.suppress(Refused):
            uplink.take(device, frame, holds=_new)
        assert all(Counter(device for device, _ in uplink._assemblies)[name] <= 2 for name in "ab")
        assembled = uplink._assemblies.values()
        assert all(assembly.held_bytes <= assembly.size_bytes <= 50 for assembly in assembled)


def test_all_transfers_together_are_bounded() -> None:
    """Many devices that never finish push out the oldest, never the one that is coming in."""
    uplink = Uplink(max_bytes=100, max_held_bytes=250)
    for number in range(20):
        for frame in FRAMES[:3]:
            uplink.take(f"device-{number}", frame, holds=_new)
        assert uplink._held_bytes == sum(a.held_bytes for a in uplink._assemblies.values()) <= 250
    assert uplink.take("device-19", FRAMES[3], holds=_new) == Complete(DIGEST, PAYLOAD)
    outcome = uplink.take("device-0", FRAMES[3], holds=_new)
    assert isinstance(outcome, Receipt)
    assert outcome.missing == ((0, 90),)
