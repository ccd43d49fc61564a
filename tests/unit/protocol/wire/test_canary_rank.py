"""Canary ranks are stable, uniform, and different for every head."""

from hypothesis import given
from hypothesis import strategies as st

from protocol.wire.canary_rank import canary_rank

RANKS = 2**32


@given(device=st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True), version=st.integers(1, 2**63 - 1))
def test_rank_is_stable_and_in_range(device: str, version: int) -> None:
    assert 0 <= canary_rank(device, version) == canary_rank(device, version) < RANKS


def test_rank_as_documented() -> None:
    assert canary_rank("door-cam", 3) == 0xD1A40130


def test_ranks_are_uniform_and_differ_by_version() -> None:
    first, second = ({n for n in range(10_000) if canary_rank(f"d{n}", v) < RANKS // 10} for v in (1, 2))
    assert 900 < len(first) < 1100
    assert len(first & second) < 200
