"""Layers of a head against their formulas; prototypes restored, weighed, and in files as in memory."""

import gc
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.covariance import oas

from aggregator.algorithms.algorithm import ABSENT_LOGIT
from aggregator.algorithms.fedtc import arrays as module
from aggregator.algorithms.fedtc.arrays import Arrays, blocks, is_in_file
from aggregator.algorithms.fedtc.discriminant import _principal_axes, _shrinkage, discriminants
from aggregator.algorithms.fedtc.head import Dense, calibrate, compress, cross_entropy, logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES, Recipe
from aggregator.algorithms.fedtc.train_head import ALWAYS_ADAPTER, TrainedHead, train_head
from aggregator.algorithms.fedtc.training_set import TrainingSet, even_rows
from protocol.errors import ProtofleetError
from tests.support.messages.prototype_sets import BLOB_SIZE, Features, Integers, blobs


def test_temperature_restores_scaled_logits() -> None:
    """Labels drawn with a softmax's probabilities: logits ten times as large need a temperature of ten."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5_000, 4)).astype(np.float32)
    drawn = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    temperature, losses = calibrate(10 * logits, drawn)
    assert 9 < temperature < 11
    np.testing.assert_allclose(losses, cross_entropy(10 * logits / np.float32(temperature), drawn), rtol=1e-4)


def test_few_correct_rows_are_not_certain() -> None:
    """Two correct rows, with a class that has no prototypes: one more incorrect row is assumed."""
    logits = np.array([[5, 0, ABSENT_LOGIT], [0, 5, ABSENT_LOGIT]], dtype=np.float32)
    _, losses = calibrate(logits, np.array([0, 1]))
    assert 0.1 < losses.mean() < 0.7


CLASSES, FEATURES = 4, 256


def _head(rng: np.random.Generator, scale: float) -> list[Dense]:
    """Layers of the paper's sizes and of rank 16, as training leaves them; the first takes features of a scale."""
    layers: list[Dense] = []
    for inputs, outputs in itertools.pairwise((FEATURES, 1024, 512, CLASSES)):
        weight = rng.normal(size=(outputs, 16)) @ rng.normal(size=(16, inputs)) / np.sqrt(inputs)
        layers.append(
            Dense(
                (weight / (1 if layers else scale)).astype(np.float32),
                rng.normal(size=outputs).astype(np.float32),
            )
        )
    return layers


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_compressed_layers_compute_nearly_the_same(scale: float) -> None:
    """Also for features so large or small that float16 could not hold the weights."""
    rng = np.random.default_rng(0)
    head = _head(rng, scale)
    features = (scale * rng.normal(size=(500, FEATURES))).astype(np.float32)
    small = compress(head, features[:400])
    expected = logits_of(head, features[400:])
    difference = logits_of(small, features[400:]) - expected
    assert np.abs(difference).max() < 0.01 * expected.std()
    assert {layer.weight.dtype for layer in small[:-1]} == {np.dtype(np.float16)}


@pytest.mark.parametrize("features", [np.zeros((5, FEATURES)), np.ones((1, FEATURES))])
def test_features_without_variance_are_compressed(features: np.ndarray) -> None:
    head = _head(np.random.default_rng(0), 1.0)
    data = features.astype(np.float32)
    assert np.isfinite(logits_of(compress(head, data), data)).all()


def test_discriminant_equals_the_formula() -> None:
    """With many more samples than features: (S^-1 mu).x - mu.S^-1.mu / 2, but for what all classes share."""
    rng = np.random.default_rng(0)
    mix, labels = rng.normal(size=(4, 4)), np.arange(30_000) % 3
    features = (rng.normal(size=(len(labels), 4)) @ mix + np.eye(3, 4)[labels]).astype(np.float32)
    centers = np.stack([features[labels == label].mean(axis=0) for label in range(3)])
    deviations = features - centers[labels]
    inverse = np.linalg.inv(deviations.T @ deviations / (len(labels) - 3))
    expected = features @ inverse @ centers.T - (centers @ inverse * centers).sum(axis=1) / 2
    (head,) = discriminants(centers, deviations, np.bincount(labels), (1.0,))
    logits = logits_of([head], features)
    np.testing.assert_allclose(
        logits - logits.mean(axis=1, keepdims=True),
        expected - expected.mean(axis=1, keepdims=True),
        atol=0.06,
    )


