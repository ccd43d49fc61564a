"""Convert an exported backbone to float16 for GPUs, and compare its features with PyTorch's."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.onnx_model import ONNXModel
from onnxruntime.transformers.float16 import convert_float_to_float16

from export.parity import Reference, compare, compared_photos
from export.quantization import normalization
from protocol.errors import ProtofleetError
from protocol.models.onnx_metadata import BackboneMetadata, Parity, delete_notes


@dataclass(frozen=True)
class Float16:
    """How a backbone is converted."""

    photos: Path | None = None
    """Folder of photos for the comparison, as in `compared_photos`; None for scikit-learn's two."""
    min_cosine: float = 0.999
    """Least cosine similarity of a feature and PyTorch's."""

    def convert(
        self, file: bytes, metadata: BackboneMetadata, reference: Reference
    ) -> tuple[onnx.ModelProto, BackboneMetadata]:
        """Return the graph in float16 with float32 features, and its metadata with the parity.

        ONNX Runtime computes most operators in float32 on the CPU, and keeps values between them that are too large for
        float16. The parity is therefore the worst of two: that of the graph, and that of the float32 graph with each
        value rounded to float16, as on a GPU.

        Raises:
            ProtofleetError: the worst cosine is below `min_cosine`, or ONNX Runtime cannot convert the graph.
        """
        model = to_float16(onnx.load_from_string(file))
        parities = [
            compare(
                bytes(graph.SerializeToString()),
                preprocessing=metadata.preprocessing,
                reference=reference,
                photos=compared_photos(self.photos),
            )
            for graph in (model, round_values(onnx.load_from_string(file)))
        ]
        parity = Parity(
            cosine=float(np.min([each.cosine for each in parities])),
            relative_error=float(np.max([each.relative_error for each in parities])),
            images=parities[0].images,
        )
        if not parity.cosine >= self.min_cosine:
            raise ProtofleetError(
                f"{metadata.model} loses too much with float16: expected a worst cosine of at least "
                f"{self.min_cosine:g} on {parity.images} photos, got {parity.cosine:.6f} (nan if a value is above "
                "65504); no file was written: export it with --precision float32"
            )
        return model, msgspec.structs.replace(metadata, precision="float16", parity=parity)


def to_float16(source: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph in float16, but for the normalization of pixels and the type of the features.

    Raises:
        ProtofleetError: ONNX Runtime cannot convert it.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(source)
    try:
        converted = ONNXModel(
            convert_float_to_float16(copy, keep_io_types=True, node_block_list=normalization(copy))
        )
        converted.topological_sort()
        model: onnx.ModelProto = converted.model
        del model.graph.value_info[:]
        delete_notes(model)
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # it has no error class of its own
        raise ProtofleetError(f"ONNX Runtime cannot convert the network to float16: {error}") from error
    return model


def round_values(source: onnx.ModelProto) -> onnx.ModelProto:
    """Return a float32 graph whose weights, and results of nodes after the normalization, are rounded to float16."""
    model: onnx.ModelProto = onnx.shape_inference.infer_shapes(source)
    graph = model.graph
    unchanged = set(normalization(model))
    floats = {
        value.name
        for value in (*graph.value_info, *graph.output)
        if value.type.tensor_type.elem_type == TensorProto.FLOAT
    }
    constants = {name for node in graph.node if node.name in unchanged for name in node.input}
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in constants:
            with np.errstate(over="ignore"):
                rounded = numpy_helper.to_array(tensor).astype(np.float16).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
    nodes = []
    for node in graph.node:
        nodes.append(node)
        for number, name in enumerate(node.output):
            if name in floats and node.name not in unchanged:
                node.output[number] = f"{name}/float32"
                nodes += [
                    helper.make_node(
                        "Cast", [f"{name}/float32"], [f"{name}/float16"], to=TensorProto.FLOAT16
                    ),
                    helper.make_node("Cast", [f"{name}/float16"], [name], to=TensorProto.FLOAT),
                ]
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]
    return model
