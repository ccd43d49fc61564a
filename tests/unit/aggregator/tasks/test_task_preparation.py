"""Tests for preparing a task: backbone metadata and the manifest."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aggregator.config.schema import Client, PrivacyBudget, PrivacySettings, TaskFile
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.tasks.manifests import task_manifest
from aggregator.tasks.task_preparation import continued, read_backbone
from protocol.errors import BackboneMismatch, ConfigError
from protocol.wire.codec import encode
from protocol.wire.messages import BlobRef, DifferentialPrivacy, TaskManifest
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


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(open_store(tmp_path)) as store:
        yield store


REFERENCE = BlobRef(digest=bytes(32), size_bytes=1, name="tiny.onnx")


def _manifest(classes: tuple[str, ...], **settings: Any) -> TaskManifest:
    return task_manifest(TaskFile(classes=classes, backbones=("b",), **settings), [REFERENCE])


def test_continued_task_names_all_earlier_ones(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """The newest first; a new name that resembles another one is pointed out."""
    first = _manifest(("ant", "bee"))
    one = store.blobs.put(encode(first))
    second = continued(_manifest(("ant", "bee", "wasp")), one, store)
    two = store.blobs.put(encode(second))
    third = continued(_manifest(("ant", "bee", "wasp", "bees")), two, store)
    assert (second.continues, third.continues) == ((one,), (two, one))
    assert [record.message for record in caplog.records] == [
        "similar names of classes: one may be meant new=bees known=bee"
    ]


@pytest.mark.parametrize(
    ("classes", "settings", "error"),
    [
        (("bee", "ant", "wasp"), {}, "removed or renamed classes are a new task"),
        (("ant", "bee"), {}, "further ones behind them"),
        (("ant",), {}, "further ones behind them"),
        (
            ("ant", "bee", "wasp"),
            {"client": Client(batch_size=7)},
            "batch_size must be those of the earlier task",
        ),
        (
            ("ant", "bee", "wasp"),
            {"privacy": PrivacySettings(dp=PrivacyBudget(epsilon=2.0, clip_norm=9.0, max_epsilon=8.0))},
            "not for tasks with rounds or with differential privacy",
        ),
    ],
)
def test_task_that_continues_nothing_is_refused(
    store: Store, classes: tuple[str, ...], settings: dict[str, Any], error: str
) -> None:
    earlier = store.blobs.put(encode(_manifest(("ant", "bee"))))
    with pytest.raises(ConfigError, match=error):
        continued(_manifest(classes, **settings), earlier, store)


def test_earlier_task_must_be_in_the_state(store: Store) -> None:
    other = store.blobs.put(b"no manifest")
    for digest in (bytes(32), other):
        with pytest.raises(ConfigError, match="this state has no task"):
            continued(_manifest(("ant", "bee", "wasp")), digest, store)
