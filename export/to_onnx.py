"""Export a PyTorch image network to an ONNX file, after comparing the two."""

import difflib
import hashlib
import io
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
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
from protocol.errors import BackboneMismatch, ProtofleetError
from protocol.log import warnings_suppressed
from protocol.models.backbone_file import check_backbone
from protocol.models.onnx_metadata import BackboneMetadata, delete_notes, to_properties
from protocol.models.preprocessing import preprocess
from protocol.storage.blobstore import write_atomically
from protocol.wire.messages import MAX_BLOB_BYTES

OPSET = 18
"""ONNX operator set, supported since ONNX Runtime 1.14."""

TOLERANCE = 1e-3
"""Maximum relative error of a feature."""

Conversion = Callable[[bytes, BackboneMetadata, Reference], tuple[onnx.ModelProto, BackboneMetadata]]
"""Takes a float32 file and PyTorch's features to another graph with its metadata and parity."""


@dataclass(frozen=True)
class Exported:
    """An exported backbone file."""

    path: Path
    sha256: str
    size_bytes: int
    metadata: BackboneMetadata


@dataclass(frozen=True)
class Candidate:
    """A backbone's float32 file before it is compared with its source."""

    file: bytes
    metadata: BackboneMetadata
    """The metadata, still without `parity`."""
    reference: Reference
    """The source's features of a photo."""
    source: str
    """PyTorch, or the name of another program's file."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How images are preprocessed, in the format of timm's data config."""
    assumed: tuple[str, ...] = ()
    """Names in `settings` that nothing gives."""


class _Normalized(nn.Module):
    """A network with its normalization: uint8 (n, H, W, 3) images to features (n, L)."""

    def __init__(self, module: nn.Module, metadata: BackboneMetadata) -> None:
        super().__init__()
        mean, std = torch.tensor(metadata.mean), torch.tensor(metadata.std)
        self.module = module
        # (x / 255 - mean) / std as one multiplication and one addition.
        self.register_buffer("scale", (1 / (255 * std)).reshape(3, 1, 1))
        self.register_buffer("shift", (-mean / std).reshape(3, 1, 1))
        self.scale: Tensor
        self.shift: Tensor

    def forward(self, image: Tensor) -> Tensor:
        pixels = image.permute(0, 3, 1, 2).to(torch.float32)
        features: Tensor = self.module(pixels * self.scale + self.shift)
        return features


def to_onnx(module: nn.Module, metadata: BackboneMetadata) -> bytes:
    """Return a network as an ONNX file, with mean and std as a part of it; the same network gives the same bytes.

    The module takes normalized float32 (n, 3, H, W) to float32 (n, L), on the CPU, in evaluation mode; the file takes
    `image` uint8 (n, H, W, 3) to `feature` float32 (n, L), with dynamic n.

    Raises:
        ProtofleetError: PyTorch cannot export the network.
    """
    spec = metadata.preprocessing
    example = torch.zeros(2, spec.height, spec.width, 3, dtype=torch.uint8)
    network = _Normalized(module, metadata).eval()
    try:
        model = _by_tracing_symbols(network, example)
    except Exception as error:
        refused = f"torch cannot export {metadata.model}: {first_words(error)}"
        if "data-dependent" in str(error):  # the older exporter would record what one image takes
            raise ProtofleetError(refused) from error
        try:
            model = _by_tracing_calls(network, example)
        except Exception as second:
            raise ProtofleetError(f"{refused}; its older exporter: {first_words(second)}") from error
    return with_metadata(model, metadata)


