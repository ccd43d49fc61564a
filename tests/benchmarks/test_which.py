import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from aggregator.algorithms.fedtc import recipe
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.hierarchical import Hierarchical
from aggregator.algorithms.statistics.feature_map import Statistics
from benchmarks.__main__ import cli
from benchmarks.accuracy import baselines, which
from benchmarks.data import domains
from benchmarks.data.images import DIGITS
from protofleet.simulation import algorithms, rounds
from protofleet.simulation.fleet import Features
from tests.benchmarks.feature_factory import domain, fill_digits, make_folders, normalized, report_of
from tests.support.graphs.exported_graphs import exported


def make_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes time: adapters, random features, most passes, and three of four programs."""
    linear = dataclasses.replace(RECIPES["default"], adapter=False)
    alone = dataclasses.replace(baselines.ALONE, rounds=4)
    for module in (algorithms, recipe):
        monkeypatch.setattr(module, "RECIPES", {"default": linear})
    monkeypatch.setattr(baselines, "ALONE", alone)
    monkeypatch.setattr(algorithms, "Statistics", lambda: Statistics(features=32))
    monkeypatch.setattr(which, "IN_ROUNDS", (Hierarchical(directions=2),))
    monkeypatch.setattr(rounds, "_built", exported)


def _which(file: Path, *options: str) -> dict[str, Any]:
    return report_of(cli, file, "accuracy", "which", "--scenario", "domain-few", *options)


def test_which_benchmark_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every algorithm trains on the same devices; of each, the table has accuracy, bytes and relative time."""
    fill_digits(tmp_path, monkeypatch, images=140, at_most=2000, classes=4)
    make_cheap(monkeypatch)
    written = _which(tmp_path / "report.json", "--seed", "0")
    runs = {run["algorithm"]: run for run in written["runs"]}
    assert list(runs) == [name for name in which.NAMES if name not in {"fedpcl", "fpl", "fedproto"}]
    for run in runs.values():
        assert len(run["own"]) == len(run["everywhere"]) == len(DIGITS)
        assert min(run["own"]) > 0.5
    ((cells, *_),) = (table["rows"] for table in written["tables"])
    run = runs["fedtc"]
    assert cells[1:4] == ["1", f"{run['up_bytes'] / 1e3:,.0f}", f"{run['down_bytes'] / 1e3:,.0f}"]
    assert cells[5] == f"{100 * sum(run['own']) / len(DIGITS):.1f}"
    assert cells[6:] == ["", "1.0", "0", run["commit"]]


def test_hidden_layers_take_their_recipe_and_their_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of normalized features are not normalized again, and runs of other layers are not mixed in."""
    loaded: set[str] = set()

    def load(name: str, *, backbone: str, **_: object) -> Features:
        loaded.add(backbone)
        return normalized(domain(DIGITS.index(name), classes=10, images=140))

    make_folders(tmp_path, monkeypatch)
    make_cheap(monkeypatch)
    monkeypatch.setattr(domains, "load_features", load)
    alone = dataclasses.replace(baselines.ALONE, learning_rate=1e-9, rounds=1)
    monkeypatch.setattr(baselines, "ALONE_DEEPER", alone)
    report = tmp_path / "report.json"
    options = ["--seed", "0", "--algorithm", "statistics", "--algorithm", which.ALONE]
    written = _which(report, *options, "--layers", "c384,c576")
    assert loaded == {"mobilenetv2_100:c384,c576"}
    runs = {run["algorithm"]: run for run in written["runs"]}
    assert np.mean(runs[which.ALONE]["own"]) < 0.4
    assert np.mean(runs[which.SINGLE_IMAGES]["own"]) > 0.5
    result = CliRunner().invoke(cli, ["accuracy", "which", *options, "--resume", str(report)])
    assert "has other layers" in result.output


def test_stored_runs_are_not_repeated_and_each_row_states_its_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Algorithms may have different seeds; one that lacks FedTC's of its seeds has no relative time."""
    fill_digits(tmp_path, monkeypatch, images=140, at_most=2000)
    make_cheap(monkeypatch)
    report = tmp_path / "report.json"
    first = _which(report, "--seed", "0", "--algorithm", "fedtc")["runs"]
    assert [(each["algorithm"], each["seed"]) for each in first] == [(which.FEDTC, 0)]
    monkeypatch.setattr(algorithms, "train_prototypes", None)
    resumed = ("--resume", str(report), "--algorithm", which.ALONE)
    _which(report, "--seed", "0", "--algorithm", "fedtc", *resumed)
    both = _which(report, "--seed", "1", *resumed)
    assert both["runs"][:1] == first
    alone = [(which.ALONE, 0), (which.ALONE, 1)]
    assert [(each["algorithm"], each["seed"]) for each in both["runs"][1:]] == alone
    assert [(row[0], row[-2], bool(row[-3])) for row in both["tables"][0]["rows"]] == [
        (which.FEDTC, "0", True),
        (which.ALONE, "0, 1", False),
    ]
