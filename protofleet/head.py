"""Heads trained on the prototypes of several devices, as the aggregator trains them."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import OneShot, Training
from aggregator.algorithms.fedtc.head import Dense, logits_of, require_layers
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.novelty import ClassDirections, directions_of
from aggregator.algorithms.registry import configured
from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.config.schema import Robust
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.training_set import judged_set
from protocol.errors import ConfigError
from protocol.models.onnx_metadata import HeadMetadata
from protocol.storage.blobstore import write_atomically
from protofleet.packages import needed_packages
from protofleet.prototypes import check_prototypes

BackboneFiles: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""The file of a backbone, or the files of several in the order of their features."""

UNKNOWN = bytes(32).hex()
"""The digest in a head's metadata of a task or a backbone that it does not know."""

ROBUST = Robust()
"""The aggregator's protection against incorrect prototypes, with its defaults."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """A classifier of features.

    Attributes:
        classes: the C class names, in the order of its outputs.
        layers: dense layers as arrays.
        loss: mean cross-entropy on held-out prototypes; on all if none could be held out.
        quarantined: devices whose prototypes were omitted as outliers, with reasons.
        warning: why outliers were not quarantined; empty if there is nothing to say.
        directions: of the classes. A saved model computes the novelty of an image from them; it has no threshold, since
            that needs images which devices hold out.
        feature_map: the map of `statistics` from features to what the layers take; None for other algorithms.
    """

    classes: tuple[str, ...]
    layers: tuple[Dense, ...]
    loss: float
    quarantined: Mapping[str, str]
    warning: str = ""
    directions: ClassDirections | None = None
    feature_map: FeatureMap | None = None

    @property
    def feature_size(self) -> int:
        """Return L, the length of a feature."""
        if self.feature_map is not None:
            return self.feature_map.feature_size
        first = self.layers[0]
        return int((first.weight if first.projection is None else first.projection).shape[1])

    def logits(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return logits, float32 (n, C), of features float32 (n, L); raises ConfigError for another shape."""
        if np.ndim(features) != 2 or np.shape(features)[1] != self.feature_size:
            raise ConfigError(f"expected features (n, {self.feature_size}), got {np.shape(features)}")
        rows = np.asarray(features)
        if self.feature_map is not None:
            from aggregator.graphs.head_export import mapped

            rows = mapped(self.feature_map, rows.astype(np.float32))
        return logits_of(self.layers, rows)

    def predict_proba(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return class probabilities, float32 (n, C), of features float32 (n, L)."""
        logits = self.logits(features)
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(odds / odds.sum(axis=1, keepdims=True))

    def predict(self, features: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the label of the most probable class, int64 (n,), of each of n features."""
        return np.asarray(self.logits(features).argmax(axis=1), np.int64)

    @needed_packages("Head.to_onnx")
    def to_onnx(self, backbones: BackboneFiles = ()) -> bytes:
        """Return the head as an ONNX file, from `feature` float32 (n, L) to `probabilities` and `logits`.

        With the backbones' files, it is `model.onnx`: fused with them, images to probabilities.

        Raises:
            RuntimeMissing: a package of the extra `aggregator` is not installed.
            ConfigError: a backbone cannot be read.
            BackboneMismatch: the backbones do not give the head's features.
        """
        from aggregator.graphs.fused_model import fuse
        from aggregator.graphs.head_export import head_to_onnx

        files = [Path(backbones)] if isinstance(backbones, str | os.PathLike) else list(map(Path, backbones))
        try:
            contents = [file.read_bytes() for file in files]
        except OSError as error:
            raise ConfigError(f"cannot read the backbone {error.filename}: {error.strerror}") from error
        metadata = HeadMetadata(
            classes=self.classes,
            version=1,
            task=UNKNOWN,
            backbones=tuple(hashlib.sha256(content).hexdigest() for content in contents) or (UNKNOWN,),
            feature_size=self.feature_size,
            training={"loss": self.loss},
        )
        head = head_to_onnx(
            self.layers, metadata=metadata, feature_map=self.feature_map, directions=self.directions
        )
        return fuse(contents, head) if contents else head

    def save(self, path: str | os.PathLike[str], backbones: BackboneFiles) -> None:
        """Write `model.onnx`: the head fused with the backbones' files, images to probabilities.

        `Model.load` opens it, and so does any program with ONNX Runtime (docs/export.md).

        Raises:
            RuntimeMissing: a package of the extra `aggregator` is not installed.
            BackboneMismatch: the backbones do not give the head's features.
            ConfigError: there are no backbones, or one cannot be read.
            StateError: the file cannot be written.
        """
        if not backbones:
            raise ConfigError("expected the files of the head's backbones, got none: `to_onnx` needs none")
        write_atomically(Path(path), self.to_onnx(backbones))


@needed_packages("train_head")
def train_head(
    devices: Mapping[str, Prototypes] | Sequence[Prototypes],
    *,
    classes: Sequence[str] | int,
    algorithm: str | OneShot = "fedtc",
    recipe: Literal["default", "paper"] = "default",
    robust: Robust = ROBUST,
    seed: int = 0,
    device: str = "cpu",
    on_progress: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Head:
    """Train a head on the prototypes of several devices, by default FedTC's (eq. 5), as the aggregator does.

    By FedTC's default recipe, principal prototypes make a linear discriminant. Of batches alone, cross-validation
    chooses between it and an adapter, which needs torch: without torch there is none. The same prototypes and seed give
    the same head on the CPU.

    Args:
        devices: what `device_prototypes` or `batch_prototypes` returned on each device, by its name, or as a sequence.
        classes: the C class names, or their number.
        algorithm: `fedtc`, `fedncm`, or another one-shot algorithm of prototypes, installed or an instance.
        recipe: `default`, or `paper` for the training that the FedTC paper describes.
        robust: protection against incorrect prototypes, as `[robust]` in a task file.
        seed: of cross-validation and training.
        device: where an adapter is trained: `cpu`, `cuda`, or `auto` for CUDA if available.
        on_progress: called with `prototypes`, and during the training of an adapter with `epoch`, `epochs` and `loss`.
            If a device has principal prototypes, `prototypes` are the images in all of them.

    Raises:
        RuntimeMissing: a package of the extra `aggregator` is not installed, or of `train` for the recipe `paper`.
        ConfigError: there are no prototypes, prototypes of different lengths or not finite, labels that are no class,
            counts below 1, another recipe, or an algorithm that is not made of prototypes alone.
        ProtofleetError: the prototypes cannot be trained on.
    """
    if recipe not in RECIPES:
        raise ConfigError(f"expected a recipe out of {', '.join(RECIPES)}, got {recipe!r}")
    method = configured(algorithm, {}) if isinstance(algorithm, str) else algorithm
    if not isinstance(method, OneShot) or method.sums:
        raise ConfigError(f"expected a one-shot algorithm of prototypes, such as fedtc, got {method.name!r}")
    names = tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(classes)
    parts = devices if isinstance(devices, Mapping) else {str(at): part for at, part in enumerate(devices)}
    for part in parts.values():
        check_prototypes(part)
    parts = {name: part for name, part in parts.items() if len(part.every[0])}
    if not parts:
        raise ConfigError(
            "expected prototypes of at least one device, got none: give the devices more images"
        )
    if recipe == "paper" and any(part.block is not None for part in parts.values()):
        raise ConfigError("expected prototypes of batches for the paper's recipe, got principal prototypes")
    if not method.blocks and any(part.block is not None for part in parts.values()):
        raise ConfigError(f"expected prototypes of batches for {method.name}, got principal prototypes")
    greatest = max(int(part.every[0].max()) for part in parts.values())
    if greatest >= len(names):
        raise ConfigError(f"expected labels below {len(names)}, the number of classes, got {greatest}")
    if len(lengths := sorted({part.values.shape[1] for part in parts.values()})) > 1:
        raise ConfigError(
            f"expected prototypes of one length, got {lengths}: use the same backbones on all devices"
        )
    data, judgment, _ = judged_set(parts, classes=names, robust=robust)
    on_progress({"prototypes": len(data.labels) if data.scatter is None else int(data.counts.sum())})
    training = Training(recipe=recipe, seed=seed, device=device)
    trained = method.train(data, training, report=on_progress)
    require_layers(trained.layers, features=data.values.shape[1], classes=data.num_classes)
    return Head(
        classes=names,
        layers=trained.layers,
        loss=trained.loss,
        quarantined=judgment.quarantined,
        warning=judgment.warning,
        directions=directions_of(data),
    )
