"""The state of a place changes once enough of its newest images agree for long enough."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.predict.majority import Majority


def _changes(answers: str, *, frames: int = 3, agree: float = 0.6, debounce_s: float = 0.0) -> str:
    """Return the states in their order, of one answer a second; "." for an image without a change."""
    state = Majority(frames=frames, agree=agree, debounce_s=debounce_s)
    return "".join(
        answer if state.changes(answer, now_s=float(second)) else "." for second, answer in enumerate(answers)
    )


@pytest.mark.parametrize(
    ("answers", "options", "changes"),
    [
        ("aaaa", {}, ".a.."),
        ("abababab", {}, "..ababab"),
        ("abababab", {"debounce_s": 2.0}, "........"),
        ("aabaabaa", {}, ".a......"),
        ("aabbbaaa", {}, ".a.b..a."),
        ("abcabcab", {}, "........"),
        ("aaab", {"frames": 1, "agree": 1.0}, "a..b"),
        ("aaaaabbbaa", {"frames": 5, "agree": 1.0}, "....a....."),
        ("aaaabbaabbbbb", {"debounce_s": 2.0}, "...a.......b."),
    ],
)
def test_states_follow_the_majority(answers: str, options: dict[str, float], changes: str) -> None:
    """The default is two of three images; an answer in between changes nothing."""
    assert _changes(answers, **options) == changes  # type: ignore[arg-type]


@given(st.text("ab", max_size=40), st.integers(1, 6), st.floats(0.51, 1))
def test_each_change_has_its_majority_and_is_to_another_state(
    answers: str, frames: int, agree: float
) -> None:
    found = _changes(answers, frames=frames, agree=agree)
    states = [(place, each) for place, each in enumerate(found) if each != "."]
    for place, each in states:
        assert Counter(answers[max(0, place + 1 - frames) : place + 1])[each] >= agree * frames
    assert all(before != after for (_, before), (_, after) in pairwise(states))