@given(rows=st.integers(2, 30), size=st.integers(2, 30), seed=st.integers(0, 99))
def test_shrinkage_is_the_oracle_approximating_one(rows: int, size: int, seed: int) -> None:
    deviations = np.random.default_rng(seed).normal(size=(rows, size))
    _, expected = oas(deviations, assume_centered=True)
    _, squares = _principal_axes(deviations)
    assert _shrinkage(squares, rows, size) == pytest.approx(expected)


@given(rows=st.integers(1, 30), size=st.integers(1, 30), seed=st.integers(0, 99))
def test_axes_span_the_rows(rows: int, size: int, seed: int) -> None:
    """With more rows and with more features, the squares and axes make up R^T R."""
    deviations = np.random.default_rng(seed).normal(size=(rows, size))
    axes, squares = _principal_axes(deviations)
    np.testing.assert_allclose((axes.T * squares) @ axes, deviations.T @ deviations, atol=1e-9)
    np.testing.assert_allclose(axes @ axes.T, np.eye(len(axes)), atol=1e-6)


def test_share_of_zero_is_the_nearest_class_mean() -> None:
    """Of classes of as many images, so that the bias for rare ones makes no difference."""
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 4
    features = (rng.normal(size=(40, 6)) + 2 * np.eye(4, 6)[labels]).astype(np.float32)
    centers = np.stack([features[labels == label].mean(axis=0) for label in range(4)])
    (head,) = discriminants(centers, features - centers[labels], np.bincount(labels), (0.0,))
    asked = rng.normal(size=(100, 6)).astype(np.float32)
    nearest = np.linalg.norm(asked[:, None] - centers, axis=2).argmin(axis=1)
    assert (logits_of([head], asked).argmax(axis=1) == nearest).all()


def test_regression_equals_the_formula() -> None:
    """(S + N/K M'M + lambda I)^-1 M', with fewer samples than features, but for a factor and what all classes share."""
    rng, size = np.random.default_rng(0), 12
    labels = np.arange(10) % 5
    features = (rng.normal(size=(10, size)) + 3 * np.eye(5, size)[labels]).astype(np.float32)
    centers = np.stack([features[labels == label].mean(axis=0) for label in range(5)])
    deviations = (features - centers[labels]).astype(np.float64)
    scatter, freedom = deviations.T @ deviations, 10 - 5
    identity = _shrinkage(np.linalg.eigvalsh(scatter), freedom, size)
    kept = 0.5 * (1 - identity)
    ridge = (1 - kept) * np.trace(scatter) / size / kept
    means = centers - centers.mean(axis=0)
    inverse = np.linalg.inv(scatter + 2 * means.T @ means + ridge * np.eye(size))
    expected = (features - centers.mean(axis=0)) @ inverse @ means.T
    _, head = discriminants(
        centers, deviations.astype(np.float32), np.bincount(labels), (0.5,), regressions=True
    )
    logits = logits_of([head], features)
    logits -= logits.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(logits / logits.std(), expected / expected.std(), atol=1e-4)


def test_regression_of_two_classes_is_their_discriminant() -> None:
    """But for a factor, also of classes of unequal numbers of images."""
    rng, labels = np.random.default_rng(0), np.array([0] * 9 + [1] * 3)
    features = (rng.normal(size=(12, 6)) + labels[:, None]).astype(np.float32)
    centers = np.stack([features[labels == label].mean(axis=0) for label in range(2)])
    heads = discriminants(centers, features - centers[labels], np.bincount(labels), (1.0,), regressions=True)
    discriminant, regression = (logits_of([head], features)[:, 0] for head in heads)
    np.testing.assert_allclose(regression / regression.std(), discriminant / discriminant.std(), rtol=1e-4)


@pytest.mark.parametrize("images", [1, 3, 16])
def test_class_of_few_images_in_the_middle_is_not_predicted_for_images_of_others(images: int) -> None:
    random = np.random.default_rng(0)
    centers = np.zeros((5, 32), dtype=np.float32)
    centers[np.arange(4), np.arange(4)] = 4.0
    centers[4] = centers[:4].mean(axis=0)
    rows = random.normal(size=(400, 32)).astype(np.float32)
    labels = np.repeat(np.arange(4), 100)
    numbers = np.array([1000, 1000, 1000, 1000, images])

    for head in discriminants(centers, rows, numbers, (1.0,), regressions=True):
        found = logits_of([head], centers[labels] + rows).argmax(axis=1)
        assert (found == labels).mean() > 0.85


