"""Token buckets: bounds over any sequence of takings, and over the number of keys."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator import rates as token_buckets
from aggregator.rates import LINES_AT_ONCE, DeviceEvents, TokenBuckets

log = logging.getLogger(__name__)

_takings = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 6)), max_size=60)


@given(_takings)
def test_tokens_taken_in_any_span_are_bounded(takings: list[tuple[float, float]]) -> None:
    """The bound is the capacity and what was refilled; a request that is refused takes none."""
    buckets, now_s = TokenBuckets[str](capacity=5, per_s=0.5), 0.0
    taken: list[tuple[float, float]] = []
    for pause_s, tokens in takings:
        now_s += pause_s
        wait_s = buckets.wait_s("a", tokens, now_s=now_s)
        if buckets.take("a", tokens, now_s=now_s):
            taken.append((now_s, tokens))
            assert wait_s == 0
        else:
            assert wait_s > 0
    for index, (since_s, _) in enumerate(taken):
        for end, (until_s, _) in enumerate(taken[index:], start=index + 1):
            assert sum(tokens for _, tokens in taken[index:end]) <= 5 + 0.5 * (until_s - since_s) + 1e-6


def test_buckets_are_independent_and_refill() -> None:
    buckets = TokenBuckets[str](capacity=2, per_s=0.1)
    assert [buckets.take("a", now_s=0.0) for _ in range(3)] == [True, True, False]
    assert buckets.take("b", now_s=0.0)
    assert buckets.wait_s("a", now_s=4.0) == pytest.approx(6.0)
    assert [buckets.take("a", now_s=now_s) for now_s in (9.0, 10.0, 11.0)] == [False, True, False]
    assert not buckets.take("c", 3, now_s=0.0)


def test_number_of_buckets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one used least recently is dropped, and full again."""
    monkeypatch.setattr(token_buckets, "MAX_KEYS", 3)
    buckets = TokenBuckets[int](capacity=1, per_s=1.0)
    assert all(buckets.take(key, now_s=0.0) for key in range(4))
    assert buckets.left(0) is None
    assert not any(buckets.take(key, now_s=0.0) for key in (1, 2, 3))


def test_lines_of_a_device_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    """Per message; other devices' and other messages are logged, and the next line has the number omitted."""
    now_s = 0.0
    caplog.set_level(logging.INFO, logger=log.name)
    events = DeviceEvents(log, clock=lambda: now_s)
    for number in range(100_000):
        events.event(logging.WARNING, "device cannot take part", device="mallory", reason=number)
    assert len(caplog.messages) == LINES_AT_ONCE
    events.event(logging.INFO, "head in use", device="mallory")
    events.event(logging.WARNING, "device cannot take part", device="honest", reason="x")
    events.event(logging.DEBUG, "device cannot take part", device="honest", frame=b"")
    assert caplog.messages[-2:] == [
        "head in use device=mallory",
        "device cannot take part device=honest reason=x",
    ]
    now_s = 60.0
    events.event(logging.WARNING, "device cannot take part", device="mallory", reason="y")
    assert caplog.messages[-1] == "device cannot take part device=mallory reason=y omitted_before=99900"
