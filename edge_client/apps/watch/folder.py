"""New images in a folder: found once they are written completely."""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from edge_client.images import file_ages
from edge_client.images.file_ages import FileAges
from edge_client.images.images import LabeledImage, images_below, log_skipped
from protocol.log import event
from protocol.retry_delay import retry_delay_s

log = logging.getLogger(__name__)

GIVE_UP_S = 10.0
"""Seconds after which an image that cannot be read, and does not change, is not half-written but broken. One that
changes all the time is read as it is."""

REPLACED_SETTLE_S, REPLACED_GIVE_UP_S = 0.5, 2.0
"""Instead of `SETTLE_S` and `GIVE_UP_S`, for an image that was read before: a camera replaces it (`latest.jpg`)."""


@dataclass
class _Waiting:
    """An image that is to be read."""

    image: LabeledImage
    since_s: float
    """When it was new, or changed after it was read."""
    age_s: float = 0.0
    has_failed: bool = False
    """It could not be read as it is."""
    tries: int = 0
    """Failures of the backbone or the head."""
    retry_s: float = 0.0


class FolderWatch:
    """The images in a folder and below that are new or have changed.

    It looks at the files' sizes and times, which works on every file system. While the folder cannot be read, for
    instance because its disk is not mounted, it waits.

    Args:
        folder: searched as those of classes are: hidden files and files without a known suffix are ignored.
        existing: the images that are there already count as new.
        clock: monotonic, seconds.
    """

    def __init__(self, folder: Path, *, existing: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self.scan_s = 0.0
        """Seconds that the last search took."""
        self._is_readable = True
        self._ages = FileAges(clock=clock)
        self._waiting: dict[str, _Waiting] = {}
        self._read: dict[str, str] = {}
        """The identities of the images that were read, by path."""
        self._logged: set[str] = set()
        self._scan()
        if not existing:
            self._read = {path: waiting.image.identity for path, waiting in self._waiting.items()}
            self._waiting = {}

    def poll(self) -> list[Path]:
        """Return the images that are ready, in the order of their times; call `done` or `retry` for each of them."""
        self._scan()
        ready = [waiting.image for path, waiting in self._waiting.items() if self._is_ready(path, waiting)]
        return [image.path for image in sorted(ready, key=lambda image: image.mtime_ns)]

    def done(self, path: Path, *, failed: bool = False) -> bool:
        """Note that an image was read; returns False if it failed and is given more time."""
        waiting = self._waiting[str(path)]
        if failed and not waiting.has_failed and waiting.age_s < GIVE_UP_S:
            waiting.has_failed, waiting.since_s = True, self._clock()
            return False
        self._read[str(path)] = waiting.image.identity
        del self._waiting[str(path)]
        return True

    def retry(self, paths: Collection[Path]) -> float:
        """Note that images could not be classified, through no fault of theirs; returns the seconds to the next try."""
        delay_s = 0.0
        for path in paths:
            waiting = self._waiting[str(path)]
            delay_s = retry_delay_s(waiting.tries)
            waiting.tries, waiting.retry_s = waiting.tries + 1, self._clock() + delay_s
        return delay_s

    def _is_ready(self, path: str, waiting: _Waiting) -> bool:
        now_s, was_read = self._clock(), path in self._read
        settle_s, give_up_s = (
            (REPLACED_SETTLE_S, REPLACED_GIVE_UP_S) if was_read else (file_ages.SETTLE_S, GIVE_UP_S)
        )
        if now_s < waiting.retry_s:
            return False
        if waiting.age_s >= settle_s:
            return not waiting.has_failed or waiting.age_s >= GIVE_UP_S
        return now_s - waiting.since_s >= give_up_s

    def _scan(self) -> None:
        skipped, begin_s = Counter[str](), self._clock()
        try:
            found = list(images_below(self._folder, skipped))
        except OSError as error:
            if self._is_readable:
                event(
                    log, logging.WARNING, "folder not readable, waiting for it", folder=self._folder,
                    reason=os.strerror(error.errno or 0),
                )  # fmt: skip
            self._is_readable = False
            return
        self._is_readable = True
        log_skipped(skipped, self._logged, self._folder)
        before, read, now_s = self._waiting, self._read, self._clock()
        self._waiting, self._read = {}, {}
        for image, age_s in zip(found, self._ages.update(found), strict=True):
            path, identity = image.relative, image.identity
            if path in read:
                self._read[path] = read[path]
                if read[path] == identity:
                    continue
            waiting = before.get(path) or _Waiting(image, now_s)
            if waiting.image != image:
                waiting.image, waiting.has_failed = image, False
            waiting.age_s = age_s
            self._waiting[path] = waiting
        self.scan_s = self._clock() - begin_s
