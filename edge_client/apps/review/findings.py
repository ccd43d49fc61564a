"""Images that are worth a person's look, found with the fleet's head; nothing of them leaves the device."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_client.heads.class_prior import Adjuster
from edge_client.heads.classifier import Classifier, Prediction, predictions
from edge_client.heads.head import Result, joined
from edge_client.images.extraction import Refusal
from edge_client.images.images import UNLABELED, LabeledImage
from edge_client.prototypes.holdout import held_out
from edge_client.store.feature_cache import CHUNK_ROWS, FeatureCache
from protocol.errors import StateError

Kind = Literal["label", "unknown", "duplicate", "unlabeled", "stranger"]

TITLES: Mapping[Kind, str] = {
    "label": "labels to check",
    "unknown": "labeled images of no known class",
    "duplicate": "equal images in several classes",
    "unlabeled": "unlabeled images to label first",
    "stranger": "unlabeled images of no known class",
}


@dataclass(frozen=True)
class Finding:
    """An image that a person should look at."""

    kind: Kind
    image: LabeledImage
    labeled: str | None
    """The class in whose folder it is; None if it is unlabeled."""
    score: float
    """The order within the kind, descending; see `review`."""
    prediction: Prediction
    held_out: bool = False
    same_as: tuple[Path, ...] = ()
    """Images of equal pixels in folders of other classes."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of a JSON answer."""
        return {
            "kind": self.kind,
            "image": str(self.image.path),
            "labeled": self.labeled,
            "held_out": self.held_out,
            "score": self.score,
            "same_as": [str(path) for path in self.same_as],
            **self.prediction.fields(),
        }


@dataclass(frozen=True)
class Review:
    """The findings of a device's images."""

    findings: tuple[Finding, ...]
    """By kind in the order of TITLES, then by descending score."""
    images: int
    """Images that were classified."""
    held_out: tuple[int, int]
    """Held-out images, and those that are classified correctly."""
    unusable: tuple[tuple[Path, str], ...]
    """Images that cannot be used, with reasons."""
    totals: Mapping[Kind, int] = field(default_factory=dict)
    """Findings of each kind, those beyond the limit included."""

    def of_kind(self, kind: Kind) -> tuple[Finding, ...]:
        """Return the findings of one kind."""
        return tuple(each for each in self.findings if each.kind == kind)


