"""Canaries are the same devices on both sides, others for every head, and about as many as asked for."""

from hypothesis import given
from hypothesis import strategies as st

from protocol.wire.canary import RANKS, canary_rank


@given(device=st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True), version=st.integers(1, 2**63 - 1))
def test_a_rank_is_one_of_them(device: str, version: int) -> None:
    """It is the same each time, and below the number of ranks."""
    assert 0 <= canary_rank(device, version) == canary_rank(device, version) < RANKS


def test_a_rank_as_written_down() -> None:
    """The first four bytes of the sha256 of `3/door-cam`, as other programs compute it."""
    assert canary_rank("door-cam", 3) == 0xD1A40130


def test_a_tenth_of_the_ranks_is_a_tenth_of_the_devices() -> None:
    """Of 10,000 devices, about 1,000; and not the same for the next head."""
    first, second = ({n for n in range(10_000) if canary_rank(f"d{n}", v) < RANKS // 10} for v in (1, 2))
    assert 900 < len(first) < 1100
    assert len(first & second) < 200
