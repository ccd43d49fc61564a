"""Tests for preparing a task: backbone metadata and the manifest."""

from pathlib import Path

import pytest

from aggregator.config.schema import Client, PrivacyBudget, PrivacySettings, TaskFile
from aggregator.tasks.manifests import task_manifest
from aggregator.tasks.task_preparation import read_backbone
from protocol.errors import BackboneMismatch, ConfigError
from protocol.wire.messages import BlobRef, DifferentialPrivacy
from tests.support.graphs.backbones import tiny_backbone


@pytest.mark.parametrize("client", [Client(), Client(alpha=1.0)])
def test_manifest_of_private_task_has_alpha_1_and_noise(client: Client) -> None:
    """Alpha becomes 1; the noise multiplier is the smallest that epsilon and delta allow."""
    budget = PrivacyBudget(epsilon=2.0, clip_norm=9.0, max_epsilon=8.0)
    task = TaskFile(classes=("a",), backbones=("b",), client=client, privacy=PrivacySettings(dp=budget))
    manifest = task_manifest(task, [BlobRef(digest=bytes(32), size_bytes=1, name="tiny.onnx")])
    assert manifest.alpha == 1
    assert manifest.differential_privacy == DifferentialPrivacy(
        clip_norm=9.0, noise_multiplier=1.994, delta=1e-5, max_epsilon=8.0
    )


def test_read_backbone_returns_metadata_or_raises(tmp_path: Path) -> None:
    path = tmp_path / "tiny.onnx"
    path.write_bytes(tiny_backbone(feature_size=12))
    assert read_backbone(path).feature_size == 12
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="cannot read the backbone"):
        read_backbone(path)
    path.write_bytes(b"")
    with pytest.raises(BackboneMismatch, match="export-backbone"):
        read_backbone(path)
