"""The map's graph gives integers, the same in any run, and is part of the head that is made of them."""

from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.statistics.feature_map import LEVELS, FeatureMap
from aggregator.graphs.fused_model import fuse
from aggregator.graphs.head_export import head_to_onnx, map_to_onnx, mapped, max_difference
from edge_client.data.statistics import to_rows
from edge_client.runtime.program_graph import open_graph
from edge_client.training.trainer import project
from protocol.statistics.second_moment import MAX_VALUE
from tests.support.graphs.backbones import tiny_backbone
from tests.support.graphs.heads import head_metadata

LENGTH = 24
CLASSES = ("down", "up", "left")
SIZES = [0, 40]


@cache
def map_of(random_features: int) -> FeatureMap:
    return FeatureMap(LENGTH, random_features, seed=3)


def features_of(rows: int) -> NDArray[np.float32]:
    random = np.random.default_rng(rows)
    return np.abs(random.normal(0, 3, (rows, LENGTH))).astype(np.float32)


def formula(feature_map: FeatureMap, features: NDArray[np.float32]) -> NDArray[np.float64]:
    roots = np.sign(features) * np.sqrt(np.abs(features.astype(np.float64)))
    normal = (roots - roots.mean(axis=1, keepdims=True)) / roots.std(axis=1, keepdims=True)
    identity = np.clip(np.rint(LEVELS * normal), -MAX_VALUE, MAX_VALUE)
    positive = np.maximum(identity @ feature_map.signs, 0) / np.sqrt(LENGTH)
    return np.concatenate([identity, np.minimum(np.rint(positive), MAX_VALUE)], axis=1)


@pytest.mark.parametrize("random_features", SIZES)
def test_rows_are_integers_of_the_formula(random_features: int) -> None:
    feature_map = map_of(random_features)
    features = features_of(200)
    rows = mapped(feature_map, features)
    assert rows.dtype == np.float32
    assert rows.shape == (200, feature_map.size)
    np.testing.assert_array_equal(rows, np.rint(rows))
    assert np.abs(rows).max() <= MAX_VALUE
    # float32 and float64 round a value at a half differently, and then the sums with it.
    away = np.abs(rows - formula(feature_map, features))
    assert away.max() <= 1
    assert (away > 0).mean() < 0.01


@pytest.mark.parametrize("random_features", SIZES)
def test_runs_of_any_length_give_the_same_rows(random_features: int) -> None:
    features = features_of(50)
    session = onnxruntime.InferenceSession(
        map_to_onnx(map_of(random_features), num_classes=3), providers=["CPUExecutionProvider"]
    )
    expected = mapped(map_of(random_features), features)
    for rows in (1, 7):
        parts = [
            session.run(None, {"feature": features[at : at + rows]})[0]
            for at in range(0, len(features), rows)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), expected)


@pytest.mark.parametrize("random_features", SIZES)
def test_device_opens_the_map_and_makes_the_same_rows(random_features: int) -> None:
    feature_map, features = map_of(random_features), features_of(70)
    graph = open_graph(map_to_onnx(feature_map, num_classes=3), role="project")
    assert (graph.metadata.feature_size, graph.metadata.projection_size) == (LENGTH, feature_map.size)
    rows = to_rows(project(graph, features, state={}, tensors={}))
    np.testing.assert_array_equal(rows, mapped(feature_map, features))


def test_image_without_any_feature_has_a_row_of_zeros() -> None:
    assert not mapped(map_of(40), np.zeros((1, LENGTH), np.float32)).any()


def test_the_same_map_is_the_same_file() -> None:
    assert map_to_onnx(FeatureMap(LENGTH, 40, seed=3), num_classes=3) == map_to_onnx(
        map_of(40), num_classes=3
    )
    assert map_to_onnx(FeatureMap(LENGTH, 40, seed=4), num_classes=3) != map_to_onnx(
        map_of(40), num_classes=3
    )


@pytest.mark.parametrize("random_features", SIZES)
def test_head_and_fused_model_contain_the_map(random_features: int) -> None:
    feature_map, random = map_of(random_features), np.random.default_rng(0)
    layer = Dense(
        random.normal(0, 0.1, (len(CLASSES), feature_map.size)).astype(np.float32),
        random.normal(size=len(CLASSES)).astype(np.float32),
    )
    backbone = tiny_backbone(feature_size=LENGTH)
    head = head_to_onnx(
        [layer],
        metadata=head_metadata(backbone, classes=CLASSES, feature_size=LENGTH),
        feature_map=feature_map,
    )
    features = features_of(30)
    assert max_difference([layer], head, features, feature_map) < 1e-5
    onnx.checker.check_model(onnx.load_from_string(fuse([backbone], head)), full_check=True)
