"""The distance of a device's means from the other devices' is limited."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from aggregator.intake.validation import Prototypes
from aggregator.training.robust import training_set as limiting
from aggregator.training.robust.outlier_detection import judge
from aggregator.training.robust.outlier_statistics import summaries
from aggregator.training.robust.training_set import combine, limited_means
from tests.support.messages.prototype_sets import CLASSES, fleet, flipped, honest


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


def test_nothing_is_limited_without_a_multiple() -> None:
    parts = [*fleet(6).values(), flipped(honest(9))]
    data = combine(parts, num_classes=len(CLASSES), max_multiple=0)
    assert np.array_equal(data.values, np.concatenate([part.values for part in parts]))


def test_devices_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many are compared with all at once does not change what is moved."""
    parts = [*fleet(7, shift=0.5).values(), _moved(honest(9, shift=0.5), 0.5)]
    whole = _moves(parts)
    assert whole.any()
    monkeypatch.setattr(limiting, "ROWS", 3)
    np.testing.assert_array_equal(_moves(parts), whole)
