"""Reconnect delays: bounded, jittered, and reset only by a useful connection."""

import random

from hypothesis import given
from hypothesis import strategies as st

from protocol.mqtt.reconnect_delay import MAX_RETRY_DELAY_S, failures_after, retry_delay_s


@given(failures=st.integers(0, 10**9), seed=st.integers())
def test_delays_are_bounded_and_jittered(failures: int, seed: int) -> None:
    rng = random.Random(seed)
    delays = {retry_delay_s(failures, rng.uniform) for _ in range(5)}
    assert all(0.2 <= delay <= MAX_RETRY_DELAY_S for delay in delays)
    assert len(delays) > 1


def test_maximum_delay_doubles_up_to_a_minute() -> None:
    longest = [retry_delay_s(failures, lambda _, high: high) for failures in range(1, 9)]
    assert longest == [2, 4, 8, 16, 32, 60, 60, 60]


def test_only_a_useful_connection_resets_the_count() -> None:
    assert failures_after(0, connected_s=0.1, delay_s=0, messages=0) == 1
    assert failures_after(4, connected_s=0, delay_s=7, messages=0) == 5
    assert failures_after(4, connected_s=6.9, delay_s=7, messages=8) == 5
    assert failures_after(4, connected_s=7.1, delay_s=7, messages=0) == 1
    assert failures_after(4, connected_s=0.1, delay_s=7, messages=50) == 1
