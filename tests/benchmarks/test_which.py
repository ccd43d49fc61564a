import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from aggregator.algorithms.fedtc import recipe
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.hierarchical import Hierarchical
from aggregator.algorithms.statistics.feature_map import Statistics
from benchmarks.__main__ import cli
from benchmarks.accuracy import baselines
from benchmarks.accuracy.which import methods
from benchmarks.data import domains
from benchmarks.data.features import cached_name
from benchmarks.data.images import DIGITS
from protofleet.simulation import algorithms, rounds
from protofleet.simulation.fleet import Features
from tests.benchmarks.feature_factory import domain, fill_cache, make_folders
from tests.support.graphs.exported_graphs import exported


def make_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes time: adapters, random features, most passes, and three of four programs."""
    linear = dataclasses.replace(RECIPES["default"], adapter=False)
    alone = dataclasses.replace(baselines.ALONE, rounds=4)
    for module in (algorithms, recipe):
        monkeypatch.setattr(module, "RECIPES", {"default": linear})
    monkeypatch.setattr(baselines, "ALONE", alone)
    monkeypatch.setattr(algorithms, "Statistics", lambda: Statistics(features=32))
    monkeypatch.setattr(methods, "IN_ROUNDS", (Hierarchical(directions=1),))
    monkeypatch.setattr(rounds, "_built", exported)


def test_which_benchmark_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every algorithm trains on the same devices; of each, the table has accuracy, bytes and relative time."""
    features = {
        cached_name(name, 2000): domain(seed, classes=10, images=140) for seed, name in enumerate(DIGITS)
    }
    fill_cache(tmp_path, monkeypatch, features)
    make_cheap(monkeypatch)
    report = tmp_path / "report.json"
    options = ("--scenario", "domain-few", "--seed", "0", "--json", str(report))
    result = CliRunner().invoke(cli, ["accuracy", "which", *options])
    assert result.exit_code == 0, result.output
    written = json.loads(report.read_text())
    runs = {run["algorithm"]: run for run in written["runs"]}
    assert list(runs) == [name for name in methods.NAMES if name not in {"fedpcl", "fpl", "fedproto"}]
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
        made = domain(DIGITS.index(name), classes=10, images=140)
        train, test = (
            part / np.sqrt(np.square(part).mean(axis=1, keepdims=True)) for part in (made.train, made.test)
        )
        return dataclasses.replace(made, train=train, test=test, normalized=True)

    make_folders(tmp_path, monkeypatch)
    make_cheap(monkeypatch)
    monkeypatch.setattr(domains, "load_features", load)
    alone = dataclasses.replace(baselines.ALONE, learning_rate=1e-9, rounds=1)
    monkeypatch.setattr(baselines, "ALONE_DEEPER", alone)
    report = tmp_path / "report.json"
    options = ["accuracy", "which", "--scenario", "domain-few", "--seed", "0", "--json", str(report)]
    names = ["--algorithm", "statistics", "--algorithm", methods.ALONE]
    result = CliRunner().invoke(cli, [*options, *names, "--layers", "c384,c576"])
    assert result.exit_code == 0, result.output
    assert loaded == {"mobilenetv2_100:c384,c576"}
    runs = {run["algorithm"]: run for run in json.loads(report.read_text())["runs"]}
    assert np.mean(runs[methods.ALONE]["own"]) < 0.4
    assert np.mean(runs[methods.SINGLE_IMAGES]["own"]) > 0.5
    result = CliRunner().invoke(cli, [*options, *names, "--resume", str(report)])
    assert "has other layers" in result.output


def test_stored_runs_are_not_repeated_and_each_row_states_its_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Algorithms may have different seeds; one that lacks FedTC's of its seeds has no relative time."""
    features = {
        cached_name(name, 2000): domain(seed, classes=10, images=140) for seed, name in enumerate(DIGITS)
    }
    fill_cache(tmp_path, monkeypatch, features)
    make_cheap(monkeypatch)
    report = tmp_path / "report.json"

    def run(*options: str) -> list[dict[str, object]]:
        result = CliRunner().invoke(
            cli, ["accuracy", "which", "--scenario", "domain-few", "--json", str(report), *options]
        )
        assert result.exit_code == 0, result.output
        runs: list[dict[str, object]] = json.loads(report.read_text())["runs"]
        return runs

    first = run("--seed", "0", "--algorithm", "fedtc")
    assert [(each["algorithm"], each["seed"]) for each in first] == [(methods.FEDTC, 0)]
    monkeypatch.setattr(algorithms, "train_prototypes", None)
    resumed = ("--resume", str(report))
    run("--seed", "0", "--algorithm", "fedtc", "--algorithm", methods.ALONE, *resumed)
    both = run("--seed", "1", "--algorithm", methods.ALONE, *resumed)
    assert both[:1] == first
    assert [(each["algorithm"], each["seed"]) for each in both[1:]] == [
        (methods.ALONE, 0),
        (methods.ALONE, 1),
    ]
    rows = json.loads(report.read_text())["tables"][0]["rows"]
    assert [(row[0], row[-2], bool(row[-3])) for row in rows] == [
        (methods.FEDTC, "0", True),
        (methods.ALONE, "0, 1", False),
    ]
