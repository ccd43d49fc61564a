"""Backbone and head together: labels and scores for pictures, offline."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.backbone import Backbone, open_session
from edge_client.features import Refusal, feature_batches
from edge_client.images import unlabelled
from protocol.errors import BackboneMismatch
from protocol.metadata import HeadMetadata, head_metadata

SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Head:
    """A trained head in ONNX Runtime."""

    metadata: HeadMetadata
    session: Any

    def probabilities(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Probabilities of the classes, float32 (n, C), of features float32 (n, L)."""
        probabilities: NDArray[np.float32] = self.session.run(["probabilities"], {"feature": features})[0]
        return probabilities


@dataclass(frozen=True)
class Prediction:
    """What a head says of one picture.

    Args:
        top: the likeliest classes with their probabilities, the best first.
        error: why there is none.
    """

    path: Path
    top: tuple[tuple[str, float], ...] = ()
    error: str = ""

    @property
    def label(self) -> str:
        """The likeliest class."""
        return self.top[0][0]


def open_head(file: bytes, *, backbone: Backbone, classes: Sequence[str] | None = None) -> Head:
    """Load a head and try it out.

    Args:
        file: the ONNX file's bytes.
        backbone: what its features come from.
        classes: the task's classes, if they are known.

    Raises:
        BackboneMismatch: it is no head, not for this backbone or these classes, or does not give probabilities.
    """
    session = open_session(file, provider="cpu", threads=1).session
    metadata = head_metadata(session.get_modelmeta().custom_metadata_map)
    _check_origin(metadata, backbone, classes)
    takes = [(value.name, value.type) for value in session.get_inputs()]
    gives = {value.name: value.type for value in session.get_outputs()}
    if takes != [("feature", "tensor(float)")] or gives.get("probabilities") != "tensor(float)":
        raise BackboneMismatch(f"expected feature -> probabilities, the head takes {takes} and gives {gives}")
    head = Head(metadata, session)
    _try_out(head)
    return head


def _check_origin(metadata: HeadMetadata, backbone: Backbone, classes: Sequence[str] | None) -> None:
    if metadata.backbones != (backbone.sha256,):
        raise BackboneMismatch(
            f"the head is for backbone {', '.join(metadata.backbones)}, and the backbone here is {backbone.sha256}"
        )
    if metadata.feature_size != backbone.metadata.feature_size:
        raise BackboneMismatch(
            f"the head takes {metadata.feature_size} features, the backbone gives {backbone.metadata.feature_size}"
        )
    if classes is not None and tuple(classes) != metadata.classes:
        named, expected = (", ".join(map(repr, names[:20])) for names in (metadata.classes, tuple(classes)))
        raise BackboneMismatch(
            f"the head's {len(metadata.classes)} classes are {named}; the task's are {expected}"
        )


def _try_out(head: Head) -> None:
    """See that the head gives probabilities, for no features and for some."""
    size = head.metadata.feature_size
    features = np.stack([np.zeros(size), np.random.default_rng(0).normal(size=size)]).astype(np.float32)
    try:
        probabilities = head.probabilities(features)
    except Exception as error:  # ONNX Runtime has no error of its own to catch
        raise BackboneMismatch(f"the head does not run: {str(error).splitlines()[0][:200]}") from error
    good = probabilities.shape == (2, len(head.metadata.classes)) and np.isfinite(probabilities).all()
    if not good or np.abs(probabilities.sum(axis=1) - 1).max() > SUM_TOLERANCE:
        raise BackboneMismatch("the head does not give one probability per class that add up to 1")


def evaluate(head: Head, chunks: Iterable[NDArray[np.float32]], *, label: int) -> int:
    """How many of the features, all of class `label`, the head gets right."""
    return sum(int((head.probabilities(chunk).argmax(axis=1) == label).sum()) for chunk in chunks)


def predict(
    paths: Iterable[Path],
    backbone: Backbone,
    head: Head,
    *,
    top: int,
    batch_size: int = 16,
    workers: int = 2,
) -> Iterator[Prediction]:
    """Say of each picture, in order, what it shows; one that cannot be used is told as such, and the rest go on.

    Args:
        paths: any number of pictures; a few at a time are in memory.
        backbone: the one the head is for.
        head: what names the classes.
        top: how many classes to name.
        batch_size: pictures in one run of the backbone.
        workers: threads that decode.
    """
    pictures = map(unlabelled, paths)
    for batch in feature_batches(pictures, backbone, batch_size=batch_size, workers=workers):
        for picture, made in batch:
            if isinstance(made, Refusal):
                yield Prediction(picture.path, error=f"{picture.path}: {made.reason}")
            else:
                yield Prediction(picture.path, _best(head, made, top))


def _best(head: Head, feature: NDArray[np.float32], top: int) -> tuple[tuple[str, float], ...]:
    (probabilities,) = head.probabilities(feature[None])
    best = np.argsort(-probabilities, kind="stable")[:top]
    return tuple((head.metadata.classes[label], float(probabilities[label])) for label in best)
