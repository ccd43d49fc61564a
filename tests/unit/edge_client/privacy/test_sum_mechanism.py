"""Sums with noise: what one image changes, and how much noise there is."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy.special import logsumexp, ndtr
from scipy.stats import chi2

from edge_client.privacy import sum_mechanism as module
from edge_client.privacy.sum_mechanism import NoisySums, clipped, noisy_sums
from protocol.errors import PrivacyRefused
from protocol.statistics.noisy_sums import (
    COUNT_WEIGHT,
    MAX_DISCRETENESS,
    TAIL,
    UNITS,
    deviations,
    discreteness,
    epsilon_of_sums,
    rows_changed,
)
from protocol.statistics.second_moment import from_triangle
from tests.unit.protocol.statistics.test_gaussian_privacy import closed_form

KEY = bytes(range(32))
ROWS = arrays(np.int8, st.tuples(st.integers(1, 4), st.just(6)), elements=st.integers(-127, 127))


def release(rows: NDArray[np.int8], labels: list[int], z: float = 1.0, key: bytes = KEY) -> NoisySums:
    return noisy_sums(rows, np.array(labels, np.int64), classes=3, noise_multiplier=z, key=key)


@given(rows=ROWS)
def test_clipped_rows_are_never_too_long_and_keep_their_direction(rows: NDArray[np.int8]) -> None:
    short, whole = clipped(rows), rows.astype(np.int64)
    squares = (whole**2).sum(axis=1)
    assert ((short**2).sum(axis=1) <= 127**2).all()
    np.testing.assert_array_equal(short[squares <= 127**2], whole[squares <= 127**2])
    factors = np.minimum(1, 127 / np.maximum(np.sqrt(squares), 1))[:, None]
    assert np.abs(short - whole * factors).max() <= 4
    assert (short * whole >= 0).all()


@given(rows=ROWS, label=st.integers(0, 2))
def test_one_image_changes_no_more_than_the_noise_is_made_for(rows: NDArray[np.int8], label: int) -> None:
    """With the same noise, the difference of two releases is the image; its squares over the variances are 1 / z^2."""
    z, others = 0.7, [0] * (len(rows) - 1)
    more, less = release(rows, [*others, label], z), release(rows[:-1], others, z)
    counts, sums = more.counts - less.counts, more.sums - less.sums
    products = from_triangle(more.second_moment - less.second_moment, 6)
    row = clipped(rows[-1:])[0]
    np.testing.assert_array_equal(counts, UNITS * np.eye(3)[label])
    np.testing.assert_array_equal(sums, UNITS * np.outer(np.eye(3)[label], row))
    np.testing.assert_array_equal(products, np.outer(row, row))
    unit = z * math.sqrt(2 + COUNT_WEIGHT**2)
    squares, above = np.diag(products), products[np.triu_indices(6, 1)]
    changes = [
        *(counts / UNITS / (unit / COUNT_WEIGHT)), *(sums / UNITS / (unit * 127)).ravel(),
        *(squares / (unit * 127**2)),
        *(above / (unit * 127**2 / math.sqrt(2))),
    ]  # fmt: skip
    assert float(np.square(changes).sum()) <= 1 / z**2 * (1 + 1e-12)


@given(rows=ROWS, labels=st.lists(st.integers(0, 2), min_size=4, max_size=4), most=st.integers(4, 6))
def test_one_person_changes_no_more_than_the_noise_of_as_many_images(
    rows: NDArray[np.int8], labels: list[int], most: int
) -> None:
    """Of at most `most` images, of any classes, beside an image of somebody else: z is for one image."""
    z, other = 0.7, np.full((1, 6), 40, np.int8)
    more = release(np.concatenate([other, rows]), [0, *labels[: len(rows)]], z * most)
    less = release(other, [0], z * most)
    assert _squared_change(more, less, z * most) <= 1 / z**2 * (1 + 1e-12)


@pytest.mark.parametrize("most", [1, 3, 10])
def test_equal_long_images_of_a_person_spend_the_whole_budget(most: int) -> None:
    rows = np.tile(np.array([[127, 0, 0, 0, 0, 0]], np.int8), (most, 1))
    more, less = release(rows, [0] * most, 0.7 * most), release(rows[:0], [], 0.7 * most)
    assert _squared_change(more, less, 0.7 * most) == pytest.approx(1 / 0.7**2)


def _squared_change(more: NoisySums, less: NoisySums, z: float) -> float:
    """Return the sum of the squared changes over the variances of the noise, which both releases have alike."""
    scale, at = deviations(z), np.triu_indices(6)
    products = np.where(at[0] == at[1], scale["squares"], scale["products"])
    changes = [
        (more.counts - less.counts) / scale["counts"],
        ((more.sums - less.sums) / scale["sums"]).ravel(),
        (more.second_moment - less.second_moment) / products,
    ]
    return float(np.square(np.concatenate(changes)).sum())


@pytest.mark.parametrize(
    ("counted", "unit", "rows"),
    [(None, None, 1), (None, 10, 10), (3, 3, 3), (3, 10, 3), (10, 3, 10), (1, None, 2), (10, None, 2)],
)
def test_rows_that_a_unit_changes(counted: int | None, unit: int | None, rows: int) -> None:
    """Of a release that counts so many images of a person, or all, for a person of so many images, or one image."""
    assert rows_changed(counted=counted, images_per_person=unit) == rows


def test_longest_image_spends_the_whole_budget() -> None:
    """The bound is reached: no noise is wasted."""
    unit = math.sqrt(2 + COUNT_WEIGHT**2)
    squares = (COUNT_WEIGHT / unit) ** 2 + 1 / unit**2 + 1 / unit**2
    assert squares == pytest.approx(1)


def test_noise_has_its_deviation_in_each_value() -> None:
    """Without images there is noise alone, of classes without images too; all of it is independent."""
    z, unit = 2.0, 2.0 * math.sqrt(2 + COUNT_WEIGHT**2)
    made = noisy_sums(
        np.zeros((0, 120), np.int8), np.zeros(0, np.int64), classes=90, noise_multiplier=z, key=KEY
    )
    products = from_triangle(made.second_moment, 120)
    for values, deviation in (
        (made.counts / UNITS, unit / COUNT_WEIGHT),
        (made.sums / UNITS, unit * 127),
        (np.diag(products), unit * 127**2),
        (products[np.triu_indices(120, 1)], unit * 127**2 / math.sqrt(2)),
    ):
        tolerance = 4 / math.sqrt(2 * values.size)
        assert np.sqrt(np.mean(np.square(values.astype(float)))) == pytest.approx(deviation, rel=tolerance)
    flat = made.sums.ravel()[:7000].astype(float)
    assert abs(np.corrcoef(flat, made.second_moment[:7000])[0, 1]) < 4 / math.sqrt(7000)


def test_same_key_is_the_same_release() -> None:
    rows, labels = np.full((2, 6), 9, np.int8), [0, 2]
    first, again, other = (release(rows, labels, key=key) for key in (KEY, KEY, KEY[::-1]))
    np.testing.assert_array_equal(first.second_moment, again.second_moment)
    assert (first.second_moment != other.second_moment).all()


@pytest.mark.parametrize("z", [0.0, -1.0, math.nan, math.inf])
def test_noise_that_is_none_is_refused(z: float) -> None:
    with pytest.raises(PrivacyRefused, match="the noise must be above 0"):
        release(np.zeros((1, 6), np.int8), [0], z)


def test_rows_without_labels_are_refused() -> None:
    with pytest.raises(PrivacyRefused, match="one row for each image"):
        release(np.zeros((2, 6), np.int8), [0])


def test_variance_is_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller one would be less noise than is charged for."""
    variances = {}

    def recorded(key: bytes, count: int, *, variance: int) -> NDArray[np.int64]:
        variances[count] = variance
        return np.zeros(count, np.int64)

    monkeypatch.setattr(module, "discrete_gaussian", recorded)
    release(np.zeros((1, 6), np.int8), [0], z=0.51)
    unit = 0.51**2 * (2 + COUNT_WEIGHT**2)
    exact = {3: 64**2 * unit / 0.04, 18: 64**2 * unit * 127**2, 6: unit * 127**4, 15: unit * 127**4 / 2}
    assert variances == {count: math.ceil(value * (1 - 1e-12)) for count, value in exact.items()}


