"""Notices that a camera shows other images than those that the device has uploaded. Features stay on the device.

A window of images is compared with the labeled ones within each class that the head finds, so that another mixture of
classes is no drift. The statistic is the squared length of the mean difference in the first principal components of
the labeled images about their class means; its distribution under "no drift" comes from permutations within classes,
with the Wilson-Hilferty approximation of their tail (Proceedings of the National Academy of Sciences 17, 1931).
"""

import logging
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client.heads.head import Head
from edge_client.images.extraction import ISOLATED
from edge_client.store.app_files import Drift, write_value
from edge_client.store.feature_cache import FeatureCache
from protocol.errors import ProtofleetError, StateError
from protocol.log import event
from protocol.threads import start_thread
from protocol.wire.messages import DRIFT_LIMIT

log = logging.getLogger(__name__)

WINDOW = 100
"""Images that are compared at a time."""

INTERVAL_S = 600.0
"""Seconds between two images of a window: frames of one scene are alike. A week has about ten windows."""

FEWEST_LABELED, MOST_LABELED = 20, 500
COMPONENTS = 20
PERMUTATIONS = 200


class DriftMonitor:
    """Compares the images that a program predicts with the device's labeled ones, and stores the result.

    A comparison takes seconds: it runs on a thread of its own, and no prediction waits for it.

    Args:
        state: the device's state folder, with its feature cache.
        head: finds the classes.
        backbones: digests of the head's backbones.
        clock: monotonic, seconds.
    """

    def __init__(
        self,
        state: Path,
        head: Head,
        backbones: tuple[str, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._head, self._backbones, self._clock = state, head, backbones, clock
        self._window: list[NDArray[np.float32]] = []
        self._next_s = clock()
        self._is_reported = False

    def observe(self, feature: NDArray[np.float32]) -> None:
        """Take an image's feature, (L,), at most one in INTERVAL_S; compare and store when the window is full."""
        if self._clock() < self._next_s:
            return
        self._next_s = self._clock() + INTERVAL_S
        self._window.append(feature)
        if len(self._window) < WINDOW:
            return
        window, self._window = np.stack(self._window), []
        try:
            start_thread(lambda: self._compare(window), name="drift", on_failure=lambda _: None)
        except ProtofleetError as error:
            event(log, logging.WARNING, "drift not tested", reason=str(error))

    def _compare(self, window: NDArray[np.float32]) -> None:
        try:
            labeled = _labeled(self._state / "features.sqlite", self._backbones)
            score = drift_score(labeled, self._classes(labeled), window, self._classes(window))
            if score is not None:
                found = Drift(score=round(score, 2), images=WINDOW, tested_s=time.time())
                write_value(self._state, found)
        except ProtofleetError as error:
            level = logging.DEBUG if self._is_reported else logging.WARNING
            event(log, level, "drift not tested", reason=str(error))
            self._is_reported = True
            return
        if score is not None and score > DRIFT_LIMIT:
            text = "images differ from the labeled ones: look at the camera, and label new images if they are to stay"
            event(log, logging.WARNING, text, score=round(score, 1), limit=DRIFT_LIMIT, images=WINDOW)

    def _classes(self, features: NDArray[np.float32]) -> NDArray[np.intp]:
        found: NDArray[np.intp] = self._head.run(features).probabilities.argmax(axis=1)
        return found


def drift_score(
    labeled: NDArray[np.float32],
    labeled_classes: NDArray[np.intp],
    window: NDArray[np.float32],
    window_classes: NDArray[np.intp],
) -> float | None:
    """Return how far a window of images is from the labeled ones, in standard deviations of chance.

    Args:
        labeled: features (n, L).
        labeled_classes: the class (n,) that the head finds in each.
        window: features (m, L).
        window_classes: the same for the window.

    Returns:
        The score; None with fewer than FEWEST_LABELED labeled images, or if less than half of the window is in classes
        with two of them.
    """
    classes, counts = np.unique(labeled_classes, return_counts=True)
    classes = classes[counts > 1]
    own, among = np.isin(labeled_classes, classes), np.isin(window_classes, classes)
    if 2 * among.sum() <= len(window):
        return None
    labeled, labeled_classes = labeled[own], labeled_classes[own]
    if len(labeled) < FEWEST_LABELED:
        return None
    groups = np.searchsorted(classes, np.concatenate([labeled_classes, window_classes[among]]))
    first = groups[: len(labeled)]
    means = np.stack([labeled[first == group].mean(axis=0) for group in range(len(classes))])
    _, deviations, components = np.linalg.svd(labeled - means[first], full_matrices=False)
    kept = min(COMPONENTS, len(labeled) // 4)
    scales = np.maximum(deviations[:kept], 1e-6 * max(deviations[0], 1e-12)) / np.sqrt(len(labeled))
    rows = (np.concatenate([labeled, window[among]]) - means[groups]) @ (components[:kept].T / scales)
    members = [np.flatnonzero(groups == group) for group in range(len(classes))]
    is_window = np.arange(len(groups)) >= len(labeled)

    def statistic(chosen: NDArray[np.bool_]) -> float:
        total = np.zeros(rows.shape[1])
        for part in members:
            of, others = part[chosen[part]], part[~chosen[part]]
            if len(of):
                total += len(of) * (rows[of].mean(axis=0) - rows[others].mean(axis=0))
        return float(total @ total)

    rng = np.random.default_rng(0)
    chance = []
    for _ in range(PERMUTATIONS):
        chosen = is_window.copy()
        for part in members:
            chosen[part] = rng.permutation(is_window[part])
        chance.append(statistic(chosen))
    mean, variance = float(np.mean(chance)), float(np.var(chance))
    if not variance:
        return 0.0
    spread = variance / (9 * mean**2)  # 2 / (9 f) of a chi-squared distribution with f = 2 mean^2 / variance
    return float((np.cbrt(statistic(is_window) / mean) - (1 - spread)) / np.sqrt(spread))


def _labeled(cache: Path, backbones: tuple[str, ...]) -> NDArray[np.float32]:
    """Return the stored features of at most MOST_LABELED of the device's images.

    Under differential privacy they have a key of their own, because a backbone is restarted for each image.

    Raises:
        StateError: none is stored.
    """
    with closing(FeatureCache(cache, read_only=True)) as features:
        keys = backbones
        if not (known := sorted(features.known(*keys))):
            keys = tuple(each + ISOLATED for each in backbones)
            known = sorted(features.known(*keys))
        chosen = np.random.default_rng(0).permutation(len(known))[:MOST_LABELED]
        found = [*features.stored_features([known[place] for place in chosen], *keys).values()]
    if not found:
        raise StateError("no features of labeled images are stored")
    return np.stack(found)
