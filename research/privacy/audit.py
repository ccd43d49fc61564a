"""`python -m research audit`: a lower bound of epsilon, measured on releases with and without one unit.

The unit is one image with a row of the greatest length, which reaches the sensitivity, or a person with k equal ones.
The attacker knows everything else and the mechanism, and guesses by the likelihood ratio: no test is better.

**By the trade-off of a Gaussian event.** With noise of 1 / mu times the sensitivity, a test with a probability a of
false alarms detects with at most Phi(Phi^-1(a) + mu) (Dong, Roth and Su 2022). So of guesses by any test, with and
without the unit equally often, at most Phi(mu / 2) are correct on average. The threshold is fixed before the releases:
the number of correct guesses bounds this probability from below (Clopper and Pearson 1934; for trials of two
probabilities, Hoeffding 1956, theorem 4), and so mu, and epsilon at delta. Nothing is assumed of the scores, but that
the release is one Gaussian event, whose mu decides every epsilon (proof, and what discrete noise adds:
`protocol.statistics.noisy_sums`).

**By delta alone.** Detections are at most e^epsilon false alarms + delta, of any mechanism (Kairouz, Oh and Viswanath
2015). At a delta of 1e-5, false alarms of about 1e-5 decide, which thousands of releases do not show: the bound is low.
"""

import itertools
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from edge_client.privacy.sum_mechanism import noisy_sums
from protocol.statistics.gaussian_privacy import epsilon_of, noise_multiplier
from protocol.statistics.noisy_sums import UNITS, deviations, epsilon_of_sums
from protocol.wire.codec import digest_of
from research.privacy.private_fleet import DELTA

ROW = np.array([50, -58, 67, 76], np.int8)
"""As long as a row can be: 50^2 + 58^2 + 67^2 + 76^2 = 127^2, so that clipping changes nothing."""

ERROR = 0.05
"""Probability that a lower bound is above epsilon."""

THRESHOLDS = np.linspace(-3, 6, 91)
"""In standard deviations above the mean without the unit; the best by expected numbers is used."""

COLUMNS = {"epsilon": ">8g", "images": ">8", "releases": ">10,", "correct": ">9.2%", "lower bound": ">13.3f",
           "of epsilon": ">12.1%", "by delta alone": ">16.3f", "epsilon of mu": ">15.3f"}  # fmt: skip

_NORMAL = NormalDist()


def scores(*, images: int, is_member: bool, z: float, releases: int, seed: int) -> NDArray[np.float64]:
    """Return log-likelihood ratios of releases with or without so many equal images, by the continuous Gaussian.

    In standard deviations above the middle of the two cases.
    """
    size, at = len(ROW), np.triu_indices(len(ROW))
    row, kinds = ROW.astype(float), deviations(z)
    products = np.where(at[0] == at[1], kinds["squares"], kinds["products"])
    scale = np.concatenate([[kinds["counts"]], np.full(size, kinds["sums"]), products])
    change = images * np.concatenate([[UNITS], UNITS * row, np.outer(row, row)[at]]) / scale
    rows = np.tile(ROW, (images if is_member else 0, 1))
    labels = np.zeros(len(rows), np.int64)
    released = np.empty((releases, len(scale)))
    for number in range(releases):
        key = digest_of(f"{seed} {images} {is_member} {z} {number}".encode())
        made = noisy_sums(rows, labels, classes=1, noise_multiplier=z, key=key)
        released[number] = np.concatenate([made.counts, made.sums.ravel(), made.second_moment])
    return np.asarray((released / scale - change / 2) @ (change / np.linalg.norm(change)))


def mu_at_least(without: NDArray[np.float64], with_unit: NDArray[np.float64]) -> float:
    """Return the lower bound of mu by the number of correct guesses."""
    trials = len(without) + len(with_unit)
    correct = int((without <= 0).sum() + (with_unit > 0).sum())
    probability = float(beta.ppf(ERROR, correct, trials - correct + 1)) if correct else 0.0
    return 2 * _NORMAL.inv_cdf(probability) if probability > 0.5 else 0.0


def epsilon_of_mu(mu: float) -> float:
    """Return epsilon of a Gaussian event at DELTA."""
    return epsilon_of({1 / mu: 1}, delta=DELTA) if mu else 0.0


def epsilon_by_delta_alone(
    without: NDArray[np.float64], with_unit: NDArray[np.float64], *, mu: float
) -> float:
    """Return the lower bound of epsilon at DELTA by detections and false alarms, at a threshold that mu chooses."""
    releases = len(without)
    expected = [
        [round(releases * _NORMAL.cdf(mu - each)), round(releases * _NORMAL.cdf(-each))]
        for each in THRESHOLDS
    ]
    threshold = THRESHOLDS[np.argmax([_by_delta(*each, releases=releases) for each in expected])] - mu / 2
    alarms = [int((found > threshold).sum()) for found in (with_unit, without)]
    return _by_delta(*alarms, releases=releases)


def _by_delta(detections: int, false_alarms: int, *, releases: int) -> float:
    """Each of two numbers has half of the error."""
    least = beta.ppf(ERROR / 2, detections, releases - detections + 1) if detections else 0.0
    most = (
        beta.ppf(1 - ERROR / 2, false_alarms + 1, releases - false_alarms) if false_alarms < releases else 1.0
    )
    return max(0.0, math.log((least - DELTA) / most)) if least > DELTA else 0.0


@click.command("audit")
@repeated("--epsilon", "epsilons", type=click.FloatRange(0, 32, min_open=True), default=(1.0, 4.0, 8.0))
@repeated(
    "--images", "counts", type=click.IntRange(1), default=(1,), help="Of the unit, with the noise of as many."
)
@repeated(
    "--releases",
    "numbers",
    type=click.IntRange(1),
    default=(40_000,),
    help="With the unit, and as many without.",
)
@repeated("--seed", "seeds", type=int, default=(0,))
@json_option
def command(
    *, epsilons: tuple[float, ...], counts: tuple[int, ...], numbers: tuple[int, ...], seeds: tuple[int, ...],
    json_file: Path | None,
) -> None:  # fmt: skip
    """Measure a lower bound of epsilon on releases of the mechanism, with 95 % confidence."""
    table, runs = Table(COLUMNS, title=f"delta {DELTA:g}"), list[dict[str, Any]]()
    for epsilon, images, releases, seed in itertools.product(epsilons, counts, numbers, seeds):
        z = noise_multiplier(epsilon, DELTA, cost=epsilon_of_sums, rows=images)
        mu = images / z
        without, with_unit = (
            scores(images=images, is_member=each, z=z, releases=releases, seed=seed) for each in (False, True)
        )
        correct = (float((without <= 0).mean()) + float((with_unit > 0).mean())) / 2
        bound = epsilon_of_mu(mu_at_least(without, with_unit))
        alone = epsilon_by_delta_alone(without, with_unit, mu=mu)
        table.row(epsilon, images, releases, correct, bound, bound / epsilon, alone, epsilon_of_mu(mu))
        runs.append({"epsilon": epsilon, "images": images, "releases": releases, "seed": seed, "correct": correct,
                     "lower bound": bound, "by delta alone": alone})  # fmt: skip
    write_json(json_file, "audit", tables=[table], plots=[], runs=runs)