def _restored(prototypes: Features, labels: Integers, counts: Integers) -> Features:
    return TrainingSet(prototypes, labels, counts, int(labels.max()) + 1, restore=True).features


@given(batch=st.integers(2, 40), seed=st.integers(0, 1000))
def test_restoring_gives_back_the_variance(batch: int, seed: int) -> None:
    """Batch means of normal features, restored, spread as those features do, around the same mean."""
    rng = np.random.default_rng(seed)
    features = rng.normal(loc=3.0, scale=2.0, size=(200 * batch, BLOB_SIZE))
    means = features.reshape(200, batch, BLOB_SIZE).mean(axis=1).astype(np.float32)
    labels, counts = np.zeros(200, dtype=np.int64), np.full(200, batch)
    restored = _restored(means, labels, counts)
    np.testing.assert_allclose(restored.mean(axis=0), means.mean(axis=0), atol=1e-4)
    assert 0.85 < restored.std() / features.std() < 1.15
    assert means.std() < 0.8 * features.std()


def test_restoring_works_class_by_class_and_weighs_by_count() -> None:
    """mu_v + sqrt(n_j) (P_j - mu_v), written out."""
    prototypes = np.array([[0.0], [3.0], [10.0]], dtype=np.float32)
    restored = _restored(prototypes, np.array([0, 0, 4]), np.array([4, 8, 9], dtype=np.uint32))
    np.testing.assert_allclose(restored, [[2 - 2 * 2], [2 + np.sqrt(8)], [10]], rtol=1e-6)


def test_the_distance_between_devices_is_not_stretched() -> None:
    """Devices in different places spread as widely as their images do, where they are."""
    rng, batch, apart = np.random.default_rng(0), 25, 10.0
    devices = np.repeat(np.arange(4), 50)
    places = apart * rng.normal(size=(4, BLOB_SIZE))
    noise = rng.normal(size=(200, BLOB_SIZE))
    prototypes = (places[devices] + noise / np.sqrt(batch)).astype(np.float32)
    labels, counts = np.zeros(200, dtype=np.int64), np.full(200, batch)
    restored = TrainingSet(prototypes, labels, counts, 1, restore=True, devices=devices).features
    np.testing.assert_allclose(restored, places[devices] + noise, atol=1.0)
    assert (restored - places[devices]).std() == pytest.approx(1, abs=0.05)
    stretched = _restored(prototypes, labels, counts)
    assert np.abs(stretched - places[devices]).mean() > apart


@given(seed=st.integers(0, 99), devices=st.integers(1, 30))
def test_alike_devices_are_restored_as_one(seed: int, devices: int) -> None:
    """Also devices with a single prototype: the variance of images is restored, and neither more nor less."""
    rng, batch = np.random.default_rng(seed), 25
    numbers = np.concatenate([np.arange(devices), rng.integers(0, devices, 300)])
    labels, counts = np.zeros(len(numbers), dtype=np.int64), np.full(len(numbers), batch)
    noise = rng.normal(size=(len(numbers), 64)).astype(np.float32)
    data = TrainingSet(noise / np.float32(5), labels, counts, 1, restore=True, devices=numbers)
    assert data.features.std() == pytest.approx(1, abs=0.1)
    together = TrainingSet(noise / np.float32(5), labels, counts, 1, restore=True).features
    assert np.abs(data.features - together).mean() < 0.15


def test_a_single_prototype_of_a_class_on_each_device() -> None:
    """Nothing tells places and images apart: the class center is all that is known."""
    prototypes = np.array([[0.0], [3.0], [10.0]], dtype=np.float32)
    labels, counts = np.array([0, 0, 1]), np.array([4, 8, 9])
    data = TrainingSet(prototypes, labels, counts, 2, restore=True, devices=np.array([0, 1, 1]))
    np.testing.assert_array_equal(data.features, _restored(prototypes, labels, counts))


