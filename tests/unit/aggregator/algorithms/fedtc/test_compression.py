import itertools

import numpy as np
import pytest

from aggregator.algorithms.fedtc.head import Dense, compress, logits_of

CLASSES, FEATURES = 4, 256


def _head(rng: np.random.Generator, scale: float) -> list[Dense]:
    """Layers of the paper's sizes and of rank 16, as training leaves them; the first takes features of a scale."""
    layers: list[Dense] = []
    for inputs, outputs in itertools.pairwise((FEATURES, 1024, 512, CLASSES)):
        weight = rng.normal(size=(outputs, 16)) @ rng.normal(size=(16, inputs)) / np.sqrt(inputs)
        layers.append(
            Dense(
                (weight / (1 if layers else scale)).astype(np.float32),
                rng.normal(size=outputs).astype(np.float32),
            )
        )
    return layers


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_compressed_layers_compute_nearly_the_same(scale: float) -> None:
    """Also for features so large or small that float16 could not hold the weights."""
    rng = np.random.default_rng(0)
    head = _head(rng, scale)
    features = (scale * rng.normal(size=(500, FEATURES))).astype(np.float32)
    small = compress(head, features[:400])
    expected = logits_of(head, features[400:])
    difference = logits_of(small, features[400:]) - expected
    assert np.abs(difference).max() < 0.01 * expected.std()
    assert {layer.weight.dtype for layer in small[:-1]} == {np.dtype(np.float16)}


def test_compressed_adapter_has_less_than_a_tenth_of_the_bytes() -> None:
    """1,280 features in float32: 7.4 MB."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(1024, 1280)).astype(np.float32)
    layer = Dense(weight, np.zeros(1024, dtype=np.float32))
    classifier = Dense(np.zeros((10, 1024), dtype=np.float32), np.zeros(10, dtype=np.float32))
    small, _ = compress([layer, classifier], rng.normal(size=(20, 1280)).astype(np.float32))
    assert small.nbytes < layer.nbytes / 8


@pytest.mark.parametrize("features", [np.zeros((5, FEATURES)), np.ones((1, FEATURES))])
def test_features_without_variance_are_compressed(features: np.ndarray) -> None:
    head = _head(np.random.default_rng(0), 1.0)
    data = features.astype(np.float32)
    assert np.isfinite(logits_of(compress(head, data), data)).all()
