"""An elapsed clock that a test moves."""

from protocol.storage.elapsed_clock import ElapsedClock


class FakeClock(ElapsedClock):
    """Stands still at `elapsed_s`; unix time begins with it."""

    def __init__(self, elapsed_s: float = 0.0) -> None:
        self.elapsed_s = elapsed_s

    def now_s(self) -> float:
        return self.elapsed_s

    def keep(self) -> None:
        return

    def unix_s(self, elapsed_s: float) -> float:
        return elapsed_s
