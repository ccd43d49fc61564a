import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import cli
from benchmarks.fleets import calibration_error
from tests.benchmarks.feature_factory import features_of_digits, fill_cache


def test_few_benchmark_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For two and for all classes, balanced and not, for each size that the data has."""
    fill_cache(tmp_path, monkeypatch, {"mnist": features_of_digits(train=800, test=200)})
    report = tmp_path / "report.json"
    sizes = ("--images", "1", "--images", "8", "--images", "5000")
    arguments = ["accuracy", "few", "--data", "mnist", "--seed", "0", *sizes, "--json", str(report)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    runs = json.loads(report.read_text())["runs"]
    assert [(run["classes"], run["images"], run["rare"]) for run in runs] == [
        (2, 1, 1), (2, 1, 1), (2, 8, 8), (2, 8, 2), (10, 1, 1), (10, 1, 1), (10, 8, 8), (10, 8, 2),
    ]  # fmt: skip
    assert all(0 <= run["head"] <= 1 for run in runs)


def test_calibration_error_is_the_gap_of_confidence_and_accuracy() -> None:
    """Three of four answers at 73.1 % are correct."""
    logits = np.array([[1, 0]] * 4, dtype=np.float32)
    assert calibration_error(logits, np.array([0, 0, 0, 1])) == pytest.approx(0.75 - 0.7311, abs=1e-4)
