"""No device counts more than a multiple of the median device."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from aggregator.ingest.validation import Prototypes
from aggregator.training.weights import MAX_MULTIPLE, MIN_DEVICES, counted_images, limited

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


def _images(part: Prototypes) -> list[int]:
    return [int(images) for images in np.bincount(part.labels, part.counts)]


def _lower_median(values: NDArray[np.float64]) -> float:
    present = sorted(values[values > 0])
    return present[(len(present) - 1) // 2] if len(present) >= MIN_DEVICES else np.inf


def test_flood_of_prototypes_counts_as_much_as_a_few_devices() -> None:
    """Twenty thousand prototypes of one device among four of twenty images a class; the others stay as they are."""
    honest = [_part([20, 20]) for _ in range(4)]
    *others, flood = limited([*honest, _part([50_000, 50_000])])
    assert all(after is before for after, before in zip(others, honest, strict=True))
    assert _images(flood) == [20 * MAX_MULTIPLE, 20 * MAX_MULTIPLE]


def test_claimed_images_of_one_prototype_count_less() -> None:
    """Where a class has a single prototype, as in rounds; its tensors stay."""
    one = Prototypes(
        np.ones((1, 2), np.float32), np.array([0]), np.array([5]), {"weight": np.ones(3, np.float32)}
    )
    liar = replace(one, counts=np.array([10**7]))
    *_, after = limited([one, one, liar])
    assert after.counts.tolist() == [5 * MAX_MULTIPLE]
    assert after.tensors == one.tensors


def test_class_of_one_device_counts_in_its_total() -> None:
    """A class that no other device has does not give a device more weight in all classes together."""
    *_, after = limited([*[_part([20, 20]) for _ in range(4)], _part([20, 20, 50_000])])
    assert _images(after) == [20, 20, 40 * MAX_MULTIPLE - 40]


def test_few_devices_count_as_they_are() -> None:
    parts = [_part([20]), _part([5000])]
    assert [_images(part) for part in limited(parts)] == [[20], [5000]]


@given(images=FLEETS)
def test_no_device_counts_more_than_the_multiple(images: NDArray[np.int64]) -> None:
    """Of the median of each class, and of that of all classes together."""
    counted = counted_images(images)
    assert (counted <= images).all()
    limits = np.array([MAX_MULTIPLE * _lower_median(column.astype(float)) for column in images.T])
    assert (counted <= limits).all()
    of_class = np.minimum(images, limits).sum(axis=1)
    assert (counted.sum(axis=1) <= MAX_MULTIPLE * _lower_median(of_class) * (1 + 1e-9)).all()


@given(images=FLEETS, seed=st.integers(0, 9))
def test_order_of_devices_does_not_matter(images: NDArray[np.int64], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(images))
    np.testing.assert_array_equal(counted_images(images[order]), counted_images(images)[order])


@given(claims=st.lists(st.integers(21, 10**7), min_size=2, max_size=2))
def test_claims_beyond_the_limit_change_nothing(claims: list[int]) -> None:
    """What one device of five states beyond the multiple has no effect at all."""
    few, many = (
        counted_images(np.array([[20]] * 4 + [[int(20 * MAX_MULTIPLE) + claim]])) for claim in claims
    )
    np.testing.assert_array_equal(few, many)


@pytest.mark.parametrize("devices", [1, 5])
def test_device_without_prototypes_is_possible(devices: int) -> None:
    empty = Prototypes(np.zeros((0, 1), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert len(limited([_part([20])] * devices + [empty])[-1].labels) == 0