def _by_tracing_symbols(network: nn.Module, example: Tensor) -> onnx.ModelProto:
    """Return the graph by `torch.export`, which some networks do not support."""
    with warnings_suppressed(), torch.inference_mode():
        program: Any = torch.onnx.export(
            network,
            (example,),
            input_names=["image"],
            output_names=["feature"],
            dynamic_shapes={"image": {0: torch.export.Dim("n")}},
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    return _checked(program.model_proto)


def _by_tracing_calls(network: nn.Module, example: Tensor) -> onnx.ModelProto:
    """Return the graph by PyTorch's older exporter, which records the calls for one batch.

    A number that it records may hold for that batch alone: the comparison with PyTorch has another size of batch.
    """
    file = io.BytesIO()
    with warnings_suppressed(), torch.no_grad():
        torch.onnx.export(
            network,
            (example,),
            file,  # type: ignore[arg-type]  # a file is documented, too
            input_names=["image"],
            output_names=["feature"],
            dynamic_axes={"image": {0: "n"}, "feature": {0: "n"}},
            opset_version=OPSET,
            dynamo=False,
        )
        features = network(example).shape[1]
    model = onnx.load_from_string(file.getvalue())
    # It may leave the length open.
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = features
    return _checked(model)


def _checked(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without the exporter's notes."""
    got = next(entry.version for entry in model.opset_import if not entry.domain)
    if got != OPSET:  # PyTorch silently falls back to a set that it supports
        raise ValueError(f"the graph has opset {got}")
    delete_notes(model)
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
    convert: Conversion | None = None,
) -> Exported:
    """Write `to_onnx`'s file with its parity, after comparing it with PyTorch on photos.

    Without a reference, the module with the device's preprocessing computes the expected features. The other arguments
    and errors are those of `write_compared`.

    Raises:
        ProtofleetError: PyTorch cannot export the network.
    """
    candidate = Candidate(
        to_onnx(module, metadata), metadata, reference or _own_reference(module, metadata), "PyTorch"
    )
    return write_compared(candidate, path=path, photos=photos, tolerance=tolerance, convert=convert)


def write_compared(
    candidate: Candidate,
    *,
    path: Path,
    photos: Iterable[Image.Image] | None = None,
    tolerance: float = TOLERANCE,
    convert: Conversion | None = None,
) -> Exported:
    """Write a backbone's file with its parity, after comparing it with its source on photos.

    Without photos, scikit-learn's two are compared. `tolerance` is the maximum of |onnx - source| / |source|. `convert`
    makes the file that is written of the one that was compared.

    Raises:
        ProtofleetError: the features differ, or devices would refuse the file; no file is written; or `convert` does.
        StateError: the file cannot be written.
    """
    metadata = candidate.metadata
    parity = compare(
        candidate.file,
        preprocessing=metadata.preprocessing,
        reference=candidate.reference,
        photos=sample_photos() if photos is None else photos,
    )
    if not parity.relative_error <= tolerance:
        raise ProtofleetError(
            f"{metadata.model} differs between ONNX Runtime and {candidate.source}: expected a relative error of at "
            f"most {tolerance:.2g}, got {parity.relative_error:.2g} (cosine {parity.cosine:.6f}); no file was written"
        )
    if convert is None:
        model, measured = (
            onnx.load_from_string(candidate.file),
            msgspec.structs.replace(metadata, parity=parity),
        )
    else:
        model, measured = convert(candidate.file, metadata, candidate.reference)
    file = with_metadata(model, measured)
    _check_as_devices(file, path.name)
    write_atomically(path, file)
    return Exported(
        path=path, sha256=hashlib.sha256(file).hexdigest(), size_bytes=len(file), metadata=measured
    )


def _check_as_devices(file: bytes, name: str) -> None:
    """Raise ProtofleetError if devices would refuse a backbone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(file)
        try:
            check_backbone(path, max_bytes=MAX_BLOB_BYTES)
        except BackboneMismatch as error:
            raise ProtofleetError(f"devices would refuse the file, and none was written: {error}") from error


def suggestion(name: str, known: Collection[str], shown: Collection[str] = ()) -> str:
    """Return the close ones of the known names, or else those that are shown, by default all."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else f"it has {', '.join(shown or known)}"


def first_words(error: BaseException) -> str:
    """Return the first sentence of a library's error message."""
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


def with_metadata(model: onnx.ModelProto, metadata: BackboneMetadata) -> bytes:
    """Return a model with its metadata as a file."""
    onnx.helper.set_model_props(model, to_properties(metadata))
    return bytes(model.SerializeToString(deterministic=True))
