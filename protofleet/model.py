"""Trained classifiers of images, run with ONNX Runtime."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from edge_client.apps.head_in_use import HeadInUse
from edge_client.graphs.onnx_model import open_model
from edge_client.heads.class_prior import Adjuster, Reason, Setting, Source
from edge_client.heads.classifier import open_adjuster, predictions
from edge_client.heads.head import Head, Result, joined
from edge_client.store.device_state import DeviceState
from protocol.errors import BackboneMismatch, ConfigError, GraphRefused, ProtofleetError
from protocol.models.onnx_metadata import ModelMetadata, read_metadata
from protocol.models.preprocessing import Preprocessing
from protocol.models.slots import Slot, describe
from protocol.storage.state_folder import default_state_folder
from protocol.wire.messages import MAX_BLOB_BYTES
from protofleet.features import features_of
from protofleet.images import BATCH_SIZE, Batch, ImageSource, batches

if TYPE_CHECKING:
    from edge_client.graphs.session import Provider


@dataclass(frozen=True)
class Prediction:
    """The result for one image."""

    label: str
    """The most probable class."""
    answer: str
    """`unrecognized` for an image of no known class, `unsure` below the minimum probability, or the label."""
    probabilities: Mapping[str, float]
    """The probability of each class, in descending order."""
    head_version: int
    """The head's number in its task: each task begins with 1."""
    round: int | None
    """The round that trained the head; None without rounds."""
    head: str
    """sha256 of the head's file, in hex; with rounds, of the round's tensors."""
    task: str
    """sha256 of the task manifest, in hex; zeros for a head that `Head.save` wrote."""
    prior: Source = "none"
    """The origin of the prior to which the probabilities are adjusted."""
    prior_shares: Mapping[str, float] = field(default_factory=dict)
    """The prior: the share of each class; empty for `none`."""
    prior_reason: Reason = "as requested"
    """Why it is the prior."""
    known: bool | None = None
    """False for an image of no known class; None if the head has no threshold of novelty."""

    @property
    def probability(self) -> float:
        """The probability of the most probable class."""
        return self.probabilities[self.label]


@dataclass(frozen=True)
class _Opened:
    """A model that can be run."""

    head: Head
    run: Callable[[Batch], Result]
    specs: frozenset[Preprocessing]
    provider: str
    identity: Mapping[str, Any]
    """The fields of `Prediction` that name the head."""
    adjuster: Callable[[Setting], Adjuster]
    """Returns the prior of a setting; for `auto` the same one every time."""


