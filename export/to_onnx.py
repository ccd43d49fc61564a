"""Any torch network of images as an ONNX file that a device can use, compared before it is written."""

import contextlib
import hashlib
import logging
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from export.parity import Reference, compare, sample_photos
from protocol.errors import ProtofleetError
from protocol.metadata import BackboneMetadata, to_properties
from protocol.preprocessing import preprocess
from protocol.storage.blobstore import write_atomically

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


class _Normalized(nn.Module):
    """uint8 (n, H, W, 3) images to features (n, L): the network behind its own normalization."""

    def __init__(self, module: nn.Module, metadata: BackboneMetadata) -> None:
        super().__init__()
        mean, std = torch.tensor(metadata.mean), torch.tensor(metadata.std)
        self.module = module
        # (x / 255 - mean) / std in two passes over the pixels instead of three.
        self.register_buffer("scale", (1 / (255 * std)).reshape(3, 1, 1))
        self.register_buffer("shift", (-mean / std).reshape(3, 1, 1))
        self.scale: Tensor
        self.shift: Tensor

    def forward(self, image: Tensor) -> Tensor:
        """Return the features."""
        pixels = image.permute(0, 3, 1, 2).to(torch.float32)
        features: Tensor = self.module(pixels * self.scale + self.shift)
        return features


def to_onnx(module: nn.Module, metadata: BackboneMetadata, *, opset: int = OPSET) -> bytes:
    """A network as an ONNX file.

    Args:
        module: normalized float32 (n, 3, H, W) to float32 (n, L), on the CPU, in evaluation mode.
        metadata: what the file says of itself; its mean and std go into the graph.
        opset: ONNX operator set, 18 or newer.

    Returns:
        A file with input `image` uint8 (n, H, W, 3) and output `feature` float32 (n, L), n dynamic. The same
        network gives the same bytes.

    Raises:
        ProtofleetError: torch cannot export the network.
    """
    spec = metadata.preprocessing
    example = torch.zeros(2, spec.height, spec.width, 3, dtype=torch.uint8)
    try:
        with _quiet(), torch.inference_mode():
            program = torch.onnx.export(
                _Normalized(module, metadata).eval(),
                (example,),
                input_names=["image"],
                output_names=["feature"],
                dynamic_shapes={"image": {0: torch.export.Dim("n")}},
                opset_version=opset,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        model = _checked(program, opset=opset)
    except Exception as error:
        raise ProtofleetError(
            f"torch cannot export {metadata.model} at opset {opset}: {first_words(error)}"
        ) from error
    return _with_metadata(model, metadata)


def _checked(program: Any, *, opset: int) -> onnx.ModelProto:
    """The graph without the exporter's notes, which are stack traces with the paths of this machine."""
    model: onnx.ModelProto = program.model_proto
    got = next(entry.version for entry in model.opset_import if not entry.domain)
    if got != opset:  # torch falls back to the set it knows, without a word
        raise ValueError(f"its graph is of opset {got}")
    graph = model.graph
    parts = (model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer)
    for part in parts:
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    onnx.checker.check_model(model)
    return model


def export_module(
    module: nn.Module,
    metadata: BackboneMetadata,
    *,
    path: Path,
    reference: Reference | None = None,
    photos: Iterable[Image.Image] | None = None,
    tolerance: float = TOLERANCE,
    opset: int = OPSET,
) -> Exported:
    """Write a network as an ONNX file, once it was compared with torch on real photographs.

    Args:
        module: normalized float32 (n, 3, H, W) to float32 (n, L), on the CPU, in evaluation mode.
        metadata: what is known of it; the parity is filled in.
        path: where the file goes.
        reference: what the features should be; the device's preprocessing and the network itself if None.
        photos: what to compare on; scikit-learn's two photographs if None.
        tolerance: largest relative error, |onnx - torch| / |torch|.
        opset: ONNX operator set, 18 or newer.

    Raises:
        ProtofleetError: torch cannot export it, or the features differ: then there is no file.
        StateError: the file cannot be written.
    """
    file = to_onnx(module, metadata, opset=opset)
    parity = compare(
        file,
        preprocessing=metadata.preprocessing,
        reference=reference or _own_reference(module, metadata),
        photos=sample_photos() if photos is None else photos,
    )
    if not parity.relative_error <= tolerance:
        raise ProtofleetError(
            f"{metadata.model} in ONNX Runtime is not what it is in torch: relative error "
            f"{parity.relative_error:.2g}, more than {tolerance:.2g} (cosine {parity.cosine:.6f}); "
            "no file was written"
        )
    measured = msgspec.structs.replace(metadata, parity=parity)
    file = _with_metadata(onnx.load_from_string(file), measured)
    write_atomically(path, file)
    return Exported(
        path=path, sha256=hashlib.sha256(file).hexdigest(), size_bytes=len(file), metadata=measured
    )


def first_words(error: Exception) -> str:
    """The first sentence of an error that somebody else wrote, to stand inside a line of ours."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(".")[:200]


def _own_reference(module: nn.Module, metadata: BackboneMetadata) -> Reference:
    graph = _Normalized(module, metadata).eval()

    def feature(photo: Image.Image) -> NDArray[np.float32]:
        image = torch.from_numpy(preprocess(photo, metadata.preprocessing).copy())
        with torch.inference_mode():
            values: NDArray[np.float32] = graph(image[None])[0].numpy()
        return values

    return feature


def _with_metadata(model: onnx.ModelProto, metadata: BackboneMetadata) -> bytes:
    onnx.helper.set_model_props(model, to_properties(metadata))
    return bytes(model.SerializeToString(deterministic=True))


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
