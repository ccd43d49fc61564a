"""Training sets of a head: all prototypes, or robust ones, whose means are limited by other devices'."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.fedtc.train_head import TrainedHead, train_head
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.intake.validation import Prototypes
from aggregator.training.robust import training_set as limiting
from aggregator.training.robust.outlier_detection import judge
from aggregator.training.robust.outlier_statistics import summaries
from aggregator.training.robust.training_set import combine, limited_means, pool
from tests.support.messages.prototype_sets import CLASSES, fleet, flipped, honest


def test_parts_are_concatenated() -> None:
    """The order of the parts stays, and each prototype has the number of its device."""
    parts = [honest(number, prototypes=2 + number) for number in range(3)]
    data = _combined(parts)
    expected = np.repeat(np.arange(3), [len(part.labels) for part in parts])
    np.testing.assert_array_equal(data.devices, expected)
    assert np.array_equal(data.values, np.concatenate([part.values for part in parts]))
    assert np.array_equal(data.labels, np.concatenate([part.labels for part in parts]))


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


def _combined(parts: list[Prototypes]) -> TrainingSet:
    return combine(parts, num_classes=RARE + 1)


def _trained(data: TrainingSet) -> TrainedHead:
    return train_head(data, replace(RECIPES["default"], adapter=False), seed=0, device="cpu")


def _accuracy(data: TrainingSet, fresh: Prototypes) -> float:
    """Return the accuracy of the linear head of a training set on new prototypes."""
    logits = logits_of(_trained(data).layers, fresh.values)
    return float((logits.argmax(axis=1) == fresh.labels).mean())


def _means(part: Prototypes) -> NDArray[np.float64]:
    return np.stack([part.values[part.labels == label].mean(axis=0) for label in range(len(CLASSES))])


def _moves(parts: list[Prototypes]) -> NDArray[np.float64]:
    """Return how far each mean of each device is moved, (K, C)."""
    after = limited_means(parts)
    return np.array(
        [np.linalg.norm(_means(b) - _means(a), axis=1) for a, b in zip(parts, after, strict=True)]
    )


def _moved(part: Prototypes, share: float) -> Prototypes:
    """Return a device's prototypes, moved by a share of the way to the next class."""
    means = _means(part)
    away = share * (np.roll(means, -1, axis=0) - means)
    return replace(part, values=part.values + away[part.labels].astype(np.float32))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_wrong_means_of_one_device_of_five_are_limited(share: float) -> None:
    """Outlier detection may find nothing among so few devices; honest devices are hardly moved."""
    parts = [*fleet(4, shift=0.5).values(), _moved(honest(9, shift=0.5), share)]
    *others, attacker = _moves(parts)
    means = _means(parts[0])
    between = np.linalg.norm(np.roll(means, -1, axis=0) - means, axis=1)
    assert (attacker > 0.5 * share * between).all()
    assert (np.array(others) < 0.1 * between).all()


def test_prototypes_of_a_class_move_together() -> None:
    """Their differences, counts and labels stay, and so does a device within the others' spread."""
    parts = [*fleet(6).values(), flipped(honest(9))]
    after = limited_means(parts)
    for before, limited in zip(parts, after, strict=True):
        assert limited.labels is before.labels
        assert limited.counts is before.counts
        for label in range(len(CLASSES)):
            mine = before.labels == label
            moves = limited.values[mine] - before.values[mine]
            np.testing.assert_allclose(moves, moves[:1].repeat(len(moves), axis=0), atol=1e-5)
    assert any(limited.values is before.values for before, limited in zip(parts, after, strict=True))


def test_device_that_is_not_quarantined_does_not_decide() -> None:
    """One of five uploads fifty times as many prototypes, half of the way to the next class: it is not an outlier."""
    attacker = _moved(honest(9, shift=0.5, prototypes=300), 0.5)
    parts = {**fleet(4, shift=0.5), "attacker": attacker}
    assert not judge(summaries(parts), classes=CLASSES, false_alarm_rate=0.01).quarantined
    honest_parts = [*fleet(4, shift=0.5).values(), honest(9, shift=0.5)]
    assert _error(list(parts.values())) < 1.2 * _error(honest_parts)
    assert _error(list(parts.values()), max_multiple=0) > 5 * _error(honest_parts)


def _error(parts: list[Prototypes], *, max_multiple: float = 5) -> float:
    """Return the mean distance of the classes' means in a training set from the true ones."""
    data = combine(parts, num_classes=len(CLASSES), max_multiple=max_multiple)
    truth = _means(honest(0, prototypes=1000, shift=0.0))
    members = [data.labels == label for label in range(len(CLASSES))]
    means = [
        np.average(data.values[mine], axis=0, weights=np.asarray(data.weights)[mine]) for mine in members
    ]
    return float(np.linalg.norm(np.stack(means) - truth, axis=1).mean())


def test_devices_of_another_place_stay() -> None:
    """They resemble each other; a single one does not."""
    place = 4 * np.random.default_rng(5).normal(size=(1, honest(0).values.shape[1])).astype(np.float32)
    elsewhere = [replace(part, values=part.values + place) for part in (honest(20), honest(21))]
    assert (_moves([*fleet(6).values(), *elsewhere])[-2:] < 0.1 * np.linalg.norm(place)).all()
    assert (_moves([*fleet(6).values(), elsewhere[0]])[-1] > 0.5 * np.linalg.norm(place)).all()


def test_few_devices_of_another_class_are_limited() -> None:
    """Two of eight that swap the same labels resemble each other, and the next class."""
    moves = _moves([*fleet(6).values(), flipped(honest(9)), flipped(honest(10))])
    means = _means(honest(0))
    between = np.linalg.norm(np.roll(means, 1, axis=0) - means, axis=1)
    assert (moves[-2:] > 0.5 * between).all()


def test_a_third_of_the_devices_stay() -> None:
    """The median is between them and the others, so it may be nearer to another class by itself."""
    moves = _moves([*fleet(4).values(), *(flipped(honest(9 + number)) for number in range(3))])
    assert (moves[-3:] < 1).all()


def test_class_of_two_devices_stays() -> None:
    """Either may be correct."""
    parts = [honest(1), flipped(honest(2))]
    assert all(
        after.values is before.values for before, after in zip(parts, limited_means(parts), strict=True)
    )


def test_devices_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many are compared with all at once does not change what is moved."""
    parts = [*fleet(7, shift=0.5).values(), _moved(honest(9, shift=0.5), 0.5)]
    whole = _moves(parts)
    assert whole.any()
    monkeypatch.setattr(limiting, "ROWS", 3)
    np.testing.assert_array_equal(_moves(parts), whole)
