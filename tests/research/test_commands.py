"""Every command of `python -m research` runs on small data and writes its figures."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.hierarchical import Hierarchical
from benchmarks.data.features import cached_name
from benchmarks.data.images import DIGITS
from protofleet.simulation import rounds
from research import restoration
from research.__main__ import cli
from research.cells import batches_of_cells
from research.poisoning.prototypes import METHODS
from research.poisoning.rare_class import ATTACKS as RARE_CLASSES
from research.poisoning.statistics import ATTACKS as FALSE_SUMS
from research.privacy import directions, measurement, noisy_sums
from tests.benchmarks.feature_factory import domain, features_of_digits, fill_cache, fill_data
from tests.support.graphs.exported_graphs import exported

NAME = "fashion_mnist-600"


def run(folder: Path, *arguments: str) -> Any:
    """Run a command, and return what it wrote."""
    file = folder / "report.json"
    result = CliRunner().invoke(cli, [*arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    return json.loads(file.read_text())


@pytest.fixture
def five_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fill_cache(tmp_path, monkeypatch, {NAME: domain(1, classes=5, images=600)})
    return tmp_path


def test_poisoning(five_classes: Path) -> None:
    """False devices are found, others are not, and a head without them is as accurate as without an attack."""
    arguments = ["--images", "600", "--clients", "10", "--share", "0", "--share", "0.3", "--epochs", "20"]
    arguments += ["--attack", "flip", "--attack", "noise", "--attack", "scale", "--seed", "0"]
    runs = run(five_classes, "poisoning", *arguments)["runs"]
    assert [(each["attack"], each["found"], each["attackers"], each["false_alarms"]) for each in runs] == [
        ("", 0, 0, 0),
        ("flip", 3, 3, 0),
        ("noise", 3, 3, 0),
        ("scale", 3, 3, 0),
    ]
    honest, *attacked = (each["accuracies"] for each in runs)
    assert honest.keys() == set(METHODS)
    assert honest["check"] == honest["none"]
    assert all(accuracies["check"] >= honest["check"] - 0.02 for accuracies in attacked)


def test_poisoned_statistics(five_classes: Path) -> None:
    """Each attack but wrong labels alone, and means near the others', lowers the accuracy where nothing is limited."""
    arguments = ["--images", "600", "--clients", "10", "--batch", "1", "--seed", "0"]
    runs = run(five_classes, "poisoned-statistics", *arguments)["runs"]
    honest, _, *strong, _ = runs
    assert [each["attack"] for each in runs] == list(FALSE_SUMS)
    assert all(each["unlimited"] < min(honest["unlimited"], each["accuracy"]) for each in strong), runs


def test_rare_class(five_classes: Path) -> None:
    """A class of one device hardly takes images of the others."""
    arguments = ["--images", "600", "--clients", "6", "--seed", "0"]
    runs = run(five_classes, "rare-class", *arguments)["runs"]
    assert [each["attack"] for each in runs] == list(RARE_CLASSES)
    assert all(each["accuracy"] > runs[0]["accuracy"] - 0.15 for each in runs)


