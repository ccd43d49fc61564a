"""Training sets of a head: all prototypes, or robust ones."""

from dataclasses import replace

import numpy as np
import pytest

from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.fedtc.train_head import TrainedHead, train_head
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.training_set import (
    combine,
    half_of,
    pool,
)
from tests.support.messages.prototype_sets import fleet, flipped, honest


def test_parts_are_concatenated() -> None:
    """The order of the parts stays."""
    parts = list(fleet(3).values())
    data = _combined(parts)
    assert np.array_equal(data.values, np.concatenate([part.values for part in parts]))
    assert np.array_equal(data.labels, np.concatenate([part.labels for part in parts]))


def test_half_has_every_second_prototype_of_each_class() -> None:
    """Each with its label and count; the only one of a class stays."""
    labels = np.array([0, 1, 0, 0, 2, 1])
    values = np.arange(6, dtype=np.float32)[:, None]
    half = half_of(Prototypes(values, labels, np.arange(10, 16)))
    assert half.values[:, 0].tolist() == [0, 1, 3, 4]
    assert half.labels.tolist() == [0, 1, 0, 2]
    assert half.counts.tolist() == [10, 11, 13, 14]


def test_flood_of_one_device_does_not_decide() -> None:
    """A device that sends 3,000 prototypes under false labels, among eight of eighteen."""
    parts = [*fleet(8).values(), flipped(honest(9, prototypes=1000))]
    fresh = honest(20, prototypes=50)
    assert _accuracy(_combined(parts), fresh) > 0.95
    alike = pool(parts)
    data = TrainingSet(alike.values, alike.labels, alike.counts, RARE + 1)
    assert _accuracy(data, fresh) < 0.05


SIZE, RARE, IMAGES = 48, 5, 5
"""Features, the number of a class that one device alone has, and the images in a prototype."""


def _overlapping(seed: int, *, rows: int = 3, images: int = IMAGES) -> Prototypes:
    """Return the prototypes of a device with five classes whose variance is greatest in few directions."""
    deviations = np.arange(1, SIZE + 1) ** -0.75
    centers = 2 + 0.5 * deviations * np.random.default_rng(0).normal(size=(RARE, SIZE))
    labels = np.repeat(np.arange(RARE), rows)
    noise = deviations * np.random.default_rng(seed).normal(size=(len(labels), SIZE)) / np.sqrt(images)
    return Prototypes((centers[labels] + noise).astype(np.float32), labels, np.full(len(labels), images))


@pytest.mark.parametrize(("kind", "images"), [("scattered", 9), ("copied", 2), ("far", 2)])
def test_class_of_one_device_does_not_decide_the_others(kind: str, images: int) -> None:
    """Its prototypes have ordinary lengths, and hide the other classes, or lie on the side of several of them."""
    parts = [_overlapping(10 + device) for device in range(10)]
    values = _false_values(pool(parts), kind)
    rare = Prototypes(values, np.full(len(values), RARE), np.full(len(values), images))
    data = _combined([pool([parts[0], rare]), *parts[1:]])
    assert data.common_rows.tolist() == (data.labels != RARE).tolist()
    fresh = _overlapping(99, rows=200, images=1)
    assert _accuracy(data, fresh) > 0.88
    assert _accuracy(replace(data, common=np.ones_like(data.common_rows)), fresh) < 0.75
    assert _accuracy(_combined(parts), fresh) == pytest.approx(0.947, abs=0.01)


def _false_values(data: Prototypes, kind: str) -> np.ndarray:
    means = np.stack([data.values[data.labels == label].mean(axis=0) for label in range(RARE)])
    if kind == "copied":
        return means[:1]
    if kind == "far":
        away = means[:3] - means.mean(axis=0)
        far: np.ndarray = (means.mean(axis=0) + away.sum(axis=0))[None]
        return far
    steps = np.concatenate([np.diff(means, axis=0), -np.diff(means, axis=0)])
    length = np.median(np.linalg.norm(data.values, axis=1))
    values: np.ndarray = steps * length / np.linalg.norm(steps, axis=1, keepdims=True)
    return values.astype(np.float32)


def test_spread_of_a_class_of_one_device_is_limited() -> None:
    """Three times as wide makes no difference between the other classes."""
    parts = [_overlapping(10 + device) for device in range(10)]
    fresh = _overlapping(99).values
    logits = []
    for scale in (1, 3):
        values = 2 + scale * np.random.default_rng(0).normal(size=(10, SIZE))
        values += 2 - values.mean(axis=0)
        rare = Prototypes(values.astype(np.float32), np.full(10, RARE), np.full(10, IMAGES))
        data = _combined([pool([parts[0], rare]), *parts[1:]])
        of_others = logits_of(_trained(data).layers, fresh)[:, :RARE]
        logits.append(of_others - of_others.mean(axis=1, keepdims=True))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-3)


@pytest.mark.parametrize(
    ("parts", "common"),
    [
        (list(fleet(4).values()), {0, 1, 2}),  # no class is on five devices
        ([*fleet(4).values(), honest(4, labels=(0, 1))], {0, 1}),
        ([*fleet(4).values(), honest(4, labels=(0,))], {0, 1, 2}),  # only one is
        ([honest(n, labels=(0, 1)) for n in range(5)] + [honest(5, prototypes=60)], {0, 1}),
        (
            [honest(n, labels=(0, 1), prototypes=2) for n in range(5)]
            + [honest(n, labels=(2,), prototypes=20) for n in range(5, 9)],
            {0, 1, 2},  # the others have most of the prototypes
        ),
    ],
)
def test_classes_on_few_devices_count_for_what_all_share_where_they_are_needed(
    parts: list[Prototypes], common: set[int]
) -> None:
    data = _combined(parts)
    assert set(data.labels[data.common_rows].tolist()) == common


def test_each_prototype_has_the_number_of_its_device() -> None:
    parts = [honest(number, prototypes=2 + number) for number in range(4)]
    expected = np.repeat(np.arange(4), [len(part.labels) for part in parts])
    np.testing.assert_array_equal(_combined(parts).devices, expected)


def _combined(parts: list[Prototypes]) -> TrainingSet:
    return combine(parts, num_classes=RARE + 1)


def _trained(data: TrainingSet) -> TrainedHead:
    return train_head(data, replace(RECIPES["default"], adapter=False), seed=0, device="cpu")


def _accuracy(data: TrainingSet, fresh: Prototypes) -> float:
    """Return the accuracy of the linear head of a training set on new prototypes."""
    logits = logits_of(_trained(data).layers, fresh.values)
    return float((logits.argmax(axis=1) == fresh.labels).mean())
