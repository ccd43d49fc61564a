"""Backbone files, validated as every device validates them: before ONNX Runtime opens them, and after."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import BackboneMismatch, GraphRefused
from protocol.models.cpu_session import cpu_session, reason
from protocol.models.onnx_metadata import BackboneMetadata, read_metadata
from protocol.models.onnx_validation import check_graph, check_versions
from protocol.models.slots import Slot, describe, mapped, slots_of


def read_backbone(path: Path, *, max_bytes: int) -> BackboneMetadata:
    """Return a file's metadata, without opening it in ONNX Runtime.

    Raises:
        BackboneMismatch: it is missing, broken, too large, has foreign or random operators or tensors in other files,
            or `export-backbone` has not written it.
    """
    try:
        properties = check_graph(mapped(path), max_bytes=max_bytes, deterministic=True)
    except GraphRefused as error:
        raise BackboneMismatch(f"cannot load {path.name}: {error}") from error
    return read_metadata(properties, BackboneMetadata)


def check_signature(
    name: str, metadata: BackboneMetadata, *, inputs: Mapping[str, Slot], outputs: Mapping[str, Slot]
) -> None:
    """Raise BackboneMismatch unless a backbone takes and gives what its metadata declares."""
    spec = metadata.preprocessing
    image = {"image": Slot(np.dtype(np.uint8), (None, spec.height, spec.width, 3))}
    feature = {"feature": Slot(np.dtype(np.float32), (None, metadata.feature_size))}
    if (inputs, outputs) != (image, feature):
        raise BackboneMismatch(
            f"{name} must take {describe(image)} and give {describe(feature)}, but takes {describe(inputs)} and gives "
            f"{describe(outputs)}: make it with export-backbone"
        )


def check_features(metadata: BackboneMetadata, features: NDArray[Any], *, images: int) -> None:
    """Raise BackboneMismatch unless the features of some images have the declared shape."""
    if features.shape != (expected := (images, metadata.feature_size)):
        raise BackboneMismatch(f"the backbone gave features of shape {features.shape}, not {expected}")


def check_backbone(path: Path, *, max_bytes: int) -> BackboneMetadata:
    """Return a file's metadata after running it on three images: black, gray and noise.

    Raises:
        RuntimeMissing: ONNX Runtime is not installed.
        BackboneMismatch: no device could use it.
    """
    metadata = read_backbone(path, max_bytes=max_bytes)
    try:
        check_versions(mapped(path))
    except GraphRefused as error:
        raise BackboneMismatch(f"cannot load {path.name}: {error}") from error
    shape = (metadata.preprocessing.height, metadata.preprocessing.width, 3)
    noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    images = np.stack([np.zeros(shape, np.uint8), np.full(shape, 127, np.uint8), noise])
    try:
        session = cpu_session(path)
    except Exception as error:  # ONNX Runtime has no error of its own to catch
        text = f"cannot load {path.name}: ONNX Runtime cannot load {path.name}: {reason(error)}"
        raise BackboneMismatch(text) from error
    try:
        inputs, outputs = slots_of(session.get_inputs()), slots_of(session.get_outputs())
    except GraphRefused as error:
        raise BackboneMismatch(f"cannot load {path.name}: {error}") from error
    check_signature(path.name, metadata, inputs=inputs, outputs=outputs)
    try:
        (features,) = session.run(["feature"], {"image": images})
    except Exception as error:
        raise BackboneMismatch(f"the backbone fails on its inputs: {reason(error)}") from error
    check_features(metadata, features, images=len(images))
    if not np.isfinite(features).all(axis=1).any():
        raise BackboneMismatch(
            f"{path.name} gives NaN or infinity for every image: make it with export-backbone"
        )
    return metadata
