"""A head with its backbones and its prior: from images to classes, offline."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edge_client.data.class_prior import NO_PRIOR, Adjuster, Prior, Source
from edge_client.data.extraction import Refusal, feature_batches, feature_of
from edge_client.data.images import unlabeled
from edge_client.predict.head import Head, open_installed
from edge_client.runtime.backbone import Backbone, open_backbone
from edge_client.runtime.session import Provider
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import InstalledHead, SubmissionReport
from protocol.errors import BlobLost, ConfigError, StateError, UnreadableImage

Guard = Callable[[], AbstractContextManager[None]]
"""A context in which a part of a model runs; it counts the program's crashes there."""


@dataclass(frozen=True)
class Prediction:
    """The result for one image."""

    path: Path
    top: tuple[tuple[str, float], ...] = ()
    """The most probable classes with their probabilities, in descending order."""
    error: str = ""
    """Why there is no prediction; empty if there is one."""
    prior: Prior = NO_PRIOR

    @property
    def label(self) -> str:
        """The most probable class."""
        return self.top[0][0]


@dataclass(frozen=True)
class Classifier:
    """An installed head, its backbones, and the prior of the images that it has classified."""

    installed: InstalledHead
    backbones: Sequence[Backbone]
    head: Head
    adjuster: Adjuster
    run_head: Guard = nullcontext
    run_backbones: Guard = nullcontext

    @property
    def notes(self) -> list[str]:
        """Notes on the backbones that do not run as they were asked to; each once."""
        return list({each.model.note: None for each in self.backbones if each.model.note})

    def classify(
        self, image: Image.Image | bytes, *, top: int
    ) -> tuple[tuple[tuple[str, float], ...], Prior]:
        """Return the `top` most probable classes of an image, decoded or as a file's bytes, with their probabilities.

        Raises:
            UnreadableImage: it cannot be used.
            ProtofleetError: the backbone or the head fails on it.
        """
        rows, prior = self.adjuster.adjust(self.probabilities(image))
        return self._best(rows[0], top), prior

    def probabilities(self, image: Image.Image | bytes) -> NDArray[np.float32]:
        """Return the head's probabilities of an image, float32 (1, C); the errors are those of `classify`."""
        feature = feature_of(image, self.backbones)
        if isinstance(feature, Refusal):
            raise UnreadableImage(feature.reason)
        return self.head.probabilities(feature[None])

    def predict(
        self,
        paths: Iterable[Path],
        *,
        top: int,
        at_once: int = 1,
        on_progress: Callable[[int], None] = lambda _: None,
        batch_size: int = 16,
    ) -> Iterator[Prediction]:
        """Yield a prediction for each image, in order, with the `top` classes; for an unusable image, with the reason.

        Two batches of images are in memory at a time. The prior is applied once the probabilities of `at_once` images
        are known; `on_progress` is called with the number of images that were run, after each batch.
        """
        images, done = map(unlabeled, paths), 0
        waiting: list[tuple[Path, NDArray[np.float32] | Refusal]] = []
        for batch in feature_batches(
            images, self.backbones, batch_size=batch_size, workers=2, run_backbones=self.run_backbones
        ):
            has_feature = any(not isinstance(feature, Refusal) for _, feature in batch)
            with self.run_head() if has_feature else nullcontext():
                waiting += [(image.path, self._probabilities(feature)) for image, feature in batch]
            done += len(batch)
            on_progress(done)
            if len(waiting) >= at_once:
                yield from self._predictions(waiting, top)
                waiting = []
        yield from self._predictions(waiting, top)

    def _probabilities(self, feature: NDArray[np.float32] | Refusal) -> NDArray[np.float32] | Refusal:
        return feature if isinstance(feature, Refusal) else self.head.probabilities(feature[None])[0]

    def _predictions(
        self, found: Sequence[tuple[Path, NDArray[np.float32] | Refusal]], top: int
    ) -> Iterator[Prediction]:
        """Yield the predictions of images by their probabilities, float32 (C,), with one prior."""
        rows, prior = [row for _, row in found if not isinstance(row, Refusal)], NO_PRIOR
        if rows:
            adjusted, prior = self.adjuster.adjust(np.stack(rows))
            rows = list(adjusted)
        left = iter(rows)
        for path, row in found:
            if isinstance(row, Refusal):
                yield Prediction(path, error=f"{path}: {row.reason}")
            else:
                yield Prediction(path, self._best(next(left), top), prior=prior)

    def _best(self, probabilities: NDArray[np.float32], top: int) -> tuple[tuple[str, float], ...]:
        best = np.argsort(-probabilities, kind="stable")[:top]
        return tuple((self.head.classes[label], float(probabilities[label])) for label in best)


def open_classifier(
    store: DeviceState,
    *,
    provider: Provider,
    threads: int | None,
    prior: Source | None = "none",
    images: int = 1,
) -> Classifier:
    """Open the head in use and its backbones; the previous head if the one in use has failed too often in a row.

    A crash of the program while it predicts counts as a failure of what runs then. With more than one image, batches
    run in parallel. For `prior`, see `open_adjuster`.

    Raises:
        ConfigError: there is no head, or no such prior.
        StateError: a file was damaged on disk.
        GraphRefused: the head cannot be used.
    """
    installed = store.heads_in_use().installed
    if installed is None:
        text = f"no head in {store.folder}: run `edge-client --broker HOST` until one is installed"
        raise ConfigError(text)
    run_backbones = partial(store.run_backbones, installed)
    try:
        files = [(digest, store.blobs.verified_path(digest)) for digest in installed.backbones]
        with run_backbones():
            backbones = [
                open_backbone(path, provider=provider, threads=threads, concurrent=images > 1, digest=digest)
                for digest, path in files
            ]
        with store.run_head(installed, is_part=True):
            head = open_installed(store.blobs, installed, backbones)
    except BlobLost as error:
        raise StateError(f"{error}: a running edge-client downloads it again") from error
    adjuster = open_adjuster(store, head, prior)
    return Classifier(installed, backbones, head, adjuster, partial(store.run_head, installed), run_backbones)


def open_adjuster(store: DeviceState, head: Head, source: Source | None) -> Adjuster:
    """Open a prior for a head; None stands for `images`, and for `none` if the head is personal.

    Raises:
        ConfigError: the device has no labeled images of the head's classes, for `labels`.
    """
    labels = {each.name: each.images for each in store.get(SubmissionReport).classes}
    if source == "labels" and not labels.keys() & set(head.classes):
        raise ConfigError("no labeled images of the head's classes in a submission: use another --prior")
    return Adjuster(head.classes, source or ("none" if head.is_personal else "images"), labels=labels)
