"""torch functions as ONNX graphs, each compared with torch before anybody gets it."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import compose, version_converter
from torch import Tensor, nn

from protocol.errors import BackboneMismatch
from protocol.metadata import HeadMetadata, ModelMetadata, backbone_metadata, head_metadata, to_properties

OPSET = 18
"""ONNX operator set of the heads: ONNX Runtime runs it since 1.14."""

BATCH_SIZES = (1, 7, 256)
"""Rows at which a graph is compared with torch."""


class _Outputs(nn.Module):
    """A head with both of its outputs."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and probabilities, (n, C) each."""
        logits = self.head(feature)
        return logits, torch.softmax(logits, dim=1)


def head_to_onnx(head: nn.Module, *, metadata: HeadMetadata) -> bytes:
    """A head as an ONNX file.

    Args:
        head: float32 (n, L) features to (n, C) logits, on the CPU, in evaluation mode.
        metadata: what the file says of itself.

    Returns:
        A file with input `feature` float32 (n, L) and outputs `logits` and `probabilities` float32 (n, C).
    """
    example = torch.zeros(2, metadata.feature_size)
    with _quiet():
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
    if program is None:
        raise BackboneMismatch("torch exported no graph")
    model = program.model_proto
    del model.metadata_props[:]
    for part in (*model.graph.node, *model.graph.value_info, model.graph):
        del part.metadata_props[:]  # the exporter's notes: stack traces with the paths of this machine
        part.doc_string = ""
    onnx.helper.set_model_props(model, to_properties(metadata))
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def max_abs_difference(head: nn.Module, file: bytes, features: NDArray[np.float32]) -> float:
    """The largest difference between torch and ONNX Runtime, over logits and probabilities.

    Args:
        head: the module that the file was made of.
        file: what `head_to_onnx` gave.
        features: float32 (m, L), m >= 1; they are repeated where a batch is larger than m.
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
            # NaN on either side must count as a difference, and max() would hide it.
            worst = float("inf") if np.isnan(difference).any() else max(worst, float(difference.max()))
    return worst


def fuse(backbone: bytes, head: bytes) -> bytes:
    """Backbone and head as one ONNX file: a picture in, `logits` and `probabilities` out.

    Raises:
        BackboneMismatch: the head was trained on another backbone's features.
    """
    first, second = _load(backbone), _load(head)
    first_facts, second_facts = backbone_metadata(_properties(first)), head_metadata(_properties(second))
    if first_facts.feature_size != second_facts.feature_size:
        raise BackboneMismatch(
            f"expected a head for {first_facts.feature_size} features, got one for {second_facts.feature_size}"
        )
    opset = max(_opset(first), _opset(second))
    first, second = _at_opset(first, opset), _at_opset(second, opset)
    first.ir_version = second.ir_version = max(first.ir_version, second.ir_version)
    for model in (first, second):
        del model.metadata_props[:]
    second = compose.add_prefix(second, "head/", rename_inputs=False, rename_outputs=False)
    model = compose.merge_models(first, second, io_map=[("feature", "feature")])
    facts = ModelMetadata(backbone=first_facts, head=second_facts)
    onnx.helper.set_model_props(model, to_properties(facts))
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def _load(file: bytes) -> onnx.ModelProto:
    return onnx.load_model(io.BytesIO(file), load_external_data=False)


def _properties(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def _opset(model: onnx.ModelProto) -> int:
    return int(next(entry.version for entry in model.opset_import if entry.domain in {"", "ai.onnx"}))


def _at_opset(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    return model if _opset(model) == opset else version_converter.convert_version(model, opset)


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
