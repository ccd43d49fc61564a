"""Adds a calibration to a head's ONNX file, and verifies what ONNX Runtime computes with it."""

import msgspec
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from aggregator.algorithms.confidence import MAX_LEAD, MIN_LEAD, ConfidenceMap, calibrated
from aggregator.graphs.fused_model import finished
from aggregator.graphs.head_export import difference_from
from protocol.errors import ProtofleetError
from protocol.models.cpu_session import cpu_session
from protocol.models.onnx_metadata import HeadMetadata, read_metadata

UNCALIBRATED = "uncalibrated_logits"

_NODES = """
    confidence_top, confidence_classes = TopK<axis=1>(uncalibrated_logits, confidence_two)
    confidence_first = Gather<axis=1>(confidence_top, confidence_zero)
    confidence_second = Gather<axis=1>(confidence_top, confidence_one)
    confidence_best = Gather<axis=1>(confidence_classes, confidence_zero)
    confidence_is_best = Equal(confidence_best, confidence_numbers)
    confidence_others = Where(confidence_is_best, confidence_lowest, uncalibrated_logits)
    confidence_shifted = Sub(confidence_others, confidence_second)
    confidence_odds = Exp(confidence_shifted)
    confidence_sum = ReduceSum<keepdims=1>(confidence_odds, confidence_one)
    confidence_rest = Log(confidence_sum)
    confidence_lead = Sub(confidence_first, confidence_second)
    confidence_log_odds = Sub(confidence_lead, confidence_rest)
    confidence_past = Sub(confidence_log_odds, confidence_starts)
    confidence_share = Div(confidence_past, confidence_widths)
    confidence_clipped = Clip(confidence_share, confidence_none, confidence_whole)
    confidence_moved = MatMul(confidence_clipped, confidence_rises)
    confidence_mapped = Add(confidence_moved, confidence_lowest_output)
    confidence_wanted = Add(confidence_mapped, confidence_rest)
    confidence_kept = Max(confidence_wanted, confidence_min_lead)
    confidence_logit = Add(confidence_second, confidence_kept)
    confidence_is_clear = Greater(confidence_lead, confidence_min_lead)
    confidence_is_known = Less(confidence_lead, confidence_max_lead)
    confidence_is_wider = And(confidence_is_clear, confidence_is_known)
    confidence_stays_best = Greater(confidence_logit, confidence_second)
    confidence_is_mapped = And(confidence_is_wider, confidence_stays_best)
    confidence_is_changed = And(confidence_is_best, confidence_is_mapped)
    logits = Where(confidence_is_changed, confidence_logit, uncalibrated_logits)
"""
"""`aggregator.algorithms.confidence.calibrated`, with the map as a sum of clipped segments."""


def with_calibration(
    head: bytes,
    confidence: ConfidenceMap,
    *,
    version: int,
    figures: dict[str, float],
    novelty_threshold: float | None = None,
) -> bytes:
    """Return a head's file with its logits calibrated, as another version with these metrics beside its own.

    Raises:
        ProtofleetError: it has a single class, or is calibrated already.
    """
    model = onnx.load_from_string(head)
    metadata = read_metadata({each.key: each.value for each in model.metadata_props}, HeadMetadata)
    last = next(node for node in model.graph.node if "logits" in node.output)
    if len(metadata.classes) < 2 or UNCALIBRATED in last.input:
        raise ProtofleetError("expected a head of several classes that is not calibrated")
    place = list(model.graph.node).index(last)
    nodes = list(
        onnx.parser.parse_graph(f"g (float[n] {UNCALIBRATED}) => (float[n] logits) {{ {_NODES} }}").node
    )
    last.output[:] = [UNCALIBRATED]
    after = list(model.graph.node)[place + 1 :]
    del model.graph.node[place + 1 :]
    model.graph.node.extend([*nodes, *after])
    constants = _constants(confidence, len(metadata.classes))
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    del model.metadata_props[:]
    training = {**metadata.training, **figures}
    changes = {"version": version, "training": training, "novelty_threshold": novelty_threshold}
    return finished(model, msgspec.structs.replace(metadata, **changes))


def _constants(confidence: ConfidenceMap, classes: int) -> dict[str, NDArray[np.generic]]:
    inputs, outputs = confidence.inputs, confidence.outputs
    arrays = {
        "two": np.array([2]), "zero": np.array([0]), "one": np.array([1]), "numbers": np.arange(classes)[None],
        "lowest": np.float32(-3e38), "none": np.float32(0), "whole": np.float32(1),
        "starts": inputs[None, :-1], "widths": np.diff(inputs)[None], "rises": np.diff(outputs)[:, None],
        "lowest_output": outputs[0], "min_lead": np.float32(MIN_LEAD), "max_lead": np.float32(MAX_LEAD),
    }  # fmt: skip
    return {f"confidence_{name}": np.ascontiguousarray(array) for name, array in arrays.items()}


def logits_and_probabilities(
    head: bytes, features: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return what a head gives in ONNX Runtime for features (n, L)."""
    session = cpu_session(head)
    logits, probabilities = session.run(["logits", "probabilities"], {"feature": features})
    return np.asarray(logits), np.asarray(probabilities)


def max_difference(
    before: bytes, after: bytes, confidence: ConfidenceMap, features: NDArray[np.float32]
) -> float:
    """Return the maximum difference of a calibrated head in ONNX Runtime from the calibration of the head before.

    Infinite if the best class of a row is another one. `features` is float32 (n, L).
    """
    logits, old = logits_and_probabilities(before, features)
    outputs = logits_and_probabilities(after, features)
    if not np.array_equal(old.argmax(axis=1), outputs[1].argmax(axis=1)):
        return float("inf")
    return difference_from(calibrated(logits, confidence), outputs)
