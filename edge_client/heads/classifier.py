"""A head with its backbones and its prior: from images to classes or "unrecognized", offline."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edge_client.graphs.backbone import Backbone, open_backbone
from edge_client.graphs.session import Provider
from edge_client.heads.class_prior import UNRECOGNIZED_IMAGE, Adjuster, Prior, Setting
from edge_client.heads.head import Head, Result, joined, open_installed
from edge_client.images.extraction import Refusal, feature_batches, feature_of
from edge_client.images.images import LabeledImage, unlabeled
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import InstalledHead, SubmissionReport
from protocol.answers import UNRECOGNIZED, UNSURE
from protocol.errors import BlobLost, ConfigError, StateError, UnreadableImage

BLACK = Image.new("RGB", (64, 64))


@dataclass(frozen=True)
class Prediction:
    """The result for one image."""

    top: tuple[tuple[str, float], ...]
    """The most probable classes with their probabilities, in descending order."""
    prior: Prior
    known: bool | None = None
    """False if the novelty exceeds the head's threshold; None if the head has no threshold."""
    is_sure: bool = True
    """The probability reaches the minimum that the user set."""

    @property
    def label(self) -> str:
        """The most probable class."""
        return self.top[0][0]

    @property
    def answer(self) -> str:
        """`unrecognized`, `unsure`, or the label."""
        return UNRECOGNIZED if self.known is False else self.label if self.is_sure else UNSURE

    def fields(self) -> dict[str, Any]:
        """Return the fields of a JSON answer."""
        scores = dict(self.top)
        answer = {"label": self.label, "answer": self.answer, "known": self.known, "scores": scores}
        return {**answer, **self.prior.fields(list(scores))}


NO_THRESHOLD = (
    "this head is not calibrated, so no image is answered as unrecognized: a calibrated one follows when devices have "
    "evaluated a head on 50 held-out images"
)


@dataclass(frozen=True)
class Classifier:
    """An installed head, its backbones, and the prior of the images that it has classified."""

    installed: InstalledHead
    backbones: Sequence[Backbone]
    head: Head
    adjuster: Adjuster
    min_probability: float = 0.0
    observe: Callable[[NDArray[np.float32]], None] = lambda _: None
    """Called with the feature, (L,), of each image."""

    @property
    def notes(self) -> list[str]:
        """Notes on backbones that do not run as they were asked to, and on what the head cannot find; each once."""
        notes = dict.fromkeys(each.model.note for each in self.backbones if each.model.note)
        if self.head.has_novelty and self.head.novelty_threshold is None:
            notes[NO_THRESHOLD] = None
        return list(notes)

    def classify(self, image: Image.Image | bytes, *, top: int) -> Prediction:
        """Return the prediction for an image, decoded or as a file's bytes, with the `top` classes.

        Raises:
            UnreadableImage: it cannot be used.
            ProtofleetError: the backbone or the head fails on it.
        """
        (prediction,) = self._predictions([self.run(image)], top)
        return prediction

    def run(self, image: Image.Image | bytes) -> Result:
        """Return the head's result for an image; the errors are those of `classify`."""
        feature = feature_of(image, self.backbones)
        if isinstance(feature, Refusal):
            raise UnreadableImage(feature.reason)
        return self._run_head(feature)

    def _run_head(self, feature: NDArray[np.float32]) -> Result:
        result = self.head.run(feature[None])
        self.observe(feature)
        return result

    def predict(
        self,
        paths: Iterable[Path],
        *,
        top: int,
        at_once: int = 1,
        on_progress: Callable[[int], None] = lambda _: None,
        batch_size: int = 16,
    ) -> Iterator[tuple[Path, Prediction | Refusal]]:
        """Yield each image's path and prediction with the `top` classes, in order; for an unusable image, the reason.

        The prior is applied once the probabilities of `at_once` images are known; `on_progress` is called with the
        number of images that were run, after each batch.
        """
        done = 0
        waiting: list[tuple[Path, Result | Refusal]] = []
        for batch in self.results(map(unlabeled, paths), batch_size=batch_size):
            waiting += [(image.path, result) for image, result in batch]
            done += len(batch)
            on_progress(done)
            if len(waiting) >= at_once:
                yield from self._with_paths(waiting, top)
                waiting = []
        yield from self._with_paths(waiting, top)

    def results(
        self,
        images: Iterable[LabeledImage],
        *,
        batch_size: int = 16,
        digests: dict[str, bytes] | None = None,
    ) -> Iterator[list[tuple[LabeledImage, Result | Refusal]]]:
        """Yield the images of each batch with the head's results; two batches of images are in memory at a time.

        `digests` gets each image's `pixel_digest`.
        """
        for batch in feature_batches(images, self.backbones, batch_size=batch_size, digests=digests):
            yield [
                (image, each if isinstance(each, Refusal) else self._run_head(each)) for image, each in batch
            ]

    def _with_paths(
        self, found: Sequence[tuple[Path, Result | Refusal]], top: int
    ) -> Iterator[tuple[Path, Prediction | Refusal]]:
        predictions = self._predictions([each for _, each in found if not isinstance(each, Refusal)], top)
        for path, result in found:
            yield path, result if isinstance(result, Refusal) else next(predictions)

    def _predictions(self, results: Sequence[Result], top: int) -> Iterator[Prediction]:
        if not results:
            return iter(())
        sure_from = self.min_probability
        return predictions(self.head, self.adjuster, joined(results), top=top, min_probability=sure_from)


