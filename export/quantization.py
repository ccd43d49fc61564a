"""Quantize the ONNX graph of a backbone to 8 bits, by ONNX Runtime's quantizer."""

import contextlib
import io
import logging
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnxruntime import GraphOptimizationLevel
from onnxruntime.quantization import CalibrationDataReader, QuantType
from onnxruntime.quantization.calibrate import MinMaxCalibrater
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

from protocol.errors import ProtofleetError
from protocol.models.cpu_session import cpu_options, cpu_session
from protocol.models.onnx_metadata import delete_notes

LAYERS = ("Conv", "Gemm", "MatMul")
"""Operators with weights, which take nearly all of the time."""

QUANTIZED = (
    *LAYERS,
    *("Add", "AveragePool", "Clip", "Concat", "GlobalAveragePool", "MaxPool", "Relu", "Reshape", "Transpose"),
)
"""Operators that are computed on 8 bits. The others are computed in float32, on quantized inputs."""

Image = NDArray[np.uint8]
"""An image as `preprocess` makes it, (H, W, 3)."""


@dataclass(frozen=True)
class Calibrated:
    """A float32 graph, and the range of values that each of its tensors takes on the images of the calibration."""

    model: onnx.ModelProto
    layers: Mapping[str, str]
    """Names of the nodes of LAYERS by the names of the layers."""
    _ranges: Any = field(repr=False)

    def to_int8(self, layers: Collection[str] | None = None) -> onnx.ModelProto:
        """Return the graph with these layers quantized, and what is between them; by default all but `stem`."""
        chosen = set(self.layers) - set(stem(self.model)) if layers is None else layers
        left_out = [node for layer, node in self.layers.items() if layer not in chosen]
        return self._quantized(nodes_to_quantize=[], nodes_to_exclude=[*left_out, *_float32(self.model)])

    def with_one_layer(self, layer: str) -> onnx.ModelProto:
        """Return the graph with one layer quantized: its weights, its input and its output."""
        return self._quantized(nodes_to_quantize=[self.layers[layer]], nodes_to_exclude=[])

    def _quantized(self, **nodes: list[str]) -> onnx.ModelProto:
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        try:
            with _quiet():
                quantizer = QDQQuantizer(
                    model,
                    per_channel=True,
                    reduce_range=False,
                    weight_qType=QuantType.QInt8,
                    activation_qType=QuantType.QUInt8,
                    tensors_range=self._ranges,
                    op_types_to_quantize=list(QUANTIZED),
                    extra_options={},
                    **nodes,
                )
                quantizer.quantize_model()
                quantizer.model.topological_sort()
            return _finished(quantizer.model.model, self.model)
        except Exception as error:  # it has no error class of its own
            raise ProtofleetError(f"ONNX Runtime cannot quantize the network: {error}") from error


def calibrate(model: onnx.ModelProto, images: Iterable[Image]) -> Calibrated:
    """Run a float32 graph on images, one by one, and keep the mean over them of each tensor's minimum and maximum.

    Means ignore what a few images alone reach, for which all others would have coarser steps.
    """
    with tempfile.TemporaryDirectory() as folder, _quiet():
        source = Path(folder) / "source.onnx"
        onnx.save_model(model, source)
        calibrator = MinMaxCalibrater(
            source, list(QUANTIZED), str(Path(folder) / "calibrated.onnx"), moving_average=True
        )
        calibrator.augment_graph()
        options = cpu_options()
        options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL  # keeps the tensors' names
        calibrator.infer_session = cpu_session(Path(calibrator.augmented_model_path), options)
        calibrator.collect_data(_Reader(images))
        ranges = calibrator.compute_data()
    return Calibrated(model, MappingProxyType(layer_names(model)), ranges)


def layer_names(model: onnx.ModelProto) -> dict[str, str]:
    """Return the names of the nodes of LAYERS by the names of their weights in the network, without `.weight`."""
    constants = {tensor.name for tensor in model.graph.initializer}
    names = {}
    for node in model.graph.node:
        if node.op_type in LAYERS:
            weight = next((name for name in node.input[1:2] if name in constants), node.name)
            name = weight.removeprefix("module.").removeprefix("network.").removesuffix(".weight")
            names[node.name if name in names else name] = node.name
    return names


def stem(model: onnx.ModelProto) -> list[str]:
    """Return the names of the first layer and of the depthwise layer directly after it; none without such a layer.

    They take little time, and their errors go through all other layers: of MobileNetV2's layers, quantizing these two
    does the most harm. With its first layer in float32, a ResNet-18 gained 2.4 times in speed instead of 3.2 times.
    """
    nodes = {node.name: node for node in model.graph.node}
    first_two = list(layer_names(model).items())[:2]
    return [name for name, _ in first_two] if _groups(nodes[first_two[-1][1]]) > 1 else []


def _groups(node: onnx.NodeProto) -> int:
    return max((attribute.i for attribute in node.attribute if attribute.name == "group"), default=1)


class _Reader(CalibrationDataReader):  # type: ignore[misc]  # it has no types
    def __init__(self, images: Iterable[Image]) -> None:
        self._images = iter(images)

    def get_next(self) -> dict[str, Image] | None:
        image = next(self._images, None)
        return None if image is None else {"image": image[None]}


def normalization(model: onnx.ModelProto) -> list[str]:
    """Return the nodes before the first layer: 8 bits of a normalized pixel are not those of the pixel."""
    names = []
    for node in model.graph.node:
        if node.op_type in LAYERS:
            break
        names.append(node.name)
    return names


def _float32(model: onnx.ModelProto) -> list[str]:
    """Return the nodes of `normalization`, and the concatenation of features: heads need more than 8 bits of it."""
    ends = [node.name for node in model.graph.node if node.op_type == "Concat" and "feature" in node.output]
    return [*normalization(model), *ends]


def _finished(model: onnx.ModelProto, source: onnx.ModelProto) -> onnx.ModelProto:
    """Return the quantizer's model with the source's operator sets and properties, and without its notes."""
    del model.opset_import[:]
    model.opset_import.extend(source.opset_import)
    delete_notes(model)
    model.metadata_props.extend(source.metadata_props)
    onnx.checker.check_model(model)
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what the quantizer prints, and its advice to preprocess: PyTorch's exporter has done that."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
