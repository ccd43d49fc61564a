"""No device counts more than its limits, and in a round no device's values are far from the others'."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import Contribution
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.local_model import PARAMETERS
from aggregator.coordination.bounds import (
    MAX_MULTIPLE,
    counted_images,
)
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.rounds import robust_contributions
from aggregator.training.robust.weights import counting, limited, prototype_weights


def _part(images: list[int], *, batch: int = 5) -> Prototypes:
    """Return a device's prototypes of `batch` images each."""
    labels = np.repeat(np.arange(len(images)), np.array(images) // batch)
    values = np.arange(len(labels), dtype=np.float32)[:, None]
    return Prototypes(values, labels, np.full(len(labels), batch))


def _shares(parts: list[Prototypes], label: int, *, multiple: float = MAX_MULTIPLE) -> list[float]:
    """Return how much of a class's weight each device has."""
    of_class = [
        float(weights[part.labels == label].sum())
        for part, weights in zip(parts, prototype_weights(parts, multiple=multiple), strict=True)
    ]
    return [weight / sum(of_class) for weight in of_class]


def test_flood_of_prototypes_weighs_as_much_as_a_few_devices() -> None:
    """Twenty thousand prototypes of one device among twenty of twenty images in each of two classes."""
    parts = [*[_part([20, 20]) for _ in range(20)], _part([50_000, 50_000])]
    for label in (0, 1):
        expected = [*[1] * 20, MAX_MULTIPLE]
        np.testing.assert_allclose(_shares(parts, label), np.array(expected) / sum(expected))


def test_prototypes_of_like_devices_weigh_alike() -> None:
    parts = [_part([20, 40 * device]) for device in range(1, 5)]
    assert all((weights == 1).all() for weights in prototype_weights(parts))


def test_images_of_a_class_count_alike_where_one_device_has_most() -> None:
    """A weight limits a device's images of all classes together: here, those of the last one."""
    parts = [_part([20, 2000]), _part([2000, 10]), _part([2000, 10]), _part([2020, 20_000])]
    *others, last = prototype_weights(parts)
    assert len({weight for weights in others for weight in weights.tolist()}) == 1
    counted = MAX_MULTIPLE * 2010
    np.testing.assert_allclose(last / others[0][0], counted / 22_020)


def test_claimed_images_of_one_prototype_count_less() -> None:
    """Where a class has a single prototype, as in rounds; its tensors stay."""
    one = Prototypes(
        np.ones((1, 2), np.float32), np.array([0]), np.array([5]), {"weight": np.ones(3, np.float32)}
    )
    attacker = replace(one, counts=np.array([10**7]))
    *_, after = limited([one, one, attacker])
    assert after.counts.tolist() == [5 * MAX_MULTIPLE]
    assert after.tensors == one.tensors


def test_limits_are_described() -> None:
    """The example of the documentation: what costs most comes first."""
    images = {f"box-{at}": np.array([10, 90]) for at in range(4)} | {"box-4": np.array([90, 0])}
    stated = np.array(list(images.values()))
    found = counting(images, ("bee", "wasp"), multiple=3.0, of_classes=counted_images(stated))
    assert (found.images, found.counted) == (490, 427)
    assert found.limited == (("box-4", "counts as 27 of 90 images of class 'bee' (40% of the class)"),)
    found = counting(images, ("bee", "wasp"), multiple=3.0, of_classes=counted_images(stated) * [0.5, 1])
    why = "far from the other devices' mean"
    assert found.limited[0] == ("box-4", f"counts as 13 of 90 images of class 'bee' ({why})")
    images["box-4"] = np.array([0, 1000])
    found = counting(images, ("bee", "wasp"), multiple=3.0)
    assert found.limited == (("box-4", "counts as 133 of 1000 images (25% of the fleet's)"),)
    del images["box-3"]
    found = counting(images, ("bee", "wasp"), multiple=3.0)
    assert found.limited == (("box-4", "counts as 300 of 1000 images (3 times the median device's)"),)
    assert (found.images, found.counted) == (1300, 600)
    assert (
        counting(images, ("bee", "wasp"), multiple=0, of_classes=np.array(list(images.values()))).limited
        == ()
    )


def test_device_without_prototypes_is_possible() -> None:
    empty = Prototypes(np.zeros((0, 1), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64))
    parts = [*[_part([20])] * 5, empty]
    assert [len(weights) for weights in prototype_weights(parts)] == [4] * 5 + [0]
    assert len(limited(parts)[-1].labels) == 0


def test_all_images_count_without_a_limit() -> None:
    parts = [*[_part([20, 20]) for _ in range(5)], _part([50_000, 50_000])]
    np.testing.assert_allclose(_shares(parts, 0, multiple=0), np.array([*[20] * 5, 50_000]) / 50_100)
    assert [part.counts.tolist() for part in limited(parts, multiple=0)] == [
        part.counts.tolist() for part in parts
    ]


CLASSES, SIZE, CLIP = 3, 4, 3.0
CENTERS = np.random.default_rng(9).normal(size=(CLASSES, SIZE))


def _contribution(device: str, seed: int, *, factor: float = 1.0, turn: int = 0) -> Contribution:
    random = np.random.default_rng(seed)
    labels = np.arange(CLASSES)
    values = factor * (CENTERS[(labels + turn) % CLASSES] + 0.1 * random.normal(size=(CLASSES, SIZE)))
    changes = factor * (1 + 0.1 * random.normal(size=(2, SIZE)))
    return Contribution(
        device=device,
        values=values.astype(np.float32),
        labels=labels,
        counts=np.full(CLASSES, 10),
        tensors={"weight": changes.astype(np.float32), "bias": changes[0].astype(np.float32)},
    )


HONEST = [_contribution(f"dev{number}", number) for number in range(5)]


def _mean(parts: list[Contribution], name: str = "weight") -> NDArray[Any]:
    mean: NDArray[Any] = np.mean([part.tensors[name] for part in parts], axis=0)
    return mean


def test_honest_contributions_stay_as_they_are() -> None:
    """Prototypes bit for bit, in the order of devices; changes of any length in their mean."""
    found = robust_contributions(HONEST[::-1], clip_multiple=CLIP)
    assert [part.device for part in found] == [part.device for part in HONEST]
    assert all(np.array_equal(one.values, other.values) for one, other in zip(HONEST, found, strict=True))
    assert np.abs(_mean(found) - _mean(HONEST)).max() < 0.02


@pytest.mark.parametrize("factor", [-1.0, 1e4, -1e4])
def test_one_of_six_moves_the_mean_little(factor: float) -> None:
    """The size of its values does not matter; without the limit they would be the mean."""
    parts = [*HONEST, _contribution("malicious", 9, factor=factor)]
    found = robust_contributions(parts, clip_multiple=CLIP)
    assert np.abs(_mean(found) - _mean(HONEST)).max() < 0.8
    prototypes = np.mean([part.values for part in found], axis=0)
    assert np.abs(prototypes - np.mean([part.values for part in HONEST], axis=0)).max() < 0.2
    unlimited = robust_contributions(parts, clip_multiple=0.0)
    assert np.array_equal(unlimited[-1].values, parts[-1].values)


def test_swapped_prototypes_are_limited() -> None:
    """They come no nearer to another class than three times the usual distance."""
    parts = [*HONEST, _contribution("malicious", 9, turn=1)]
    *honest, attacker = robust_contributions(parts, clip_multiple=CLIP)
    center = np.median([part.values for part in parts], axis=0)
    usual = np.median([np.linalg.norm(part.values - center, axis=1) for part in parts], axis=0)
    np.testing.assert_allclose(np.linalg.norm(attacker.values - center, axis=1), CLIP * usual, rtol=1e-4)
    assert all(np.array_equal(part.values, HONEST[number].values) for number, part in enumerate(honest))


def test_two_devices_stay_as_they_are() -> None:
    """It is unknown which of them is malicious."""
    parts = [HONEST[0], _contribution("malicious", 9, factor=1e4)]
    found = robust_contributions(parts, clip_multiple=CLIP)
    assert all(np.array_equal(one.values, other.values) for one, other in zip(found, parts, strict=True))


def test_no_contribution_is_an_empty_round() -> None:
    assert robust_contributions([], clip_multiple=CLIP) == []


def test_devices_without_changes_or_classes() -> None:
    """FedPCL and FedProto upload no changes, and a device may lack a class."""
    parts = [Contribution(**{**vars(part), "tensors": {}}) for part in HONEST]
    parts[0] = Contribution(
        device="few", values=parts[0].values[:1], labels=np.array([2]), counts=np.array([1]), tensors={}
    )
    found = robust_contributions(parts, clip_multiple=CLIP)
    assert [len(part.labels) for part in found] == [3, 3, 3, 3, 1]
    before, after = (np.linalg.norm(each.values[0] - CENTERS[2]) for each in (parts[0], found[-1]))
    assert after < before


@pytest.mark.parametrize(("devices", "attackers"), [(6, 0), (6, 1), (20, 3)])
def test_stated_images_and_long_changes_do_not_multiply(devices: int, attackers: int) -> None:
    """Attackers that state many images and reverse their changes move the model by as much as others; also FPL's."""
    settings = FPL(projection_size=SIZE)
    first = settings.first_tensors(feature_size=5, num_classes=CLASSES, seed=0)

    def part(number: int) -> Prototypes:
        images, factor = (10**7, -1000.0) if number < attackers else (10 + number, 1.0)
        tensors = {name: np.full(first[name].shape, factor, np.float32) for name in PARAMETERS}
        return Prototypes(CENTERS.astype(np.float32), np.arange(CLASSES), np.full(CLASSES, images), tensors)

    parts = [
        Contribution(
            device=str(number),
            values=part.values,
            labels=part.labels,
            counts=part.counts,
            tensors=part.tensors,
        )
        for number, part in enumerate(limited([part(number) for number in range(devices)]))
    ]
    safe = robust_contributions(parts, clip_multiple=CLIP)
    after = settings.aggregate(safe, first, num_classes=CLASSES, seed=0)
    least = 1 - 2.5 * attackers / devices
    assert all((after[name] - first[name] > least - 1e-5).all() for name in PARAMETERS)


def test_long_prototypes_do_not_decide_classes_that_one_honest_device_has() -> None:
    """Places with different classes: no class has a median of its own."""
    rng, size = np.random.default_rng(0), 256
    honest = [
        Contribution(
            device=f"d{label}",
            values=rng.normal(size=(1, size)).astype(np.float32),
            labels=np.array([label]),
            counts=np.array([20]),
            tensors={},
        )
        for label in range(4)
    ]
    long = np.full((4, size), 65504, np.float32)
    every, images = np.arange(4), np.full(4, 20)
    attacker = Contribution(device="malicious", values=long, labels=every, counts=images, tensors={})
    *others, changed = robust_contributions([*honest, attacker], clip_multiple=3.0)
    assert np.linalg.norm(changed.values, axis=1).max() < 3.01 * np.sqrt(size) * 1.1
    for before, after in zip(honest, others, strict=True):
        np.testing.assert_array_equal(before.values, after.values)
