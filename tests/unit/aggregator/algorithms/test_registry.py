"""Properties that every algorithm of rounds has."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aggregator.algorithms.algorithm import Contribution, RoundAlgorithm
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fedproto import FedProto
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.hierarchical import Hierarchical
from aggregator.algorithms.tensors import pack_tensors, unpack_tensors

SIZES = {"feature_size": 5, "num_classes": 3}
ALGORITHMS = [
    FedPCL(projection_size=2),
    FedPCL(projection_size=2, max_sets=2),
    FPL(projection_size=2),
    FedProto(projection_size=2),
    Hierarchical(directions=2),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(st.integers(0, 9), st.permutations(range(9)))
def test_order_of_contributions_does_not_matter(
    algorithm: RoundAlgorithm, count: int, order: list[int]
) -> None:
    """The tensors are equal bit for bit."""
    first, random = algorithm.first_tensors(**SIZES, seed=0), np.random.default_rng(count)
    parts = []
    for number in range(count):
        labels = np.flatnonzero(random.random(3) < 0.6)
        parts.append(
            Contribution(
                device=f"device-{number}",
                values=random.normal(size=(len(labels), algorithm.prototype_size(5))).astype(np.float32),
                labels=labels,
                counts=random.integers(1, 9, size=len(labels)),
                tensors={name: np.full_like(first[name], number / 7) for name in algorithm.uploaded},
            )
        )
    straight, shuffled = (
        algorithm.aggregate([parts[place] for place in places], first, num_classes=3, seed=3)
        for places in (range(count), [place for place in order if place < count])
    )
    for name, value in straight.items():
        np.testing.assert_array_equal(value, shuffled[name])


def test_packed_tensors_are_unchanged() -> None:
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "a": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "b": np.ones((0, 4), np.float16),
    }
    again = unpack_tensors(pack_tensors(tensors))
    assert again.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(again[name], values, strict=True)


@pytest.mark.parametrize(
    ("algorithm", "weight"), [(ALGORITHMS[0], "weight"), (ALGORITHMS[3], "adapter_weight")]
)
def test_initial_model_depends_on_the_seed(algorithm: RoundAlgorithm, weight: str) -> None:
    """A device's images do not change it."""
    first, same, other = (
        algorithm.functions(**SIZES, seed=seed).init.apply(
            {"feature": feature, "labels": torch.zeros(len(feature), dtype=torch.int64)}
        )[weight]
        for seed, feature in ((0, torch.zeros(0, 5)), (0, torch.ones(4, 5)), (1, torch.zeros(0, 5)))
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_initial_shared_model_depends_on_the_seed() -> None:
    """Its values lie in +-1/sqrt(inputs)."""
    first, again, other = (FPL().first_tensors(**SIZES, seed=seed)["adapter_weight"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(again, first)
    assert not np.array_equal(other, first)
    assert np.abs(first).max() <= 5**-0.5


@pytest.mark.parametrize(("algorithm", "epochs"), [(FedPCL(epochs=3), [0, 3, 3]), (FPL(epochs=4), [4, 4, 4])])
def test_epochs_of_the_first_rounds(algorithm: RoundAlgorithm, epochs: list[int]) -> None:
    """FedPCL's round 0 does not train: its prototypes are those of the common initial projection."""
    assert [algorithm.epochs_of(number) for number in range(3)] == epochs
