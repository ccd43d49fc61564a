"""Fleets with attackers: detection and accuracy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from aggregator.intake.validation import Prototypes
from benchmarks.__main__ import cli
from benchmarks.research.poisoning.prototypes import METHODS, VOLUME, falsified
from benchmarks.research.poisoning.statistics import ATTACKS
from tests.benchmarks.feature_factory import domain, fill_cache


def test_poisoning_benchmark_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """False devices are found, others are not, and a head without them is as accurate as without an attack."""
    fill_cache(tmp_path, monkeypatch, {"fashion_mnist-600": domain(1, classes=5, images=600)})
    file = tmp_path / "report.json"
    arguments = ["--images", "600", "--clients", "10", "--share", "0", "--share", "0.3", "--epochs", "20"]
    arguments += ["--attack", "flip", "--attack", "noise", "--attack", "scale"]
    result = CliRunner().invoke(
        cli, ["research", "poisoning", *arguments, "--seed", "0", "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    runs: list[dict[str, Any]] = json.loads(file.read_text())["runs"]
    assert [(run["attack"], run["found"], run["attackers"], run["false_alarms"]) for run in runs] == [
        ("", 0, 0, 0),
        ("flip", 3, 3, 0),
        ("noise", 3, 3, 0),
        ("scale", 3, 3, 0),
    ]
    honest, *attacked = (run["accuracies"] for run in runs)
    assert honest.keys() == set(METHODS)
    assert honest["check"] == honest["none"]
    assert all(accuracies["check"] >= honest["check"] - 0.02 for accuracies in attacked)
    assert "found  false alarms" in result.stdout
    assert "flip      30%      3/3           0/7" in result.stdout


def test_without_training_only_detection_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough to count false alarms."""
    fill_cache(tmp_path, monkeypatch, {"fashion_mnist-600": domain(1, classes=5, images=600)})
    arguments = [
        "--images",
        "600",
        "--components",
        "4",
        "--no-train",
        "--share",
        "0",
        "--false-alarm-rate",
        "0.5",
        "--seed",
        "0",
    ]
    result = CliRunner().invoke(
        cli, ["research", "poisoning", *arguments, "--json", str(tmp_path / "report.json")]
    )
    assert result.exit_code == 0, result.output
    (run,) = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert run["accuracies"] == {}
    assert run["false_alarms"] == 0


def test_false_prototypes() -> None:
    """Of the next class, moved half of the way to the nearest one, noise, or all values times three."""
    labels = np.array([0, 1, 2])
    part = Prototypes(np.eye(3, 300, dtype=np.float32), labels, np.full(3, 5))
    centers = np.zeros((3, 300), np.float32)
    centers[:, 0] = 0, 1, 3
    flip = falsified(part, "flip", centers=centers, seed=0)
    assert flip.labels.tolist() == [1, 2, 0]
    assert np.array_equal(flip.values, part.values)
    volume = falsified(part, "volume", centers=centers, seed=0)
    assert volume.labels.tolist() == [1, 2, 0] * VOLUME
    assert np.array_equal(volume.values[-3:], part.values)
    near = falsified(part, "near", centers=centers, seed=0)
    assert near.labels.tolist() == [0, 1, 2] * VOLUME
    assert (near.values[:3] - part.values)[:, 0].tolist() == [0.5, -0.5, -1]
    assert np.array_equal(falsified(part, "scale", centers=centers, seed=0).values, 3 * part.values)
    noise = falsified(part, "noise", centers=centers, seed=0)
    assert noise.labels.tolist() == [0, 1, 2]
    assert noise.values.std() > 2 * part.values.std()


def test_poisoned_statistics_benchmark_writes_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attack but wrong labels alone, and means near the others', lowers the accuracy where nothing is limited."""
    fill_cache(tmp_path, monkeypatch, {"fashion_mnist-600": domain(1, classes=5, images=600)})
    file = tmp_path / "report.json"
    arguments = ["--images", "600", "--clients", "10", "--batch", "1"]
    arguments += ["--seed", "0", "--json", str(file)]
    result = CliRunner().invoke(cli, ["research", "poisoned-statistics", *arguments])
    assert result.exit_code == 0, result.output
    runs = json.loads(file.read_text())["runs"]
    honest, _, *strong, _ = runs
    assert [run["attack"] for run in runs] == list(ATTACKS)
    assert all(run["unlimited"] < min(honest["unlimited"], run["accuracy"]) for run in strong), runs
