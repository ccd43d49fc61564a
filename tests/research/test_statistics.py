import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from aggregator.algorithms.fedtc.recipe import RECIPES
from research import statistics
from research.__main__ import cli
from tests.benchmarks.feature_factory import features_of_digits, fill_cache


def test_statistics_benchmark_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each map and form beside FedTC; sums of single images have the ceiling's accuracy in any partition."""
    fill_cache(tmp_path, monkeypatch, {"mnist": features_of_digits(train=800, test=200)})
    linear = dataclasses.replace(RECIPES["default"], adapter=False)  # which takes no time
    monkeypatch.setattr(statistics, "RECIPES", {"default": linear})
    report = tmp_path / "report.json"
    options = ("--data", "mnist", "--partition", "dirichlet:0.5", "--features", "0", "--features", "32")
    seeds = ("--seed", "0", "--seed", "1", "--max-multiple", "0")
    result = CliRunner().invoke(cli, ["statistics", *options, *seeds, "--json", str(report)])
    assert result.exit_code == 0, result.output
    written = json.loads(report.read_text())
    runs = {(run["method"], run["partition"], run["seed"]): run for run in written["runs"]}
    for seed in (0, 1):
        for name, size in (("identity", 64), ("+ 32", 96)):
            top = runs[f"statistics, {name}", "all features", seed]
            single = runs[f"statistics, {name}, B 1", "dirichlet:0.5", seed]
            groups = runs[f"statistics, {name}, B 5", "dirichlet:0.5", seed]
            assert single["accuracy"] == top["accuracy"] > 0.85
            assert (single["rows"], top["bytes_up"]) == (800, None)
            assert groups["rows"] * 5 <= 800
            assert groups["rows"] * size < groups["bytes_up"] < 1.3 * groups["rows"] * size
        assert runs["FedTC, B 5", "dirichlet:0.5", seed]["accuracy"] > 0.8
        assert runs["LDA of FedTC's prototypes, B 5", "dirichlet:0.5", seed]["accuracy"] > 0.8
    means = [line for line in result.stdout.splitlines() if "mean" in line.split()]
    assert len(means) == len(written["accuracy"]) == 8
    first = written["accuracy"][0]
    assert first["method"] in means[0]
    assert f"{first['mean']:.2%}" in means[0]
