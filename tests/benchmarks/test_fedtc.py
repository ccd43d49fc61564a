"""FedTC on simulated fleets."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.statistics.moments import moments_of
from aggregator.algorithms.statistics.ridge import solve
from benchmarks.__main__ import cli
from benchmarks.accuracy.few_images import _run
from benchmarks.data.features import VALIDATION, load_features, prepared
from benchmarks.data.images import data_folder, weights_folder
from benchmarks.fleets import Settings, run_ceiling, run_fleet
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition
from protofleet.simulation.statistics import map_features
from tests.benchmarks.feature_factory import (
    features_of_digits,
    fill_data,
    fill_weights,
    make_folders,
    report_of,
)

BACKBONE = "tf_mobilenetv3_small_100"
DEFAULT = Settings(recipe=replace(RECIPES["default"], adapter=False))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of data and weights."""
    make_folders(tmp_path, monkeypatch)
    fill_data(tmp_path, train=800, test=200)
    fill_weights(tmp_path, monkeypatch, BACKBONE)
    return tmp_path


def _fedtc(folder: Path, *arguments: str) -> dict[str, Any]:
    small = ("--data", "mnist", "--backbone", BACKBONE, "--image-size", "32")
    return report_of(cli, folder / "report.json", "accuracy", "fedtc", *small, *arguments)


def test_fedtc_benchmark_writes_its_report(folder: Path) -> None:
    """One command exports the backbone, extracts, runs every partition and seed, and writes what it printed.

    A second run needs no images, and gives the same.
    """
    runs = ("--partition", "sharding:2", "--partition", "dirichlet:0.5", "--seed", "0", "--seed", "1")
    figures = _fedtc(folder, *runs, "--recipe", "paper", "--epochs", "2")
    partitions = ("sharding:2", "dirichlet:0.5", "all features")
    made = [(run["partition"], run["seed"]) for run in figures["runs"]]
    assert made == [(partition, seed) for partition in partitions for seed in (0, 1)]
    size = figures["runs"][0]["tensor_bytes"] // figures["runs"][0]["prototypes"]
    others = 10 * (size * 4 + 300)  # of each device: ranges of values, and all that is no tensor
    for run in figures["runs"][:4]:
        assert run["tensor_bytes"] == run["prototypes"] * size
        assert run["tensor_bytes"] < run["bytes_up"] < run["tensor_bytes"] + others
    assert all(run["epochs"] == 2 for run in figures["runs"])
    for partition in partitions:
        both = [run["accuracy"] for run in figures["runs"] if run["partition"] == partition]
        assert figures["accuracy"][partition] == pytest.approx(sum(both) / 2)
    assert not figures["recipe"]["restore"]
    (folder / "data" / "mnist.npz").unlink()
    again = _fedtc(folder, "--partition", "sharding:2", "--recipe", "paper", "--epochs", "2", "--no-ceiling")
    assert again["tables"][0]["rows"][0][:-1] == figures["tables"][0]["rows"][0][:-1]


def test_few_images_of_each_class(folder: Path) -> None:
    """Others with each seed, for the fleet as for all features."""
    options = ("--partition", "dirichlet:0.5", "--images", "9", "--seed", "0", "--seed", "1")
    runs = _fedtc(folder, *options, "--clients", "1")["runs"]
    assert [run["images"] for run in runs[2:]] == [90] * 2
    assert runs[2]["accuracy"] != runs[3]["accuracy"]


@pytest.fixture(scope="module")
def digits() -> Features:
    return features_of_digits(train=1000, test=360)


def test_fleet_is_trained_from_encoded_submissions(digits: Features) -> None:
    """Ten devices with two classes each come near the ceiling; their messages are little larger than the tensors."""
    batches = replace(DEFAULT, prototypes="batches")
    result = run_fleet(digits, Partition("sharding", 2), batches, seed=0)
    assert result.devices == 10
    assert result.images / 5 >= result.prototypes > 0.9 * result.images / 5
    assert 0.98 * len(digits.train) <= result.images <= len(digits.train)
    assert result.tensor_bytes == 64 * result.prototypes
    assert result.accuracy > 0.92
    assert run_ceiling(digits, DEFAULT, seed=0).accuracy > result.accuracy
    principal = run_fleet(digits, Partition("sharding", 2), DEFAULT, seed=0)
    assert (principal.prototypes, principal.images) == (20, result.images)
    assert principal.tensor_bytes < result.tensor_bytes
    assert principal.accuracy > 0.9