@given(variance=st.floats(10, 1e9), distance=st.floats(0, 30))
def test_discrete_noise_is_close_to_rounded_noise(variance: float, distance: float) -> None:
    """The two bounds of the ratio in the proof, by scipy's distribution function."""
    root = math.sqrt(variance)
    k = round(distance * root)
    rounded = float(ndtr((-k + 0.5) / root) - ndtr((-k - 0.5) / root))
    discrete = math.exp(-k * k / (2 * variance)) / math.sqrt(2 * math.pi * variance)
    slack = 1e-9 * max(1, variance)  # the difference of two values of the distribution function
    if discrete > 1e-280 and variance < 1e6:
        ratio = math.log(rounded / discrete)
        assert -1 / (23 * variance) - slack <= ratio <= k * k / (24 * variance**2) + slack


@pytest.mark.parametrize("z", [0.02, 0.05])
def test_one_discrete_value_is_as_private_as_the_bound_says(z: float) -> None:
    """A count alone, exactly: the sum over all integers of how much one distribution exceeds e^epsilon of the other."""
    deviation = UNITS * z / COUNT_WEIGHT
    values = np.arange(-40 * math.ceil(deviation) - 99, 40 * math.ceil(deviation) + 99)
    logs = [-((values - shift) ** 2) / (2 * deviation**2) for shift in (0, UNITS)]
    one, other = (np.exp(each - logsumexp(each)) for each in logs)
    margin = 1 / (23 * deviation**2) + 17 / 16 * (1 + 2 * math.sqrt(TAIL) + 2 * TAIL) / (24 * deviation**2)
    for epsilon in (0.1, 1.0, 3.0):
        m = COUNT_WEIGHT / z
        gaussian = ndtr(m / 2 - epsilon / m) - math.exp(epsilon) * ndtr(-m / 2 - epsilon / m)
        exact = np.maximum(one - math.exp(epsilon + margin) * other, 0).sum()
        assert exact <= gaussian * math.exp(margin) + 1e-15


