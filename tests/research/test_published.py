import dataclasses
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import save_file

from aggregator.algorithms.fedtc.recipe import RECIPES
from benchmarks.data.features import BACKBONES
from research import published
from research.__main__ import cli
from tests.benchmarks.feature_factory import fill_weights, make_folders

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
    linear = dataclasses.replace(RECIPES["default"], adapter=False)  # which takes no time
    monkeypatch.setattr(published, "RECIPES", {"default": linear})
    monkeypatch.setattr(published, "IMAGE_SIZE", 32)
    report = tmp_path / "report.json"
    size = ("--image-size", "32", "--clients", "2", "--partition", "dirichlet:0.5")
    result = CliRunner().invoke(cli, ["published", *size, "--json", str(report)])
    assert result.exit_code == 0, result.output
    assert "tiny_imagenet: skipped" in result.stdout
    runs = json.loads(report.read_text())["runs"]
    assert {run["data"] for run in runs} == {"cifar100"}
    measured = {(run["method"], run["layers"]): run for run in runs if run["source"] == "measured"}
    assert set(measured) == {
        (published.AFL, "last"),
        (published.LDA, "last"),
        *((method, layers) for method in ("statistics, B 1", "FedTC, B 5") for layers in ("last", "all")),
    }
    assert measured[published.AFL, "last"]["values"] == 512
    assert measured["statistics, B 1", "all"]["values"] == 64 + 64 + 128 + 256 + 512
    assert min(run["accuracy"] for run in measured.values()) > 0.8
    as_published = {run["method"]: run for run in runs if run["source"] != "measured"}
    assert as_published["AFL"]["accuracy"] == 0.5856
    assert as_published["AFL"]["source"] == "as published, not checked"
    assert as_published["GH-LDA"]["megabytes"] is None
