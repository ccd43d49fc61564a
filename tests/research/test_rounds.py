import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.hierarchical import Hierarchical
from benchmarks.accuracy.wire import methods
from benchmarks.data import domains
from benchmarks.data.domains import feature_shift
from benchmarks.data.features import cached_name
from benchmarks.data.images import DIGITS, PACS
from protofleet.simulation import rounds
from protofleet.simulation.fleet import Client, Features
from research.__main__ import cli
from research.rounds import comparison, fedpcl, flower_tuning, tuning, wire_rivals
from research.rounds.baselines import Recipe
from research.rounds.eager import eager_accuracies
from research.rounds.heads import run_rounds
from tests.benchmarks.feature_factory import domain, fill_cache
from tests.support.graphs.exported_graphs import exported

CLASSES = 4
PROJECTION = 8
FEDPCL = FedPCL(rounds=4, projection_size=PROJECTION, tau=0.1, learning_rate=1e-2)
"""With the graphs of tests/unit/aggregator/graphs, as FedProto of 8 values."""


@pytest.fixture(autouse=True)
def each_program_is_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_built", exported)


@pytest.fixture(scope="module")
def fleet() -> list[Client]:
    domains = {name: domain(seed, classes=CLASSES, images=200) for seed, name in enumerate(DIGITS)}
    return feature_shift(domains, per_class=5, rng=np.random.default_rng(0), validation=False)


@pytest.mark.parametrize("algorithm", [FEDPCL, Hierarchical(directions=1)], ids=lambda each: each.name)
def test_torch_functions_are_as_accurate_as_graphs(algorithm: RoundAlgorithm, fleet: list[Client]) -> None:
    """Settings are chosen without graphs: only the order of the images differs."""
    with_graphs = run_rounds(algorithm, fleet, classes=CLASSES, seed=0).accuracies
    eager = eager_accuracies(algorithm, fleet, classes=CLASSES, seed=0)
    assert eager.tolist() == pytest.approx(with_graphs.tolist(), abs=0.03)


