"""The size of frames on a slow or unstable link, or one that drops large packets without announcing a limit.

Only whole frames count. If frames do not arrive, they are halved, and grow again as they arrive.
"""

from dataclasses import dataclass, replace

from protocol.wire.messages import MAX_CHUNK_BYTES

MIN_BYTES = 4096

FAILURES_TO_HALVE = 2
"""Failures in a row after which frames are halved: one may be a coincidence."""

WINDOWS_TO_DOUBLE = 16
"""Windows in a row after which frames are doubled: the link may be faster again."""


@dataclass(frozen=True)
class FrameSize:
    """The largest payload of a frame in one direction, with the failures or windows in a row."""

    limit_bytes: int = MAX_CHUNK_BYTES
    failures: int = 0
    windows: int = 0
    ceiling_bytes: int = MAX_CHUNK_BYTES
    """Frames do not grow above it: the broker acknowledges larger ones, and drops them."""

    @property
    def is_reduced(self) -> bool:
        """True if the link has lost larger frames."""
        return self.limit_bytes < MAX_CHUNK_BYTES

    def failed(self) -> "FrameSize":
        """Return the size after frames did not arrive in time."""
        if self.failures + 1 < FAILURES_TO_HALVE:
            return replace(self, failures=self.failures + 1, windows=0)
        return replace(self, limit_bytes=max(MIN_BYTES, self.limit_bytes // 2), failures=0, windows=0)

    def dropped(self) -> "FrameSize":
        """Return the size after no frame of a whole transfer arrived twice, although smaller messages do."""
        limit_bytes = max(MIN_BYTES, self.limit_bytes // 2)
        return FrameSize(limit_bytes, ceiling_bytes=limit_bytes)

    def arrived(self) -> "FrameSize":
        """Return the size after a window has arrived."""
        if self.windows + 1 < WINDOWS_TO_DOUBLE:
            return replace(self, failures=0, windows=self.windows + 1)
        limit_bytes = min(self.ceiling_bytes, 2 * self.limit_bytes)
        return replace(self, limit_bytes=limit_bytes, failures=0, windows=0)
