"""The accountant, compared with the closed form for Gaussian mechanisms."""

import builtins
import math
from collections.abc import Mapping
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from aggregator.tasks.manifests import noise_multiplier
from edge_client.privacy.accountant import MOST_LOSS, NO_ACCOUNTANT, epsilon_of
from edge_client.privacy.policy import MAX_DELTA
from protocol.errors import PrivacyRefused, RuntimeMissing


def delta_of(epsilon: float, mu: float) -> float:
    """Delta of a Gaussian mechanism of sensitivity mu and noise 1 (Balle and Wang 2018, Theorem 8)."""
    second = math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))
    return float(ndtr(mu / 2 - epsilon / mu)) - second


def closed_form(releases: Mapping[float, int], delta: float) -> float:
    """Epsilon of Gaussian releases together: they are one whose 1 / z^2 is the sum of theirs."""
    mu = math.sqrt(sum(times / multiplier**2 for multiplier, times in releases.items()))
    if delta_of(0.0, mu) <= delta:
        return 0.0
    return float(brentq(lambda epsilon: delta_of(epsilon, mu) - delta, 0.0, 1000.0))


@settings(max_examples=12, deadline=None)
@given(
    releases=st.dictionaries(st.floats(1.0, 50.0), st.integers(1, 4), min_size=1, max_size=3),
    delta=st.sampled_from([1e-3, 1e-5, 1e-8]),
)
def test_epsilon_matches_the_closed_form(releases: dict[float, int], delta: float) -> None:
    """For releases of different noise: never below the exact value, and hardly above it."""
    exact, said = closed_form(releases, delta), epsilon_of(releases, delta=delta)
    assert exact - 1e-9 <= said <= exact * 1.001 + 1e-3


def test_any_number_of_multipliers_is_one_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An aggregator that names another multiplier in each task does not make the accountant slower."""
    composed: list[float] = []
    compose = PLDAccountant.compose

    def counted(self: PLDAccountant, event: GaussianDpEvent, count: int = 1) -> PLDAccountant:
        composed.append(event.noise_multiplier)
        return compose(self, event, count)

    monkeypatch.setattr(PLDAccountant, "compose", counted)
    releases = {100.0 + number / 7: 1 for number in range(2000)}
    exact, said = closed_form(releases, 1e-5), epsilon_of(releases, delta=1e-5)
    assert exact <= said <= exact * 1.001
    assert composed == pytest.approx([sum(z**-2 for z in releases) ** -0.5])


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_calibrated_noise_is_just_enough(epsilon: float) -> None:
    """The calibrated multiplier gives epsilon, and 1 % less noise does not."""
    multiplier = noise_multiplier(epsilon, 1e-5)
    assert closed_form({multiplier: 1}, 1e-5) <= epsilon < closed_form({multiplier * 0.99: 1}, 1e-5)
    assert epsilon_of({multiplier: 1}, delta=1e-5) <= epsilon


@pytest.mark.parametrize("multiplier", [0.0, -1.0, math.nan, math.inf, 1e-6, 0.14])
def test_too_little_noise_has_infinite_epsilon(multiplier: float) -> None:
    """It is not computed, whatever a task asks for."""
    assert epsilon_of({multiplier: 1, 5.0: 1}, delta=1e-5) == math.inf


def test_infinite_epsilon_exceeds_the_largest_budget() -> None:
    """Epsilon is above the 40 that a task file may allow, at the largest delta too."""
    assert closed_form({MOST_LOSS**-0.5: 1}, MAX_DELTA) > 40


def without_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take dp-accounting away, as on a device that was installed without it."""
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "dp_accounting":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_missing_accountant_is_refused_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    without_accountant(monkeypatch)
    with pytest.raises(PrivacyRefused, match=r"protofleet-.*\.whl\[privacy\]"):
        epsilon_of({1.0: 1}, delta=1e-5)
    with pytest.raises(RuntimeMissing, match=r"protofleet-.*\.whl\[aggregator\]"):
        noise_multiplier.__wrapped__(1.0, 1e-5)
    assert "pip install" in NO_ACCOUNTANT
