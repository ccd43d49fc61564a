from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from protofleet.simulation.fleet import Client
from research.rounds.baselines import (
    METHODS,
    Method,
    Recipe,
    baseline_logits,
    run_baseline,
    traffic_bytes,
)

CLASSES, FEATURES = 3, 8
RECIPE = Recipe(
    rounds=4,
    epochs=3,
    batch_size=8,
    optimizer="adam",
    learning_rate=1e-2,
    weight_decay=0.0,
    standardize=True,
    adapter_size=16,
)


def _client(seed: int, *, shift: float = 0.0, labels: tuple[int, ...] = (0, 1, 2)) -> Client:
    """A client that has some of three well separated classes, all of its features shifted, judged by all three."""
    centers = np.random.default_rng(7).normal(size=(CLASSES, FEATURES)) * 3
    random = np.random.default_rng(seed)
    owned = np.repeat(np.array(labels), 8)
    everything = np.repeat(np.arange(CLASSES), 20)
    return Client(
        domain=f"shifted by {shift}",
        train=(centers[owned] + shift + random.normal(size=(len(owned), FEATURES))).astype(np.float32),
        train_labels=owned,
        test=(centers[everything] + shift + random.normal(size=(60, FEATURES))).astype(np.float32),
        test_labels=everything,
        weights=np.full(60, 1 / 60),
    )


FLEET = [_client(0), _client(1, shift=5.0), _client(2, shift=-5.0)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_every_method_learns(method: Method, optimizer: Literal["adam", "sgd"]) -> None:
    """On classes that are far apart, each method is nearly always correct."""
    recipe = replace(RECIPE, optimizer=optimizer)
    accuracies = run_baseline(method, FLEET, recipe, classes=CLASSES, seed=0)
    assert accuracies.shape == (3,)
    assert accuracies.min() > 0.9


@pytest.mark.parametrize("method", METHODS)
def test_results_depend_on_the_seed_alone(method: Method) -> None:
    recipe = replace(RECIPE, rounds=1, epochs=1, learning_rate=1e-3)
    first, second, other = (
        run_baseline(method, FLEET, recipe, classes=CLASSES, seed=seed) for seed in (0, 0, 1)
    )
    assert first.tolist() == second.tolist()
    assert first.tolist() != other.tolist()


@pytest.mark.parametrize("method", ["FedAvg-v", "FedProx", "FedProto averaged", "centralized"])
def test_shared_model_predicts_absent_classes(method: Method) -> None:
    """Clients that share a model predict classes that they lack; a client alone does not."""
    fleet = [_client(0, labels=(0, 1)), _client(1, labels=(1, 2)), _client(2, labels=(0, 2))]
    recipe = replace(RECIPE, standardize=False, rounds=20, adapter_size=0)
    shared = run_baseline(method, fleet, recipe, classes=CLASSES, seed=0)
    alone = run_baseline("Solo", fleet, recipe, classes=CLASSES, seed=0)
    assert alone.max() < 0.7
    assert shared.min() > 0.9


def test_prior_of_the_own_images() -> None:
    """With two classes that cannot be told apart, a client that knows its mixture expects the one that it has."""
    fleet = [_mixture(0, 30, 2), _mixture(1, 2, 30)]
    recipe = replace(RECIPE, adapter_size=0, rounds=1, epochs=1)
    without, known = (
        run_baseline("FedAvg-v", fleet, recipe, classes=2, seed=0, prior=prior) for prior in (False, True)
    )
    assert without.mean() < 0.7
    assert known.min() > 0.9


def test_calibrated_clients_predict_without_the_prior_that_they_train_with() -> None:
    """Clients of very different mixtures make a model for all classes alike, which without it prefers the own ones."""
    fleet = [_client(seed, labels=(seed,) * 9 + (0, 1, 2)) for seed in range(3)]
    recipe = replace(RECIPE, standardize=False, adapter_size=0, rounds=1, epochs=1, learning_rate=1e-2)
    plain, calibrated, known = (
        baseline_logits("FedAvg-v", fleet, each, classes=CLASSES, seed=0, prior=prior)[0]
        for each, prior in (
            (recipe, False),
            (replace(recipe, calibrated=True), False),
            (recipe, True),
        )
    )
    prior = known - calibrated
    assert np.allclose(prior, prior[0], atol=1e-5)
    assert prior[0].argmax() == 0
    assert not np.allclose(plain, calibrated, atol=1e-3)


def test_server_momentum_takes_earlier_rounds_further() -> None:
    """After two rounds with a tiny rate, the model has moved by nearly twice 1 + 0.9 / 2 as far as without."""
    recipe = replace(
        RECIPE, optimizer="sgd", learning_rate=1e-6, standardize=False, adapter_size=0, rounds=2, epochs=1
    )
    start, plain, fast = (
        baseline_logits("FedAvg-v", FLEET, each, classes=CLASSES, seed=0)[0].astype(np.float64)
        for each in (replace(recipe, learning_rate=1e-12), recipe, replace(recipe, server_momentum=0.9))
    )
    ratio = np.linalg.norm(fast - start) / np.linalg.norm(plain - start)
    assert ratio == pytest.approx(1.45, abs=0.05)


def _mixture(seed: int, *counts: int) -> Client:
    """A client that has so many images of each class, without features, judged by its own mixture."""
    labels = np.repeat(np.arange(len(counts)), counts)
    noise = np.random.default_rng(seed).normal(size=(2, len(labels), FEATURES)).astype(np.float32) / 100
    return Client(
        domain="mixture",
        train=noise[0],
        train_labels=labels,
        test=noise[1],
        test_labels=labels,
        weights=np.full(len(labels), 1 / len(labels)),
    )


def test_traffic_of_each_method() -> None:
    """Two bytes a value: nothing, a whole model, an adapter, prototypes, or model and prototypes."""
    sizes = {
        method: traffic_bytes(method, RECIPE, feature_size=FEATURES, classes=CLASSES) for method in METHODS
    }
    adapter, classifier, prototypes = 2 * 16 * 9, 2 * 3 * 17, 2 * 3 * 16
    assert sizes == {
        "Solo": 0,
        "FedAvg-v": adapter + classifier,
        "FedProx": adapter + classifier,
        "FedRep": adapter,
        "FedProto": prototypes,
        "FedProto averaged": adapter + classifier + prototypes,
        "centralized": 0,
    }
