"""Training sets of a head: all prototypes, or robust ones."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.ingest.validation import Prototypes
from aggregator.training.robust_training_set import (
    TRIMMED_SHARE,
    WeightedPrototypes,
    combine,
    half_of,
    pool,
)
from tests.support.prototype_sets import fleet, flipped, honest


def _class_mean(data: Prototypes, label: int) -> np.ndarray:
    mine = data.labels == label
    return np.average(data.values[mine], axis=0, weights=data.counts[mine])


def _one_class(values: list[float], counts: list[int]) -> Prototypes:
    column = np.array(values, dtype=np.float32)[:, None]
    return Prototypes(column, np.zeros(len(values), dtype=np.int64), np.array(counts))


def test_none_concatenates_the_parts() -> None:
    """In the order of the parts."""
    parts = list(fleet(3).values())
    data = combine(parts, by="none")
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


def test_trimmed_omits_the_farthest() -> None:
    """A fifth of each class, first a liar's prototypes."""
    parts = [*fleet(6).values(), flipped(honest(9))]
    data = combine(parts, by="trimmed")
    everything = pool(parts)
    for label in range(3):
        before, after = (int((one.labels == label).sum()) for one in (everything, data))
        assert after == before - int(TRIMMED_SHARE * before)
    lies = {value.tobytes() for value in parts[-1].values}
    assert lies.isdisjoint(value.tobytes() for value in data.values)


def test_trimmed_weighs_distances_by_images() -> None:
    """A mean of ten images that is 1 off is less likely than a single image that is 2 off."""
    parts = [_one_class([0, 0], [1, 1]), _one_class([0, 0], [1, 1]), _one_class([1, -2], [10, 1])]
    assert combine(parts, by="trimmed").values.tolist() == [[0], [0], [0], [0], [-2]]


def test_median_shifts_each_device() -> None:
    """Nothing is omitted, and differences within a device stay."""
    parts = [*fleet(6).values(), flipped(honest(9))]
    data = combine(parts, by="median")
    everything = pool(parts)
    assert np.array_equal(data.labels, everything.labels)
    for label in range(3):
        honest_mean = _class_mean(pool(parts[:-1]), label)
        moved, lied = (np.linalg.norm(_class_mean(one, label) - honest_mean) for one in (data, everything))
        assert moved < 0.3 * lied
        mine, was = (one.values[one.labels == label][-6:] for one in (data, everything))
        assert np.allclose(mine - mine[0], was - was[0], atol=1e-4)


@pytest.mark.parametrize("by", ["trimmed", "median"])
def test_class_of_few_devices_is_unchanged(by: str) -> None:
    """Of two devices that differ, either may be correct."""
    parts = [honest(1), honest(2, labels=(0,)), honest(3, labels=(0,))]
    data = combine(parts, by="trimmed" if by == "trimmed" else "median")
    everything = pool(parts)
    for label in (1, 2):
        assert np.array_equal(
            data.values[data.labels == label], everything.values[everything.labels == label]
        )
    zero = everything.values[everything.labels == 0]
    assert not np.array_equal(data.values[data.labels == 0], zero)


@pytest.mark.parametrize("by", ["none", "trimmed", "median"])
def test_flood_of_one_device_does_not_decide(by: Literal["none", "trimmed", "median"]) -> None:
    """A device that sends 3,000 prototypes under false labels, among eight of eighteen."""
    parts = [*fleet(8).values(), flipped(honest(9, prototypes=1000))]
    assert _accuracy(combine(parts, by=by)) > 0.95
    assert _accuracy(pool(parts)) < 0.05


def _accuracy(data: Prototypes) -> float:
    """Return the accuracy of the linear head of a training set on new prototypes."""
    trained = train_head(
        *(data.values, data.labels, data.counts),
        weights=data.weights if isinstance(data, WeightedPrototypes) else None,
        num_classes=3,
        recipe=replace(RECIPES["default"], adapter=False),
        seed=0,
        device="cpu",
    )
    fresh = honest(20, prototypes=50)
    return float((logits_of(trained.layers, fresh.values).argmax(axis=1) == fresh.labels).mean())
