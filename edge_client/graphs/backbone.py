"""The frozen backbone: images (n, H, W, 3) to features (n, L)."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client.graphs.onnx_model import OnnxModel, open_model
from edge_client.graphs.session import Provider
from protocol.errors import BackboneMismatch, GraphRefused, ProtofleetError
from protocol.models.backbone_file import check_features, check_signature
from protocol.models.onnx_metadata import BackboneMetadata, read_metadata
from protocol.storage.blobstore import file_digest
from protocol.wire.messages import MAX_BLOB_BYTES

MAX_IMAGE_S = 120.0
"""Time limit for a batch, for each image in it: far above what the slowest device needs."""

MAX_LOAD_S, MAX_ENGINE_S = 600.0, 3600.0
"""Time limits for loading a backbone, and for TensorRT, which builds an engine first."""


@dataclass(frozen=True)
class Backbone:
    """A frozen network that turns images into features."""

    sha256: str
    """Hex digest of its file."""
    metadata: BackboneMetadata
    model: OnnxModel

    @contextlib.contextmanager
    def isolated(self) -> Iterator["Backbone"]:
        """Yield the backbone with runs that have a process of their own each, on the CPU.

        Each takes as long as the backbone may take on one image, by its time on images of random pixels.

        Raises:
            GraphRefused: it fails on those.
        """
        spec = self.metadata.preprocessing
        pixels = np.random.default_rng(0).integers(0, 256, (1, spec.height, spec.width, 3), np.uint8)
        with self.model.isolated({"image": pixels}) as model:
            yield replace(self, model=model)

    def features(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the features, float32 (n, L), of images as `preprocess` makes them, uint8 (n, H, W, 3).

        Raises:
            BackboneMismatch: the features are not of the declared shape.
            ProtofleetError: the run fails, for example for lack of memory.
        """
        try:
            limit_s = MAX_IMAGE_S * len(images)
            features: NDArray[np.float32] = self.model.run({"image": images}, limit_s=limit_s)["feature"]
        except GraphRefused as error:
            raise ProtofleetError(
                f"{error} ({len(images)} images on {self.model.provider}): fewer at a time need less memory; lower "
                "--batch-size, or give `edge-client predict` fewer images"
            ) from error
        check_features(self.metadata, features, images=len(images))
        return features


def open_backbone(
    path: Path,
    *,
    provider: Provider = "auto",
    threads: int | None = None,
    concurrent: bool = True,
    digest: bytes = b"",
) -> Backbone:
    """Open an ONNX file written by `export-backbone`, as `open_session` does; `digest` is its sha256, if it is known.

    One image at a time needs `concurrent` false, so that several threads share it.

    Raises:
        RuntimeMissing: ONNX Runtime is not installed.
        BackboneMismatch: the file cannot be loaded, is no backbone, or not one that may be run here.
    """
    try:
        model = open_model(
            path,
            name="backbone",
            provider=provider,
            threads=threads,
            concurrent=concurrent,
            max_bytes=MAX_BLOB_BYTES,
            deterministic=True,
            max_load_s=MAX_ENGINE_S if provider == "tensorrt" else MAX_LOAD_S,
        )
    except GraphRefused as error:
        raise BackboneMismatch(f"cannot load {path.name}: {error}") from error
    metadata = read_metadata(model.properties, BackboneMetadata)
    check_signature(path.name, metadata, inputs=model.inputs, outputs=model.outputs)
    return Backbone(sha256=(digest or file_digest(path)).hex(), metadata=metadata, model=model)
