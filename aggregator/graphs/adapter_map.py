"""The first layer of the adapter of FedTC's head as a map of features, whose rows refine the head."""

import math
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.statistics.feature_map import LEVELS, ROUNDED, Nodes
from aggregator.graphs.head_export import hidden_layers
from protocol.errors import ProtofleetError
from protocol.statistics.second_moment import MAX_VALUE


@dataclass(frozen=True)
class AdapterMap:
    """Features (n, L) to rows (n, D): a layer's rectified output of unit length, times LEVELS sqrt(D), in integers."""

    layer: Dense

    @property
    def feature_size(self) -> int:
        """L."""
        first = self.layer.weight if self.layer.projection is None else self.layer.projection
        return int(first.shape[1])

    @property
    def size(self) -> int:
        """D, the length of a row."""
        return len(self.layer.bias)

    @property
    def longest(self) -> tuple[tuple[slice, float], ...]:
        """The whole row, with the length that no image's is above."""
        return ((slice(None), (LEVELS + ROUNDED) * math.sqrt(self.size)),)

    def nodes(self) -> Nodes:
        """Return the graph."""
        nodes, constants, unit = hidden_layers([self.layer])
        constants |= {
            "map_scale": np.array(LEVELS * math.sqrt(self.size), np.float32),
            "map_largest": np.array(MAX_VALUE, np.float32),
        }
        return [
            *nodes,
            f"row_scaled = Mul({unit}, map_scale)",
            "row_rounded = Round(row_scaled)",
            "projection = Min(row_rounded, map_largest)",
        ], constants


def adapter_of(head: bytes) -> AdapterMap:
    """Return the map of a head's file; raises ProtofleetError if the head has no adapter."""
    graph = onnx.load_from_string(head).graph
    constants = {each.name: numpy_helper.to_array(each) for each in graph.initializer}

    def matrix(name: str) -> NDArray[np.floating] | None:
        return constants.get(name, constants.get(f"{name}_float16"))

    weight = matrix("dense_0_weight")
    if weight is None:
        raise ProtofleetError("expected a head with an adapter, got a linear discriminant")
    return AdapterMap(Dense(weight, constants["dense_0_bias"], matrix("dense_0_projection")))
