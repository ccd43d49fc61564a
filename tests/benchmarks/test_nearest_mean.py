"""With few images, heads are about as accurate as the nearest class mean of the same images, or more."""

from dataclasses import replace

import numpy as np
import pytest

from aggregator.algorithms.statistics.moments import moments_of
from aggregator.algorithms.statistics.ridge import solve
from benchmarks.accuracy.few_images import _run
from benchmarks.data.features import load_features
from benchmarks.data.images import data_folder, weights_folder
from protofleet.simulation.fleet import Features
from protofleet.simulation.statistics import map_features

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
