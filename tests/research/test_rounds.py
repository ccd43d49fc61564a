from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.hierarchical import Hierarchical
from benchmarks.accuracy.wire import methods
from benchmarks.data import domains
from benchmarks.data.domains import feature_shift
from benchmarks.data.features import cached_name
from benchmarks.data.images import DIGITS, PACS
from protofleet.simulation import rounds
from protofleet.simulation.fleet import Client, Features
from research.__main__ import cli
from research.rounds import comparison, fedpcl, flower_tuning, fpl, tuning, wire_rivals
from research.rounds.baselines import (
    METHODS,
    Method,
    Recipe,
    baseline_logits,
    run_baseline,
    traffic_bytes,
)
from research.rounds.eager import eager_accuracies
from research.rounds.heads import run_rounds
from tests.benchmarks.feature_factory import domain, fill_cache, fill_digits, report_of
from tests.support.graphs.exported_graphs import exported

CLASSES = 4
PROJECTION = 8
FEDPCL = FedPCL(rounds=4, projection_size=PROJECTION, tau=0.1, learning_rate=1e-2)
"""With the graphs of tests/unit/aggregator/graphs, as FedProto of 8 values and `hierarchical` of two directions."""


class SmallFPL(FPL, frozen=True, kw_only=True):
    """FPL whose graphs are exported already, in tests/unit/aggregator/graphs."""

    projection_size: int = PROJECTION
    tau: float = 0.1
    learning_rate: float = 1e-2
    regularization: float = 1.0


@pytest.fixture(autouse=True)
def each_program_is_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_built", exported)


@pytest.fixture(scope="module")
def fleet() -> list[Client]:
    domains = {name: domain(seed, classes=CLASSES, images=200) for seed, name in enumerate(DIGITS)}
    return feature_shift(domains, per_class=5, rng=np.random.default_rng(0), validation=False)


@pytest.mark.parametrize("algorithm", [FEDPCL, Hierarchical(directions=2)], ids=lambda each: each.name)
def test_torch_functions_are_as_accurate_as_graphs(algorithm: RoundAlgorithm, fleet: list[Client]) -> None:
    """Settings are chosen without graphs: only the order of the images differs."""
    with_graphs = run_rounds(algorithm, fleet, classes=CLASSES, seed=0).accuracies
    eager = eager_accuracies(algorithm, fleet, classes=CLASSES, seed=0)
    assert eager.tolist() == pytest.approx(with_graphs.tolist(), abs=0.03)


def _report(*arguments: str, folder: Path) -> dict[str, Any]:
    return report_of(cli, folder / "report.json", *arguments)


