"""Opens and tests the heads that a device runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_client.graphs.backbone import Backbone
from edge_client.graphs.onnx_model import OnnxModel, Tensors, fit, open_model
from edge_client.graphs.program_graph import open_graph
from edge_client.store.stored_values import InstalledHead
from edge_client.training.local_round import LocalModel, read_tensors, unpack
from protocol.errors import BackboneMismatch, ConfigError, GraphRefused
from protocol.models.onnx_metadata import HeadMetadata, read_metadata
from protocol.models.slots import Slot, describe
from protocol.storage.blobstore import BlobStore
from protocol.wire.messages import BlobRef

SUM_TOLERANCE = 1e-3


class Result(NamedTuple):
    """A head's result for n images."""

    probabilities: NDArray[np.float32]
    """(n, C)."""
    novelty: NDArray[np.float32] | None
    """(n,); None if the head has none."""

    def row(self, number: int) -> "Result":
        """Return the result for one image."""
        one = slice(number, number + 1)
        return Result(self.probabilities[one], None if self.novelty is None else self.novelty[one])


def joined(results: Sequence[Result]) -> Result:
    """Return one result for all images of these results of a head; raises ConfigError if there are none."""
    if not results:
        raise ConfigError("expected at least one image, got none: check the folder or pattern")
    novelty = [each.novelty for each in results if each.novelty is not None]
    probabilities = np.concatenate([each.probabilities for each in results])
    return Result(probabilities, np.concatenate(novelty) if novelty else None)


@dataclass(frozen=True)
class Head:
    """A trained classifier head."""

    classes: tuple[str, ...]
    """C names, in the order of its outputs."""
    model: OnnxModel
    bound: Tensors
    """Its inputs other than features."""
    is_personal: bool = False
    """Some of them are the device's own: it may expect the device's classes already."""
    novelty_threshold: float | None = None
    """The novelty above which an image is of no known class; None if there is none."""

    @property
    def has_novelty(self) -> bool:
        """True if `run` returns the novelty of each image."""
        return self.model.outputs.get("novelty") == Slot(np.dtype(np.float32), (None,))

    def known(self, result: Result) -> NDArray[np.bool_] | None:
        """Return False for each image, (n,), whose novelty exceeds the threshold; None if there is no threshold."""
        if result.novelty is None or self.novelty_threshold is None:
            return None
        return result.novelty <= self.novelty_threshold

    def probabilities(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return class probabilities, float32 (n, C), of features float32 (n, L); the errors are those of `run`."""
        return self.run(features)[0]

    def run(self, features: NDArray[np.float32]) -> Result:
        """Return the result for features float32 (n, L); the errors are those of `run_on`."""
        return self.run_on({"feature": features, **self.bound})

    def run_on(self, feeds: Tensors) -> Result:
        """Return the result for the graph's inputs, of which the first one has a row for each image.

        Raises:
            GraphRefused: the run fails, exceeds the time limit, or does not give a finite number for each class.
        """
        images = len(next(iter(feeds.values())))
        names = ["probabilities", "novelty"] if self.has_novelty else ["probabilities"]
        outputs = self.model.run(feeds, names)
        probabilities: NDArray[np.float32] = outputs["probabilities"]
        novelty: NDArray[np.float32] | None = outputs.get("novelty")
        expected = (images, len(self.classes))
        if probabilities.shape != expected:
            raise GraphRefused(
                f"expected one probability per class, {expected}, got {probabilities.shape} from the head"
            )
        if not np.isfinite(probabilities).all():
            raise GraphRefused(
                "the head gives NaN or infinity, not one probability per class that add up to 1"
            )
        if novelty is not None and not (novelty.shape == (images,) and np.isfinite(novelty).all()):
            raise GraphRefused("the head does not give a finite novelty for each image")
        return Result(probabilities, novelty)

    @property
    def known_classes(self) -> list[int]:
        """The classes that have prototypes, by the round's tensor `present`; all without it."""
        present = self.bound.get("present", np.ones(len(self.classes)))
        return [int(label) for label in np.flatnonzero(present)]


def open_installed(blobs: BlobStore, installed: InstalledHead, backbones: Sequence[Backbone]) -> Head:
    """Open a head from its stored description; in tasks with rounds, bind it to the round's tensors and local model.

    Raises:
        BackboneMismatch: it is not for these backbones or classes.
        GraphRefused: it cannot be used.
        StateError: a part of it is missing.
    """
    if not installed.tensors:
        file = blobs.read(installed.head)
        return open_head(file, backbones=backbones, classes=installed.classes)
    local_model = unpack(blobs.read(installed.local_model))
    reference = BlobRef(digest=installed.tensors, size_bytes=0, name="the round's tensors")
    return open_round_head(
        blobs.read(installed.head),
        local_model=local_model,
        tensors=read_tensors(blobs, reference),
        feature_size=installed.feature_size,
        classes=installed.classes,
    )


def open_head(file: bytes, *, backbones: Sequence[Backbone], classes: Sequence[str] | None = None) -> Head:
    """Open and test a head whose only input is features, from the ONNX file's bytes.

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
    threshold = metadata.novelty_threshold
    return _tested(Head(metadata.classes, model, {}, novelty_threshold=threshold), metadata.feature_size)


def open_round_head(
    file: bytes,
    *,
    local_model: LocalModel,
    tensors: Tensors,
    feature_size: int,
    classes: Sequence[str],
) -> Head:
    """Open and test the head of a program, bound to the local model and to the round's tensors.

    A tensor of the round replaces the one of the local model with the same name.

    Raises:
        GraphRefused: it takes other tensors, cannot run here, or does not give probabilities.
    """
    graph = open_graph(file, role="head")
    if (graph.metadata.feature_size, graph.metadata.classes) != (feature_size, len(classes)):
        raise GraphRefused(
            f"expected a head for {feature_size} features and {len(classes)} classes, got one for "
            f"{graph.metadata.feature_size} and {graph.metadata.classes}"
        )
    local = {"local_prototypes": local_model.prototypes, "local_counts": local_model.counts}
    bound = graph.bind({**local_model.state, **tensors, **local})
    if "present" in bound:
        fit("present", bound["present"], Slot(bound["present"].dtype, (len(classes),)))
    is_personal = not bound.keys() <= tensors.keys()
    return _tested(Head(tuple(classes), graph.model, bound, is_personal), feature_size)


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


def _tested(head: Head, size: int) -> Head:
    """Check that a head gives probabilities, for zeros and for features of both signs (2, size), and return it."""
    # Not random ones: importing numpy.random takes as long as all that follows.
    features = np.stack([np.zeros(size), 2 * np.sin(np.arange(1, size + 1) ** 2)]).astype(np.float32)
    probabilities = head.probabilities(features)
    if np.abs(probabilities.sum(axis=1) - 1).max() > SUM_TOLERANCE:
        raise GraphRefused("the head does not give one probability per class that add up to 1")
    return head
