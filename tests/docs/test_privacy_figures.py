"""Figures of the pages on privacy, computed by the formulas of the code."""

import math
from pathlib import Path
from statistics import NormalDist

import pytest

from aggregator.config.privacy import SumsSettings
from protocol.statistics.gaussian_privacy import noise_multiplier
from protocol.statistics.noisy_sums import UNITS, deviations, epsilon_of_sums, share_of_noise
from tests.unit.protocol.statistics.test_gaussian_privacy import closed_form

DOCS = Path(__file__).parents[2] / "docs"
PRIVACY, SECURE_SUMS, PROTECTION = (
    (DOCS / name).read_text(encoding="utf-8")
    for name in ("privacy.md", "secure-sums.md", "data-protection.md")
)


def multiplier_of(epsilon: float) -> float:
    return noise_multiplier(epsilon, 1e-5, cost=epsilon_of_sums)


def hidden_images(multiplier: float) -> float:
    """Return two standard deviations of the noise of a class's count, in images."""
    return 2 * deviations(multiplier)["counts"] / UNITS


@pytest.mark.parametrize("epsilon", [1, 8])
def test_epsilon_and_guesses_by_the_number_of_a_persons_images(epsilon: int) -> None:
    """Equal images are one Gaussian event of a multiple of the sensitivity; the best guess has Phi(mu / 2)."""
    mu = [images / multiplier_of(epsilon) for images in (1, 10)]
    one, ten = (f"{math.ceil(100 * NormalDist().cdf(each / 2))}" for each in mu)
    if epsilon == 1:
        assert f"at most {one} of 100 guesses are correct at a total epsilon of 1" in PROTECTION
        assert (
            f"an epsilon of 1 becomes {closed_form({1 / mu[1]: 1}, 1e-5):.1f} for a person on ten"
            in PROTECTION
        )
        assert f"ten images: at most {ten} of 100 guesses are correct" in PROTECTION
    else:
        assert f"and {one} at {epsilon}" in PROTECTION


def test_how_certain_uploads_make_an_observer() -> None:
    """The logarithm of how much the odds rise has the mean mu^2 / 2 and the deviation mu where the unit is there."""
    mu = 1 / multiplier_of(1)
    odds = 9 * math.e
    cases = math.ceil(10_000 * (1 - NormalDist(mu**2 / 2, mu).cdf(1)))
    certain = f"{100 * odds / (1 + odds):.0f}"
    assert f"becomes more than {certain} % certain in at most {cases} of 10,000 cases" in PROTECTION


@pytest.mark.parametrize("epsilon", [1, 4])
@pytest.mark.parametrize(("unit", "rows"), [("image", 1), ("person, k = 10", 10)])
def test_measured_membership_by_a_persons_images_is_the_promised_one(
    unit: str, rows: int, epsilon: int
) -> None:
    """Within the error of a thousand releases: equal images have the area Phi(mu / sqrt 2)."""
    (line,) = (each for each in PROTECTION.splitlines() if each.startswith(f"| {unit} | {epsilon} |"))
    shown = [float(each) for each in line.split("|")[3:-1]]
    z = rows * multiplier_of(epsilon)
    exact = [100 * NormalDist().cdf(images / z / math.sqrt(2)) for images in (1, 2, 5, 10)]
    assert shown == pytest.approx(exact, abs=2.5)


@pytest.mark.parametrize("devices", [2, 3, 10])
def test_epsilon_of_a_person_on_several_devices(devices: int) -> None:
    """Two uploads are two releases; in one sum, which has the noise once, the person has twice the images."""
    each = multiplier_of(1)
    both = {each: devices}, {each / devices: 1}
    uploads, in_a_sum = (math.ceil(10 * closed_form(of, 1e-5)) / 10 for of in both)
    assert f"\n| {devices} | {uploads} | {in_a_sum} |\n" in PROTECTION


def test_what_a_devices_share_of_the_noise_hides() -> None:
    shares = [
        share_of_noise(multiplier_of(1), honest=SumsSettings(operator="", min_devices=each).honest)
        for each in (10, 100)
    ]
    ten, hundred = (f"{hidden_images(each):.2g}" for each in shares)
    assert f"\n| hidden images of each class | {ten} | {hundred} |\n" in PROTECTION
    assert f"about {math.sqrt(2) * hidden_images(multiplier_of(1)):.0f} images more or fewer" in PROTECTION
    ten, hundred = (f"{closed_form({each: 1}, 1e-5):.1f}" for each in shares)
    assert f"\n| epsilon of one device | {ten} | {hundred} |\n" in PROTECTION
    assert f"one device's has {ten} with a `min_devices` of 10, and {hundred} with 100" in SECURE_SUMS


@pytest.mark.parametrize(("epsilon", "auc"), [(1, 57.5), (8, 88.1)])
def test_membership_tests(epsilon: int, auc: float) -> None:
    """A Gaussian event of shift mu has the area Phi(mu / sqrt 2)."""
    exact = 100 * NormalDist().cdf(1 / multiplier_of(epsilon) / math.sqrt(2))
    assert exact == pytest.approx(auc, abs=0.1)
    assert f"{auc} %" in PRIVACY
