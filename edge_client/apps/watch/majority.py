"""The state of a place from the answers to its newest images. Pure."""

from collections import Counter, deque


class Majority:
    """The answer that enough of the newest images agree on.

    Args:
        needed: images that must have one answer, more than half of `images`.
        images: images that are considered, the newest ones.
    """

    def __init__(self, needed: int, images: int) -> None:
        self._needed = needed
        self._newest: deque[str] = deque(maxlen=images)
        self._state: str | None = None

    def changes(self, answer: str) -> bool:
        """Add the answer to a further image; return True if it becomes the state, which was another one or none."""
        self._newest.append(answer)
        if answer == self._state or Counter(self._newest)[answer] < self._needed:
            return False
        self._state = answer
        return True
