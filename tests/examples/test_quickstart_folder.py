"""The demo's data, its backbone and its folder."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.config.task_file import load_task
from aggregator.tasks.task_preparation import read_backbone
from edge_client.data.images import decode, find_images
from edge_client.runtime.backbone import open_backbone
from examples.quickstart import digits as data
from examples.quickstart.folder import (
    ALGORITHMS,
    BACKBONE,
    ROUNDS,
    Folder,
    device_names,
    prepare,
    task_text,
)
from protocol.errors import ConfigError
from protocol.models.preprocessing import preprocess
from protocol.storage.blobstore import file_digest

DIGITS = data.load()


def filled(root: Path, *, devices: int = 5) -> Folder:
    folder = Folder(root)
    deal = data.deal(DIGITS.labels, devices=devices, seed=0)
    prepare(folder, DIGITS, deal, names=device_names(devices), seed=0)
    return folder


@settings(deadline=None, max_examples=30)
@given(devices=st.integers(data.FEWEST_DEVICES, 50), seed=st.integers(0, 2**32))
def test_every_image_is_dealt_once(devices: int, seed: int) -> None:
    """However many devices: each has two classes, every class is somewhere, and no image is in two places."""
    deal = data.deal(DIGITS.labels, devices=devices, seed=seed)
    everything = np.concatenate([*deal.shares, deal.held_out])
    assert sorted(everything) == list(range(len(DIGITS.labels)))
    assert len(deal.shares) == devices
    assert all(len(np.unique(DIGITS.labels[share])) == data.CLASSES_EACH for share in deal.shares)
    assert set(DIGITS.labels[deal.held_out]) == set(range(10))
    assert len(deal.held_out) == pytest.approx(0.2 * len(DIGITS.labels), abs=5)


def test_dealing_is_reproducible() -> None:
    first, again, other = (data.deal(DIGITS.labels, devices=10, seed=seed) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first.shares, again.shares, strict=True))
    assert not np.array_equal(first.held_out, other.held_out)


def test_too_few_devices_are_refused() -> None:
    """Four devices with two classes each cannot cover ten."""
    with pytest.raises(ValueError, match="at least 5 devices"):
        data.deal(DIGITS.labels, devices=4, seed=0)


def test_images_on_disk_are_the_digits(tmp_path: Path) -> None:
    """A device reads from its folder what was dealt to it, pixel for pixel."""
    folder = filled(tmp_path)
    share = data.deal(DIGITS.labels, devices=5, seed=0).shares[2]
    images = find_images(folder.images("device-03"), data.CLASSES)
    assert sorted(int(image.path.stem) for image in images) == list(share)
    for image in images[:5]:
        number = int(image.path.stem)
        assert image.label == DIGITS.labels[number]
        assert np.array_equal(np.asarray(decode(image.path)), DIGITS.images[number])


def test_task_file_is_valid(tmp_path: Path) -> None:
    """The task file waits for every device, and names the algorithm and the backbone beside it."""
    folder = filled(tmp_path, devices=7)
    for algorithm in ALGORITHMS:
        if algorithm != "fedtc":
            folder.task.write_text(task_text(algorithm, devices=7, seed=3), encoding="utf-8")
        task, (backbone,) = load_task(folder.task)
        assert (task.quorum, task.classes, task.algorithm) == (7, data.CLASSES, algorithm)
        assert backbone == tmp_path / BACKBONE.name
        assert task.learning is None or task.learning.rounds == (1 if algorithm == "hierarchical" else ROUNDS)
    assert read_backbone(backbone).feature_size == 256


def test_earlier_run_is_replaced(tmp_path: Path) -> None:
    """Nothing of an earlier, larger fleet is left in the folder."""
    filled(tmp_path, devices=10)
    (tmp_path / "aggregator").mkdir()
    folder = filled(tmp_path, devices=5)
    assert len(list((tmp_path / "devices").iterdir())) == 5
    assert not folder.aggregator.exists()


def test_foreign_folder_is_refused(tmp_path: Path) -> None:
    """A folder that no demo made is refused, and nothing in it is touched."""
    (tmp_path / "devices").mkdir()
    with pytest.raises(ConfigError, match="choose another --out"):
        filled(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["devices"]


def test_shipped_backbone_matches_its_note() -> None:
    """Small, described by its own digest, and loaded as a device loads it."""
    note = BACKBONE.with_name("BACKBONE.md").read_text(encoding="utf-8")
    assert BACKBONE.stat().st_size <= 3_000_000
    assert file_digest(BACKBONE).hex() in note
    assert f"{BACKBONE.stat().st_size:,} bytes" in note
    backbone = open_backbone(BACKBONE, provider="cpu")
    assert backbone.metadata.parity is not None
    assert backbone.metadata.parity.relative_error < 1e-5
    assert (backbone.metadata.preprocessing.height, backbone.metadata.feature_size) == (32, 256)


def test_shipped_backbone_distinguishes_digits(tmp_path: Path) -> None:
    """The nearest class mean, of 100 digits, names most of another 100: features of noise would name ten."""
    backbone = open_backbone(BACKBONE, provider="cpu")
    data.write_images(tmp_path, DIGITS, np.arange(200))
    paths = sorted(tmp_path.glob("*/*.png"), key=lambda path: path.stem)
    images = np.stack([preprocess(decode(path), backbone.metadata.preprocessing) for path in paths])
    features, labels = backbone.features(images), DIGITS.labels[:200]
    means = np.stack([features[:100][labels[:100] == label].mean(axis=0) for label in range(10)])
    distances = np.linalg.norm(features[100:, None] - means, axis=2)
    assert (distances.argmin(axis=1) == labels[100:]).mean() > 0.85
