"""The head of sums is that of the rows, whichever device has them; its map gives integers, the same in any run."""

from dataclasses import replace
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import ABSENT_LOGIT
from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.statistics.feature_map import LEVELS, FeatureMap
from aggregator.algorithms.statistics.moments import (
    WHOLE,
    Moments,
    add,
    class_means,
    factors,
    moments_of,
    no_rows,
    require_possible,
    within_scatter,
)
from aggregator.algorithms.statistics.ridge import LEAST_EXPLAINED, MAX_FREEDOM, STRENGTHS, TEMPERATURE, solve
from aggregator.graphs.fused_model import fuse
from aggregator.graphs.head_export import head_to_onnx, map_to_onnx, mapped, max_difference
from edge_client.graphs.program_graph import open_graph
from edge_client.prototypes.statistics import to_rows
from edge_client.training.trainer import project
from protocol.errors import ProtofleetError
from protocol.statistics.integer_rows import MAX_VALUE
from protocol.statistics.second_moment import from_triangle, to_triangle
from tests.support.graphs.backbones import tiny_backbone
from tests.support.graphs.heads import head_metadata

CLASSES = 4
SIZE = 12
SEEDS = st.integers(0, 2**32 - 1)


def rows_of(
    seed: int, counts: tuple[int, ...] = (30, 30, 30, 30)
) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Rows around their class's mean."""
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    means = random.normal(0, 8, size=(len(counts), SIZE))
    rows = np.clip(np.rint(means[labels] + random.normal(0, 8, size=(len(labels), SIZE))), -127, 127)
    order = random.permutation(len(labels))
    return rows[order].astype(np.int8), labels[order]


def moments(rows: NDArray[np.int8], labels: NDArray[np.int64], classes: int = CLASSES) -> Moments:
    return moments_of(rows, labels, np.ones(len(labels), np.int64), num_classes=classes)