def review(
    classifier: Classifier,
    images: Sequence[LabeledImage],
    *,
    holdout: float,
    grouped: Collection[bytes],
    kept: Collection[str] = (),
    cache: Path,
    limit: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Review:
    """Return at most `limit` findings of each kind among a device's labeled and unlabeled images.

    The scores: of a label, p(best) - p(label); of an image of no known class, its novelty; of a duplicate, 0; of an
    unlabeled image of a known class, 1 - (p(best) - p(second)).

    Args:
        classifier: the fleet's head.
        images: labels are indices into the head's classes.
        holdout: fraction of each class's images that the device holds out.
        grouped: digests of the images that were in a prototype, of which none is held out.
        kept: identities of images that are no finding, whatever the head finds.
        cache: file of the device's features, which saves the backbones' work; it need not exist.
        limit: findings of each kind.
        on_progress: called with the number of images that were classified.

    Raises:
        ProtofleetError: a backbone or the head fails.
    """
    rows: list[tuple[LabeledImage, Result]] = []
    unusable: list[tuple[Path, str]] = []
    digests: dict[str, bytes] = {}
    for image, result in _results(classifier, images, cache, digests):
        if isinstance(result, Refusal):
            unusable.append((image.path, result.reason))
        else:
            rows.append((image, result))
        on_progress(len(rows) + len(unusable))
    if not rows:
        return Review((), 0, (0, 0), tuple(unusable))
    found = [image for image, _ in rows]
    result = joined([each for _, each in rows])
    labels = np.array([image.label for image in found])
    known = classifier.head.known(result)
    same = _duplicates(found, digests)
    labeled_images = [image for image in found if image.label != UNLABELED]
    in_groups = {image.relative for image in labeled_images if digests.get(image.identity) in grouped}
    held = held_out(labeled_images, holdout, grouped=in_groups)
    no_prior = Adjuster(classifier.head.classes, "none", labels={})

    def finding(kind: Kind, row: int, score: float) -> Finding:
        image = found[row]
        (prediction,) = predictions(
            classifier.head, no_prior, result.row(row), top=len(classifier.head.classes)
        )
        labeled = None if image.label == UNLABELED else classifier.head.classes[image.label]
        return Finding(kind, image, labeled, score, prediction, image.relative in held, same.get(row, ()))

    ranked: dict[Kind, list[tuple[int, float]]] = {
        **suspicious(result, labels, known),
        "duplicate": [(row, 0.0) for row in same],
    }
    ranked = {
        kind: [(row, score) for row, score in each if found[row].identity not in kept]
        for kind, each in ranked.items()
    }
    totals = {kind: len(each) for kind, each in ranked.items()}
    members = [row for row, image in enumerate(found) if image.relative in held]
    correct = int((result.probabilities[members].argmax(axis=1) == labels[members]).sum())
    findings = (finding(kind, row, score) for kind in TITLES for row, score in ranked[kind][:limit])
    return Review(tuple(findings), len(found), (len(members), correct), tuple(unusable), totals)


def suspicious(
    result: Result, labels: NDArray[np.intp], known: NDArray[np.bool_] | None
) -> dict[Kind, list[tuple[int, float]]]:
    """Return the rows, with scores, of labels that differ from the best class, of unknown and of unlabeled images.

    Args:
        result: of n images.
        labels: (n,), indices or UNLABELED.
        known: (n,); None if every image counts as known.
    """
    probabilities = result.probabilities
    is_labeled = labels != UNLABELED
    is_known = known if known is not None else np.ones(len(labels), bool)
    lead = probabilities.max(axis=1) - probabilities[np.arange(len(labels)), labels]
    two = np.sort(probabilities, axis=1)[:, -2:]
    margin = two[:, -1] - two[:, 0] if two.shape[1] > 1 else two[:, -1]
    novelty = np.zeros(len(labels)) if result.novelty is None else result.novelty
    return {
        "label": _descending(lead, is_labeled & is_known & (lead > 0)),
        "unknown": _descending(novelty, is_labeled & ~is_known),
        "unlabeled": _descending(1 - margin, ~is_labeled & is_known),
        "stranger": _descending(novelty, ~is_labeled & ~is_known),
    }


def _descending(scores: NDArray[Any], chosen: NDArray[np.bool_]) -> list[tuple[int, float]]:
    rows = np.flatnonzero(chosen)
    order = rows[np.argsort(-scores[rows], kind="stable")]
    return [(row, float(scores[row])) for row in order.tolist()]


def _duplicates(images: Sequence[LabeledImage], digests: Mapping[str, bytes]) -> dict[int, tuple[Path, ...]]:
    """Return the rows of images that are in several classes, side by side, each with the others' paths."""
    by_digest: dict[bytes, list[int]] = {}
    for row, image in enumerate(images):
        if image.label != UNLABELED and image.identity in digests:
            by_digest.setdefault(digests[image.identity], []).append(row)
    return {
        row: tuple(images[each].path for each in rows if images[each].label != images[row].label)
        for rows in by_digest.values()
        if len({images[row].label for row in rows}) > 1
        for row in rows
    }


def _results(
    classifier: Classifier, images: Sequence[LabeledImage], cache: Path, digests: dict[str, bytes]
) -> Iterator[tuple[LabeledImage, Result | Refusal]]:
    """Yield the head's result for each image, first those whose features are in the cache."""
    backbones, done = [each.sha256 for each in classifier.backbones], set[str]()
    with suppress(StateError), closing(FeatureCache(cache, read_only=True)) as features:
        digests |= features.contents()
        digested = [image for image in images if image.identity in digests]
        for start in range(0, len(digested), CHUNK_ROWS):
            part = digested[start : start + CHUNK_ROWS]
            stored = features.stored_features([image.identity for image in part], *backbones)
            if found := [image for image in part if image.identity in stored]:
                result = classifier.head.run(np.stack([stored[image.identity] for image in found]))
                for row, image in enumerate(found):
                    done.add(image.identity)
                    yield image, result.row(row)
    for batch in classifier.results((each for each in images if each.identity not in done), digests=digests):
        yield from batch
