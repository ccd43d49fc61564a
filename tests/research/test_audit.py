"""The measured lower bound of epsilon: near the promised one, and above it where the noise is too little."""

from statistics import NormalDist

import numpy as np
import pytest

from protocol.statistics.gaussian_privacy import noise_multiplier
from protocol.statistics.noisy_sums import epsilon_of_sums
from research.privacy.audit import ROW, epsilon_by_delta_alone, epsilon_of_mu, mu_at_least, scores
from research.privacy.private_fleet import DELTA

RELEASES = 500


def measured(epsilon: float, *, images: int = 1, noise_of: int | None = None) -> tuple[float, float]:
    """Return the lower bound by the trade-off of a Gaussian event, and the one by (epsilon, delta) alone."""
    z = noise_multiplier(epsilon, DELTA, cost=epsilon_of_sums, rows=noise_of or images)
    without, with_unit = (
        scores(images=images, is_member=each, z=z, releases=RELEASES, seed=0) for each in (False, True)
    )
    mu = images / z
    return epsilon_of_mu(mu_at_least(without, with_unit)), epsilon_by_delta_alone(without, with_unit, mu=mu)


@pytest.mark.parametrize(("epsilon", "images"), [(4.0, 1), (4.0, 10), (8.0, 1)])
def test_bounds_are_below_the_promised_epsilon_and_near_it(epsilon: float, images: int) -> None:
    """The seed is fixed: with an eightieth of the report's releases, the first bound is above two thirds."""
    by_trade_off, by_delta = measured(epsilon, images=images)
    assert 2 / 3 * epsilon < by_trade_off <= epsilon
    assert epsilon / 10 < by_delta < by_trade_off


def test_audit_finds_a_person_in_the_noise_of_one_image() -> None:
    assert measured(4.0, images=3, noise_of=1)[0] > 4


def test_bound_is_above_mu_in_one_of_twenty_audits() -> None:
    """Of scores that are Gaussian, whose mu is known; without a difference it is zero in nineteen of twenty."""
    random, mu = np.random.default_rng(0), 0.5
    bounds = [
        mu_at_least(random.normal(-mu / 2, 1, 2000), random.normal(mu / 2, 1, 2000)) for _ in range(400)
    ]
    assert 0.02 < np.mean(np.array(bounds) > mu) < 0.08
    assert np.median(bounds) == pytest.approx(mu, rel=0.2)
    assert np.mean([mu_at_least(*random.normal(size=(2, 2000))) > 0 for _ in range(400)]) < 0.08


def test_row_is_the_longest_and_scores_are_a_mu_apart() -> None:
    assert int((ROW.astype(int) ** 2).sum()) == 127**2
    without, with_unit = (
        scores(images=2, is_member=each, z=1.0, releases=300, seed=1) for each in (False, True)
    )
    assert np.median(with_unit) - np.median(without) == pytest.approx(2, abs=0.3)
    assert NormalDist().cdf(-1) == pytest.approx((with_unit <= 0).mean(), abs=0.07)
