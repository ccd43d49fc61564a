"""Exports heads from PyTorch to ONNX, and measures their difference from PyTorch."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from aggregator.graphs.fused_model import finished
from protocol.onnx_metadata import HeadMetadata

OPSET = 18
"""ONNX operator set of all graphs; ONNX Runtime supports it since 1.14."""

BATCH_SIZES = (1, 7, 256)
"""Rows with which a head is compared with PyTorch."""


class _Outputs(nn.Module):
    """A head with logits and probabilities as outputs."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, feature: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(feature)
        return logits, torch.softmax(logits, dim=1)


def head_to_onnx(head: nn.Module, *, metadata: HeadMetadata) -> bytes:
    """Export a head to an ONNX file.

    Args:
        head: float32 (n, L) features to (n, C) logits, on the CPU, in evaluation mode.
        metadata: the file's metadata.

    Returns:
        A file with input `feature` float32 (n, L) and outputs `logits` and `probabilities` float32 (n, C).
    """
    example = torch.zeros(2, metadata.feature_size)
    with quiet():
        program = torch.onnx.export(
            _Outputs(head).eval(),
            (example,),
            input_names=["feature"],
            output_names=["logits", "probabilities"],
            dynamic_shapes={"feature": {0: torch.export.Dim("n")}},
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    return finished(without_notes(program), metadata)


def without_notes(program: Any) -> onnx.ModelProto:
    """Return the graph without the exporter's stack traces, which contain paths of this machine."""
    model: onnx.ModelProto = program.model_proto
    graph = model.graph
    parts = (model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer)
    for part in parts:
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    return model


def max_abs_difference(head: nn.Module, file: bytes, features: NDArray[np.float32]) -> float:
    """Return the maximum difference between PyTorch and ONNX Runtime over logits and probabilities.

    Args:
        head: the exported module.
        file: its ONNX file.
        features: float32 (m, L), m >= 1; repeated for batches larger than m.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    worst = 0.0
    for size in BATCH_SIZES:
        batch = np.resize(features, (size, features.shape[1]))
        with torch.inference_mode():
            expected = _Outputs(head)(torch.from_numpy(batch))
        for theirs, ours in zip(expected, session.run(None, {"feature": batch}), strict=True):
            difference = np.abs(theirs.numpy() - ours)
            # NaN must count as a difference, and max() would hide it.
            worst = float("inf") if np.isnan(difference).any() else max(worst, float(difference.max()))
    return worst


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the exporter's warnings."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