class Model:
    """A classifier of images: frozen backbones and a head. Make one with `Model.load` or `Model.installed`.

    It is a context manager, which closes it.
    """

    def __init__(self, opened: Callable[[], _Opened], *, close: Callable[[], None] = lambda: None) -> None:
        self._opened = opened
        self._close = close

    def close(self) -> None:
        """Free the memory of its graphs, and the state directory of an installed model; it cannot be used then."""

        def closed() -> _Opened:
            raise ProtofleetError("the model is closed: open it again")

        self._opened = closed
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def classes(self) -> tuple[str, ...]:
        """The C class names, in the order of the probabilities."""
        return self._opened().head.classes

    @property
    def provider(self) -> str:
        """The execution provider that runs it, such as `cpu` or `cuda`."""
        return self._opened().provider

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, provider: "Provider" = "auto", threads: int | None = None
    ) -> "Model":
        """Open `model.onnx`: images to probabilities in one file, written by the aggregator or `Head.save`.

        Args:
            path: the file.
            provider: `cpu`, `cuda`, `tensorrt`, or `auto` for CUDA if available.
            threads: CPU threads of a run; None for all cores.

        Raises:
            RuntimeMissing: ONNX Runtime is not installed.
            BackboneMismatch: the file is no such model.
            GraphRefused: the file is broken, or may not be run here.
        """
        try:
            opened = open_model(
                Path(path),
                name="model",
                provider=provider,
                threads=threads,
                max_bytes=MAX_BLOB_BYTES,
                deterministic=True,
            )
            metadata = read_metadata(opened.properties, ModelMetadata)
        except (GraphRefused, BackboneMismatch) as error:
            raise type(error)(f"cannot load {Path(path).name}: {error}") from error
        specs = {name: each.preprocessing for name, each in metadata.backbones.items()}
        inputs = {
            name: Slot(np.dtype(np.uint8), (None, spec.height, spec.width, 3)) for name, spec in specs.items()
        }
        classes = metadata.head.classes
        if len(set(classes)) < len(classes):
            raise BackboneMismatch(f"{Path(path).name} names a class twice")
        output = Slot(np.dtype(np.float32), (None, len(classes)))
        if opened.inputs != inputs or opened.outputs.get("probabilities") != output:
            raise BackboneMismatch(
                f"{Path(path).name} must take {describe(inputs)} and give probabilities {output}, but takes "
                f"{describe(opened.inputs)} and gives {describe(opened.outputs)}"
            )

        head = Head(classes, opened, bound={}, novelty_threshold=metadata.head.novelty_threshold)

        def run(batch: Batch) -> Result:
            return head.run_on({name: batch[spec] for name, spec in specs.items()})

        digests = {"head": metadata.head_sha256, "task": metadata.head.task}
        identity = {"head_version": metadata.head.version, "round": None, **digests}

        auto = Adjuster(classes, "auto", labels={})

        def adjuster(prior: Setting) -> Adjuster:
            return auto if prior == "auto" else Adjuster(classes, prior, labels={})

        model = _Opened(head, run, frozenset(specs.values()), opened.provider, identity, adjuster)
        return cls(lambda: model)

    @classmethod
    def installed(
        cls,
        *,
        fleet: str = "default",
        state: str | os.PathLike[str] | None = None,
        provider: "Provider" = "auto",
        threads: int | None = None,
    ) -> "Model":
        """Open the head that a device has installed on this machine, with its backbones.

        Each call of `predict` uses the newest head: one that is installed later is opened then.

        Args:
            fleet: the fleet of the device, if there is no `state`.
            state: the device's state directory; None for the default one of the fleet.
            provider: as for `load`.
            threads: as for `load`.

        Raises:
            ConfigError: no head is installed.
            StateError: the state cannot be read, or a file was damaged on disk.
            GraphRefused: the head cannot be used.
        """
        folder = Path(state) if state is not None else default_state_folder(f"protofleet/{fleet}")
        store = DeviceState(folder, read_only=True)
        heads = HeadInUse(store, provider=provider, threads=threads)

        def opened() -> _Opened:
            found = heads.follow()
            return _Opened(
                found.head,
                lambda batch: found.head.run(features_of(batch, found.backbones)),
                frozenset(each.metadata.preprocessing for each in found.backbones),
                found.backbones[0].model.provider,
                found.installed.identity,
                lambda prior: found.adjuster if prior == "auto" else open_adjuster(store, found.head, prior),
            )

        try:
            opened()
        except BaseException:
            store.close()
            raise
        return cls(opened, close=store.close)

    def predict(
        self, image: ImageSource, *, prior: Setting = "auto", min_probability: float = 0.0
    ) -> Prediction:
        """Classify one image: a path, a Pillow image, or an array uint8 (H, W, 3).

        `prior` and `min_probability` are as for `predict_all`.

        Raises:
            UnreadableImage: it cannot be decoded.
            ConfigError: there is no such prior or probability, or the device has no labeled images.
        """
        return next(self.predict_all([image], prior=prior, min_probability=min_probability))

    def predict_all(
        self,
        images: Iterable[ImageSource],
        *,
        prior: Setting = "auto",
        min_probability: float = 0.0,
        batch_size: int = BATCH_SIZE,
    ) -> Iterator[Prediction]:
        """Yield a prediction for each image, in order; two batches of images are in memory at a time.

        Probabilities are adjusted to the classes of the place: with `labels` to those of the device's labeled images,
        with `images` to those of all these images, once they are read. `auto` chooses by the last 100 images of the
        model: the labeled images of an installed model as long as these are likelier, or else as estimated. With
        `none`, they are the head's. The `answer` is `unsure` where the most probable class is less probable than
        `min_probability`.

        Raises:
            UnreadableImage: an image cannot be decoded.
            ConfigError: there is no such prior or probability, or the device has no labeled images.
        """
        if not 0 <= min_probability <= 1:
            raise ConfigError(f"expected a min_probability from 0 to 1, got {min_probability}")
        if prior not in get_args(Setting):
            raise ConfigError(f"expected the prior auto, none, images or labels, got {prior!r}")
        model = self._opened()
        adjuster = model.adjuster(prior)
        parts = map(model.run, batches(images, model.specs, batch_size=batch_size))
        for part in [joined(list(parts))] if prior == "images" else parts:
            top = len(model.head.classes)
            for each in predictions(model.head, adjuster, part, top=top, min_probability=min_probability):
                yield Prediction(
                    each.label, each.answer, dict(each.top), **model.identity, known=each.known,
                    prior=each.prior.source, prior_shares=each.prior.shares, prior_reason=each.prior.reason,
                )  # fmt: skip

    def predict_proba(
        self, images: Iterable[ImageSource], *, batch_size: int = BATCH_SIZE
    ) -> NDArray[np.float32]:
        """Return class probabilities, float32 (n, C), of n images, without a prior; each row adds up to 1.

        Raises:
            ConfigError: there are no images.
            UnreadableImage: an image cannot be decoded.
        """
        model = self._opened()
        return joined(
            [model.run(batch) for batch in batches(images, model.specs, batch_size=batch_size)]
        ).probabilities
