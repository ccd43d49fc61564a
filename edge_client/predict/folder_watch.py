"""New images in a folder: found once they are written completely."""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_client.data.images import LabeledImage, images_below, log_skipped, unlabeled
from protocol.log import event

log = logging.getLogger(__name__)

SETTLE_S = 0.5
"""Seconds for which an image must not have changed: others may be half-written."""

GIVE_UP_S = 10.0
"""Seconds after which an image that cannot be read, and does not change, is not half-written but broken."""


@dataclass
class _Seen:
    """An image as it was found at a time."""

    image: LabeledImage
    since_s: float
    is_done: bool = False
    has_failed: bool = False


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
        self._is_readable = True
        self._seen: dict[Path, _Seen] = {}
        self._skipped: Counter[str] = Counter()
        self._scan()
        for seen in self._seen.values():
            seen.is_done = not existing

    def poll(self) -> list[Path]:
        """Return the images that are ready, in the order of their times; call `done` for each of them."""
        self._scan()
        now_s = self._clock()
        ready = [
            seen
            for seen in self._seen.values()
            if not seen.is_done and now_s - seen.since_s >= (GIVE_UP_S if seen.has_failed else SETTLE_S)
        ]
        return [seen.image.path for seen in sorted(ready, key=lambda seen: seen.image.mtime_ns)]

    def done(self, path: Path, *, failed: bool = False) -> bool:
        """Note that an image was read; returns False if it failed and is given more time."""
        seen = self._seen[path]
        waits = failed and not seen.has_failed and self._clock() - seen.since_s < GIVE_UP_S
        seen.has_failed, seen.is_done = failed, not waits
        return not waits

    def _scan(self) -> None:
        skipped: Counter[str] = Counter()
        try:
            found = [unlabeled(Path(path)) for path in images_below(self._folder, skipped)]
        except OSError as error:
            if self._is_readable:
                event(
                    log, logging.WARNING, "folder not readable, waiting for it", folder=self._folder,
                    reason=os.strerror(error.errno or 0),
                )  # fmt: skip
            self._is_readable = False
            return
        self._is_readable = True
        log_skipped(skipped, self._skipped, self._folder)
        self._skipped = skipped
        before, now_s = self._seen, self._clock()
        self._seen = {}
        for image in found:
            known = before.get(image.path)
            is_same = known is not None and known.image == image
            self._seen[image.path] = known if is_same and known else _Seen(image, now_s)
