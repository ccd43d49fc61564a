"""Data for benchmarks: digits, and features whose classes are far apart, with every domain shifted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from benchmarks.data.features import BACKBONES, cached_name
from benchmarks.data.images import DIGITS
from protocol.storage.blobstore import file_digest
from protofleet.simulation.fleet import Features
from tests.support.graphs.backbones import tiny_backbone

FEATURES = 12


def domain(seed: int, *, classes: int, images: int) -> Features:
    """Return a domain of so many classes, with so many images for training, and as many for evaluation."""
    centers = np.random.default_rng(7).normal(size=(classes, FEATURES)) * 2
    random = np.random.default_rng(seed)
    labels = np.arange(2 * images) % classes
    shift = random.normal(size=FEATURES)
    features = (centers[labels] + shift + random.normal(size=(len(labels), FEATURES))).astype(np.float32)
    return Features(features[:images], labels[:images], features[images:], labels[images:])


def normalized(made: Features) -> Features:
    """Return features whose rows have the mean square 1, as those of hidden layers."""
    train, test = (
        part / np.sqrt(np.square(part).mean(axis=1, keepdims=True)) for part in (made.train, made.test)
    )
    return replace(made, train=train, test=test, normalized=True)


def report_of(cli: click.Command, file: Path, *arguments: str) -> dict[str, Any]:
    """Run a command of a benchmark, and return what it has written to a file."""
    result = CliRunner().invoke(cli, [*arguments, "--json", str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def make_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make empty folders for data, weights and features, and point the benchmarks at them."""
    for name in ("data", "weights", "cache"):
        (folder / name).mkdir()
        monkeypatch.setenv(f"PROTOFLEET_BENCH_{name.upper()}", str(folder / name))


def pixels_of_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return scikit-learn's digits as images (n, 8, 8), and their classes."""
    pixels, labels = load_digits(return_X_y=True)
    return (pixels.reshape(-1, 8, 8) * 15).astype(np.uint8), labels.astype(np.int64)


def features_of_digits(*, train: int, test: int) -> Features:
    """Return the pixels of scikit-learn's digits as features: the images that `fill_data` writes."""
    images, labels = pixels_of_digits()
    pixels = (images.reshape(-1, 64) / 255).astype(np.float32)
    end = train + test
    return Features(pixels[:train], labels[:train], pixels[train:end], labels[train:end])


def fill_data(folder: Path, *, train: int, test: int) -> None:
    """Write scikit-learn's digits in place of MNIST."""
    images, labels = pixels_of_digits()
    np.savez(
        folder / "data" / "mnist.npz",
        x_train=images[:train],
        y_train=labels[:train].astype(np.uint8),
        x_test=images[train : train + test],
        y_test=labels[train : train + test].astype(np.uint8),
    )


def fill_weights(folder: Path, monkeypatch: pytest.MonkeyPatch, backbone: str) -> int:
    """Write random weights, of a small network in place of a backbone's; returns the number of its features."""
    small = replace(BACKBONES[backbone], model="test_resnet")
    monkeypatch.setattr("benchmarks.data.features.BACKBONES", {**BACKBONES, backbone: small})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(small.model, num_classes=0)
    save_file(model.state_dict(), folder / "weights" / small.file)
    return int(model.num_features)


def fill_cache(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, Features]) -> None:
    """Write features into the benchmarks' cache, as if the smallest of backbones had been exported."""
    make_folders(folder, monkeypatch)
    weights = folder / "weights" / BACKBONES["mobilenetv2_100"].file
    weights.write_bytes(b"weights")
    cache = folder / "cache" / f"mobilenetv2_100-96-{file_digest(weights).hex()[:16]}"
    cache.mkdir()
    (cache / "backbone.onnx").write_bytes(tiny_backbone())
    for name, features in files.items():
        arrays = {key: values for key, values in vars(features).items() if key != "normalized"}
        np.savez(cache / f"{name}.npz", **arrays)


def fill_digits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, images: int, at_most: int, classes: int = 10
) -> None:
    """Write features of the four domains of digits into the cache, under the name of `at_most` images of each."""
    files = {
        cached_name(name, at_most): domain(seed, classes=classes, images=images)
        for seed, name in enumerate(DIGITS)
    }
    fill_cache(folder, monkeypatch, files)
