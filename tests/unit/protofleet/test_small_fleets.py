"""A fleet gets a head as soon as two classes have a prototype, however few images its devices have."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.fedtc.train_head import FedTC
from aggregator.algorithms.hierarchical import Hierarchical
from aggregator.config.schema import Robust
from protofleet.simulation import algorithms, statistics
from protofleet.simulation.fleet import Client, pooled

SIZE = 12

NUMBERS = st.one_of(st.just(0), st.integers(1, 6), st.integers(1, 100))
"""Images of a class on a device."""

CLASSES = st.integers(2, 10)


@st.composite
def fleets(draw: st.DrawFn, numbers: st.SearchStrategy[int] = CLASSES) -> list[Client]:
    """Return devices with random features, of one of these numbers of classes; the last has one or two images."""
    devices, classes = draw(st.integers(1, 10)), draw(numbers)
    images = np.array(draw(st.lists(NUMBERS, min_size=devices * classes, max_size=devices * classes)))
    images = images.reshape(devices, classes)
    if devices > 1:
        images[-1] = 0
        images[-1, draw(st.integers(0, classes - 1))] = draw(st.integers(1, 2))
    assume(np.count_nonzero((images >= 2).any(axis=0)) >= 2)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    centers = random.normal(0, draw(st.sampled_from([0.1, 1.0, 10.0])), (classes, SIZE))

    def features(labels: NDArray[np.int64]) -> NDArray[np.float32]:
        return (centers[labels] + random.normal(size=(len(labels), SIZE))).astype(np.float32)

    truth = np.arange(classes)
    labels = [np.repeat(truth, row) for row in images]
    return [
        Client(
            domain="", train=features(own), train_labels=own,
            test=features(truth), test_labels=truth, weights=np.ones(classes),
        )
        for own in labels
        if len(own)
    ]  # fmt: skip


@pytest.mark.parametrize("batch_size", [1, 5])
@settings(max_examples=500)
@given(clients=fleets())
def test_statistics_gives_a_finite_head(clients: list[Client], batch_size: int) -> None:
    """By the aggregator's job and its result file."""
    features, owners = pooled(clients)
    data = statistics.map_features(features, random_features=8, seed=0)
    made = statistics.run_fleet(data, owners, batch_size=batch_size, seed=0, robust=Robust())
    assert np.isfinite(made.logits).all()
    assert 0 < made.counting.counted <= made.counting.images
    assert bool(made.counting.limited) == (made.counting.counted < made.counting.images)


@settings(max_examples=50)
@given(clients=fleets())
def test_fedtc_gives_a_finite_head(clients: list[Client]) -> None:
    """After a few steps, in place of hundreds of epochs."""
    brief = Training(epochs=3, device="cpu")
    made = algorithms.train_prototypes(FedTC(), clients, robust=Robust(), training=brief)
    assert np.isfinite(made.logits[0]).all()


@settings(max_examples=50)
@given(clients=fleets(st.sampled_from([2, 6])))
def test_hierarchical_gives_a_finite_head(clients: list[Client]) -> None:
    """Its graphs are exported once for each number of classes."""
    classes = len(clients[0].test_labels)
    made = algorithms.train_rounds(Hierarchical(), clients, classes=classes)
    assert all(np.isfinite(logits).all() for logits in made.logits)
