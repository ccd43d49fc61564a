"""The state of a place from the answers to its newest images. Pure."""

import math
from collections import Counter, deque


class Majority:
    """The answer that enough of the newest images agree on.

    Args:
        frames: images that are considered, the newest ones.
        agree: the share of `frames` that must have one answer, above 0.5.
        debounce_s: seconds for which they must agree before the state changes.
    """

    def __init__(self, *, frames: int, agree: float, debounce_s: float) -> None:
        self._needed = math.ceil(agree * frames)
        self._debounce_s = debounce_s
        self._newest: deque[str] = deque(maxlen=frames)
        self._agreed: tuple[str, float] | None = None
        self._state: str | None = None

    def changes(self, answer: str, *, now_s: float) -> bool:
        """Add the answer to a further image; return True if it becomes the state, which was another one or none."""
        self._newest.append(answer)
        (best, images), *_ = Counter(self._newest).most_common(1)
        if images < self._needed:
            self._agreed = None
        elif self._agreed is None or self._agreed[0] != best:
            self._agreed = best, now_s
        is_stable = self._agreed is not None and now_s - self._agreed[1] >= self._debounce_s
        if not is_stable or best != answer or best == self._state:
            return False
        self._state = best
        return True
