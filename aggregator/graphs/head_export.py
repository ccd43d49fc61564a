"""Writes heads as ONNX files, and measures their difference from PyTorch."""

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import numpy_helper

from aggregator.algorithms.fedtc import Head
from aggregator.graphs.fused_model import finished
from protocol.onnx_metadata import HeadMetadata

OPSET = 18
"""ONNX operator set of all graphs; ONNX Runtime supports it since 1.14."""

IR_VERSION = 8
"""ONNX file format that came with that operator set."""

BATCH_SIZES = (1, 7, 256)
"""Rows with which a head is compared with PyTorch."""

MIN_LENGTH = 1e-12
"""Least length that a row is divided by, as in `torch.nn.functional.normalize`."""


def head_to_onnx(head: Head, *, metadata: HeadMetadata) -> bytes:
    """Return a head as an ONNX file.

    Its input is `feature`, float32 (n, L); its outputs are `logits` and `probabilities`, float32 (n, C).
    """
    constants = {"axes": np.array([1]), "min_length": np.float32(MIN_LENGTH)}
    nodes, value = [], "feature"
    for number, layer in enumerate(head.layers):
        constants[f"weight_{number}"] = layer.weight.detach().numpy()
        constants[f"bias_{number}"] = layer.bias.detach().numpy()
        nodes.append(f"dense_{number} = Gemm<transB=1>({value}, weight_{number}, bias_{number})")
        if layer is not head.layers[-1]:
            nodes += [
                f"positive_{number} = Relu(dense_{number})",
                f"length_{number} = ReduceL2<keepdims=1>(positive_{number}, axes)",
                f"divisor_{number} = Max(length_{number}, min_length)",
                f"unit_{number} = Div(positive_{number}, divisor_{number})",
            ]
            value = f"unit_{number}"
    nodes[-1] = nodes[-1].replace(f"dense_{number}", "logits")
    rows = f"float[n, {len(metadata.classes)}]"
    model = onnx.parser.parse_model(
        f'<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}]>'
        f"head (float[n, {metadata.feature_size}] feature) => ({rows} logits, {rows} probabilities)"
        f"{{ {' '.join(nodes)} probabilities = Softmax<axis=1>(logits) }}"
    )
    model.graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in constants.items()
    )
    return finished(model, metadata)


def max_abs_difference(head: Head, file: bytes, features: NDArray[np.float32]) -> float:
    """Return the maximum difference between PyTorch and ONNX Runtime over logits and probabilities.

    Args:
        head: the exported module.
        file: its ONNX file.
        features: float32 (m, L), m >= 1; repeated for batches larger than m.
    """
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    worst = 0.0
    for size in BATCH_SIZES:
        batch = np.resize(features, (size, features.shape[1]))
        with torch.inference_mode():
            logits = head(torch.from_numpy(batch))
        expected = logits, torch.softmax(logits, dim=1)
        for theirs, ours in zip(expected, session.run(None, {"feature": batch}), strict=True):
            difference = np.abs(theirs.numpy() - ours)
            # NaN must count as a difference, and max() would hide it.
            worst = float("inf") if np.isnan(difference).any() else max(worst, float(difference.max()))
    return worst
