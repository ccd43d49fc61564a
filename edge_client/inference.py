"""Heads on the device: opened, tested, evaluated, and used to predict, offline."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client.data.class_prior import NO_PRIOR, Adjuster, Prior, Source
from edge_client.data.extraction import Refusal, feature_batches
from edge_client.data.images import unlabeled
from edge_client.runtime.backbone import Backbone, open_backbone
from edge_client.runtime.onnx_model import OnnxModel, Slot, Tensors, describe, fit, open_model
from edge_client.runtime.program_graph import open_graph
from edge_client.runtime.session import Provider
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import InstalledHead, SubmissionReport
from edge_client.training.local_round import LocalModel, read_tensors, unpack
from protocol.errors import BackboneMismatch, BlobLost, ConfigError, GraphRefused, StateError
from protocol.models.onnx_metadata import HeadMetadata, read_metadata
from protocol.statistics.confidence import confidence_bins
from protocol.storage.blobstore import BlobStore
from protocol.wire.messages import BlobRef

SUM_TOLERANCE = 1e-3


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

    def probabilities(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return class probabilities, float32 (n, C), of features float32 (n, L).

        Raises:
            GraphRefused: the run fails, exceeds the time limit, or does not give a finite number for each class.
        """
        feeds = {"feature": features, **self.bound}
        probabilities: NDArray[np.float32] = self.model.run(feeds, ["probabilities"])["probabilities"]
        expected = (len(features), len(self.classes))
        if probabilities.shape != expected:
            raise GraphRefused(
                f"expected one probability per class, {expected}, got {probabilities.shape} from the head"
            )
        if not np.isfinite(probabilities).all():
            raise GraphRefused(
                "the head gives NaN or infinity, not one probability per class that add up to 1"
            )
        return probabilities

    @property
    def known_classes(self) -> list[int]:
        """The classes that have prototypes, by the round's tensor `present`; all without it."""
        present = self.bound.get("present", np.ones(len(self.classes)))
        return [int(label) for label in np.flatnonzero(present)]


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


def open_in_use(
    store: DeviceState, *, provider: Provider, threads: int | None, images: int = 1
) -> tuple[InstalledHead, list[Backbone], Head]:
    """Open the head in use and its backbones; the previous head if the one in use has failed too often in a row.

    `images` is the number of images to predict: of several, parts run at the same time.

    Raises:
        ConfigError: there is no head.
        StateError: a file was damaged on disk.
        GraphRefused: the head cannot be used.
    """
    installed = store.heads_in_use().installed
    if installed is None:
        text = f"no head in {store.folder}: run `edge-client --broker HOST` until one is installed"
        raise ConfigError(text)
    try:
        files = [(digest, store.blobs.verified_path(digest)) for digest in installed.backbones]
        with store.run_backbones(installed):
            backbones = [
                open_backbone(path, provider=provider, threads=threads, concurrent=images > 1, digest=digest)
                for digest, path in files
            ]
        with store.run_head(installed, is_part=True):
            return installed, backbones, open_installed(store.blobs, installed, backbones)
    except BlobLost as error:
        raise StateError(f"{error}: a running edge-client downloads it again") from error


def open_adjuster(store: DeviceState, head: Head, source: Source | None) -> Adjuster:
    """Open a prior for a head; None stands for `images`, and for `none` if the head is personal.

    Raises:
        ConfigError: the device has no labeled images of the head's classes, for `labels`.
    """
    labels = {each.name: each.images for each in store.get(SubmissionReport).classes}
    if source == "labels" and not labels.keys() & set(head.classes):
        raise ConfigError("no labeled images of the head's classes in a submission: use another --prior")
    return Adjuster(head.classes, source or ("none" if head.is_personal else "images"), labels=labels)


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
    return _tested(Head(metadata.classes, model, bound={}), metadata.feature_size)


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


def evaluate(
    head: Head,
    chunks: Iterable[NDArray[np.float32]],
    *,
    label: int,
    found: list[NDArray[np.float32]] | None = None,
    bins: NDArray[np.int64] | None = None,
) -> int:
    """Return how many of these features, all of class `label`, the head classifies correctly.

    The probabilities are appended to `found`, and the correct predictions and all are added to those of their
    confidence in `bins`, (2, CONFIDENCE_BINS).

    Raises:
        GraphRefused: it fails on them.
    """
    correct = 0
    for chunk in chunks:
        probabilities = head.probabilities(chunk)
        is_correct = probabilities.argmax(axis=1) == label
        correct += int(is_correct.sum())
        if bins is not None:
            places = confidence_bins(probabilities)
            for row, chosen in zip(bins, (places[is_correct], places), strict=True):
                np.add.at(row, chosen, 1)
        if found is not None:
            found.append(probabilities)
    return correct


def predict(  # noqa: PLR0913 - how images are read, run and adjusted
    paths: Iterable[Path],
    backbones: Sequence[Backbone],
    head: Head,
    *,
    top: int,
    adjuster: Adjuster | None = None,
    at_once: int = 1,
    on_progress: Callable[[int], None] = lambda _: None,
    batch_size: int = 16,
    run_head: Callable[[], AbstractContextManager[None]] = nullcontext,
    run_backbones: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[Prediction]:
    """Yield a prediction for each image, in order, with the `top` classes; for an unusable image, with the reason.

    Two batches of images are in memory at a time. The head runs within the context of `run_head`, and the backbones
    within that of `run_backbones`. Probabilities are adjusted by `adjuster` once there are those of `at_once` images;
    `on_progress` is called with the number of images for which there are any, after each batch.
    """
    images, done = map(unlabeled, paths), 0
    waiting: list[tuple[Path, NDArray[np.float32] | Refusal]] = []
    for batch in feature_batches(
        images, backbones, batch_size=batch_size, workers=2, run_backbones=run_backbones
    ):
        has_feature = any(not isinstance(feature, Refusal) for _, feature in batch)
        with run_head() if has_feature else nullcontext():
            waiting += [
                (
                    image.path,
                    feature if isinstance(feature, Refusal) else head.probabilities(feature[None])[0],
                )
                for image, feature in batch
            ]
        done += len(batch)
        on_progress(done)
        if len(waiting) >= at_once:
            yield from _predictions(waiting, head.classes, adjuster, top)
            waiting = []
    yield from _predictions(waiting, head.classes, adjuster, top)


def _predictions(
    found: Sequence[tuple[Path, NDArray[np.float32] | Refusal]],
    classes: Sequence[str],
    adjuster: Adjuster | None,
    top: int,
) -> Iterator[Prediction]:
    """Yield the predictions of images by their probabilities, float32 (C,), with one prior."""
    rows, prior = [row for _, row in found if not isinstance(row, Refusal)], NO_PRIOR
    if adjuster is not None and rows:
        adjusted, prior = adjuster.adjust(np.stack(rows))
        rows = list(adjusted)
    left = iter(rows)
    for path, row in found:
        if isinstance(row, Refusal):
            yield Prediction(path, error=f"{path}: {row.reason}")
        else:
            yield Prediction(path, best_classes(next(left), classes, top), prior=prior)


def best_classes(
    probabilities: NDArray[np.float32], classes: Sequence[str], top: int
) -> tuple[tuple[str, float], ...]:
    """Return the `top` most probable classes of an image, float32 (C,), with probabilities in descending order."""
    best = np.argsort(-probabilities, kind="stable")[:top]
    return tuple((classes[label], float(probabilities[label])) for label in best)
