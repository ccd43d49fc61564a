"""Scans the data folder in a thread, for jobs and to find out whether images changed since the last build."""

import logging
import os
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from edge_client.config import Settings
from edge_client.images.image_scanner import ImageScanner, Scan
from edge_client.privacy.image_choice import chosen
from edge_client.store.job_folder import ImageList, ListedImage
from protocol.log import event
from protocol.threads import start_thread
from protocol.wire.messages import TaskManifest

log = logging.getLogger(__name__)

ABOVE_LIMIT = "more than --max-images"
"""The reason why files do not count."""


@dataclass(eq=False)
class ScanOrder:
    """A scan that waits, or is done once it has a `scan`."""

    manifest: TaskManifest
    is_for_job: bool = True
    scan: Scan | None = None


class Scanned(msgspec.Struct, frozen=True):
    """An ordered scan of the data folder."""

    order: ScanOrder
    scan: Scan


def listed(scan: Scan) -> ImageList:
    """Return a scan as a job reads it."""
    folder = scan.images[0].folder if scan.images else Path()
    return ImageList(
        folder=os.fsencode(folder),
        images=tuple(
            ListedImage(
                os.fsencode(each.relative),
                each.label,
                each.size_bytes,
                each.mtime_ns,
                each.ctime_ns,
                each.inode,
                each.person,
            )
            for each in scan.images
        ),
        problem=scan.problem,
        being_written=tuple(map(os.fsencode, scan.being_written)),
        unknown=scan.unknown,
        unknown_names=tuple(map(os.fsencode, scan.unknown_names)),
        skipped=scan.skipped,
    )


def limited(scan: Scan, *, limit: int, key: bytes) -> Scan:
    """Return a scan with at most `limit` files, chosen by a keyed hash of their paths: before any is read."""
    names = {
        f"{image.label} {image.relative}".encode(errors="surrogateescape"): image for image in scan.images
    }
    counted = chosen(names, limit, key)
    if not (left := len(names) - len(counted)):
        return scan
    images = tuple(image for name, image in names.items() if name in counted)
    return replace(scan, images=images, skipped={**scan.skipped, ABOVE_LIMIT: left})


class DataFolder:
    """The data folder and its images at the last build; `emit` takes what its thread has scanned, for `take`."""

    def __init__(self, settings: Settings, *, emit: Callable[[Scanned | BaseException], None]) -> None:
        self._settings, self._emit = settings, emit
        self._scanner = ImageScanner(settings.data)
        self._orders: queue.SimpleQueue[ScanOrder | None] = queue.SimpleQueue()
        self._open = 0
        self._manifest: TaskManifest | None = None
        self._identities: str | None = None
        """Images of the last build, joined: many small strings would keep the memory around them, too."""
        self._missing_since_s: dict[str, float] = {}
        """When scans began to miss images of the last build (monotonic)."""

    @property
    def is_busy(self) -> bool:
        """True while a scan waits, runs, or was not taken."""
        return bool(self._open)

    def start(self) -> None:
        """Start the thread."""
        start_thread(self._scan, name="scan", on_failure=self._emit)

    def stop(self) -> None:
        """End the thread after its waiting scans, without waiting for it."""
        self._orders.put(None)

    def order(self, manifest: TaskManifest, *, is_for_job: bool = True) -> ScanOrder:
        """Order a scan of the classes' images."""
        order = ScanOrder(manifest, is_for_job)
        self._open += 1
        self._orders.put(order)
        return order

    def check(self) -> None:
        """Order a scan for `has_changed`, once there was a build."""
        if self._manifest is not None:
            self.order(self._manifest, is_for_job=False)

    def take(self, scanned: Scanned) -> None:
        """Give an order its scan."""
        self._open -= 1
        scanned.order.scan = scanned.scan

    def begin_build(self, manifest: TaskManifest, scan: Scan) -> None:
        """Note what a build is made of."""
        self._manifest, self._identities = manifest, "\0".join(scan.identities)

    def has_changed(self, scan: Scan) -> bool:
        """Return whether there are new images since the last build, or images of it are gone.

        Two scans must miss an image, at least half of `rescan_s` apart: a file that a program replaces is missing for
        a moment, and each of two submissions would cost privacy.
        """
        if self._identities is None:  # no build yet
            self._identities = "\0".join(scan.identities)
        identities = frozenset(filter(None, self._identities.split("\0")))
        now_s, missing = time.monotonic(), scan.missing(identities)
        self._missing_since_s = {each: self._missing_since_s.get(each, now_s) for each in missing}
        is_gone = any(
            now_s - since_s >= self._settings.rescan_s / 2 for since_s in self._missing_since_s.values()
        )
        if not is_gone and identities.issuperset(scan.identities):
            return False
        self._identities = "\0".join(scan.identities)
        event(log, logging.INFO, "images changed", folder=self._settings.data)
        return True

    def _scan(self) -> None:
        while (order := self._orders.get()) is not None:
            self._emit(Scanned(order, self._scanner.scan(order.manifest.classes)))
            del order  # its job holds the scan from now on
