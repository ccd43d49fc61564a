"""The commands that chose the size of blocks run on small data."""

from pathlib import Path

import numpy as np
import pytest

from protofleet.simulation.fleet import Features
from research.__main__ import cli
from research.defaults import block_edits, block_size
from tests.benchmarks.feature_factory import report_of
from tests.support.graphs.backbones import tiny_backbone


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace data set and backbone by separable classes in 24 values."""
    rng = np.random.default_rng(0)
    labels = np.arange(900) % 3
    values = (rng.normal(size=(900, 24)) + 3 * np.eye(3, 24)[labels]).astype(np.float32)
    features = Features(values[:600], labels[:600], values[600:], labels[600:])
    (tmp_path / "tiny.onnx").write_bytes(tiny_backbone(feature_size=24))
    for module in (block_size, block_edits):
        monkeypatch.setattr(module, "load_features", lambda *_, **__: features)
        monkeypatch.setattr(module, "prepared", lambda each, **_: each)
        monkeypatch.setattr(module, "DEVICES", 2)
    monkeypatch.setattr(block_edits, "backbone_file", lambda *_, **__: tmp_path / "tiny.onnx")
    return tmp_path


def test_sizes_of_blocks(made: Path) -> None:
    """More blocks have more bytes; without one, deleted images cost their groups alone."""
    arguments = ["block-size", "--data", "cifar10", "--images", "600", "--seed", "0"]
    options = ["--largest", "0", "--largest", "100", "--least", "50", "--bits", "8"]
    whole, parts = report_of(cli, made / "report.json", *arguments, *options)["runs"]
    assert min(*whole["figures"], *parts["figures"]) > 0
    assert whole["figures"][1] < parts["figures"][1]
    assert whole["figures"][0] > 0.8


def test_edits_of_blocks(made: Path) -> None:
    """Accuracy and MB with blocks, and with batches, which take more bytes."""
    arguments = ["block-edits", "--data", "cifar10", "--images", "600", "--seed", "0"]
    events = ["--event", "three portions", "--event", "5 % deleted"]
    for run in report_of(cli, made / "report.json", *arguments, *events)["runs"]:
        accuracy, size, of_batches, size_of_batches = run["figures"]
        assert min(accuracy, of_batches) > 0.8
        assert 0 < size < size_of_batches
