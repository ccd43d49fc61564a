"""Every command of `python -m research` runs on small data and writes its figures."""

import io
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import save_file

from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.fedtc.train_head import MIN_PROTOTYPES
from aggregator.algorithms.hierarchical import Hierarchical
from benchmarks.data.features import BACKBONES, cached_name
from benchmarks.data.images import DataSet, Labeled
from protofleet.simulation import rounds
from protofleet.simulation.fleet import Features
from research import blocks, published, restoration, statistics
from research.__main__ import cli
from research.cells import batches_of_cells
from research.defaults import default_layers, drift, forecast, head_choice, novelty, own_classes
from research.defaults.class_prior import TRAINED_ON
from research.poisoning import squares
from research.poisoning.prototypes import METHODS
from research.poisoning.rare_class import ATTACKS as RARE_CLASSES
from research.poisoning.statistics import ATTACKS as FALSE_SUMS
from research.privacy import directions, measurement, noisy_sums, persons
from research.privacy.blocks import command as principal_prototypes
from research.privacy.blocks import membership, row_decoder
from research.privacy.blocks.uploads import Pool
from research.rounds import step
from tests.benchmarks.feature_factory import (
    domain,
    features_of_digits,
    fill_cache,
    fill_data,
    fill_digits,
    fill_weights,
    make_folders,
    report_of,
)
from tests.support.graphs.exported_graphs import exported

NAME = "fashion_mnist-600"


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a command, and return what it wrote."""
    return report_of(cli, folder / "report.json", *arguments)


@pytest.fixture
def five_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fill_cache(tmp_path, monkeypatch, {NAME: domain(1, classes=5, images=600)})
    return tmp_path


def test_blocks(five_classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Principal prototypes have fewer bytes than batches of the same fleets."""
    fleet = blocks.Fleet(layers="", at_most=600, images=500, devices=4)
    monkeypatch.setitem(blocks.FLEETS, "even", (fleet,))
    made = run(five_classes, "blocks", "--fleets", "even", "--seed", "0")["runs"][0]
    (batches,), (auto,) = made["batches"], made["auto"]
    assert auto["bytes_up"] < batches["bytes_up"]
    assert auto["images"] == batches["images"]


def test_poisoning(five_classes: Path) -> None:
    """False devices are found, others are not, and a head without them is as accurate as without an attack."""
    arguments = ["--images", "600", "--clients", "10", "--share", "0", "--share", "0.3", "--epochs", "20"]
    arguments += ["--attack", "flip", "--attack", "noise", "--attack", "scale", "--seed", "0"]
    runs = run(five_classes, "poisoning", *arguments)["runs"]
    assert [(each["form"], each["attack"], each["found"], each["false_alarms"]) for each in runs] == [
        (form, attack, found, 0)
        for attacks, found in (([""], 0), (["flip", "noise", "scale"], 3))
        for form in ("batches", "auto")
        for attack in attacks
    ]
    for form in ("batches", "auto"):
        honest, *attacked = (each["accuracies"] for each in runs if each["form"] == form)
        assert honest.keys() == set(METHODS)
        assert honest["check"] == honest["none"]
        assert all(accuracies["check"] >= honest["check"] - 0.02 for accuracies in attacked)


