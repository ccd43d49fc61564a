"""Features that were never extracted: classes far apart, and every domain shifted another way."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.data.features import BACKBONES, Features
from protocol.storage.blobstore import file_digest

FEATURES = 16


def domain(seed: int, *, classes: int, images: int) -> Features:
    """A domain of so many classes, with so many images to learn from, and as many to judge by."""
    centers = np.random.default_rng(7).normal(size=(classes, FEATURES)) * 2
    random = np.random.default_rng(seed)
    labels = np.arange(2 * images) % classes
    shift = random.normal(size=FEATURES)
    features = (centers[labels] + shift + random.normal(size=(len(labels), FEATURES))).astype(np.float32)
    return Features(features[:images], labels[:images], features[images:], labels[images:])


def fill_cache(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, Features]) -> None:
    """Put features where a benchmark finds them, as if the smallest of backbones had been exported."""
    for name in ("data", "weights", "cache"):
        (folder / name).mkdir()
        monkeypatch.setenv(f"PROTOFLEET_BENCH_{name.upper()}", str(folder / name))
    weights = folder / "weights" / BACKBONES["mobilenetv2_100"].file
    weights.write_bytes(b"weights")
    cache = folder / "cache" / f"mobilenetv2_100-96-{file_digest(weights).hex()[:16]}"
    cache.mkdir()
    (cache / "backbone.onnx").write_bytes(b"never opened")
    for name, features in files.items():
        np.savez(cache / f"{name}.npz", **vars(features))
