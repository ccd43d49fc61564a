"""The attack by time: what it may reach, the bound of what it reaches, and that it succeeds without a period."""

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.processes import mosquitto
from research.privacy.timed_fleet import EPSILON, Fleet, Published
from research.privacy.timing import allowed_auc, auc, auc_at_least, charged, compared
from tests.support.network.brokers import needs_mosquitto


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (1.0, 0.0), (2.0, 0.01), (8.0, 1e-5)])
def test_allowed_auc_is_the_area_below_the_best_detections(epsilon: float, delta: float) -> None:
    false_alarms = np.linspace(0, 1, 100_001)
    lines = [
        delta + math.exp(epsilon) * false_alarms,
        1 - math.exp(-epsilon) * (1 - delta - false_alarms),
        np.ones_like(false_alarms),
    ]
    area = np.trapezoid(np.min(lines, axis=0), false_alarms)
    assert allowed_auc(epsilon, delta) == pytest.approx(area, abs=1e-4)


def test_lower_bound_is_above_the_auc_in_few_attacks() -> None:
    """One in forty, or one in twenty where the score and its negative are as good."""
    random, shift = np.random.default_rng(0), 1.0
    true = 0.5 * (1 + math.erf(shift / 2))

    def bounds(scores: np.ndarray, shift: float) -> np.ndarray:
        return np.array([auc_at_least(a, b + shift, error=0.05, random=random) for a, b in scores])

    found = bounds(random.normal(size=(2000, 2, 50)), shift)
    assert 0.005 < np.mean(found > true) <= 0.03
    assert np.median(found) > true - 0.15
    assert np.mean(bounds(np.zeros((1000, 2, 50)), 0.0) > 0.5) <= 0.07
    assert auc_at_least([0.0] * 50, [1.0] * 50, error=0.05, random=random) == pytest.approx(0.025 ** (1 / 50))


def test_auc_counts_equal_scores_half() -> None:
    assert auc([1, 2, 3, 4], [2, 3, 3, 3]) == 5 / 8


def test_scores_are_of_times_number_and_order() -> None:
    """With the image, the submission comes three seconds later, after a second `info`."""
    without = Published([(0.0, "info", b""), (2.0, "up", b"")], None)
    with_image = Published([(0.0, "info", b""), (5.0, "info", b""), (5.5, "up", b"")], None)
    found = {each["score"]: each for each in compared([(without, with_image)] * 10)}
    assert {name for name, each in found.items() if each["AUC"] == 1} == {*found} - {"sequence, s"}
    assert found["sequence, s"]["AUC"] == 0.5
    assert (found["longest silence, s"]["with"][0], found["messages"]["with"][0]) == (5, 3)


@needs_mosquitto
def test_attacker_at_the_broker_sees_submissions_that_the_owner_has_allowed(tmp_path: Path) -> None:
    """Without --variable-time, devices report a problem, and nothing is charged."""
    with mosquitto(tmp_path) as broker:
        fleet = Fleet(tmp_path, broker)
        with fleet.serving():
            allowed = fleet.builds(("--variable-time",), pairs=1)
            refused = fleet.builds((), pairs=1)
    epsilon, delta = charged(allowed)
    assert EPSILON - 0.01 < epsilon <= EPSILON
    assert delta == 1e-5
    assert charged(refused) == (0, 0)
    assert all("up" in each.channels for pair in allowed for each in pair)
    assert not any("up" in each.channels for pair in refused for each in pair)
