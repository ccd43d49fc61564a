"""The head of principal prototypes: what their class means and their scatter say, however they are divided."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.fedncm import FedNCM
from aggregator.algorithms.fedtc.block_head import CLEAR_DISTANCE, STRENGTHS, sums_of
from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.fedtc.train_head import TrainedHead, train_head
from aggregator.algorithms.novelty import directions_of
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.training_set import combine
from protocol.wire.principal_prototypes import PrincipalPrototypes
from protofleet import batch_prototypes
from protofleet.prototypes import device_prototypes

CLASSES, SIZE = 4, 24
DEVIATIONS = np.arange(1, SIZE + 1) ** -0.75
CENTERS = 2 + 0.6 * DEVIATIONS * np.random.default_rng(0).normal(size=(CLASSES, SIZE))


def _images(seed: int, *, each: int = 40) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    labels = np.repeat(np.arange(CLASSES), each)
    noise = DEVIATIONS * np.random.default_rng(seed).normal(size=(len(labels), SIZE))
    return (CENTERS[labels] + noise).astype(np.float32), labels


def _exact(features: NDArray[np.float32], labels: NDArray[np.int64]) -> Prototypes:
    """Return a device's block with all directions of its scatter."""
    classes = np.unique(labels)
    means = np.array([features[labels == label].mean(axis=0) for label in classes])
    away = features - means[np.searchsorted(classes, labels)]
    block = PrincipalPrototypes(
        means, classes, np.bincount(labels)[classes], away, np.zeros(SIZE, np.float32)
    )
    return replace(_batches(features[:0], labels[:0]), block=block)


def _batches(features: NDArray[np.float32], labels: NDArray[np.int64]) -> Prototypes:
    return batch_prototypes(features, labels, alpha=1.0)


def _trained(parts: Sequence[Prototypes], *, widths: Sequence[int] = ()) -> TrainedHead:
    data = combine(parts, num_classes=CLASSES + 1, max_multiple=0)
    return train_head(replace(data, widths=widths), RECIPES["default"], seed=0, device="cpu")


def _accuracy(head: TrainedHead) -> float:
    features, labels = _images(99, each=400)
    return float((logits_of(head.layers, features).argmax(axis=1) == labels).mean())


