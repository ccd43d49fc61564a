"""The privacy loss of Gaussian releases, compared with scipy and with dp-accounting."""

import math
from collections.abc import Mapping

import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from edge_client.cli.options import MAX_DELTA
from protocol.statistics.gaussian_privacy import MOST_LOSS, STEPS, epsilon_of, noise_multiplier


def delta_of(epsilon: float, mu: float) -> float:
    """Delta of a Gaussian mechanism of sensitivity mu and noise 1 (Balle and Wang 2018, theorem 8)."""
    second = math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))
    return float(ndtr(mu / 2 - epsilon / mu)) - second


def closed_form(releases: Mapping[float, int], delta: float) -> float:
    """Epsilon of Gaussian releases together: they are one whose 1 / z^2 is the sum of theirs."""
    mu = math.sqrt(sum(times / multiplier**2 for multiplier, times in releases.items()))
    if delta_of(0.0, mu) <= delta:
        return 0.0
    return float(brentq(lambda epsilon: delta_of(epsilon, mu) - delta, 0.0, 1000.0, xtol=1e-14))


@given(
    releases=st.dictionaries(st.floats(1.0, 2000.0), st.integers(1, 9), min_size=1, max_size=5),
    delta=st.sampled_from([1e-3, 1e-5, 1e-8, 1e-12]),
)
@example(releases={MOST_LOSS**-0.5 * 1.000001: 1}, delta=1e-12)
@example(releases={1e6: 1}, delta=1e-5)
def test_epsilon_is_never_below_the_exact_value_and_hardly_above(
    releases: dict[float, int], delta: float
) -> None:
    exact, said = closed_form(releases, delta), epsilon_of(releases, delta=delta)
    assert exact - 1e-12 <= said <= exact * (1 + 1e-6) + 1e-6


@pytest.mark.parametrize("releases", [{1.0: 1}, {3.0: 2, 11.0: 5}, {0.5: 1}, {40.0: 1}])
def test_epsilon_is_that_of_dp_accounting(releases: dict[float, int]) -> None:
    """The accountant rounds up more; a release after the other is composed with the ones before it."""
    accountant = PLDAccountant()
    for multiplier, times in releases.items():
        accountant.compose(GaussianDpEvent(multiplier), times)
    said = epsilon_of(releases, delta=1e-5)
    assert said <= accountant.get_epsilon(1e-5) <= said * 1.001 + 1e-3


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 2.0, 8.0, 40.0])
def test_calibrated_noise_is_just_enough(epsilon: float) -> None:
    """A step less is too little."""
    multiplier = noise_multiplier(epsilon, 1e-5)
    assert closed_form({multiplier: 1}, 1e-5) <= epsilon < closed_form({multiplier - 1 / STEPS: 1}, 1e-5)


@pytest.mark.parametrize("multiplier", [0.0, -1.0, math.nan, math.inf, 1e-6, 1e-200, 0.14])
def test_too_little_noise_has_infinite_epsilon(multiplier: float) -> None:
    """It is not computed, whatever a task asks for."""
    assert epsilon_of({multiplier: 1, 5.0: 1}, delta=1e-5) == math.inf


def test_infinite_epsilon_exceeds_the_largest_budget() -> None:
    """Epsilon is above the 40 that a task file may allow, at the largest delta too."""
    assert closed_form({MOST_LOSS**-0.5: 1}, MAX_DELTA) > 40


def test_no_release_costs_nothing() -> None:
    assert epsilon_of({}, delta=1e-5) == 0
