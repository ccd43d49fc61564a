import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.data.features import cached_name
from research.__main__ import cli
from research.defaults.class_prior import TRAINED_ON
from tests.benchmarks.feature_factory import features_of_digits, fill_cache


def test_prior_benchmark_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where classes are uneven, the prior gains; where they are even, it is hardly used."""
    features = features_of_digits(train=800, test=900)
    fill_cache(tmp_path, monkeypatch, {cached_name("mnist", TRAINED_ON): features})
    report = tmp_path / "report.json"
    arguments = ["prior", "--data", "mnist", "--places", "8", "--seed", "0", "--json", str(report)]
    result = CliRunner().invoke(cli, [*arguments, "--concentration", "0.1", "--concentration", "1000"])
    assert result.exit_code == 0, result.output
    uneven, even = (run["places"] for run in json.loads(report.read_text())["runs"])
    assert len(uneven) == len(even) == 8
    assert sum(place[1] - place[0] for place in uneven) > 0
    assert all(place[3] for place in uneven)
    assert not all(place[3] for place in even)
