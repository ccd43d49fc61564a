"""Reconnect delays: bounded, jittered, and reset only by a useful connection."""

import random

from hypothesis import given
from hypothesis import strategies as st

from protocol.mqtt.reconnect_delay import MAX_RETRY_DELAY_S, Backoff, retry_delay_s


@given(failures=st.integers(0, 10**9), seed=st.integers())
def test_delays_are_bounded_and_jittered(failures: int, seed: int) -> None:
    rng = random.Random(seed)
    delays = {retry_delay_s(failures, rng.uniform) for _ in range(5)}
    assert all(0.2 <= delay <= MAX_RETRY_DELAY_S for delay in delays)
    assert len(delays) > 1


def test_maximum_delay_doubles_up_to_a_minute() -> None:
    longest = [retry_delay_s(failures, lambda _, high: high) for failures in range(1, 9)]
    assert longest == [2, 4, 8, 16, 32, 60, 60, 60]


def _longest(_: float, high: float) -> float:
    return high


def test_only_a_useful_connection_resets_the_count() -> None:
    backoff = Backoff(1, _longest)
    assert backoff.pause_s(connected_s=0.1, messages=0) == 2
    assert backoff.pause_s(connected_s=0, messages=0) == 4
    assert backoff.pause_s(connected_s=3.9, messages=8) == 8
    assert backoff.pause_s(connected_s=8.1, messages=0) == 2
    assert backoff.pause_s(connected_s=0, messages=0) == 4
    assert backoff.pause_s(connected_s=0.1, messages=50) == 2


def test_next_address_is_tried_at_once_unless_a_connection_has_ended() -> None:
    """A pause follows a whole round of addresses that cannot be reached, and the end of each connection."""
    backoff = Backoff(3, _longest)
    pauses = [backoff.pause_s(connected_s=0, messages=0) for _ in range(9)]
    assert pauses == [0, 0, 2, 0, 0, 4, 0, 0, 8]
    pauses = [backoff.pause_s(connected_s=seconds, messages=0) for seconds in (100, 0, 0, 0)]
    assert pauses == [2, 0, 0, 4]


@given(connected_s=st.floats(0.001, 59), messages=st.integers(0, 10**6), addresses=st.integers(1, 5))
def test_brokers_that_end_each_connection_are_not_tried_without_a_pause(
    *, connected_s: float, messages: int, addresses: int
) -> None:
    backoff = Backoff(addresses, _longest)
    assert all(backoff.pause_s(connected_s=connected_s, messages=messages) for _ in range(3 * addresses))