def predictions(
    head: Head, adjuster: Adjuster, result: Result, *, top: int, min_probability: float = 0.0
) -> Iterator[Prediction]:
    """Yield a prediction with the `top` classes for each image; the prior is that of the images of known classes."""
    known = head.known(result)
    members = np.ones(len(result.probabilities), bool) if known is None else known
    rows = result.probabilities.copy()
    rows[members], prior = adjuster.adjust(rows[members])
    for row, is_member in zip(rows, members.tolist(), strict=True):
        labels = np.argsort(-row, kind="stable")[:top]
        best = tuple((head.classes[label], float(row[label])) for label in labels)
        yield Prediction(
            top=best,
            prior=prior if is_member else UNRECOGNIZED_IMAGE,
            known=None if known is None else is_member,
            is_sure=best[0][1] >= min_probability,
        )


def open_classifier(
    store: DeviceState,
    *,
    provider: Provider,
    threads: int | None,
    prior: Setting = "auto",
    images: int = 1,
    min_probability: float = 0.0,
    opened: Sequence[Backbone] = (),
    sample: Image.Image | None = BLACK,
) -> Classifier:
    """Open the head in use and its backbones, and try them on an image, unless `sample` is None.

    A trial that fails or crashes the program counts: after MAX_FAILURES in a row, the previous head is in use. A
    failure of the backbones counts only if the previous head has others: otherwise going back would not help, and the
    memory that they lack may be there later.

    Of the backbones in `opened`, which have the same provider and threads, none is opened again. With more than one
    image, batches run in parallel. For `prior`, see `open_adjuster`.

    Raises:
        ConfigError: there is no head, or no such prior.
        StateError: a file was damaged on disk.
        ProtofleetError: the head or a backbone cannot be used.
    """
    heads = store.heads_in_use()
    if (installed := heads.installed) is None:
        text = f"no head in {store.folder} yet: `edge-client run` installs it once the fleet has one"
        raise ConfigError(text)
    has_other_backbones = heads.previous is not None and heads.previous.backbones != installed.backbones
    trial = nullcontext() if sample is None else store.head_trials.count(installed.key)
    open_by_digest = {each.sha256: each for each in opened}
    try:
        with trial if has_other_backbones else nullcontext():
            backbones = [
                open_by_digest.get(digest.hex())
                or open_backbone(
                    store.blobs.verified_path(digest),
                    provider=provider,
                    threads=threads,
                    concurrent=images > 1,
                    digest=digest,
                )
                for digest in installed.backbones
            ]
            feature = None if sample is None else feature_of(sample, backbones)
            with nullcontext() if has_other_backbones else trial:
                head = open_installed(store.blobs, installed, backbones)
                if isinstance(feature, np.ndarray):
                    head.run(feature[None])
    except BlobLost as error:
        raise StateError(f"{error}: a running edge-client downloads it again") from error
    return Classifier(installed, backbones, head, open_adjuster(store, head, prior), min_probability)


def open_adjuster(store: DeviceState, head: Head, setting: Setting) -> Adjuster:
    """Open a prior for a head.

    `auto` does not use labels that differential privacy protects, because answers may leave the device.

    Raises:
        ConfigError: the device has no labeled images of the head's classes, for `labels`.
    """
    report = store.get(SubmissionReport)
    labels = {} if report.is_private and setting == "auto" else report.labels
    return Adjuster(head.classes, setting, labels=labels, is_personal=head.is_personal)
