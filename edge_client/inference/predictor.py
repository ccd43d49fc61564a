"""Heads on the device: opened, tested, evaluated, and used to predict."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client.data.extraction import Refusal, feature_batches
from edge_client.data.images import unlabeled
from edge_client.runtime.backbone import Backbone
from edge_client.runtime.model import OnnxModel, Tensors, describe, open_model
from edge_client.runtime.program_graph import open_graph
from protocol.errors import BackboneMismatch, GraphRefused
from protocol.onnx_metadata import HeadMetadata, read_metadata

SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Head:
    """A trained classifier head.

    Args:
        classes: the C class names, in the order of its outputs.
        feature_size: L, of all backbones together.
        model: the opened file.
        bound: its inputs other than features.
    """

    classes: tuple[str, ...]
    feature_size: int
    model: OnnxModel
    bound: Tensors

    def probabilities(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return class probabilities, float32 (n, C), of features float32 (n, L).

        Raises:
            GraphRefused: the run fails or exceeds the time limit.
        """
        feeds = {"feature": features, **self.bound}
        probabilities: NDArray[np.float32] = self.model.run(feeds, ["probabilities"])["probabilities"]
        return probabilities


@dataclass(frozen=True)
class Prediction:
    """The result for one image.

    Args:
        top: the most probable classes with their probabilities, in descending order.
        error: why there is no prediction; empty if there is one.
    """

    path: Path
    top: tuple[tuple[str, float], ...] = ()
    error: str = ""

    @property
    def label(self) -> str:
        """The most probable class."""
        return self.top[0][0]


def open_head(file: bytes, *, backbones: Sequence[Backbone], classes: Sequence[str] | None = None) -> Head:
    """Open and test a head whose only input is features.

    Args:
        file: the ONNX file's bytes.
        backbones: those that compute its features, in order.
        classes: the task's classes, if known.

    Raises:
        BackboneMismatch: it is no head, or not for these backbones or classes.
        GraphRefused: it cannot run here, or does not give probabilities.
    """
    model = open_model(
        file,
        name="head",
        accept=lambda properties: _check_origin(read_metadata(properties, HeadMetadata), backbones, classes),
    )
    metadata = read_metadata(model.properties, HeadMetadata)
    dtypes = [slot.dtype for slot in (*model.inputs.values(), model.outputs.get("probabilities")) if slot]
    if list(model.inputs) != ["feature"] or dtypes != [np.float32, np.float32]:
        raise GraphRefused(
            "expected a head from feature to probabilities in float32, got one that takes "
            f"{describe(model.inputs)} and gives {describe(model.outputs)}"
        )
    return _tested(Head(metadata.classes, metadata.feature_size, model, bound={}))


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
    """Open and test the head of a program, bound to the tensors that it takes.

    Args:
        file: the ONNX file's bytes.
        state: the device's own.
        tensors: the round's; they replace tensors of the state with the same name.
        local_prototypes: the device's own, float32 (C, D); zeros for classes without images.
        local_counts: images in each, float32 (C,).
        feature_size: L, of all backbones together.
        classes: the task's.

    Raises:
        GraphRefused: it takes other tensors, cannot run here, or does not give probabilities.
    """
    graph = open_graph(file, role="head")
    if (graph.metadata.feature_size, graph.metadata.classes) != (feature_size, len(classes)):
        raise GraphRefused(
            f"expected a head for {feature_size} features and {len(classes)} classes, got one for "
            f"{graph.metadata.feature_size} and {graph.metadata.classes}"
        )
    local = {"local_prototypes": local_prototypes, "local_counts": local_counts}
    bound = graph.bind({**state, **tensors, **local})
    return _tested(Head(tuple(classes), feature_size, graph.model, bound))


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


def _tested(head: Head) -> Head:
    """Check that a head gives probabilities, for zeros and for random features, and return it."""
    size = head.feature_size
    features = np.stack([np.zeros(size), np.random.default_rng(0).normal(size=size)]).astype(np.float32)
    probabilities = head.probabilities(features)
    valid = probabilities.shape == (2, len(head.classes)) and np.isfinite(probabilities).all()
    if not valid or np.abs(probabilities.sum(axis=1) - 1).max() > SUM_TOLERANCE:
        raise GraphRefused("the head does not give one probability per class that add up to 1")
    return head


def evaluate(head: Head, chunks: Iterable[NDArray[np.float32]], *, label: int) -> int:
    """Return how many of these features, all of class `label`, the head classifies correctly.

    Raises:
        GraphRefused: it fails on them, or gives NaN or infinity.
    """
    correct = 0
    for chunk in chunks:
        probabilities = head.probabilities(chunk)
        if not np.isfinite(probabilities).all():
            raise GraphRefused("the head gives NaN or infinity for held-out images")
        correct += int((probabilities.argmax(axis=1) == label).sum())
    return correct


def predict(
    paths: Iterable[Path],
    backbones: Sequence[Backbone],
    head: Head,
    *,
    top: int,
    batch_size: int = 16,
    workers: int = 2,
) -> Iterator[Prediction]:
    """Yield a prediction for each image, in order; for an unusable image, one with the reason.

    Args:
        paths: any number of images; a few at a time are in memory.
        backbones: those that the head is for, in order.
        head: the classifier.
        top: classes to name.
        batch_size: images in one run of a backbone.
        workers: threads that decode.
    """
    images = map(unlabeled, paths)
    for batch in feature_batches(images, backbones, batch_size=batch_size, workers=workers):
        for image, feature in batch:
            if isinstance(feature, Refusal):
                yield Prediction(image.path, error=f"{image.path}: {feature.reason}")
            else:
                yield Prediction(image.path, _best(head, feature, top))


def _best(head: Head, feature: NDArray[np.float32], top: int) -> tuple[tuple[str, float], ...]:
    (probabilities,) = head.probabilities(feature[None])
    best = np.argsort(-probabilities, kind="stable")[:top]
    return tuple((head.classes[label], float(probabilities[label])) for label in best)
