import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fedproto import FedProto
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.hierarchical import Hierarchical
from benchmarks.__main__ import cli
from benchmarks.data.domains import feature_shift
from benchmarks.data.features import cached_name
from benchmarks.data.images import DIGITS, PACS
from protofleet.simulation import rounds
from protofleet.simulation.fleet import Client
from protofleet.simulation.rounds import run_rounds
from tests.benchmarks.feature_factory import FEATURES, domain, fill_cache
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


def test_fedpcl_in_process(fleet: list[Client]) -> None:
    """Accuracy rises, the seed decides, and a submission is its float16 prototypes and 600 bytes."""
    first, again = (run_rounds(FEDPCL, fleet, classes=CLASSES, seed=0) for _ in range(2))
    assert first.accuracies.min() > 0.7
    assert first.accuracies.tolist() == again.accuracies.tolist()
    prototypes = CLASSES * PROJECTION * 2
    assert prototypes < first.up_bytes.min()
    assert first.up_bytes.max() <= prototypes + 600
    sets = (len(fleet) + 1) * prototypes
    assert sets < first.down_bytes[-1] < sets + 1000


def test_devices_of_few_classes_have_another_accuracy_over_all_classes() -> None:
    """`status` never shows more than there is."""
    data = domain(0, classes=CLASSES, images=400)
    clients = []
    for label in range(CLASSES):
        own, asked = (
            np.isin(labels, [label, (label + 1) % CLASSES])
            for labels in (data.train_labels, data.test_labels)
        )
        clients.append(
            Client(
                domain="two",
                train=data.train[own][:40],
                train_labels=data.train_labels[own][:40],
                test=data.test,
                test_labels=data.test_labels,
                weights=asked / asked.sum(),
            )
        )
    outcome = run_rounds(FEDPCL, clients, classes=CLASSES, seed=0)
    assert outcome.accuracies.mean() > 0.9
    assert 0.3 < outcome.balanced.mean() < 0.9
    assert (outcome.reported <= outcome.balanced).all()
    assert outcome.reported.max() <= 2 / CLASSES


def test_fpl_in_process(fleet: list[Client]) -> None:
    """Devices have one model at the end that suits all of them; they upload its change and the prototypes."""
    outcome = run_rounds(FPL(rounds=4), fleet, classes=CLASSES, seed=0)
    assert outcome.accuracies.min() > 0.7
    values = 256 * (FEATURES + 1) + CLASSES * 257 + CLASSES * 256
    assert 2 * values < outcome.up_bytes.min() <= outcome.up_bytes.max() < 2 * values + 1000


def test_fedproto_in_process(fleet: list[Client]) -> None:
    """Devices with models of their own learn, and upload prototypes only."""
    settings = FedProto(rounds=4, projection_size=PROJECTION)
    outcome = run_rounds(settings, fleet, classes=CLASSES, seed=0)
    assert outcome.accuracies.min() > 0.7
    prototypes = CLASSES * PROJECTION * 2
    assert prototypes < outcome.up_bytes.min() <= outcome.up_bytes.max() < prototypes + 600


def test_hierarchical_in_process(fleet: list[Client]) -> None:
    """One upload of class means and directions is enough for classes that are far apart in every domain."""
    outcome = run_rounds(Hierarchical(directions=1), fleet, classes=CLASSES, seed=0)
    assert outcome.accuracies.min() > 0.9
    values = 2 * (CLASSES + 1) * FEATURES
    (up_bytes,) = outcome.up_bytes
    assert values < up_bytes < values + 700


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
    methods = ("FedPCL, prior", "FedPCL, 2 sets, sample, prior", "Solo, prior")
    assert named == [
        (f"{shift} shift, 1 backbone", method) for shift in ("feature", "label") for method in methods
    ]
    for figures, clients in zip(report["summaries"], (4, 4, 4, 5, 5, 5), strict=True):
        assert len(figures["clients"]) == clients
        assert figures["mean"] == pytest.approx(np.mean(figures["clients"]))
        assert figures["worst_10"] <= figures["worst_40"] <= figures["mean"] <= figures["best_10"]
        assert figures["seeds"] == [1]
    assert report["summaries"][1]["down_bytes"] < report["summaries"][0]["down_bytes"]


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
