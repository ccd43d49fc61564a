"""The first layer of a head's adapter, read from its file, is a map of features with bounded integers."""

import numpy as np
import pytest

from aggregator.algorithms.fedtc.compression import compress
from aggregator.algorithms.fedtc.head import Dense, unit_rows
from aggregator.algorithms.statistics.feature_map import LEVELS
from aggregator.graphs.adapter_map import adapter_of
from aggregator.graphs.head_export import head_to_onnx, mapped, max_difference
from tests.unit.aggregator.graphs.test_head_export import (
    CLASSES,
    FEATURE_SIZE,
    described,
    network,
    random_features,
)

SIZE = 64


@pytest.mark.parametrize("compressed", [False, True])
def test_adapter_of_a_head_is_a_map(*, compressed: bool) -> None:
    """Of unit length times sqrt(D), in eighths; a head of its rows computes the same in ONNX Runtime."""
    features = random_features(70)
    layers = compress(network(), features) if compressed else tuple(network())
    feature_map = adapter_of(head_to_onnx(layers, metadata=described()))
    assert (feature_map.feature_size, feature_map.size) == (FEATURE_SIZE, SIZE)
    rows = mapped(feature_map, features)
    assert np.abs(rows - LEVELS * np.sqrt(SIZE) * unit_rows(layers[0].of(features))).max() < 0.501
    ((_, longest),) = feature_map.longest
    assert np.linalg.norm(rows, axis=1).max() <= longest
    last = Dense(np.full((len(CLASSES), SIZE), 0.01, np.float32), np.zeros(len(CLASSES), np.float32))
    head = head_to_onnx([last], metadata=described(), feature_map=feature_map)
    assert max_difference([last], head, features, feature_map) < 1e-5