@pytest.mark.parametrize(("spread", "strength"), [(1, 3.0), (3, 1.5), (9, 1.0)])
def test_head_is_the_discriminant_of_all_images(spread: float, strength: float) -> None:
    """Blocks with all directions say as much as the images, on any devices; classes that are near need more ridge."""
    features, labels = _images(1)
    features += ((spread - 1) * CENTERS[labels]).astype(np.float32)
    owners = np.where(labels < 2, 0, np.arange(len(labels)) % 2 + 1)
    head = _trained([_exact(features[owners == each], labels[owners == each]) for each in range(3)])
    means = np.array([features[labels == label].mean(axis=0, dtype=np.float64) for label in range(CLASSES)])
    away = features - means[labels]

    def discriminant(strength: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        ridge = strength * (away**2).sum() / len(away) * np.eye(SIZE)
        covariance = (away.T @ away + ridge) / len(away)
        directions = np.linalg.solve(covariance, (means - means.mean(axis=0)).T)
        trace = np.trace(np.linalg.solve(covariance, away.T @ away / len(away)))
        return directions, (directions.T * (means - means.mean(axis=0))).sum(axis=1) - trace / 40

    _, distances = discriminant(STRENGTHS[0])
    chosen = np.clip(CLEAR_DISTANCE / distances.mean(), *STRENGTHS)
    assert chosen == pytest.approx(strength, abs=0.4)
    directions, lengths = discriminant(chosen)
    expected = (features - means.mean(axis=0)) @ directions - lengths / 2
    found = logits_of(head.layers, features)[:, :CLASSES] * head.temperature
    np.testing.assert_allclose(
        found - found.mean(axis=1, keepdims=True), expected - expected.mean(axis=1, keepdims=True), atol=1e-3
    )


def test_batches_and_blocks_of_one_fleet_make_one_head() -> None:
    """A device's batches have the scatter of its images: the accuracy is that of blocks alone, and no class is lost."""
    devices = [_images(seed) for seed in range(6)]
    blocks = [_exact(*each) for each in devices]
    mixed = [
        _batches(*each) if number % 2 else block
        for number, (each, block) in enumerate(zip(devices, blocks, strict=True))
    ]
    alone, both = _trained(blocks), _trained(mixed)
    assert _accuracy(both) == pytest.approx(_accuracy(alone), abs=0.02)
    assert _accuracy(alone) > 0.8
    absent = logits_of(both.layers, _images(99)[0])[:, CLASSES]
    assert (absent < -1000).all()


def test_device_counts_by_its_images() -> None:
    """One mean of 200 images counts like 40 batches of five."""
    features, labels = _images(3, each=200)
    mine = labels == 0
    parts = [_exact(features[mine], labels[mine]) for _ in range(2)]
    data = combine([*parts, _batches(features[mine], labels[mine])], num_classes=CLASSES)
    assert data.weights is not None
    assert data.counts.tolist() == [200] * 3
    np.testing.assert_allclose(data.weights, 1)


def test_scatter_beyond_a_multiple_of_the_median_is_shortened() -> None:
    """Rows that are ten times as long make no direction useless; without a limit they do."""
    parts = [_exact(*_images(seed)) for seed in range(6)]
    block = parts[0].block
    assert block is not None
    hostile = replace(parts[0], block=replace(block, rows=100 * block.rows))
    limited = combine([hostile, *parts[1:]], num_classes=CLASSES)
    assert limited.scatter is not None
    squares = limited.scatter.traces()
    np.testing.assert_allclose(squares, limited.scatter.squares().sum(axis=1))
    assert squares[0] == pytest.approx(3 * np.sort(squares)[2], rel=1e-3)
    free = combine([hostile, *parts[1:]], num_classes=CLASSES, max_multiple=0)
    assert free.scatter is not None
    assert free.scatter.squares()[0].sum() == pytest.approx(1e4 * (block.rows**2).sum(), rel=1e-3)


@pytest.mark.parametrize(("devices", "max_multiple", "counted"), [(9, 3, 120), (9, 0, 200), (4, 3, 200)])
def test_device_with_most_images_of_a_class_does_not_decide_its_mean(
    devices: int, max_multiple: float, counted: int
) -> None:
    """It has the effect of three times the median device's images, where five devices have the class."""
    (some, of_some), (more, of_more) = _images(0), _images(50, each=160)
    features, labels = np.concatenate([some, more]), np.concatenate([of_some, of_more])
    mine = np.arange(len(labels)) < CLASSES * 40 + 160
    first = _exact(features[mine], labels[mine])
    parts = [first, *(_exact(*_images(seed)) for seed in range(1, devices))]
    data = combine(parts, num_classes=CLASSES, max_multiple=max_multiple)
    assert data.scatter is not None
    of_class = data.labels == 0
    np.testing.assert_allclose(data.scatter.in_means[of_class], [counted, *[40] * (devices - 1)])
    np.testing.assert_allclose(data.scatter.in_means[~of_class], 40)
    expected = np.average(data.values[of_class], axis=0, weights=data.scatter.in_means[of_class])
    np.testing.assert_allclose(sums_of(data, data.scatter).means[0], expected, rtol=1e-4)


def test_values_of_backbones_are_brought_to_one_scale() -> None:
    """A backbone whose values are a thousand times as large changes no prediction."""
    parts = [device_prototypes(*_images(seed)) for seed in range(6)]
    scales = np.repeat([1, 1000], [SIZE // 2, SIZE - SIZE // 2]).astype(np.float32)
    scaled = [device_prototypes(features * scales, labels) for features, labels in map(_images, range(6))]
    widths = (SIZE // 2, SIZE - SIZE // 2)
    head, other = _trained(parts, widths=widths), _trained(scaled, widths=widths)
    features = _images(99)[0]
    same = logits_of(head.layers, features).argmax(axis=1) == logits_of(
        other.layers, features * scales
    ).argmax(axis=1)
    assert same.mean() > 0.97


def test_class_on_one_device_takes_fewer_images_of_others() -> None:
    """A class of two images, anywhere, on one device of ten: its mean is drawn to the middle of the others."""
    parts = [_exact(*_images(number)) for number in range(10)]
    away = DEVIATIONS * np.random.default_rng(2).normal(size=SIZE)
    rare = (CENTERS.mean(axis=0, keepdims=True) + away).astype(np.float32)
    data = combine(
        [Prototypes(rare, np.array([CLASSES]), np.array([2]), block=parts[0].block), *parts[1:]],
        num_classes=CLASSES + 1,
    )
    assert data.common_classes.tolist() == [True] * CLASSES + [False]
    limited, free = (
        train_head(replace(data, common=common), RECIPES["default"], seed=0, device="cpu")
        for common in (data.common, None)
    )
    assert _accuracy(limited) > _accuracy(free) + 0.04


def test_nearest_mean_and_novelty_have_the_means_of_blocks() -> None:
    data = combine([_exact(*_images(seed)) for seed in range(3)], num_classes=CLASSES, max_multiple=0)
    features = np.concatenate([_images(seed)[0] for seed in range(3)])
    means = np.array([features[np.tile(_images(0)[1], 3) == label].mean(axis=0) for label in range(CLASSES)])
    np.testing.assert_allclose(data.centers, means, rtol=1e-4)
    directions = directions_of(data).units
    np.testing.assert_allclose(directions, means / np.linalg.norm(means, axis=1, keepdims=True), rtol=1e-4)
    head = FedNCM().train(data, Training())
    images, labels = _images(99, each=400)
    logits = logits_of(head.layers, images)
    nearest = ((images[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert (logits.argmax(axis=1) == nearest).mean() > 0.99
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    confidence = float((odds.max(axis=1) / odds.sum(axis=1)).mean())
    assert confidence == pytest.approx((logits.argmax(axis=1) == labels).mean(), abs=0.1)