def test_poisoned_rounds(five_classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_built", exported)
    arguments = ["--images", "600", "--algorithm", "hierarchical", "--rounds", "1", "--clients", "3"]
    runs = run(five_classes, "poisoned-rounds", *arguments, "--attack", "none", "--attack", "scale")["runs"]
    assert [(each["attack"], each["method"]) for each in runs] == [
        (attack, method) for attack in ("none", "scale") for method in ("none", "clip")
    ]


def test_false_alarms(tmp_path: Path) -> None:
    arguments = ["--fleets", "5", "--devices", "8", "--images", "10", "--places", "one"]
    (one,) = run(tmp_path, "false-alarms", *arguments)["runs"]
    assert one["alarms"] <= 1


def test_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("research.rounds.step.FEATURES", 16)
    report = run(tmp_path, "step", "--images", "40", "--repetitions", "1", "--no-compile")
    assert [row[:2] for row in report["tables"][0]["rows"]] == [["1 x 16", "40"], ["3 x 16", "40"]]


def test_noisy_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less noise is more accurate, and a fleet whose devices each add noise less than one of one device."""
    made = domain(1, classes=5, images=400)
    monkeypatch.setattr(noisy_sums, "load_features", lambda _name, **_: made)
    arguments = ["--data", "mnist", "--images", "400", "--seed", "0", "--size", "12", "--prototypes", "0.5"]
    arguments += [
        "--devices",
        "1",
        "--devices",
        "10",
        "--epsilon",
        "0.5",
        "--epsilon",
        "32",
        "--prototypes",
        "32",
    ]
    runs = run(tmp_path, "noisy-sums", *arguments)["runs"]
    found = {(each["devices"], each["epsilon"]): each["sums"][0] for each in runs}
    assert found[1, None] >= found[1, 32] - 0.02
    assert found[1, 32] > found[10, 0.5] + 0.05
    assert found[10, 32] > found[10, 0.5]
    rivals = [each["prototypes"] for each in runs if each["prototypes"] is not None]
    assert len(rivals) == 2
    assert rivals[0] < rivals[1]


def test_hierarchical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    domains = {
        cached_name(name, 300): domain(seed, classes=10, images=300) for seed, name in enumerate(DIGITS)
    }
    fill_cache(tmp_path, monkeypatch, domains)
    arguments = ["--images", "300", "--shift", "feature", "--seed", "0", "--variant"]
    (row,) = run(tmp_path, "hierarchical", *arguments, "exact eigenvectors")["rows"]
    assert row["feature"] > 0.5


def test_restoration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of domains that are far apart, a linear discriminant needs the variance within devices."""
    domains = {
        cached_name(name, 2000): domain(seed, classes=10, images=300) for seed, name in enumerate(DIGITS)
    }
    fill_cache(tmp_path, monkeypatch, domains)
    monkeypatch.setattr(restoration, "ADAPTER", replace(restoration.ADAPTER, epochs=1, min_steps=0))
    arguments = ["--devices", "2", "--batch", "5", "--seed", "0", "--validation"]
    runs = run(tmp_path, "restoration", *arguments)["runs"]
    found = {each["about"]: each["accuracies"] for each in runs}
    assert list(found) == ["as they are", "class", "device"]
    assert found["device"][1] >= found["class"][1]


def test_privacy(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command attacks, measures, and draws both figures."""
    recipe = replace(RECIPES["default"], adapter=False)
    monkeypatch.setattr(measurement, "RECIPES", {"default": recipe})
    monkeypatch.setattr(measurement, "SIZES", (100, 60_000))
    monkeypatch.setattr(measurement, "NON_MEMBERS", 200)
    small = ("--public", "300", "--images", "10", "--decoder-epochs", "1")
    fleets = ("--per-class", "30", "--devices", "2", "--epsilon", "8", "--plots", str(digits))
    figures = run(digits, "privacy", "--data", "mnist", *small, *fleets)["mnist"]
    rows = {row["protection"] for row in figures["accuracies"]}
    assert rows == {"none", "perturbed", "differential privacy"}
    assert all(leak["linear_r2"] < 1 for leak in figures["leaks"])
    assert [leak["images"] for leak in figures["sums"]] == [100]
    assert [again["batch"] for again in figures["resubmitted"]] == [5, 25]
    for name in ("reconstruction.png", "privacy-accuracy.png"):
        assert (digits / name).stat().st_size > 1000


def test_directions(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directions, "PER_CLASS", 30)
    monkeypatch.setattr(directions, "CANDIDATES", 20)
    monkeypatch.setattr(directions, "Hierarchical", lambda: Hierarchical(directions=4))
    arguments = ["--data", "mnist", "--public", "300", "--device", "5x2", "--decoder-epochs", "1"]
    report = run(digits, "directions", *arguments)
    assert [one["devices"] for one in report["runs"]] == ["5x2"]
    assert len(report["added"]) == 2


def test_cells(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("research.cells.PUBLIC", 300)
    monkeypatch.setattr("research.cells.PER_CLASS", 20)
    monkeypatch.setattr("benchmarks.data.features.VALIDATION", 300)
    runs = run(digits, "cells", "--data", "mnist", "--cell", "10")["runs"]
    assert [set(each) for each in runs] == [
        {"cell", "own", "others", "own_first"},
        {"cell", "own", "others", "own_first"},
        {"cell", "seed", "adapter", "lda"},
    ]


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fill_cache(tmp_path, monkeypatch, {"mnist": features_of_digits(train=1700, test=97)})
    fill_data(tmp_path, train=1700, test=97)
    return tmp_path


@pytest.mark.parametrize(("images", "cell"), [(203, 40), (203, 0), (9, 40), (1, 40), (0, 40)])
def test_batches_are_of_one_cell(images: int, cell: int) -> None:
    """Each has at least five images, and all images are in one; with cells, batch mates are near each other."""
    rng = np.random.default_rng(0)
    place = np.arange(images) % 5
    features = ((rng.normal(size=(5, 8)) * 50)[place] + rng.normal(size=(images, 8))).astype(np.float32)
    numbers, cells = batches_of_cells(features, batch=5, cell=cell, alpha=1.0, rng=rng)
    if images < 2:
        assert not len(cells)
        assert not (numbers >= 0).any()
        return
    assert np.bincount(numbers).min() >= 5
    assert numbers.min() == 0
    assert len(np.bincount(numbers)) == len(cells)
    together = [len(np.unique(place[numbers == number])) for number in range(len(cells))]
    assert (np.mean(together) < 2.5) == (images == 203 and cell > 0)
