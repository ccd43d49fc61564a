import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from research.__main__ import cli
from tests.benchmarks.feature_factory import features_of_digits, fill_cache


def test_confidence_benchmark_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after the calibration, for each head and each draw of the held-out images."""
    fill_cache(tmp_path, monkeypatch, {"mnist": features_of_digits(train=1000, test=700)})
    report = tmp_path / "report.json"
    arguments = ["confidence", "--data", "mnist", "--at-most", "300", "--seed", "0", "--json", str(report)]
    result = CliRunner().invoke(cli, [*arguments, "--held-out", "60", "--held-out", "400"])
    assert result.exit_code == 0, result.output
    before, few, many = json.loads(report.read_text())["runs"]
    assert [run["held_out"] for run in (before, few, many)] == [0, 60, 400]
    assert [[len(draws) for draws in run["heads"]] for run in (before, few, many)] == [[1], [8], [8]]
    errors = [error for error, *_ in many["heads"][0]]
    assert sum(errors) / 8 < 0.05
    assert re.search(r"^mnist +none .*\nmnist +60 .*\nmnist +400 ", result.stdout, re.MULTILINE)
