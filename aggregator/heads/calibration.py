"""When the newest head gets its calibrated version, and by which counts of held-out images.

A head is calibrated at most once, and a calibrated one never: this follows from the stored heads, so that a restart or
a kill at any point changes nothing.
"""

from collections.abc import Iterable

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from aggregator.coordination.bounds import device_factors
from aggregator.coordination.minimums import CALIBRATION_IMAGES
from aggregator.storage.heads import CALIBRATED_FROM, HeadRecord
from aggregator.storage.store import Store
from aggregator.tasks.task_preparation import Task
from aggregator.training.jobs import CalibrationJob
from protocol.errors import BlobLost
from protocol.wire.messages import CONFIDENCE_BINS, Evaluation

POLL_S = 1.0
"""Seconds between queries for evaluations."""

RETRY_S = 3600.0
"""Seconds until the next attempt, after one that failed or found too few images."""


class Calibration:
    """Decides when the newest head of a task is calibrated."""

    def __init__(self, task: Task, store: Store) -> None:
        self._task = task
        self._store = store
        self._version, self._next_s = 0, 0.0

    def job(self, head: HeadRecord) -> CalibrationJob | None:
        """Return the job that makes the calibrated version of the newest head; None if it is not due."""
        if not self._task.calibrates or CALIBRATED_FROM in head.metrics:
            return None
        now_s = self._store.clock.now_s()
        if head.version != self._version:
            self._version, self._next_s = head.version, now_s
        if now_s < self._next_s or self._is_unused(head):
            return None
        self._next_s = now_s + POLL_S
        counts = self._store.decisions(self._task.digest).counts
        try:
            devices = self._store.members(head).keys() - head.quarantined.keys()
        except BlobLost:  # logged where the open collection is counted
            self.postpone()
            return None
        members = set(filter(counts, devices))
        if not self._has_evaluations(members, now_s):
            return None
        evaluations = self._store.evaluations.of_head(self._task.digest, head.version)
        multiple = self._task.file.robust.max_multiple
        correct, images, novelty = pooled(
            (evaluations[each] for each in members & evaluations.keys()), multiple
        )
        if images.sum() < CALIBRATION_IMAGES:
            self.postpone()
            return None
        return CalibrationJob(
            version=head.version + 1,
            attempt=1,
            task=self._task.digest.hex(),
            feature_size=self._task.feature_size,
            head=head.file.hex(),
            correct=tuple(correct.tolist()),
            images=tuple(images.tolist()),
            novelty=tuple(novelty.tolist()),
        )

    def postpone(self) -> None:
        self._next_s = self._store.clock.now_s() + RETRY_S

    def _is_unused(self, head: HeadRecord) -> bool:
        """Return True if another head is current, or the next one is made without a forgotten device."""
        return head.state != "current" or self._store.forgotten.newest_head(self._task.digest) >= head.version

    def _has_evaluations(self, members: set[str], now_s: float) -> bool:
        """Return True if all devices of the head have evaluated it, or half of them when the deadline has passed.

        The deadline is that of the first head that was not calibrated, so that a device which never answers does not
        prevent it in a fleet whose heads follow each other faster.
        """
        evaluated = len(members & self._store.evaluations.devices(self._task.digest, self._version))
        if evaluated >= len(members) or evaluated < len(members) / 2:
            return evaluated >= len(members)
        heads = self._store.heads.all(self._task.digest)
        last = max((head.version for head in heads if CALIBRATED_FROM in head.metrics), default=0)
        since_s = min(head.trained_s for head in heads if head.version > last)
        return self._store.clock.unix_s(now_s) >= since_s + self._task.file.deadline_s


def pooled(
    evaluations: Iterable[Evaluation], multiple: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the correct predictions and all in each bin, and all in each bin of novelty, (CONFIDENCE_BINS,).

    A device that claims many held-out images counts at most as its submission could (`bounds`).
    """
    parts = np.array(
        [
            (
                each.confidence_correct,
                each.confidence_images,
                each.novelty_images or [0] * CONFIDENCE_BINS,
            )
            for each in evaluations
            if each.confidence_correct is not UNSET and each.confidence_images is not UNSET
        ],
        np.float64,
    ).reshape(-1, 3, CONFIDENCE_BINS)
    parts = parts[parts[:, 1].any(axis=1)]
    factors = device_factors(parts[:, 1], multiple=multiple)
    correct, images, novelty = (parts * factors[:, None, None]).sum(axis=0)
    return correct, images, novelty
