import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.registry import ALGORITHMS
from benchmarks.__main__ import cli
from benchmarks.accuracy.wire import methods
from benchmarks.accuracy.wire.command import Mean, front
from tests.benchmarks.feature_factory import domain, fill_cache

STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "wire.json"
LINEAR, FLOATS, BYTES = "FedAvg of a linear head", "FedTC, float16", "FedTC"


def _wire(file: Path, *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["wire", *arguments, "--json", str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def test_bytes_are_those_of_encoded_messages_and_stored_runs_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prototypes of two bytes a value are twice as long; a plot has all methods, also those of an earlier file."""
    fill_cache(tmp_path, monkeypatch, {"fashion_mnist": domain(0, classes=10, images=2400)})
    linear = dataclasses.replace(RECIPES["default"], adapter=False)
    monkeypatch.setattr(methods, "RECIPES", {"default": linear})
    file = tmp_path / "wire.json"
    first = _wire(file, "--seed", "0", "--method", LINEAR)
    assert [run["uploads"] for run in first["runs"]] == [1, 3, 10, 30, 100]
    each = 10 * 2 * (12 + 1) * 10
    assert [run["bytes_up"] for run in first["runs"]] == [each * rounds for rounds in (1, 3, 10, 30, 100)]

    report = _wire(
        file, "--seed", "0", "--resume", str(file), "--method", LINEAR, "--method", BYTES, "--method", FLOATS
    )

    assert report["runs"][:5] == first["runs"]
    sizes = {(run["method"], run["setting"]): run["bytes_up"] for run in report["runs"]}
    assert 1.2 < sizes[FLOATS, "B 5"] / sizes[BYTES, "B 5"] < 2
    assert set(report["plots"][0]["series"]) == {LINEAR, FLOATS, BYTES}
    rows = report["tables"][0]["rows"]
    assert len(rows) == len(report["runs"])
    assert [float(row[-1]) for row in rows] == sorted(float(row[-1]) for row in rows)
    assert rows[0][-2] == "*"


def test_the_front_is_what_nothing_smaller_reaches() -> None:
    points = [
        Mean(method="a", setting=f"{number}", accuracy=accuracy, bytes_up=number, accuracies=[accuracy])
        for number, accuracy in enumerate((0.5, 0.4, 0.5, 0.6))
    ]
    assert front(points) == [True, False, False, True]


def test_the_stored_plot_has_every_algorithm() -> None:
    series = json.loads(STORED.read_text())["plots"][0]["series"]
    named = {name.partition(",")[0].lower() for name in series}
    assert {"fedtc", "statistics", *ALGORITHMS} <= named
