"""Backbone and head together: labels and scores for pictures, offline."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.backbone import Backbone, open_session
from edge_client.images import decode
from protocol.errors import BackboneMismatch, UnreadablePicture
from protocol.metadata import HeadMetadata, head_metadata
from protocol.preprocessing import preprocess

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
    if metadata.backbone_sha256 != backbone.sha256:
        raise BackboneMismatch(
            f"the head is for backbone {metadata.backbone_sha256}, and the backbone here is {backbone.sha256}"
        )
    if metadata.feature_size != backbone.metadata.feature_size:
        raise BackboneMismatch(
            f"the head takes {metadata.feature_size} features, the backbone gives {backbone.metadata.feature_size}"
        )
    if classes is not None and tuple(classes) != metadata.classes:
        raise BackboneMismatch("the head's classes are not the task's")
    takes = [(value.name, value.type) for value in session.get_inputs()]
    gives = {value.name: value.type for value in session.get_outputs()}
    if takes != [("feature", "tensor(float)")] or gives.get("probabilities") != "tensor(float)":
        raise BackboneMismatch(f"expected feature -> probabilities, the head takes {takes} and gives {gives}")
    head = Head(metadata, session)
    _try_out(head)
    return head


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


def predict(paths: Iterable[Path], backbone: Backbone, head: Head, *, top: int) -> Iterator[Prediction]:
    """Say of each picture what it shows; one that cannot be read is told as such, and the rest go on."""
    for path in paths:
        try:
            pixels = preprocess(decode(path), backbone.metadata.preprocessing)
        except UnreadablePicture as error:
            yield Prediction(path, error=str(error))
            continue
        (probabilities,) = head.probabilities(backbone.features(pixels[None]))
        best = np.argsort(-probabilities, kind="stable")[:top]
        named = tuple((head.metadata.classes[label], float(probabilities[label])) for label in best)
        yield Prediction(path, named)
