"""Backbones with another mean and standard deviation of pixels, to find out which ones their weights need."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edge_client.runtime.backbone import Backbone
from protocol.models.onnx_metadata import BackboneMetadata
from protofleet.features import load_backbone
from protofleet.simulation.candidates import list_candidates
from protofleet.simulation.cross_validation import LOGISTIC, Estimate, cross_validate, split
from protofleet.simulation.dataset import Dataset

Normalization = tuple[tuple[float, float, float], tuple[float, float, float]]
"""Mean and standard deviation of pixels scaled to 0..1, for each channel."""

COMMON: Mapping[str, Normalization] = MappingProxyType(
    {
        "ImageNet's": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        "0.5 and 0.5": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    }
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Another normalization with which a backbone is more accurate, by `gain`."""

    backbone: Path
    name: str
    normalization: Normalization
    gain: Estimate


def check_normalization(
    file: Path,
    backbone: Backbone,
    *,
    load: Callable[[Sequence[Backbone]], Dataset],
    folds: int,
) -> list[Finding]:
    """Return the common normalizations that are more accurate than a backbone's own beyond the interval.

    The accuracy is that of a logistic regression, of the last layer if the file has it. `load` returns the features of
    images by backbones.
    """
    candidate = list_candidates([backbone.metadata])[0]
    found = []
    for name, other in other_normalizations(backbone.metadata).items():
        graph = renormalized(onnx.load(file), backbone.metadata, other)
        if graph is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            changed = Path(folder) / file.name
            changed.write_bytes(graph)
            parts = [load([each]) for each in (load_backbone(changed), backbone)]
        splits = split(parts[0].labels, folds=folds, draws=2, seed=0)
        theirs, own = (
            cross_validate(candidate.of(part), splits, [LOGISTIC])[LOGISTIC].accuracy for part in parts
        )
        gain = theirs.minus(own)
        if gain.mean > gain.margin:
            found.append(Finding(backbone=file, name=name, normalization=other, gain=gain))
    return found


def other_normalizations(metadata: BackboneMetadata) -> dict[str, Normalization]:
    """Return the common ones that a backbone does not have; none of 8 bits, whose ranges fit its own only."""
    if metadata.precision == "int8":
        return {}
    own = (*metadata.mean, *metadata.std)
    return {
        name: (mean, std)
        for name, (mean, std) in COMMON.items()
        if not np.allclose(own, (*mean, *std), atol=2e-3)
    }


def renormalized(model: onnx.ModelProto, metadata: BackboneMetadata, wanted: Normalization) -> bytes | None:
    """Return a backbone's file with another normalization of pixels; None if it has no conversion to floating point.

    A multiplication and an addition are put before the file's own normalization: it makes of a x + b what the wanted
    mean and deviation make of x. The same change to uint8 pixels would clip them.
    """
    own_mean, own_std, mean, std = (np.array(each) for each in (metadata.mean, metadata.std, *wanted))
    factor, shift = own_std / std, 255 * (own_mean - mean * own_std / std)
    graph, place = model.graph, _first_cast(model)
    if place is None:
        return None
    pixels = graph.node[place].output[0]
    for node in graph.node:
        node.input[:] = ["pixels_shifted" if name == pixels else name for name in node.input]
    shape = (3,) if graph.node[place].input[0] == "image" else (3, 1, 1)
    for name, values in (("pixels_factor", factor), ("pixels_shift", shift)):
        graph.initializer.append(numpy_helper.from_array(values.astype(np.float32).reshape(shape), name))
    graph.node.insert(place + 1, helper.make_node("Mul", [pixels, "pixels_factor"], ["pixels_scaled"]))
    graph.node.insert(
        place + 2, helper.make_node("Add", ["pixels_scaled", "pixels_shift"], ["pixels_shifted"])
    )
    return bytes(model.SerializeToString())


def _first_cast(model: onnx.ModelProto) -> int | None:
    """Return the number of the node that converts pixels to float32, which may be transposed before."""
    tensors = {"image"}
    for number, node in enumerate(model.graph.node):
        if tensors & set(node.input):
            if node.op_type == "Cast":
                return number
            tensors |= set(node.output)
    return None