def assert_equal(one: Moments, other: Moments) -> None:
    assert one.rows == other.rows
    for name in ("counts", "sums", "second_moment", "class_counts", "class_sums"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_sums_are_those_of_the_rows() -> None:
    rows, labels = rows_of(0)
    weights = np.random.default_rng(1).integers(1, 9, len(labels))
    found = moments_of(rows, labels, weights, num_classes=CLASSES)
    wide = rows.astype(np.int64)
    np.testing.assert_array_equal(
        found.second_moment, ((wide * weights[:, None]).T @ wide)[np.triu_indices(SIZE)]
    )
    for label in range(CLASSES):
        mine = labels == label
        np.testing.assert_array_equal(found.sums[label], (wide * weights[:, None])[mine].sum(axis=0))
        assert found.counts[label] == weights[mine].sum()


@settings(max_examples=30)
@given(seed=SEEDS, devices=st.integers(1, 9))
def test_any_split_over_devices_in_any_order_gives_the_same_sums(seed: int, devices: int) -> None:
    rows, labels = rows_of(seed)
    random = np.random.default_rng(seed)
    device_of = random.integers(0, devices, len(labels))
    total = no_rows(num_classes=CLASSES, size=SIZE)
    for device in random.permutation(devices):
        mine = device_of == device
        total = add(total, moments(rows[mine], labels[mine]))
    assert_equal(total, moments(rows, labels))


@settings(max_examples=30)
@given(seed=SEEDS)
def test_device_that_leaves_leaves_nothing(seed: int) -> None:
    """A replaced submission is one that leaves and another one that comes."""
    one, other = moments(*rows_of(seed)), moments(*rows_of(seed + 1))
    total = add(add(add(no_rows(num_classes=CLASSES, size=SIZE), one), other), one, factor=-1)
    assert_equal(total, other)
    np.testing.assert_array_equal(solve(total).layer.weight, solve(other).layer.weight)


@settings(max_examples=20)
@given(seed=SEEDS)
def test_regression_is_that_of_the_rows(seed: int) -> None:
    rows, labels = rows_of(seed)
    found = solve(moments(rows, labels))
    values = rows.astype(np.float64)
    centered, one_hot = values - values.mean(axis=0), np.eye(CLASSES)[labels]
    scatter = sum(
        (each - each.mean(axis=0)).T @ (each - each.mean(axis=0))
        for each in (values[labels == label] for label in range(CLASSES))
    )
    errors, regressions = [], []
    for strength in STRENGTHS:
        ridge = strength * np.trace(scatter) / SIZE * np.eye(SIZE)
        inverse = np.linalg.inv(centered.T @ centered + ridge)
        weight = inverse @ centered.T @ (one_hot - one_hot.mean(axis=0))
        residual = centered @ weight - (one_hot - one_hot.mean(axis=0))
        freedom = np.trace(centered @ inverse @ centered.T)
        errors.append(len(rows) * (residual**2).sum() / (len(rows) - freedom - 1) ** 2)
        regressions.append((weight, one_hot.mean(axis=0) - values.mean(axis=0) @ weight, freedom))
    weight, bias, freedom = regressions[int(np.argmin(errors))]
    assert found.strength == STRENGTHS[int(np.argmin(errors))]
    assert found.error == pytest.approx(min(errors), rel=1e-9)
    assert found.degrees_of_freedom == pytest.approx(freedom, rel=1e-9)
    # The layer is float32.
    np.testing.assert_allclose(found.layer.weight, weight.T / TEMPERATURE, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.layer.bias, bias / TEMPERATURE, rtol=1e-6, atol=1e-6)


def test_classes_that_overlap_have_the_discriminant() -> None:
    """Three classes on a line: the regression never predicts the one between two others."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 400)
    values = 20 * random.normal(size=(len(labels), SIZE))
    values[:, 0] += 40 * labels
    rows = np.rint(np.clip(values, -127, 127)).astype(np.int8)
    found = solve(moments(rows, labels))
    assert found.error > LEAST_EXPLAINED * (1 - 1 / 3)
    predicted = found.layer.outputs(rows.astype(np.float32)).argmax(axis=1)
    assert (predicted[labels == 1] == 1).mean() > 0.6
    assert (predicted == labels).mean() > 0.75


def test_rare_class_is_predicted() -> None:
    """The regression is that of a fleet with as many images of each class."""
    rows, labels = rows_of(3, (400, 400, 400, 6))
    layer = solve(moments(rows, labels)).layer
    found = layer.outputs(rows.astype(np.float32)).argmax(axis=1)
    assert (found[labels == 3] == 3).mean() > 0.8


def test_class_without_images_is_never_predicted() -> None:
    rows, labels = rows_of(4)
    layer = solve(moments(rows, labels, CLASSES + 1)).layer
    assert layer.bias[CLASSES] == np.float32(ABSENT_LOGIT)
    assert not layer.weight[CLASSES].any()


@pytest.mark.parametrize("counts", [(1, 0, 0, 0), (1, 1, 0, 0), (1, 1, 1, 0), (2, 1, 1, 1)])
def test_few_rows_give_a_finite_head(counts: tuple[int, ...]) -> None:
    """One row of a class, or one class, has no scatter."""
    rows, labels = rows_of(5, counts)
    found = solve(moments(rows, labels))
    assert np.isfinite([found.error, *found.layer.bias, *found.layer.weight.ravel()]).all()
    correct = found.layer.outputs(rows.astype(np.float32)).argmax(axis=1) == labels
    assert correct.all() or max(counts) > 1
    assert correct.mean() > 0.5


def test_no_rows_give_no_head() -> None:
    with pytest.raises(ProtofleetError, match="no images"):
        solve(no_rows(num_classes=CLASSES, size=SIZE))


def test_sums_of_no_rows_at_all_are_refused() -> None:
    """A second moment that is smaller than the class means explain."""
    honest = moments(*rows_of(6))
    with pytest.raises(ProtofleetError, match="negative"):
        solve(replace(honest, second_moment=honest.second_moment // 4))


@settings(max_examples=20)
@given(seed=SEEDS, images=st.integers(1, 40))
def test_sums_of_rows_are_possible_and_others_are_not(seed: int, images: int) -> None:
    """Rounding never makes those of rows impossible, be they fewer than the values of a row."""
    rows, labels = rows_of(seed, (images, 1, 0, images))
    honest = moments(rows, labels)
    require_possible(honest)
    square = from_triangle(honest.second_moment, SIZE)
    largest = np.linalg.eigh(within_scatter(honest))[1][:, -1]
    square -= np.rint(2 * np.trace(square) * np.outer(largest, largest)).astype(np.int64)
    with pytest.raises(ProtofleetError, match="negative"):
        require_possible(replace(honest, second_moment=to_triangle(square)))


def test_factors_are_parts_of_a_whole() -> None:
    """Small enough for a device with thousands of times the images that count."""
    stated, counted = np.array([100, 100, 300, 0, 30_000]), np.array([100.0, 200, 100, 0, 27])
    assert factors(stated, counted).tolist() == [WHOLE, WHOLE, WHOLE // 3, 0, 58]


def test_class_mean_and_scatter_are_limited_apart() -> None:
    """A device that claims a class as often as it likes leaves the scatter alone, which is never negative."""
    rows, labels = rows_of(8)
    evil = moments(np.full((200, SIZE), 127, np.int8), np.zeros(200, np.int64))
    total = add(no_rows(num_classes=CLASSES, size=SIZE), moments(rows, labels))
    half = add(total, evil, class_factors=np.array([0, 1, 1, 1]))
    np.testing.assert_array_equal(class_means(half), class_means(moments(rows, labels)))
    assert np.linalg.eigvalsh(within_scatter(half))[0] > 0
    assert half.counts.tolist() == [230, 30, 30, 30]
    assert solve(half).error < np.inf


def test_strength_leaves_at_most_a_third_of_the_rows_as_parameters() -> None:
    """Cross-validation of few rows in many dimensions would choose the weakest ridge, or find none that exists."""
    random = np.random.default_rng(0)
    rows = np.clip(random.normal(0, 8, (24, 200)), -127, 127).astype(np.int8)
    found = solve(moments(rows, np.repeat(np.arange(CLASSES), 6)))
    assert found.degrees_of_freedom <= MAX_FREEDOM * 24
    assert 0 < found.error < 24


LENGTH = 24
NAMES = ("down", "up", "left")
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
        random.normal(0, 0.1, (len(NAMES), feature_map.size)).astype(np.float32),
        random.normal(size=len(NAMES)).astype(np.float32),
    )
    backbone = tiny_backbone(feature_size=LENGTH)
    head = head_to_onnx(
        [layer], metadata=head_metadata(backbone, classes=NAMES, feature_size=LENGTH), feature_map=feature_map
    )
    features = features_of(30)
    assert max_difference([layer], head, features, feature_map) < 1e-5
    onnx.checker.check_model(onnx.load_from_string(fuse([backbone], head)), full_check=True)
