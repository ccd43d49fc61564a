"""No device counts more than a multiple of the median device."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from aggregator.config.schema import MAX_MULTIPLE
from aggregator.ingest.validation import Prototypes
from aggregator.training.robust.weights import (
    MIN_DEVICES,
    PARTS,
    SHARED_BY,
    counted_images,
    counted_totals,
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
    assert counted_images(images)[-1].tolist() == [20, 20, 40 * MAX_MULTIPLE - 40]


@pytest.mark.parametrize(
    ("stated", "counted"),
    [
        ([30, 30, 30, 30, 10**6], [30, 30, 30, 30, 40]),
        ([12, 12, 12, 10**6, 10**6], [12, 12, 12, 18, 18]),
        ([20, 20, 20, 25, 30], [20, 20, 20, 25, 28 + 1 / 3]),
        ([20, 20, 20, 20, 20], [20, 20, 20, 20, 20]),
        ([20, 20, 20, 10**6], [20, 20, 20, 100]),
    ],
)
def test_no_device_of_five_counts_more_than_a_quarter(stated: list[int], counted: list[float]) -> None:
    """One device that claims more would have more than half of a class, and among so few is hardly found."""
    images = np.array([[count, 0] for count in stated])
    np.testing.assert_allclose(counted_images(images)[:, 0], counted)


def test_one_weight_for_all_classes_is_no_more_than_a_quarter_of_all() -> None:
    """A class of its own is a device's, but not what all classes share."""
    images = np.array([[20, 20, 0]] * 4 + [[0, 0, 200]])
    np.testing.assert_allclose(counted_images(images)[-1].sum(), 200)
    np.testing.assert_allclose(counted_totals(images), [40, 40, 40, 40, 160 / 3])
    np.testing.assert_array_equal(counted_totals(images, multiple=0), images.sum(axis=1))


def test_few_devices_count_as_they_are() -> None:
    assert counted_images(np.array([[20], [5000]])).tolist() == [[20], [5000]]


@given(images=FLEETS)
def test_no_device_counts_more_than_the_multiple(images: NDArray[np.int64]) -> None:
    """The multiple is that of the median device, in each class and in all together."""
    counted = counted_images(images)
    assert (counted <= images).all()
    total = MAX_MULTIPLE * _lower_median(images.sum(axis=1).astype(float))
    assert (counted.sum(axis=1) <= total * (1 + 1e-9)).all()
    for column, stated in zip(counted.T, images.T.astype(float), strict=True):
        assert column.max() <= MAX_MULTIPLE * _lower_median(stated)
        if np.count_nonzero(stated) >= SHARED_BY:
            assert column.max() <= column.sum() / PARTS * (1 + 1e-9)


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
    np.testing.assert_array_equal(few, many)


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
