"""No device counts more than its limits, and in a round no device's values are far from the others'."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import Contribution
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.local_model import PARAMETERS
from aggregator.config.schema import MAX_MULTIPLE
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.rounds import robust_contributions
from aggregator.training.robust.weights import (
    CLASS_SHARES,
    FLEET_SHARE,
    MIN_DEVICES,
    SHARED_BY,
    class_share,
    counted_images,
    counted_scatter,
    counted_totals,
    counting,
    limited,
    prototype_weights,
)

FLEETS = hnp.arrays(
    np.int64,
    st.tuples(st.integers(1, 8), st.integers(1, 4)),
    elements=st.one_of(st.just(0), st.integers(0, 20), st.integers(0, 10**7)),
)


def _part(images: list[int], *, batch: int = 5) -> Prototypes:
    """Return a device's prototypes of `batch` images each."""
    labels = np.repeat(np.arange(len(images)), np.array(images) // batch)
    values = np.arange(len(labels), dtype=np.float32)[:, None]
    return Prototypes(values, labels, np.full(len(labels), batch))


def _lower_median(values: NDArray[np.float64]) -> float:
    present = sorted(values[values > 0])
    return present[(len(present) - 1) // 2] if len(present) >= MIN_DEVICES else np.inf


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


def test_class_of_one_device_counts_in_its_total() -> None:
    """A class that no other device has does not give a device more weight in all classes together."""
    images = np.array([[20, 20, 0]] * 4 + [[20, 20, 50_000]])
    assert counted_totals(images)[-1] == pytest.approx(160 / 3)
    assert counted_images(images)[-1].sum() == pytest.approx(160 / 3)


@pytest.mark.parametrize(
    ("stated", "counted"),
    [
        ([30, 30, 30, 30, 10**6], [30, 30, 30, 30, 40]),
        ([12, 12, 12, 10**6, 10**6], [12, 12, 12, 18, 18]),
        ([20, 20, 20, 25, 30], [20, 20, 20, 25, 28 + 1 / 3]),
        ([20, 20, 20, 20, 20], [20, 20, 20, 20, 20]),
        ([20, 20, 20, 10**6], [20, 20, 20, 60]),
        ([6, 60, 89, 101, 113], [6, 60, 66, 66, 66]),
    ],
)
def test_no_device_of_five_counts_more_than_a_quarter(stated: list[int], counted: list[float]) -> None:
    """One device that claims more would have more than half of a class, and among so few is hardly found."""
    images = np.array([[count, 0] for count in stated])
    np.testing.assert_allclose(counted_totals(images), counted)
    np.testing.assert_allclose(counted_images(images)[:, 0], counted)
    for count in (counted_totals, counted_scatter):
        np.testing.assert_array_equal(count(images, multiple=0), images.sum(axis=1))


@pytest.mark.parametrize(
    ("devices", "share"), [(3, 1.0), (5, 0.4), (10, 0.4), (12, 1 / 3), (16, 0.25), (99, 0.25)]
)
def test_share_of_a_class_depends_on_its_devices(devices: int, share: float) -> None:
    """A device with few images in all, and most of a class."""
    images = np.array([[1, 60]] * (devices - 1) + [[60, 1]])
    counted = counted_images(images)[:, 0]
    assert counted.max() / counted.sum() == pytest.approx(min(share, 60 / (devices + 59)))


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


def test_few_devices_count_as_they_are() -> None:
    assert counted_images(np.array([[20], [5000]])).tolist() == [[20], [5000]]


@given(images=FLEETS)
def test_no_device_counts_more_than_its_limits(images: NDArray[np.int64]) -> None:
    """In all classes together, and in each class; no claim makes a limit longer than that."""
    totals, counted, scatter = counted_totals(images), counted_images(images), counted_scatter(images)
    assert (scatter <= counted.sum(axis=1)).all()
    assert np.count_nonzero(scatter) < SHARED_BY or scatter.max() <= scatter.sum() * FLEET_SHARE * (1 + 1e-9)
    assert (counted <= images).all()
    assert (counted.sum(axis=1) <= totals * (1 + 1e-9)).all()
    assert (totals <= MAX_MULTIPLE * _lower_median(images.sum(axis=1).astype(float))).all()
    if np.count_nonzero(totals) >= SHARED_BY:
        assert totals.max() <= totals.sum() * FLEET_SHARE * (1 + 1e-9)
    for column, stated in zip(counted.T, images.T, strict=True):
        if (devices := int(np.count_nonzero(stated))) >= SHARED_BY:
            assert CLASS_SHARES[0] <= class_share(devices) <= CLASS_SHARES[1]
            assert column.max() <= column.sum() * class_share(devices) * (1 + 1e-9)


@given(images=FLEETS, seed=st.integers(0, 9))
def test_order_of_devices_does_not_matter(images: NDArray[np.int64], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(images))
    np.testing.assert_array_equal(counted_images(images[order]), counted_images(images)[order])


@given(claims=st.lists(st.integers(21, 10**7), min_size=2, max_size=2))
def test_claims_beyond_the_limit_change_nothing(claims: list[int]) -> None:
    """Larger claims of one device among five have no effect."""
    few, many = (
        counted_images(np.array([[20]] * 4 + [[int(20 * MAX_MULTIPLE) + claim]])) for claim in claims
    )
    np.testing.assert_allclose(few, many, rtol=1e-12)


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
