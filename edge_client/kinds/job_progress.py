"""The progress of a job, which the service shows."""

import time
from collections.abc import Callable

from edge_client.store.job_folder import EXTRACTING, Doing

INTERVAL_S = 0.2
"""Between two messages, but for the last one."""


class JobProgress:
    """Sends how much of something is done."""

    def __init__(
        self, label: str, send: Callable[[Doing], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._label, self._send, self._clock = label, send, clock
        self._sent_s = -INTERVAL_S

    def update(self, done: int, total: int, *, per_s: float = 0.0) -> None:
        """Show `done` of `total`, and the speed if it is known."""
        now_s = self._clock()
        if done >= total or now_s >= self._sent_s + INTERVAL_S:
            self._sent_s = now_s
            self._send(Doing(self._label, done, total, per_s))

    def close(self) -> None:
        """Show nothing any more."""
        self._send(Doing(self._label))


class ExtractionCounter:
    """Counts images whose features are there, for each backbone, and measures the speed."""

    def __init__(
        self,
        send: Callable[[Doing], None],
        *,
        images: int,
        backbones: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = JobProgress(EXTRACTING, send, clock=clock)
        self._images, self._backbones = images, backbones
        self._clock, self._started_s = clock, clock()
        self._done = self._computed = 0

    def advance(self, cached: int, computed: int) -> None:
        """Count images for one of the backbones: in the cache before, which took no time, or computed."""
        self._done += cached + computed
        self._computed += computed
        elapsed_s = self._clock() - self._started_s
        speed = self._computed / elapsed_s / self._backbones if elapsed_s > 0 else 0.0
        self._progress.update(self._done // self._backbones, self._images, per_s=speed)

    def close(self) -> None:
        """End the progress."""
        self._progress.close()
