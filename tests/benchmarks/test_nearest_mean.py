"""With few images, the head of sums is about as accurate as the nearest class mean of the same images, or more."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aggregator.algorithms.statistics.moments import moments_of
from aggregator.algorithms.statistics.ridge import solve
from benchmarks.data.features import load_features
from benchmarks.data.images import data_folder, weights_folder
from protofleet.simulation.statistics import map_features

IMAGES = (3, 5, 10, 30, 100)
"""Of each class."""

DRAWS = 50
COMPONENTS = 160
"""Principal components of the features, which makes 250 heads a matter of seconds."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


@pytest.mark.skipif(
    not (data_folder() / "mnist.npz").is_file() or not weights_folder().is_dir(),
    reason="needs the data sets and weights of the benchmarks",
)
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_sums_are_no_worse_than_the_nearest_class_mean(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROTOFLEET_BENCH_CACHE", str(cache))
    features = load_features(name, backbone="mobilenetv2_100", image_size=64, at_most=1500)
    center = features.train.mean(axis=0)
    axes = np.linalg.svd(features.train - center, full_matrices=False)[2][:COMPONENTS].T
    trained, tested = (
        map_features(
            replace(features, train=((each - center) @ axes).astype(np.float32)), random_features=0, seed=0
        ).rows
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