def _report(*arguments: str, folder: Path) -> dict[str, Any]:
    file = folder / "report.json"
    result = CliRunner().invoke(cli, [*arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(file.read_text())
    for figures in report["summaries"]:
        assert figures["method"] in result.stdout
    return report


def test_fedpcl_benchmark_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command compares on every shift, by name, with the given limits."""
    features = {
        cached_name(name, 500): domain(seed, classes=CLASSES, images=500) for seed, name in enumerate(DIGITS)
    }
    fill_cache(tmp_path, monkeypatch, features)
    arguments = "fedpcl --backbones 1 --images 500 --per-class 4 --clients 5 --rounds 2 --seed 1 --prior with"
    report = _report(
        *arguments.split(), "--shift", "feature", "--shift", "label", "--max-sets", "2", "--baseline", "Solo",
        folder=tmp_path,
    )  # fmt: skip
    named = [(figures["setting"], figures["method"]) for figures in report["summaries"]]
    methods = ("FedPCL, prior", "FedPCL, 2 sets, prior", "Solo, prior")
    assert named == [
        (f"{shift} shift, 1 backbone", method) for shift in ("feature", "label") for method in methods
    ]
    for figures, clients in zip(report["summaries"], (4, 4, 4, 5, 5, 5), strict=True):
        assert len(figures["clients"]) == clients
        assert figures["mean"] == pytest.approx(np.mean(figures["clients"]))
        assert figures["worst_10"] <= figures["worst_40"] <= figures["mean"] <= figures["best_10"]
        assert figures["seeds"] == [1]
    assert report["summaries"][1]["down_bytes"] < report["summaries"][0]["down_bytes"]


def test_fedpcl_benchmark_takes_layers_of_every_backbone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their baselines have recipes of their own."""
    loaded: list[str] = []

    def load(name: str, *, backbone: str, **_: Any) -> Features:
        loaded.append(backbone)
        return domain(DIGITS.index(name), classes=CLASSES, images=200)

    used: list[Any] = []

    def run(_method: str, clients: list[Client], recipe: Recipe, **_: Any) -> NDArray[np.float64]:
        used.append(recipe)
        return np.ones(len(clients))

    recipe = replace(fedpcl.RECIPES["Solo"], rounds=2)
    monkeypatch.setattr(domains, "load_features", load)
    monkeypatch.setattr(fedpcl, "DEEPER_RECIPES", {"Solo": recipe})
    monkeypatch.setattr(fedpcl, "DEEPER_FEDPCL", {})
    monkeypatch.setattr(comparison, "run_baseline", run)
    arguments = "fedpcl --backbones 2 --shift feature --per-class 4 --rounds 2 --seed 0 --baseline Solo"
    report = _report(*arguments.split(), "--layers", "c384,c576", "--prior", "with", folder=tmp_path)
    assert set(loaded) == {"mobilenetv2_100:c384,c576+mobilenetv2_100_birds:c384,c576"}
    assert used == [recipe]
    assert report["layers"] == "c384,c576"


def test_settings_are_chosen_one_after_the_other_on_validation_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test images of no use do not matter, and a value stays only if it is better than those before."""
    features = {}
    for seed, name in enumerate(DIGITS):
        made = domain(seed, classes=CLASSES, images=400)
        features[cached_name(name, 2000)] = replace(made, test=np.zeros_like(made.test))
    fill_cache(tmp_path, monkeypatch, features)
    monkeypatch.setattr(tuning, "CANDIDATES", {"Solo": {"learning_rate": (1e-9, 3e-2), "rounds": (2,)}})
    monkeypatch.setattr(fedpcl, "RECIPES", {"Solo": replace(fedpcl.RECIPES["Solo"], rounds=4)})
    file = tmp_path / "tune.json"
    result = CliRunner().invoke(cli, ["tune", "--method", "Solo", "--shift", "feature", "--json", str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    rows = report["tables"][0]["rows"]
    assert [row[1:3] for row in rows] == [
        ["", ""],
        ["learning_rate", "1e-09"],
        ["learning_rate", "0.03"],
        ["rounds", "2"],
    ]
    accuracies = [float(row[3].rstrip("%")) for row in rows]
    assert max(accuracies) > 90
    assert [row[4] for row in rows[:3]] == ["*", "", "*"]
    assert "learning_rate=0.03" in report["chosen"]["Solo"]


def test_fpl_benchmark_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten devices of four domains, with the mean over domains and the worst of them."""
    features = {name: domain(seed, classes=CLASSES, images=140) for seed, name in enumerate(PACS)}
    fill_cache(tmp_path, monkeypatch, features)
    arguments = "fpl --data pacs --rounds 2 --seed 0 --baseline FedProto --baseline FedAvg-v"
    report = _report(*arguments.split(), folder=tmp_path)
    assert [figures["method"] for figures in report["summaries"]] == ["FPL", "FedAvg-v", "FedProto"]
    for figures in report["summaries"]:
        assert list(figures["domains"]) == list(PACS)
        assert figures["worst_domain"] == min(figures["domains"].values())
        assert figures["domain_mean"] == pytest.approx(np.mean(list(figures["domains"].values())))
        assert len(figures["clients"]) == 10


def test_candidates_of_rivals_are_compared_on_validation_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test images, here of no use, choose nothing."""
    made = domain(0, classes=10, images=12_000)
    useless = replace(made, test=np.zeros_like(made.test))
    fill_cache(tmp_path, monkeypatch, {"fashion_mnist": useless})
    monkeypatch.setattr(wire_rivals, "LAYERS", {})
    monkeypatch.setattr(wire_rivals, "LINEAR_GRID", wire_rivals.LINEAR_GRID[:1])
    monkeypatch.setattr(wire_rivals, "MOMENTUM_GRID", wire_rivals.MOMENTUM_GRID[:2])
    monkeypatch.setattr(wire_rivals, "RANDOM_FEATURES", 64)
    monkeypatch.setattr(wire_rivals, "ROUNDS", 10)
    result = CliRunner().invoke(cli, ["tune-wire", "--images", "1000"], catch_exceptions=False)
    lines = [line for line in result.output.splitlines() if line.endswith("%")]
    assert len(lines) == 1 + 2 + len(wire_rivals.GROUPS) * len(wire_rivals.SHRINKAGES) + len(
        wire_rivals.WIDTHS
    ) * len(wire_rivals.RIDGES)
    assert max(float(line.split()[-1].rstrip("%")) for line in lines) > 80


def test_settings_of_flowers_clients_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_cache(tmp_path, monkeypatch, {"mnist": domain(0, classes=3, images=300)})
    monkeypatch.setattr("benchmarks.data.features.VALIDATION", 100)
    monkeypatch.setattr(flower_tuning, "GRID", flower_tuning.GRID[-4:-3])
    result = CliRunner().invoke(
        cli, ["tune-flower", "--data", "mnist", "--rounds", "4"], catch_exceptions=False
    )
    assert float(result.output.split()[-1].rstrip("%")) > 80


def test_rivals_send_sums_of_random_features_in_float32_and_means_in_bytes() -> None:
    data = domain(0, classes=10, images=1200)
    owners = np.arange(1200) % 10
    fleet = methods.Fleet(owners=owners, seed=0, project=lambda _: data, features=data, deeper=lambda _: data)
    (point,) = wire_rivals.fed3r_rf(fleet, number=64)
    assert point.accuracy > 0.8
    assert point.bytes_up == 10 * 4 * (64 * 65 / 2 + 10 * 64)
    means, groups = wire_rivals._fedcof_rows(fleet, layers="")
    assert min(means.accuracy, groups.accuracy) > 0.8
    assert means.bytes_up < groups.bytes_up < 1200 / 5 * 12 * 3
