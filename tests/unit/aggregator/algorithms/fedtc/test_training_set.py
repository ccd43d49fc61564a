import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.algorithms.fedtc.training_set import TrainingSet, even_rows
from protocol.errors import ProtofleetError
from tests.unit.aggregator.algorithms.fedtc.heads import (
    FEATURE_SIZE,
    Features,
    Integers,
    blobs,
)


def _restored(prototypes: Features, labels: Integers, counts: Integers) -> Features:
    return TrainingSet(prototypes, labels, counts, int(labels.max()) + 1, restore=True).features


@given(batch=st.integers(2, 40), seed=st.integers(0, 1000))
def test_restoring_gives_back_the_variance(batch: int, seed: int) -> None:
    """Batch means of normal features, restored, spread as those features do, around the same mean."""
    rng = np.random.default_rng(seed)
    features = rng.normal(loc=3.0, scale=2.0, size=(200 * batch, FEATURE_SIZE))
    means = features.reshape(200, batch, FEATURE_SIZE).mean(axis=1).astype(np.float32)
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
    places = apart * rng.normal(size=(4, FEATURE_SIZE))
    noise = rng.normal(size=(200, FEATURE_SIZE))
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


def test_single_images_are_restored_to_themselves() -> None:
    """Without averaging there is no loss of variance."""
    prototypes, labels, _ = blobs(0, 1)
    np.testing.assert_allclose(
        _restored(prototypes, labels, np.ones(len(labels), dtype=np.int64)), prototypes, atol=1e-6
    )


@given(counts=st.lists(st.integers(1, 20), min_size=2, max_size=2), seed=st.integers(0, 99))
def test_extrapolated_prototypes_spread_as_images_do(counts: list[int], seed: int) -> None:
    """Two prototypes of each of many classes: the same mean as the images, and their variance."""
    rng = np.random.default_rng(seed)
    labels, numbers = np.repeat(np.arange(2_000), 2), np.tile(counts, 2_000)
    prototypes = 3 + rng.normal(size=(len(labels), FEATURE_SIZE)) / np.sqrt(numbers)[:, None]
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


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_prototypes_that_are_not_finite_are_refused(value: float) -> None:
    """They would end in a head of NaN."""
    prototypes, labels, counts = blobs(0, 1)
    prototypes[3, 2] = value
    with pytest.raises(ProtofleetError, match="finite"):
        TrainingSet(prototypes, labels, counts, 4, restore=True)


def test_what_does_not_fit_together_is_refused() -> None:
    """No prototypes, labels outside the task, empty prototypes, arrays of different length."""
    prototypes, labels, counts = blobs(0, 3)
    with pytest.raises(ProtofleetError, match="at least one prototype"):
        TrainingSet(prototypes[:0], labels[:0], counts[:0], 4, restore=True)
    with pytest.raises(ProtofleetError, match="with a label and a count"):
        TrainingSet(prototypes, labels[1:], counts, 4, restore=True)
    with pytest.raises(ProtofleetError, match="labels must lie in 0 to 2"):
        TrainingSet(prototypes, labels, counts, 3, restore=True)
    with pytest.raises(ProtofleetError, match="at least one image"):
        TrainingSet(prototypes, labels, np.zeros_like(counts), 4, restore=True)


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


@given(
    weights=st.lists(st.floats(0.01, 50), min_size=1, max_size=40),
    seed=st.integers(0, 9),
)
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
