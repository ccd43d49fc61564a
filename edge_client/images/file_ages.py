"""Ages of files: how long each has not changed, so that a file which is still being copied is no image yet."""

import os
import time
from collections.abc import Callable, Iterable

import msgspec

from edge_client.images.images import LabeledImage

_decoder = msgspec.msgpack.Decoder(dict[bytes, tuple[float, int]])

SETTLE_S = 2.0
"""Seconds for which a complete file has not changed. Windows and SMB set a file's size first, then write its blocks,
then set its old time; a third of half-copied JPEG files decode without an error."""


class FileAges:
    """How long files have not changed, from scan to scan.

    Clocks of network storage differ from this machine's, and copies keep old times. Therefore a file's age counts from
    the first scan that finds it as it is. Only the first of all scans compares times with the clock, so that old files
    need no second one: a file's time of modification, and that of its last change of any kind (ctime), which no program
    can set back.

    Args:
        clock: monotonic, seconds.
        wall_clock: Unix time, seconds.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._since: bytes | None = None
        """When each file was found as it is, and its inode: encoded, for a service keeps it from scan to scan."""

    @property
    def is_new(self) -> bool:
        """Return whether the next scan is the first one."""
        return self._since is None

    def forget(self) -> None:
        """Begin anew: other folders are scanned."""
        self._since = None

    def update(self, images: Iterable[LabeledImage]) -> list[float]:
        """Return the ages of all files that a scan has found, seconds."""
        before = None if self._since is None else _decoder.decode(self._since)
        since: dict[bytes, tuple[float, int]] = {}
        now_s, wall_s = self._clock(), self._wall_clock()
        ages = []
        for image in images:
            identity = os.fsencode(image.identity)
            if before is None:
                since_s = now_s - _age_s(image, wall_s)
            else:
                since_s, inode = before.get(identity, (now_s, image.inode))
                # Some file systems renumber old files.
                if inode != image.inode and now_s - since_s < SETTLE_S:
                    since_s = now_s
            since[identity] = since_s, image.inode
            ages.append(now_s - since_s)
        self._since = msgspec.msgpack.encode(since)
        return ages


def _age_s(image: LabeledImage, wall_s: float) -> float:
    """Return an age by the clock; 0 if the file changed in the future, of which its own time is no sign."""
    return max(0.0, min(wall_s - image.ctime_ns / 1e9, abs(wall_s - image.mtime_ns / 1e9)))
