"""An attacker tries to tell whether one unit was summed: the epsilon that is measured is below the promised one.

The unit is an image, or a person with several. The attacker knows all other images and the mechanism, and tests by the
likelihood ratio, which no other test exceeds.
From false and missed alarms a lower bound of epsilon follows (Kairouz, Oh and Viswanath 2015; Clopper and Pearson 1934
for the confidence of both).
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import beta

from edge_client.privacy import sum_mechanism as module
from edge_client.privacy.discrete_gaussian import discrete_gaussian
from edge_client.privacy.noise_key import subkey
from edge_client.privacy.sum_mechanism import noisy_sums
from protocol.statistics.gaussian_privacy import noise_multiplier
from protocol.statistics.noisy_sums import UNITS, deviations, epsilon_of_sums

EPSILON, DELTA = 2.0, 1e-5
RELEASES = 1500
IMAGE = np.array([[127, -127, 127, 127]], np.int8)
"""Longer than a row can be, unless it is clipped."""
SIZE = IMAGE.shape[1]


def _likelihoods(rows: NDArray[np.int8], key: bytes, *, unit: int, z: float) -> NDArray[np.float64]:
    """Return the log-likelihood ratio of each of RELEASES releases, by the continuous Gaussian, which is close.

    The unit has so many images, which are equal.
    """
    kinds = vars(module)["deviations"](z)  # the attacker knows a faulty mechanism, too
    row, at = vars(module)["clipped"](IMAGE)[0].astype(float), np.triu_indices(SIZE)
    changes = unit * np.concatenate([[UNITS], UNITS * row, np.outer(row, row)[at]])
    of_products = np.where(at[0] == at[1], kinds["squares"], kinds["products"])
    scale = np.concatenate([[kinds["counts"]], np.full(SIZE, kinds["sums"]), of_products])
    released = []
    for number in range(RELEASES):
        made = noisy_sums(
            rows,
            np.zeros(len(rows), np.int64),
            classes=1,
            noise_multiplier=z,
            key=subkey(key, b"%d" % number),
        )
        released.append(np.concatenate([made.counts, made.sums.ravel(), made.second_moment]))
    return np.asarray((np.array(released) - changes / 2) @ (changes / scale**2))


def _measured_epsilon(unit: int = 1, noise_of: int | None = None) -> float:
    """Return a lower bound of epsilon at DELTA, with a confidence of 99.9 % at each threshold.

    The noise is that of `noise_of` images, by default of as many as the unit has.
    """
    z = noise_multiplier(EPSILON, DELTA, cost=epsilon_of_sums, rows=noise_of or unit)
    without, with_image = (
        _likelihoods(np.tile(IMAGE, (images, 1)), bytes([number]) * 32, unit=unit, z=z)
        for number, images in enumerate((0, unit))
    )
    best = 0.0
    for threshold in np.quantile(np.concatenate([without, with_image]), np.linspace(0.05, 0.95, 19)):
        for right, wrong in (
            ((with_image > threshold).sum(), (without > threshold).sum()),
            ((without <= threshold).sum(), (with_image <= threshold).sum()),
        ):
            least = beta.ppf(0.001, right, RELEASES - right + 1) if right else 0.0
            most = beta.ppf(0.999, wrong + 1, RELEASES - wrong)
            if least > DELTA:
                best = max(best, math.log((least - DELTA) / most))
    return best


@pytest.mark.parametrize("unit", [1, 3, 10])
def test_measured_epsilon_is_below_the_promised_one(unit: int) -> None:
    """The attack is strong: it measures more than an eighth of what is allowed at this delta."""
    assert EPSILON / 8 < _measured_epsilon(unit) <= EPSILON


def test_attack_finds_a_person_in_the_noise_of_one_image() -> None:
    assert _measured_epsilon(10, noise_of=1) > EPSILON


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "rows are not clipped": lambda patch: patch.setattr(
        module, "clipped", lambda rows: rows.astype(np.int64)
    ),
    "a sampler with too small a variance": lambda patch: patch.setattr(
        module,
        "discrete_gaussian",
        lambda key, count, *, variance: discrete_gaussian(key, count, variance=variance // 16),
    ),
    "counts with the noise of 1 instead of 1 / UNITS": lambda patch: patch.setattr(
        module, "deviations", _scaled({"counts": 1 / UNITS})
    ),
    "sums as if rows were short": lambda patch: patch.setattr(
        module, "deviations", _scaled({"sums": 1 / 127})
    ),
    "products as if rows were short": lambda patch: patch.setattr(
        module, "deviations", _scaled({"squares": 1 / 127, "products": 1 / 127})
    ),
}


def _scaled(factors: dict[str, float]) -> Callable[[float], dict[str, float]]:
    return lambda z: {name: value * factors.get(name, 1.0) for name, value in deviations(z).items()}


@pytest.mark.parametrize("fault", FAULTS)
def test_attack_finds_a_mechanism_with_too_little_noise(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert _measured_epsilon() > EPSILON
