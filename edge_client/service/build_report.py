"""Reports what builds have left out: each omission is logged once, with its reason."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from edge_client.core.state import UploadItem
from edge_client.images.images import is_folder, name_some
from edge_client.store.job_folder import Built
from edge_client.store.stored_values import ClassReport, SubmissionReport
from protocol.log import event
from protocol.wire.messages import TaskManifest

log = logging.getLogger(__name__)

LOST_IMAGES = "class has lost images: restore them, or restart edge-client if they were removed on purpose"

AWAITS_BLOCK = (
    "images of a block are missing, and the last submission counts for a day, without new images: restore them, "
    "unless they were deleted on purpose"
)


class BuildReporter:
    """Compares each build with those before it since the start."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._warned: set[tuple[str, str]] = set()
        self._images: tuple[bytes, dict[str, int]] = b"", {}
        """The task, and the images that each class had before it lost most of them."""

    def report(
        self,
        built: Built,
        *,
        task: bytes,
        manifest: TaskManifest,
        last: UploadItem | None,
        before: SubmissionReport,
    ) -> SubmissionReport | None:
        """Log what a build has left out, and return the report to store; None if the stored one stays.

        `last` is the newest submission before this build, and `before` its report.
        """
        lost = ""
        compared = before if last is not None and last.task == task else SubmissionReport()
        if built.report is not None:
            lost = self._lost_images(task, built.report.classes, compared)
            self._warn(manifest, built.report, is_uploaded=not built.awaits_block)
        elif built.no_images:
            self._lost_images(task, (), compared)
        if built.awaits_block:
            if before.lost_images == AWAITS_BLOCK:
                return None
            log.warning("%s", AWAITS_BLOCK)
            return msgspec.structs.replace(before, lost_images=AWAITS_BLOCK)
        return None if built.report is None else msgspec.structs.replace(built.report, lost_images=lost)

    def _lost_images(self, task: bytes, classes: Sequence[ClassReport], before: SubmissionReport) -> str:
        """Log and return which classes have lost their prototypes, or most of their images.

        They are compared with the last submission to the same task, or with that before they were lost.
        """
        known, images = self._images
        most_images = dict(images) if known == task else {}
        for entry in before.classes:
            if entry.counts or entry.in_blocks or entry.unused:
                most_images.setdefault(entry.name, entry.images)
        now = {entry.name: entry.images for entry in classes}
        used = {entry.name for entry in classes if entry.counts or entry.in_blocks or entry.unused}
        lost = {
            name: most
            for name, most in most_images.items()
            if name not in used or 2 * now.get(name, 0) < most
        }
        for name, most in lost.items():
            if images.get(name) != most:
                event(log, logging.WARNING, LOST_IMAGES, name=name, images=now.get(name, 0), before=most)
        self._images = task, lost
        texts = [f"{name} has {now.get(name, 0)} of {most} images" for name, most in lost.items()]
        return f"{LOST_IMAGES}: {name_some(texts)}" if texts else ""

    def _warn(self, manifest: TaskManifest, report: SubmissionReport, *, is_uploaded: bool) -> None:
        """Log each omission once, with its reason; of a submission that is not uploaded, only unusable images."""
        used = {entry.name for entry in report.classes}
        before, self._warned = self._warned, set()

        def warn(message: str, **fields: object) -> None:
            self._warned.add((message, str(fields)))
            if (message, str(fields)) not in before:
                event(log, logging.WARNING, message, **fields)

        for path, reason in report.unusable:
            warn("image omitted", path=path, reason=reason)
        for entry in report.classes if is_uploaded else ():
            _warn_of_class(entry, warn)
        for name in manifest.classes:
            if name not in used and is_folder(self._data / name):
                warn("no usable image", folder=self._data / name)


def _warn_of_class(entry: ClassReport, warn: Callable[..., None]) -> None:
    missing = entry.missing or None
    if entry.unused:
        text = "images left out, their block does not suit the task, or awaits an image"
        warn(text, name=entry.name, images=entry.unused, missing=missing)
    elif entry.left_out:
        warn("class omitted, too few images", name=entry.name, images=entry.images)
    if entry.waiting:
        # A group of fewer images would reveal single ones.
        text = "images held back, too few for a prototype"
        if missing:
            text = "images held back, others of the same prototype are missing: restore them"
        warn(text, name=entry.name, waiting=entry.waiting, more_needed=entry.more_needed, missing=missing)