@pytest.mark.parametrize(("z", "most"), [(0.3, 2e-3), (1.0, 1e-4), (3.73, 1e-5), (1e-3, math.inf)])
def test_discreteness_is_negligible_unless_there_is_hardly_any_noise(z: float, most: float) -> None:
    """Ten classes, and the 376 values of residual sums."""
    found = discreteness(z, classes=10, size=376)
    assert 0 < found <= most
    assert (found == math.inf) == (most == math.inf)


def test_tail_of_weighted_squares_is_rarer_than_the_bound() -> None:
    """Of equal weights it is the chi-squared distribution's."""
    for count in (1, 10, 10_000):
        bound = count + 2 * math.sqrt(TAIL * count) + 2 * TAIL
        assert chi2.logsf(bound, count) <= -TAIL


def test_epsilon_has_room_for_discreteness() -> None:
    """Of each release in epsilon, and in delta: the Gaussian mechanism is held to a smaller one."""
    for releases in ({2.0: 1}, {3.0: 2, 11.0: 5}):
        number = sum(releases.values())
        exact, said = closed_form(releases, 1e-5), epsilon_of_sums(releases, delta=1e-5)
        smaller = closed_form(releases, 1e-5 * math.exp(-MAX_DISCRETENESS * number))
        assert said == pytest.approx(smaller + MAX_DISCRETENESS * number, rel=1e-6)
        assert exact < said < exact + 0.02
    assert epsilon_of_sums({2.0: 1}, delta=1e-30) == math.inf
