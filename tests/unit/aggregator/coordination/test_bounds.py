"""No device counts more than its limits, whatever it states."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from aggregator.coordination.bounds import (
    CLASS_SHARES,
    COMPARED_DEVICES,
    FLEET_SHARE,
    MAX_MULTIPLE,
    class_share,
    counted_images,
    counted_scatter,
    counted_totals,
    median_limits,
)
from aggregator.coordination.minimums import MEDIAN_DEVICES

FLEETS = hnp.arrays(
    np.int64,
    st.tuples(st.integers(1, 8), st.integers(1, 4)),
    elements=st.one_of(st.just(0), st.integers(0, 20), st.integers(0, 10**7)),
)


def _lower_median(values: NDArray[np.float64]) -> float:
    present = sorted(values[values > 0])
    return present[(len(present) - 1) // 2] if len(present) >= MEDIAN_DEVICES else np.inf


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


def test_few_devices_count_as_they_are() -> None:
    assert counted_images(np.array([[20], [5000]])).tolist() == [[20], [5000]]


@given(images=FLEETS)
def test_no_device_counts_more_than_its_limits(images: NDArray[np.int64]) -> None:
    """In all classes together, and in each class; no claim makes a limit longer than that."""
    totals, counted, scatter = counted_totals(images), counted_images(images), counted_scatter(images)
    assert (scatter <= counted.sum(axis=1)).all()
    assert np.count_nonzero(scatter) < COMPARED_DEVICES or scatter.max() <= scatter.sum() * FLEET_SHARE * (
        1 + 1e-9
    )
    assert (counted <= images).all()
    assert (counted.sum(axis=1) <= totals * (1 + 1e-9)).all()
    assert (totals <= MAX_MULTIPLE * _lower_median(images.sum(axis=1).astype(float))).all()
    if np.count_nonzero(totals) >= COMPARED_DEVICES:
        assert totals.max() <= totals.sum() * FLEET_SHARE * (1 + 1e-9)
    for column, stated in zip(counted.T, images.T, strict=True):
        if (devices := int(np.count_nonzero(stated))) >= COMPARED_DEVICES:
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


@given(images=FLEETS, sets=st.integers(1, 3), fewest=st.integers(1, 5))
def test_limits_of_sets_are_those_of_each_alone(images: NDArray[np.int64], sets: int, fewest: int) -> None:
    """A device is compared with those of its own set only, if these are enough; devices without any do not count."""
    amounts = images.ravel()
    rows = np.arange(len(amounts)) % sets
    limits = median_limits(amounts, 2.0, sets=rows, fewest=fewest)
    for number in range(sets):
        present = sorted(amounts[(rows == number) & (amounts > 0)])
        limit = 2.0 * present[(len(present) - 1) // 2] if len(present) >= max(fewest, 1) else np.inf
        assert (limits[(rows == number) & (amounts > 0)] == limit).all()
