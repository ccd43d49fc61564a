"""The size of frames on a slow or unstable link, where whole frames must arrive before the connection ends.

Only whole frames count. If the connection is lost before frames arrive, they are halved, and grow again as they arrive.
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

    @property
    def is_reduced(self) -> bool:
        """True if the link has lost larger frames."""
        return self.limit_bytes < MAX_CHUNK_BYTES

    def failed(self) -> "FrameSize":
        """Return the size after frames did not arrive in time."""
        if self.failures + 1 < FAILURES_TO_HALVE:
            return replace(self, failures=self.failures + 1, windows=0)
        return FrameSize(max(MIN_BYTES, self.limit_bytes // 2))

    def arrived(self) -> "FrameSize":
        """Return the size after a window has arrived."""
        if self.windows + 1 < WINDOWS_TO_DOUBLE:
            return replace(self, failures=0, windows=self.windows + 1)
        return FrameSize(min(MAX_CHUNK_BYTES, 2 * self.limit_bytes))
