"""Backbones and head together: labels and scores for images, offline."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.data.extraction import Refusal, feature_batches
from edge_client.data.images import unlabeled
from edge_client.runtime.backbone import Backbone, first_line
from edge_client.runtime.graph import Tensors, bind, open_checked, open_graph
from edge_client.runtime.onnx_validation import check_graph
from edge_client.runtime.watchdog import ending
from protocol.errors import BackboneMismatch, GraphRefused
from protocol.metadata import HeadMetadata, head_metadata

SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Head:
    """A trained head in ONNX Runtime.

    Args:
        classes: the C class names, in the order of its probabilities.
        feature_size: L, of all backbones together.
        session: ONNX Runtime's.
        bound: what it takes beside features.
    """

    classes: tuple[str, ...]
    feature_size: int
    session: Any
    bound: Tensors

    def probabilities(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Probabilities of the classes, float32 (n, C), of features float32 (n, L).

        Raises:
            GraphRefused: it fails on these.
        """
        try:
            with ending() as options:
                probabilities: NDArray[np.float32] = self.session.run(
                    ["probabilities"], {"feature": features, **self.bound}, options
                )[0]
        except Exception as error:  # ONNX Runtime has no error of its own to catch
            raise GraphRefused(f"the head does not run: {first_line(error)}") from error
        return probabilities


@dataclass(frozen=True)
class Prediction:
    """What a head says of one image.

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


def open_head(file: bytes, *, backbones: Sequence[Backbone], classes: Sequence[str] | None = None) -> Head:
    """Load a head that needs nothing but features, and try it out.

    Args:
        file: the ONNX file's bytes.
        backbones: what its features come from, in their order.
        classes: the task's classes, if they are known.

    Raises:
        BackboneMismatch: it is no head, or not for these backbones or classes.
        GraphRefused: it cannot be run here, or does not give probabilities.
    """
    metadata = head_metadata(check_graph(file))
    _check_origin(metadata, backbones, classes)
    session = open_checked(file)
    takes = [(value.name, value.type) for value in session.get_inputs()]
    gives = {value.name: value.type for value in session.get_outputs()}
    if takes != [("feature", "tensor(float)")] or gives.get("probabilities") != "tensor(float)":
        raise GraphRefused(f"expected feature -> probabilities, the head takes {takes} and gives {gives}")
    return _tried_out(Head(metadata.classes, metadata.feature_size, session, bound={}))


def open_round_head(
    file: bytes,
    *,
    state: Tensors,
    tensors: Tensors,
    local_prototypes: NDArray[np.float32],
    local_counts: NDArray[np.float32],
    feature_size: int,
    classes: Sequence[str],
) -> Head:
    """Load the head of a program, bind what it asks for, and try it out.

    Args:
        file: the ONNX file's bytes.
        state: the device's own.
        tensors: the round's; those named like a tensor of the state take its place.
        local_prototypes: the device's own, float32 (C, D); zeros for a class that it has none of.
        local_counts: images in each, float32 (C,).
        feature_size: L, of all backbones together.
        classes: the task's.

    Raises:
        GraphRefused: it asks for something else, it cannot be run here, or does not give probabilities.
    """
    graph = open_graph(file, role="head")
    if (graph.metadata.feature_size, graph.metadata.classes) != (feature_size, len(classes)):
        raise GraphRefused(
            f"expected a head for {feature_size} features and {len(classes)} classes, got one for "
            f"{graph.metadata.feature_size} and {graph.metadata.classes}"
        )
    local = {"local_prototypes": local_prototypes, "local_counts": local_counts}
    return _tried_out(
        Head(tuple(classes), feature_size, graph.session, bound=bind(graph, {**state, **tensors, **local}))
    )


def _check_origin(
    metadata: HeadMetadata, backbones: Sequence[Backbone], classes: Sequence[str] | None
) -> None:
    here = tuple(backbone.sha256 for backbone in backbones)
    if metadata.backbones != here:
        raise BackboneMismatch(
            f"the head is for backbone {', '.join(metadata.backbones)}, and the backbone here is {', '.join(here)}"
        )
    size = sum(backbone.metadata.feature_size for backbone in backbones)
    if metadata.feature_size != size:
        raise BackboneMismatch(f"the head takes {metadata.feature_size} features, the backbone gives {size}")
    if classes is not None and tuple(classes) != metadata.classes:
        named, expected = (", ".join(map(repr, names[:20])) for names in (metadata.classes, tuple(classes)))
        raise BackboneMismatch(
            f"the head's {len(metadata.classes)} classes are {named}; the task's are {expected}"
        )


def _tried_out(head: Head) -> Head:
    """See that a head gives probabilities, for no features and for some."""
    size = head.feature_size
    features = np.stack([np.zeros(size), np.random.default_rng(0).normal(size=size)]).astype(np.float32)
    probabilities = head.probabilities(features)
    good = probabilities.shape == (2, len(head.classes)) and np.isfinite(probabilities).all()
    if not good or np.abs(probabilities.sum(axis=1) - 1).max() > SUM_TOLERANCE:
        raise GraphRefused("the head does not give one probability per class that add up to 1")
    return head


def evaluate(head: Head, chunks: Iterable[NDArray[np.float32]], *, label: int) -> int:
    """How many of the features, all of class `label`, the head gets right.

    Raises:
        GraphRefused: it fails on them, or gives NaN or infinity.
    """
    right = 0
    for chunk in chunks:
        probabilities = head.probabilities(chunk)
        if not np.isfinite(probabilities).all():
            raise GraphRefused("the head gives NaN or infinity for images that are held out")
        right += int((probabilities.argmax(axis=1) == label).sum())
    return right


def predict(
    paths: Iterable[Path],
    backbones: Sequence[Backbone],
    head: Head,
    *,
    top: int,
    batch_size: int = 16,
    workers: int = 2,
) -> Iterator[Prediction]:
    """Say of each image, in order, what it shows; one that cannot be used is told as such, and the rest go on.

    Args:
        paths: any number of images; a few at a time are in memory.
        backbones: those the head is for, in their order.
        head: what names the classes.
        top: how many classes to name.
        batch_size: images in one run of a backbone.
        workers: threads that decode.
    """
    images = map(unlabeled, paths)
    for batch in feature_batches(images, backbones, batch_size=batch_size, workers=workers):
        for image, made in batch:
            if isinstance(made, Refusal):
                yield Prediction(image.path, error=f"{image.path}: {made.reason}")
            else:
                yield Prediction(image.path, _best(head, made, top))


def _best(head: Head, feature: NDArray[np.float32], top: int) -> tuple[tuple[str, float], ...]:
    (probabilities,) = head.probabilities(feature[None])
    best = np.argsort(-probabilities, kind="stable")[:top]
    return tuple((head.classes[label], float(probabilities[label])) for label in best)