@given(counts=st.lists(st.integers(1, 20), min_size=2, max_size=2), seed=st.integers(0, 99))
def test_extrapolated_prototypes_spread_as_images_do(counts: list[int], seed: int) -> None:
    """Two prototypes of each of many classes: the same mean as the images, and their variance."""
    rng = np.random.default_rng(seed)
    labels, numbers = np.repeat(np.arange(2_000), 2), np.tile(counts, 2_000)
    prototypes = 3 + rng.normal(size=(len(labels), BLOB_SIZE)) / np.sqrt(numbers)[:, None]
    data = TrainingSet(prototypes.astype(np.float32), labels, numbers, 2_000, restore=True)
    features = data.extrapolated()
    np.testing.assert_allclose(features.mean(axis=0), 3, atol=0.2)
    assert features.std() == pytest.approx(1, abs=0.05)


def test_extrapolation_leaves_other_classes_and_single_prototypes_alone() -> None:
    """P_a + k (P_a - P_b); with 5 images in both, k is 1."""
    prototypes = np.array([[1.0], [7.0], [2.0]], dtype=np.float32)
    data = TrainingSet(prototypes, np.array([0, 3, 0]), np.full(3, 5), 4, restore=True)
    np.testing.assert_allclose(data.extrapolated(), [[0], [7], [3]], atol=1e-6)


def test_extrapolation_takes_prototypes_of_the_same_device() -> None:
    """Where it has several: otherwise the distance between devices would be stretched."""
    prototypes = np.array([[1.0], [70.0], [2.0], [80.0], [5.0]], dtype=np.float32)
    devices = np.array([0, 1, 0, 2, 0])
    labels = np.array([0, 0, 0, 0, 1])
    data = TrainingSet(prototypes, labels, np.full(5, 5), 2, restore=True, devices=devices)
    np.testing.assert_allclose(data.extrapolated(), [[0], [60], [3], [90], [5]], atol=1e-5)


VALUES, LABELS, COUNTS = blobs(0, 3)


def with_value(value: float) -> Features:
    values = VALUES.copy()
    values[3, 2] = value
    return values


@pytest.mark.parametrize(
    ("values", "labels", "counts", "message"),
    [
        (with_value(np.nan), LABELS, COUNTS, "finite"),
        (with_value(np.inf), LABELS, COUNTS, "finite"),
        (VALUES[:0], LABELS[:0], COUNTS[:0], "at least one prototype"),
        (VALUES, LABELS[1:], COUNTS, "with a label and a count"),
        (VALUES, LABELS + 1, COUNTS, "labels must lie in 0 to 3"),
        (VALUES, LABELS, 0 * COUNTS, "at least one image"),
    ],
    ids=["NaN", "infinity", "no prototypes", "a label too few", "a class too many", "no images"],
)
def test_arrays_that_make_no_head_are_refused(
    values: Features, labels: Integers, counts: Integers, message: str
) -> None:
    with pytest.raises(ProtofleetError, match=message):
        TrainingSet(values, labels, counts, 4, restore=True)


def _weighted(weights: list[float], labels: list[int]) -> TrainingSet:
    values = np.arange(len(labels), dtype=np.float32)[:, None]
    counts = np.full(len(labels), 5)
    return TrainingSet(values, np.array(labels), counts, 3, restore=True, weights=np.array(weights))


def test_rows_occur_as_often_as_their_weight() -> None:
    """Their order stays, and equal weights leave the set as it is."""
    even = _weighted([1.0] * 6, [0, 1, 0, 2, 1, 0])
    assert even.evenly_weighted() is even
    doubled = _weighted([2.0, 0.5, 0.5, 1.0, 0.1], [0, 1, 1, 0, 2]).evenly_weighted()
    assert doubled.values[:, 0].tolist() in ([0, 0, 1, 3, 4], [0, 0, 2, 3, 4])
    assert doubled.weights is None


@given(weights=st.lists(st.floats(0.01, 50), min_size=1, max_size=40), seed=st.integers(0, 9))
def test_rows_occur_in_proportion_to_their_weight(weights: list[float], seed: int) -> None:
    """Rounded up or down, within each class; no class is lost."""
    labels = np.random.default_rng(seed).integers(0, 3, len(weights)).tolist()
    data = _weighted(weights, labels)
    occurrences = np.bincount(even_rows(data.labels, data.weights), minlength=len(weights))
    for label in set(labels):
        mine = data.labels == label
        total = np.array(weights)[mine].sum()
        expected = np.array(weights)[mine] * max(round(total), 1) / total
        assert occurrences[mine].sum() == max(round(total), 1)
        assert (np.abs(occurrences[mine] - expected) < 1 + 1e-6).all()