def test_fedpcl_benchmark_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command compares on every shift, by name, with the given limits."""
    fill_digits(tmp_path, monkeypatch, images=500, at_most=500, classes=CLASSES)
    arguments = "fedpcl --backbones 1 --images 500 --per-class 4 --clients 5 --rounds 2 --seed 0 --prior with"
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
        assert figures["seeds"] == [0]
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
    report = _report("tune", "--method", "Solo", "--shift", "feature", folder=tmp_path)
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
    monkeypatch.setattr(fpl, "FPL", SmallFPL)
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
    monkeypatch.setattr(wire_rivals, "LINEAR_GRID", wire_rivals.LINEAR_GRID[:1])
    monkeypatch.setattr(wire_rivals, "MOMENTUM_GRID", wire_rivals.MOMENTUM_GRID[:2])
    monkeypatch.setattr(wire_rivals, "RANDOM_FEATURES", 64)
    monkeypatch.setattr(wire_rivals, "ROUNDS", 10)
    monkeypatch.setattr(wire_rivals, "STRENGTHS", {"GH-LDA": (0.1, 0.5)})
    arguments = ["tune-wire", "--images", "1000", "--layers", "", "--seed", "0", "--seed", "1"]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    lines = [line for line in result.output.splitlines() if line.endswith("%")]
    assert len(lines) == 1 + 2 + 2 + len(wire_rivals.GROUPS) * len(wire_rivals.SHRINKAGES) + len(
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
    fleet = methods.Fleet(data="", seed=0, load=lambda _: data)
    (point,) = wire_rivals.fed3r_rf(fleet, number=64)
    assert point.accuracy > 0.8
    assert point.bytes_up == 10 * 4 * (64 * 65 / 2 + 10 * 64)
    means, groups = wire_rivals._fedcof_rows(fleet, layers="")
    assert min(means.accuracy, groups.accuracy) > 0.8
    assert means.bytes_up < groups.bytes_up < 1200 / 5 * 12 * 3


BASELINE_CLASSES, FEATURES = 3, 8
RECIPE = Recipe(
    rounds=4,
    epochs=3,
    batch_size=8,
    optimizer="adam",
    learning_rate=1e-2,
    weight_decay=0.0,
    standardize=True,
    adapter_size=16,
)


def _client(seed: int, *, shift: float = 0.0, labels: tuple[int, ...] = (0, 1, 2)) -> Client:
    """A client that has some of three well separated classes, all of its features shifted, judged by all three."""
    centers = np.random.default_rng(7).normal(size=(BASELINE_CLASSES, FEATURES)) * 3
    random = np.random.default_rng(seed)
    owned = np.repeat(np.array(labels), 8)
    everything = np.repeat(np.arange(BASELINE_CLASSES), 20)
    return Client(
        domain=f"shifted by {shift}",
        train=(centers[owned] + shift + random.normal(size=(len(owned), FEATURES))).astype(np.float32),
        train_labels=owned,
        test=(centers[everything] + shift + random.normal(size=(60, FEATURES))).astype(np.float32),
        test_labels=everything,
        weights=np.full(60, 1 / 60),
    )


FLEET = [_client(0), _client(1, shift=5.0), _client(2, shift=-5.0)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_every_method_learns(method: Method, optimizer: Literal["adam", "sgd"]) -> None:
    """On classes that are far apart, each method is nearly always correct."""
    recipe = replace(RECIPE, optimizer=optimizer)
    accuracies = run_baseline(method, FLEET, recipe, classes=BASELINE_CLASSES, seed=0)
    assert accuracies.shape == (3,)
    assert accuracies.min() > 0.9


@pytest.mark.parametrize("method", METHODS)
def test_results_depend_on_the_seed_alone(method: Method) -> None:
    recipe = replace(RECIPE, rounds=1, epochs=1, learning_rate=1e-3)
    first, second, other = (
        run_baseline(method, FLEET, recipe, classes=BASELINE_CLASSES, seed=seed) for seed in (0, 0, 1)
    )
    assert first.tolist() == second.tolist()
    assert first.tolist() != other.tolist()


@pytest.mark.parametrize("method", ["FedAvg-v", "FedProx", "FedProto averaged", "centralized"])
def test_shared_model_predicts_absent_classes(method: Method) -> None:
    """Clients that share a model predict classes that they lack; a client alone does not."""
    fleet = [_client(0, labels=(0, 1)), _client(1, labels=(1, 2)), _client(2, labels=(0, 2))]
    recipe = replace(RECIPE, standardize=False, rounds=20, adapter_size=0)
    shared = run_baseline(method, fleet, recipe, classes=BASELINE_CLASSES, seed=0)
    alone = run_baseline("Solo", fleet, recipe, classes=BASELINE_CLASSES, seed=0)
    assert alone.max() < 0.7
    assert shared.min() > 0.9


def test_prior_of_the_own_images() -> None:
    """With two classes that cannot be told apart, a client that knows its mixture expects the one that it has."""
    fleet = [_mixture(0, 30, 2), _mixture(1, 2, 30)]
    recipe = replace(RECIPE, adapter_size=0, rounds=1, epochs=1)
    without, known = (
        run_baseline("FedAvg-v", fleet, recipe, classes=2, seed=0, prior=prior) for prior in (False, True)
    )
    assert without.mean() < 0.7
    assert known.min() > 0.9


def test_calibrated_clients_predict_without_the_prior_that_they_train_with() -> None:
    """Clients of very different mixtures make a model for all classes alike, which without it prefers the own ones."""
    fleet = [_client(seed, labels=(seed,) * 9 + (0, 1, 2)) for seed in range(3)]
    recipe = replace(RECIPE, standardize=False, adapter_size=0, rounds=1, epochs=1, learning_rate=1e-2)
    plain, calibrated, known = (
        baseline_logits("FedAvg-v", fleet, each, classes=BASELINE_CLASSES, seed=0, prior=prior)[0]
        for each, prior in (
            (recipe, False),
            (replace(recipe, calibrated=True), False),
            (recipe, True),
        )
    )
    prior = known - calibrated
    assert np.allclose(prior, prior[0], atol=1e-5)
    assert prior[0].argmax() == 0
    assert not np.allclose(plain, calibrated, atol=1e-3)


def test_server_momentum_takes_earlier_rounds_further() -> None:
    """After two rounds with a tiny rate, the model has moved by nearly twice 1 + 0.9 / 2 as far as without."""
    recipe = replace(
        RECIPE, optimizer="sgd", learning_rate=1e-6, standardize=False, adapter_size=0, rounds=2, epochs=1
    )
    start, plain, fast = (
        baseline_logits("FedAvg-v", FLEET, each, classes=BASELINE_CLASSES, seed=0)[0].astype(np.float64)
        for each in (replace(recipe, learning_rate=1e-12), recipe, replace(recipe, server_momentum=0.9))
    )
    ratio = np.linalg.norm(fast - start) / np.linalg.norm(plain - start)
    assert ratio == pytest.approx(1.45, abs=0.05)


def _mixture(seed: int, *counts: int) -> Client:
    """A client that has so many images of each class, without features, judged by its own mixture."""
    labels = np.repeat(np.arange(len(counts)), counts)
    noise = np.random.default_rng(seed).normal(size=(2, len(labels), FEATURES)).astype(np.float32) / 100
    return Client(
        domain="mixture",
        train=noise[0],
        train_labels=labels,
        test=noise[1],
        test_labels=labels,
        weights=np.full(len(labels), 1 / len(labels)),
    )


def test_traffic_of_each_method() -> None:
    """Two bytes a value: nothing, a whole model, an adapter, prototypes, or model and prototypes."""
    sizes = {
        method: traffic_bytes(method, RECIPE, feature_size=FEATURES, classes=BASELINE_CLASSES)
        for method in METHODS
    }
    adapter, classifier, prototypes = 2 * 16 * 9, 2 * 3 * 17, 2 * 3 * 16
    assert sizes == {
        "Solo": 0,
        "FedAvg-v": adapter + classifier,
        "FedProx": adapter + classifier,
        "FedRep": adapter,
        "FedProto": prototypes,
        "FedProto averaged": adapter + classifier + prototypes,
        "centralized": 0,
    }
