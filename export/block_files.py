"""Cut a backbone's file after some of its blocks, and measure what is left."""

import time
import timeit
from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx
from onnx.utils import Extractor

from protocol.models.cpu_session import cpu_options, cpu_session

TIMED_RUNS = 20
"""Runs of each graph, of which the fastest counts."""


def block_tensors(model: onnx.ModelProto) -> list[str]:
    """Return the tensors that a backbone's feature is concatenated of; the feature alone if it is one."""
    ends = {output: node for node in model.graph.node for output in node.output}
    end = ends["feature"]
    while end.op_type == "Cast" and end.input[0] in ends:
        end = ends[end.input[0]]
    return list(end.input) if end.op_type == "Concat" else ["feature"]


def cut(model: onnx.ModelProto, tensors: Sequence[str]) -> bytes:
    """Return the part of a backbone that computes some of its tensors, as a file."""
    whole = onnx.shape_inference.infer_shapes(model)
    return bytes(Extractor(whole).extract_model(["image"], list(tensors)).SerializeToString())


def fastest_seconds(files: Sequence[bytes], size: Sequence[int]) -> list[float]:
    """Return the least processor time of each graph for one image of H x W on one thread of the CPU, in seconds.

    The graphs take turns, so that other load slows all of them.
    """
    image = np.zeros((1, *size, 3), np.uint8)
    options = cpu_options()
    options.intra_op_num_threads = 1  # others would wait, and count as busy
    runs = [partial(cpu_session(file, options).run, None, {"image": image}) for file in files]
    times = [
        [timeit.timeit(run, timer=time.process_time, number=1) for run in runs] for _ in range(TIMED_RUNS)
    ]
    return [min(each) for each in zip(*times, strict=True)]