def test_only_large_arrays_are_in_files_and_only_with_a_folder(tmp_path: Path) -> None:
    arrays = Arrays(tmp_path, in_memory_bytes=80)
    assert not is_in_file(arrays.empty((20,), np.float32))
    large = arrays.empty((7, 3), np.float32)
    assert is_in_file(large)
    assert large.shape == (7, 3)
    assert not is_in_file(Arrays(in_memory_bytes=80).empty((7, 3)))


def test_kept_values_are_equal_and_need_few_files(tmp_path: Path) -> None:
    """Parts of any size, some without rows."""
    arrays, rng = Arrays(tmp_path, in_memory_bytes=400), np.random.default_rng(0)
    before = _open_files(tmp_path)
    parts = [rng.normal(size=(rows, 5)).astype(np.float32) for rows in rng.integers(0, 9, 500)]
    kept = [arrays.keep(part) for part in parts]
    assert kept[0] is parts[0]
    for part, one in zip(parts, kept, strict=True):
        np.testing.assert_array_equal(one, part)
    assert 1 <= _open_files(tmp_path) - before <= 12  # 40 kB in doublings of 400 bytes
    assert list(tmp_path.iterdir()) == []
    del kept, one, arrays
    gc.collect()
    assert _open_files(tmp_path) == before


def _open_files(folder: Path) -> int:
    links = (each for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return sum(str(each.readlink()).startswith(str(folder)) for each in links)


def test_rows_by_mask_and_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_ROWS", 4)
    values = np.arange(30).reshape(10, 3)
    arrays, mask, numbers = Arrays(tmp_path, in_memory_bytes=0), np.arange(10) % 3 > 0, np.array([9, 9, 0])
    np.testing.assert_array_equal(arrays.rows(values, mask), values[mask])
    np.testing.assert_array_equal(arrays.rows(values, numbers), values[numbers])
    assert [*blocks(10)] == [slice(0, 4), slice(4, 8), slice(8, 10)]


def test_folder_without_room_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ProtofleetError, match=r"a training needs \d+\.\d GB in /.*"):
        Arrays(tmp_path).empty((2**50,), np.uint8)


@pytest.mark.parametrize("recipe", ["default", "paper"])
def test_head_has_the_same_bits_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """With blocks of few rows, rare classes, several devices and weights."""
    monkeypatch.setattr(module, "BLOCK_ROWS", 64)
    chosen = replace(RECIPES[recipe], epochs=2, min_steps=20, learning_rate=3e-3)
    expected = _trained(chosen, Arrays())
    made = _trained(chosen, Arrays(tmp_path, in_memory_bytes=0))
    assert len(expected.layers) == 3
    assert made.epochs == expected.epochs > 0
    assert (made.loss, made.accuracy, made.temperature) == (
        expected.loss,
        expected.accuracy,
        expected.temperature,
    )
    for one, other in zip(made.layers, expected.layers, strict=True):
        assert _bytes(one) == _bytes(other)


def _bytes(layer: Dense) -> list[bytes]:
    return [each.tobytes() for each in (layer.weight, layer.bias, layer.projection) if each is not None]


def _trained(recipe: Recipe, arrays: Arrays) -> TrainedHead:
    """Each class is a sphere around the same center, which no linear discriminant separates."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(4 * ALWAYS_ADAPTER, 8))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    labels = np.where(np.arange(len(directions)) < 20, 2, np.arange(len(directions)) % 2)
    data = TrainingSet(
        (directions * np.array([1, 4, 9])[labels][:, None]).astype(np.float32),
        labels,
        rng.integers(1, 3, len(labels)),
        4,
        weights=np.where(np.arange(len(labels)) < 40, 0.5, 1.0),
        common=labels < 2,
        devices=rng.integers(0, 5, len(labels)),
        arrays=arrays,
    )
    return train_head(data, recipe, seed=0, device="cpu")
