"""Any torch network of pictures as an ONNX file that a device can use, compared before it is written."""

import contextlib
import hashlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from export.parity import Reference, compare, sample_photos
from protocol.blobstore import write_atomically
from protocol.errors import ProtofleetError
from protocol.metadata import BackboneMetadata, to_properties
from protocol.preprocessing import preprocess

OPSET = 18
"""ONNX operator set: ONNX Runtime runs it since 1.14."""

TOLERANCE = 1e-3
"""Largest relative error of a feature."""


@dataclass(frozen=True)
class Exported:
    """A backbone file that was written."""

    path: Path
    sha256: str
    size_bytes: int
    metadata: BackboneMetadata


class _Normalised(nn.Module):
    """uint8 (n, H, W, 3) pictures to features (n, L): the network behind its own normalisation."""

    def __init__(self, module: nn.Module, metadata: BackboneMetadata) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("mean", torch.tensor(metadata.mean).reshape(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(metadata.std).reshape(1, 3, 1, 1))
        self.mean: Tensor
        self.std: Tensor

    def forward(self, image: Tensor) -> Tensor:
        """Return the features."""
        pixels = image.permute(0, 3, 1, 2).to(torch.float32) / 255
        features: Tensor = self.module((pixels - self.mean) / self.std)
        return features


def to_onnx(module: nn.Module, metadata: BackboneMetadata) -> bytes:
    """A network as an ONNX file.

    Args:
        module: normalised float32 (n, 3, H, W) to float32 (n, L), on the CPU, in evaluation mode.
        metadata: what the file says of itself; its mean and std go into the graph.

    Returns:
        A file with input `image` uint8 (n, H, W, 3) and output `feature` float32 (n, L), n dynamic.

    Raises:
        ProtofleetError: torch cannot export the network.
    """
    spec = metadata.preprocessing
    example = torch.zeros(2, spec.height, spec.width, 3, dtype=torch.uint8)
    try:
        with _quiet(), torch.inference_mode():
            program = torch.onnx.export(
                _Normalised(module, metadata).eval(),
                (example,),
                input_names=["image"],
                output_names=["feature"],
                dynamic_shapes={"image": {0: torch.export.Dim("n")}},
                opset_version=OPSET,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ProtofleetError(f"torch cannot export {metadata.model}: {reason}") from error
    if program is None:
        raise ProtofleetError(f"torch exported no graph of {metadata.model}")
    model = program.model_proto
    del model.metadata_props[:]
    for part in (
        *model.graph.node,
        *model.graph.value_info,
        *model.graph.input,
        *model.graph.output,
        model.graph,
    ):
        del part.metadata_props[:]  # the exporter's notes: stack traces with the paths of this machine
        part.doc_string = ""
    onnx.helper.set_model_props(model, to_properties(metadata))
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def export_module(
    module: nn.Module,
    metadata: BackboneMetadata,
    *,
    path: Path,
    reference: Reference | None = None,
    photos: Sequence[Image.Image] | None = None,
    tolerance: float = TOLERANCE,
) -> Exported:
    """Write a network as an ONNX file, once it was compared with torch on real photographs.

    Args:
        module: normalised float32 (n, 3, H, W) to float32 (n, L), on the CPU, in evaluation mode.
        metadata: what is known of it; the parity is filled in.
        path: where the file goes.
        reference: what the features should be; the device's preprocessing and the network itself if None.
        photos: what to compare on; scikit-learn's two photographs if None.
        tolerance: largest relative error, |onnx - torch| / |torch|.

    Raises:
        ProtofleetError: torch cannot export it, or the features differ: then there is no file.
        StateError: the file cannot be written.
    """
    chosen = sample_photos() if photos is None else photos
    file = to_onnx(module, metadata)
    parity = compare(
        file,
        preprocessing=metadata.preprocessing,
        reference=reference or _own_reference(module, metadata),
        photos=chosen,
    )
    if not parity.relative_error <= tolerance:
        raise ProtofleetError(
            f"{metadata.model} in ONNX Runtime is not what it is in torch: relative error "
            f"{parity.relative_error:.2g}, more than {tolerance:.2g} (cosine {parity.cosine:.6f}); no file was written"
        )
    file = _with_metadata(file, msgspec.structs.replace(metadata, parity=parity))
    write_atomically(path, file)
    return Exported(
        path=path,
        sha256=hashlib.sha256(file).hexdigest(),
        size_bytes=len(file),
        metadata=msgspec.structs.replace(metadata, parity=parity),
    )


def feature_size(module: nn.Module, *, height: int, width: int) -> int:
    """L: how many values the network gives for a picture."""
    with torch.inference_mode():
        return int(module(torch.zeros(2, 3, height, width)).shape[1])


def _own_reference(module: nn.Module, metadata: BackboneMetadata) -> Reference:
    graph = _Normalised(module, metadata).eval()

    def feature(picture: Image.Image) -> NDArray[np.float32]:
        image = torch.from_numpy(preprocess(picture, metadata.preprocessing).copy())
        with torch.inference_mode():
            values: NDArray[np.float32] = graph(image[None])[0].numpy()
        return values

    return feature


def _with_metadata(file: bytes, metadata: BackboneMetadata) -> bytes:
    model = onnx.load_from_string(file)
    onnx.helper.set_model_props(model, to_properties(metadata))
    return bytes(model.SerializeToString())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's chatter out of the log."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
