import dataclasses

import numpy as np
import pytest
from sklearn.datasets import load_digits

from aggregator.algorithms.fedtc.recipe import RECIPES
from benchmarks.data.features import VALIDATION, prepared
from benchmarks.fleets import Settings, run_ceiling, run_fleet
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition

ADAPTER = dataclasses.replace(RECIPES["default"], min_steps=60, compress=False, closed_form=False)
DEFAULT = Settings(
    clients=10,
    alpha=0.99,
    batch_size=5,
    recipe=dataclasses.replace(RECIPES["default"], adapter=False),
    device="cpu",
)


@pytest.fixture(scope="module")
def digits() -> Features:
    """960 of scikit-learn's real handwritten digits, their 64 pixels as features."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    features, labels = (pixels / 16).astype(np.float32)[order], labels[order].astype(np.int64)
    return Features(
        train=features[360:960], train_labels=labels[360:960], test=features[:360], test_labels=labels[:360]
    )


def test_fleet_is_trained_from_encoded_submissions(digits: Features) -> None:
    """Ten devices with two classes each come near the ceiling; their messages are little larger than the tensors."""
    result = run_fleet(digits, Partition("sharding", 2), DEFAULT, seed=0)
    assert result.devices == 10
    assert result.images / 5 >= result.prototypes > 0.9 * result.images / 5
    assert 0.98 * len(digits.train) <= result.images <= len(digits.train)
    assert result.tensor_bytes == 64 * result.prototypes
    assert result.accuracy > 0.92
    assert run_ceiling(digits, DEFAULT, seed=0).accuracy > result.accuracy


def test_restored_variance_improves_accuracy(digits: Features) -> None:
    """The same prototypes, of ten images each, train a better adapter with their variance restored."""
    raw = dataclasses.replace(ADAPTER, restore=False, mix=False)
    restored, plain = (
        run_fleet(
            digits,
            Partition("sharding", 2),
            dataclasses.replace(DEFAULT, batch_size=10, recipe=recipe),
            seed=0,
        )
        for recipe in (ADAPTER, raw)
    )
    assert restored.accuracy > plain.accuracy + 0.01
    assert (restored.prototypes, restored.bytes_up) == (plain.prototypes, plain.bytes_up)


def test_clients_without_images_do_not_count(digits: Features) -> None:
    """At a tiny concentration some clients of forty go empty, and the rest still make a head."""
    settings = dataclasses.replace(DEFAULT, clients=40)
    result = run_fleet(digits, Partition("dirichlet", 0.01), settings, seed=0)
    assert 10 <= result.devices < 40
    assert result.accuracy > 0.9


def test_roots_and_validation_images() -> None:
    """Roots keep their sign; images held out for validation are training images."""
    values = np.arange(-15_000, 5_000, dtype=np.float32)[:, None]
    labels = np.arange(len(values))
    divided = prepared(Features(values, labels, values[:0], labels[:0]), root=True, validation=True)
    assert len(divided.test_labels) == VALIDATION
    assert set(divided.test_labels) | set(divided.train_labels) == set(labels)
    assert np.allclose(divided.train * np.abs(divided.train), values[divided.train_labels])