def test_squares(five_classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of a fleet with the attack predicts more squared images as the attacker's class."""
    made = domain(1, classes=5, images=600)
    part = Labeled(np.zeros((600, 8, 8), np.uint8), made.train_labels)
    test = Labeled(part.images, made.test_labels)
    monkeypatch.setattr(squares, "load_data", lambda _: DataSet(part, test))
    monkeypatch.setattr(squares, "sample", lambda labeled, _: labeled)
    monkeypatch.setattr(squares, "open_backbone", lambda _: None)
    monkeypatch.setattr(squares, "backbone_file", lambda *_args, **_options: None)
    far = np.eye(made.train.shape[1], dtype=np.float32)[0] * 9
    monkeypatch.setattr(squares, "features_of", lambda images, *_: np.tile(far, (len(images), 1)))
    arguments = ["--images", "600", "--share", "0.5", "--seed", "0"]
    runs = run(five_classes, "squares", *arguments)["runs"]
    assert [(each["form"], each["share"]) for each in runs] == [
        (form, share) for form in ("batches", "auto") for share in (0.0, 0.5)
    ]
    assert all(each["accuracy"] > 0.8 for each in runs)


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


def test_poisoned_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the graphs of tests/unit/protofleet/test_simulate.py."""
    fill_cache(tmp_path, monkeypatch, {NAME: domain(1, classes=4, images=600)})
    monkeypatch.setattr(rounds, "_built", exported)
    arguments = ["--images", "600", "--algorithm", "hierarchical", "--rounds", "1", "--clients", "3"]
    runs = run(tmp_path, "poisoned-rounds", *arguments, "--attack", "none", "--attack", "scale")["runs"]
    assert [(each["attack"], each["method"]) for each in runs] == [
        (attack, method) for attack in ("none", "scale") for method in ("none", "clip")
    ]


def test_false_alarms(tmp_path: Path) -> None:
    arguments = ["--fleets", "5", "--devices", "8", "--images", "10", "--places", "one"]
    (one,) = run(tmp_path, "false-alarms", *arguments)["runs"]
    assert one["alarms"] <= 1


def test_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the graphs of tests/research/test_rounds.py, of one backbone."""
    monkeypatch.setattr(step, "FEATURES", 12)
    monkeypatch.setattr(step, "CLASSES", 4)
    monkeypatch.setattr(step, "build", exported)
    report = run(tmp_path, "step", "--images", "40", "--repetitions", "1", "--no-compile")
    assert [row[:2] for row in report["tables"][0]["rows"]] == [["1 x 12", "40"], ["3 x 12", "40"]]


def test_sum_costs(tmp_path: Path) -> None:
    """A mask adds less than a hundredth to an upload of the same values."""
    arguments = ["--devices", "3", "--devices", "9", "--classes", "4", "--size", "200"]
    few, more = run(tmp_path, "sum-costs", *arguments)["runs"]
    assert 1 < few["of unmasked"] <= 1.01
    assert (few["reply kB"], few["upload kB"]) == (more["reply kB"], more["upload kB"])
    assert few["request kB"] < more["request kB"]


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
    report = run(tmp_path, "noisy-sums", *arguments)
    runs, (table, compared) = report["runs"], report["tables"]
    assert [row[2] for row in table["rows"]] == ["1", "10"]
    assert [row[2] for row in compared["rows"]] == ["0.5", "32"]
    assert list(report["plots"][0]["series"]) == ["400 images, noise once", "400 images, noise of 10 devices"]
    found = {(each["devices"], each["epsilon"]): each["sums"][0] for each in runs if "sums" in each}
    assert found[None, None] >= found[1, 32] - 0.02
    assert found[1, 32] > found[10, 0.5] + 0.05
    assert found[10, 32] > found[10, 0.5]
    rivals = [each["prototypes"][0] for each in runs if "prototypes" in each]
    assert len(rivals) == 2
    assert rivals[0] < rivals[1]


def test_persons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More images of a person need more noise, and an image's noise does not hide ten of a person."""
    made = domain(1, classes=5, images=400)
    for module in (noisy_sums, persons):
        monkeypatch.setattr(module, "load_features", lambda _name, **_: made)
    arguments = ["--data", "mnist", "--images", "400", "--seed", "0", "--size", "12", "--releases", "100"]
    arguments += [
        "--devices",
        "1",
        "--epsilon",
        "32",
        "--images-per-person",
        "1",
        "--images-per-person",
        "10",
    ]
    runs = run(tmp_path, "persons", *arguments)["runs"]
    found = {each["k"]: each["sums"][0] for each in runs if "sums" in each}
    assert found[1] > found[10]
    aucs = {(each["k"], each["epsilon"]): each["auc"]["10"] for each in runs if "auc" in each}
    assert aucs[1, 4.0] > 0.95 > aucs[10, 4.0]
    kinds = [each for each in runs if "clipped" in each]
    assert [each["persons"] for each in kinds] == ["alike, one class", "one class", "any class"]
    assert 1 < kinds[2]["length"] < kinds[1]["length"] <= 10


def test_audit(tmp_path: Path) -> None:
    (made,) = run(tmp_path, "audit", "--epsilon", "8", "--releases", "100")["runs"]
    assert 3 < made["lower bound"] <= 8


def test_hierarchical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_digits(tmp_path, monkeypatch, images=300, at_most=300)
    arguments = ["--images", "300", "--shift", "feature", "--seed", "0", "--variant"]
    (row,) = run(tmp_path, "hierarchical", *arguments, "exact eigenvectors")["rows"]
    assert row["feature"] > 0.5


def test_restoration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of domains that are far apart, a linear discriminant needs the variance within devices."""
    fill_digits(tmp_path, monkeypatch, images=300, at_most=2000)
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


def test_principal_prototypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random, labels = np.random.default_rng(0), np.arange(2000) % 2
    images = random.integers(0, 255, size=(2000, 8, 8), dtype=np.uint8)
    pool = Pool(random.normal(size=(2000, 24)).astype(np.float32), labels, images, (12, 12))
    monkeypatch.setattr(principal_prototypes, "load_pool", lambda *_args, **_options: pool)
    arguments = ["--at-most", "2000", "--images", "60", "--classes", "2", "--members", "60"]
    report = run(tmp_path, "principal-prototypes", *arguments, "--decoder-epochs", "0")
    assert [one["form"] for one in report["membership"]] == list(membership.FORMS)
    assert [one["form"] for one in report["decoder"]] == list(row_decoder.FORMS)
    assert report["sequences"][0]["released"] == "one block"


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


def test_prior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where classes are uneven, the prior gains; where they are even, it is hardly used."""
    features = features_of_digits(train=800, test=900)
    fill_cache(tmp_path, monkeypatch, {cached_name("mnist", TRAINED_ON): features})
    arguments = ["--data", "mnist", "--places", "8", "--seed", "0"]
    runs = run(tmp_path, "prior", *arguments, "--concentration", "0.1", "--concentration", "1000")["runs"]
    uneven, even = (each["places"] for each in runs)
    assert len(uneven) == len(even) == 8
    assert sum(place[1] - place[0] for place in uneven) > 0
    assert all(place[3] for place in uneven)
    assert not all(place[3] for place in even)


def test_own_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The labels' prior gains on a device's own classes, and is not used on all classes alike."""
    made = features_of_digits(train=400, test=600)
    monkeypatch.setattr(own_classes, "load_features", lambda *_args, **_options: made)
    monkeypatch.setattr(own_classes, "IMAGES", 60)
    arguments = ["--data", "fashion_mnist", "--partition", "dirichlet:0.1", "--seed", "0"]
    runs = {each["classes"]: each["devices"] for each in run(tmp_path, "own-classes", *arguments)["runs"]}
    assert set(runs) == set(own_classes.OWN)
    gains = {
        classes: np.mean([device["auto"] - device["no prior"] for device in devices])
        for classes, devices in runs.items()
    }
    assert gains["own"] > 0
    assert gains["all"] > -0.01


@pytest.mark.parametrize("option", ["--validation", "--leave-out"])
def test_head_choice(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both heads are evaluated; that of 200 images is in closed form."""
    made = features_of_digits(train=400, test=300)
    monkeypatch.setattr(head_choice, "load_features", lambda *_args, **_options: made)
    monkeypatch.setattr(head_choice, "ADAPTER", replace(head_choice.ADAPTER, min_steps=60))
    monkeypatch.setitem(head_choice.CASES, "pacs", head_choice.Case("mnist", "", 200, partition="iid"))
    (one,) = run(tmp_path, "head-choice", "--case", "pacs", "--seed", "0", option)["runs"]
    assert 30 < one["prototypes"] < MIN_PROTOTYPES
    assert min(one["closed form"], one["adapter"]) > 0.6
    assert one["chosen"] == ("closed form" if option == "--validation" else None)


def test_confidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after the calibration, for each head and each draw of the held-out images."""
    fill_cache(tmp_path, monkeypatch, {"mnist": features_of_digits(train=1000, test=700)})
    arguments = ["--data", "mnist", "--at-most", "300", "--seed", "0"]
    report = run(tmp_path, "confidence", *arguments, "--held-out", "60", "--held-out", "400")
    assert [each["held_out"] for each in report["runs"]] == [0, 60, 400]
    assert [[len(draws) for draws in each["heads"]] for each in report["runs"]] == [[1], [8], [8]]
    errors = [error for error, *_ in report["runs"][-1]["heads"][0]]
    assert sum(errors) / 8 < 0.05


def test_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each map and form beside FedTC; sums of single images have the ceiling's accuracy in any partition."""
    fill_cache(tmp_path, monkeypatch, {"mnist": features_of_digits(train=800, test=200)})
    linear = replace(RECIPES["default"], adapter=False)  # which takes no time
    monkeypatch.setattr(statistics, "RECIPES", {"default": linear})
    options = ("--data", "mnist", "--partition", "dirichlet:0.5", "--features", "0", "--features", "32")
    seeds = ("--seed", "0", "--seed", "1", "--max-multiple", "0")
    written = run(tmp_path, "statistics", *options, *seeds)
    runs = {(each["method"], each["partition"], each["seed"]): each for each in written["runs"]}
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
    assert len(written["accuracy"]) == 8


def test_layers_are_compared_on_the_same_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last depthwise activation of training images is the only informative one here.

    PACS has its domains in one, with or without sketches.
    """
    wanted = []

    def load(name: str, *, backbone: str, image_size: int, at_most: int | None) -> Features:
        wanted.append((name, backbone, image_size, at_most))
        made = domain(0, classes=3, images=90)
        blank = replace(made, test=0 * made.test)
        return blank if backbone.endswith(":c960") else replace(blank, train=0 * made.train)

    monkeypatch.setattr(default_layers, "load_features", load)
    chosen = ("--data", "pacs_without_sketches", "--data", "usps", "--backbone", "mobilenetv2_100")
    options = (*chosen, "--images", "20", "--draws", "2")
    made = run(tmp_path, "layers", *options)
    assert [(each["data"], each["image_size"]) for each in made["runs"]] == [
        ("pacs_without_sketches", 224), ("usps", 96),
    ]  # fmt: skip
    for each in made["runs"]:
        of = dict(zip(made["layers"], np.array(each["accuracies"]).T, strict=True))
        assert (of["last depthwise"] > 0.8).all()
        assert (of["last,residual"] < 0.5).all()
        assert (of["last,residual"] == of["last three"]).all()  # the same draws
    assert ("usps", "mobilenetv2_100:last,residual", 96, default_layers.AT_MOST) in wanted
    assert ("pacs_cartoon", "mobilenetv2_100:c384,c576,c960", 224, None) in wanted
    assert not any(name == "pacs_sketch" for name, *_ in wanted)
    assert len(made["tables"][1]["rows"]) == 2
    tested = run(tmp_path, "layers", *options[2:], "--test")
    assert np.max(tested["runs"][0]["accuracies"]) < 0.5


CLASSES, IMAGES = 3, 20


def _fill_archive(folder: Path, name: str) -> None:
    """Write images of one color for each class, with noise."""
    rng = np.random.default_rng(0)
    with zipfile.ZipFile(folder / "data" / f"{name}.zip", "w") as archive:
        for part in ("train", "test"):
            for number in range(CLASSES * IMAGES):
                label = number % CLASSES
                pixels = rng.integers(0, 60, size=(8, 8, 3), dtype=np.uint8)
                pixels[:, :, label] += 120
                file = io.BytesIO()
                Image.fromarray(pixels).save(file, "PNG")
                archive.writestr(f"{part}/{label}/{number}.png", file.getvalue())


def test_missing_files_are_skipped_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without weights all data sets are skipped, without an archive that one; the command succeeds."""
    make_folders(tmp_path, monkeypatch)
    result = CliRunner().invoke(cli, ["published"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(published.DATA)
    assert all("resnet18.tv_in1k.safetensors" in line for line in lines)
    fill_weights(tmp_path, monkeypatch, published.BACKBONE)
    result = CliRunner().invoke(cli, ["published", "--image-size", "32"])
    assert result.exit_code == 0, result.output
    for name in published.DATA:
        assert f"{name}: skipped: no {tmp_path / 'data' / f'{name}.zip'}" in result.stdout


def test_rollouts_beside_measured_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of an archive's images, by a random ResNet-18 with a classifier, and the published figures."""
    make_folders(tmp_path, monkeypatch)
    torch.manual_seed(0)
    network = timm.create_model("resnet18")
    save_file(network.state_dict(), tmp_path / "weights" / BACKBONES[published.BACKBONE].file)
    _fill_archive(tmp_path, "cifar100")
    linear = replace(RECIPES["default"], adapter=False)  # which takes no time
    monkeypatch.setattr(published, "RECIPES", {"default": linear})
    monkeypatch.setattr(published, "IMAGE_SIZE", 32)
    size = ("--image-size", "32", "--clients", "2", "--partition", "dirichlet:0.5")
    runs = run(tmp_path, "published", *size)["runs"]
    assert {each["data"] for each in runs} == {"cifar100"}
    measured = {(each["method"], each["layers"]): each for each in runs if each["source"] == "measured"}
    assert set(measured) == {
        (published.AFL, "last"),
        (published.LDA, "last"),
        *((method, layers) for method in ("statistics, B 1", "FedTC, B 5") for layers in ("last", "all")),
    }
    assert measured[published.AFL, "last"]["values"] == 512
    assert measured["statistics, B 1", "all"]["values"] == 64 + 64 + 128 + 256 + 512
    assert min(each["accuracy"] for each in measured.values()) > 0.8
    as_published = {each["method"]: each for each in runs if each["source"] != "measured"}
    assert as_published["AFL"]["accuracy"] == 0.5856
    assert as_published["AFL"]["source"] == "as published, not checked"
    assert as_published["GH-LDA"]["megabytes"] is None


def test_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = features_of_digits(train=200, test=200)
    monkeypatch.setattr(forecast, "load_features", lambda *_args, **_options: made)
    runs = run(tmp_path, "forecast", "--data", "mnist", "--seed", "0")["runs"]
    assert runs[0]["images"] == 5
    assert runs[0]["least"] <= runs[0]["most"]


def test_novelty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = {
        name: domain(seed, classes=10, images=400) for seed, name in enumerate(("fashion_mnist", "mnist"))
    }
    monkeypatch.setattr(novelty, "load_features", lambda name, **_: sets[name])
    monkeypatch.setattr(novelty, "SETS", {"fashion_mnist": (96, ("mnist", "new classes"))})
    runs = run(tmp_path, "novelty", "--known", "fashion_mnist")["runs"]
    assert [each["foreign"] for each in runs] == ["mnist", "new classes"]
    assert min(each["Mahalanobis"] for each in runs) > 0.5


def test_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos, sketches = (domain(seed, classes=3, images=60) for seed in (0, 1))
    part = Labeled(np.zeros((60, 8, 8, 3), np.uint8), photos.train_labels)
    monkeypatch.setattr(drift, "load_data", lambda _: DataSet(part, part))
    monkeypatch.setattr(drift, "load_features", lambda *_args, **_options: sketches)
    monkeypatch.setattr(drift, "open_backbone", lambda _: None)
    monkeypatch.setattr(drift, "backbone_file", lambda *_args, **_options: None)
    whole = np.concatenate([photos.train, photos.test])
    monkeypatch.setattr(drift, "features_of", lambda *_: whole)
    runs = {each["images"]: each["scores"] for each in run(tmp_path, "drift")["runs"]}
    assert set(runs) == {*drift.CHANGES, "sketches"}


def test_families(tmp_path: Path) -> None:
    """Means of blocks equal timm's, of a network with channels first and of one with channels last."""
    made = run(tmp_path, "families", "--network", "test_resnet", "--network", "test_mambaout")
    assert [each["compared"] > 0 for each in made["runs"]] == [True, True]
    assert max(each["worst"] for each in made["runs"]) < 1e-5