def test_clients_without_images_do_not_count(digits: Features) -> None:
    """At a tiny concentration some clients of forty go empty, and the rest still make a head."""
    settings = replace(DEFAULT, clients=40)
    result = run_fleet(digits, Partition("dirichlet", 0.01), settings, seed=0)
    assert 10 <= result.devices < 40
    assert result.accuracy > 0.9


@pytest.mark.parametrize(("images", "held_out"), [(20_000, VALIDATION), (400, 100)])
def test_roots_and_validation_images(images: int, held_out: int) -> None:
    """Roots keep their sign; images held out for validation are training images, at most a quarter of few."""
    values = np.arange(-images // 2, images // 2, dtype=np.float32)[:, None]
    labels = np.arange(len(values))
    divided = prepared(Features(values, labels, values[:0], labels[:0]), root=True, validation=True)
    assert len(divided.test_labels) == held_out
    assert set(divided.test_labels) | set(divided.train_labels) == set(labels)
    assert np.allclose(divided.train * np.abs(divided.train), values[divided.train_labels])


IMAGES = (3, 5, 10, 30, 100)
"""Of each class."""

DRAWS = 50
COMPONENTS = 160
"""Principal components of the features, which makes 250 heads a matter of seconds."""


@pytest.fixture(scope="module", params=["mnist", "fashion_mnist", "cifar10"])
def features(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Features:
    """The first principal components of a data set's features."""
    if not (data_folder() / "mnist.npz").is_file() or not weights_folder().is_dir():
        pytest.skip("needs the data sets and weights of the benchmarks")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PROTOFLEET_BENCH_CACHE", str(tmp_path_factory.mktemp("features")))
        loaded = load_features(request.param, backbone="mobilenetv2_100", image_size=64, at_most=1500)
    center = loaded.train.mean(axis=0)
    axes = np.linalg.svd(loaded.train - center, full_matrices=False)[2][:COMPONENTS].T
    train, test = (((each - center) @ axes).astype(np.float32) for each in (loaded.train, loaded.test))
    return replace(loaded, train=train, test=test)


def test_prototypes_are_no_worse_than_the_nearest_class_mean(features: Features) -> None:
    """FedTC's heads of the few images that make a choice by cross-validation hard; a draw's gain deviates by 0.02."""
    for images in (3, 10, 30):
        runs = [_run(features, "", images, images, seed) for seed in range(4)]
        assert np.mean([run["head"] - run["nearest_mean"] for run in runs]) >= -0.005, images


def test_sums_are_no_worse_than_the_nearest_class_mean(features: Features) -> None:
    trained, tested = (
        map_features(replace(features, train=each), random_features=0, seed=0).rows
        for each in (features.train, features.test)
    )
    gains = []
    for images in IMAGES:
        for draw in range(DRAWS):
            rng = np.random.default_rng(draw)
            chosen = np.concatenate(
                [
                    rng.permutation(np.flatnonzero(features.train_labels == label))[:images]
                    for label in range(features.classes)
                ]
            )
            rows, labels = trained[chosen], features.train_labels[chosen]
            layer = solve(moments_of(rows, labels, np.ones_like(labels), num_classes=features.classes)).layer
            means = np.stack([rows[labels == label].mean(axis=0) for label in range(features.classes)])
            scores = (
                tested @ layer.weight.T + layer.bias,
                tested @ means.T - 0.5 * np.square(means).sum(axis=1),
            )
            head, nearest = (float((each.argmax(axis=1) == features.test_labels).mean()) for each in scores)
            gains.append(head - nearest)
    by_size = np.reshape(gains, (len(IMAGES), DRAWS)).mean(axis=1)
    assert (by_size >= -0.005).all(), dict(zip(IMAGES, by_size.round(4).tolist(), strict=True))
