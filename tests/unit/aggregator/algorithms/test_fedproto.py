"""FedProto: aggregation by hand, and the loss against an independent formula."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aggregator.algorithms.fedproto import FedProto, loss
from aggregator.algorithms.program import ABSENT_LOGIT, Contribution
from aggregator.graphs.tracing import to_torch

SETTINGS = FedProto(projection_size=2, pull=0.5)


def uploaded(device: str, prototypes: dict[int, list[float]], images: int = 1) -> Contribution:
    """A contribution of prototypes by class, each of so many images."""
    return Contribution(
        device=device,
        values=np.array(list(prototypes.values()), dtype=np.float32).reshape(-1, 2),
        labels=np.array(list(prototypes), dtype=np.int64),
        counts=np.full(len(prototypes), images),
        tensors={},
    )


def test_global_prototypes_are_means_over_devices_by_images() -> None:
    """Class 0 is (1*[4,0] + 3*[0,4]) / 4 = [1,3]; class 1 is device a's; class 2 is absent."""
    parts = [uploaded("b", {0: [0, 4]}, images=3), uploaded("a", {0: [4, 0], 1: [2, 2]})]
    tensors = SETTINGS.aggregate(parts, {}, num_classes=3, seed=0)
    assert tensors["prototypes"].tolist() == [[1, 3], [2, 2], [0, 0]]
    assert tensors["present"].tolist() == [1, 1, 0]
    assert [value.dtype.name for value in tensors.values()] == ["float16", "uint8"]
    empty = SETTINGS.first_tensors(feature_size=5, num_classes=3, seed=0)
    assert (empty["prototypes"].tolist(), empty["present"].tolist()) == ([[0, 0]] * 3, [0, 0, 0])


@given(st.permutations(range(7)))
def test_order_of_contributions_does_not_matter(order: list[int]) -> None:
    """The tensors are equal bit for bit."""
    random = np.random.default_rng(0)
    parts = [uploaded(f"d{number}", {number % 3: random.normal(size=2).tolist()}, 3) for number in range(7)]
    straight, shuffled = (
        SETTINGS.aggregate([parts[place] for place in places], {}, num_classes=3, seed=0)
        for places in (range(7), order)
    )
    assert all(np.array_equal(value, shuffled[name]) for name, value in straight.items())


def test_loss_equals_an_independent_formula() -> None:
    """Cross entropy by PyTorch plus lambda times the mean squared distance; a class without prototype adds none."""
    random = np.random.default_rng(0)
    features = torch.from_numpy(random.normal(size=(6, 2)))
    logits = torch.from_numpy(random.normal(size=(6, 3)))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    pooled = SETTINGS.aggregate([uploaded("a", {0: [4, 0], 1: [2, 2]})], {}, num_classes=3, seed=0)
    found = loss(SETTINGS, {**to_torch(pooled), "labels": labels}, features, logits)
    distances = [
        float(np.mean((feature - pooled["prototypes"][label]) ** 2)) if label < 2 else 0.0
        for feature, label in zip(features.numpy(), labels.tolist(), strict=True)
    ]
    entropy = torch.nn.functional.cross_entropy(logits, labels)
    assert float(found) == pytest.approx(float(entropy) + 0.5 * np.mean(distances), rel=1e-6)


def test_head_prefers_the_nearest_prototype() -> None:
    """Logit differences are those of -|f(x) - C|^2 / 2, and a class without prototype is never predicted."""
    functions = SETTINGS.functions(feature_size=2, num_classes=3, seed=0)
    feature = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    identity = {"adapter_weight": torch.eye(2), "adapter_bias": torch.zeros(2)}
    state = {**functions.init.apply({"feature": torch.zeros(0, 2)}), **identity}
    prototypes = torch.tensor([[1.0, 1.0], [0.0, 3.0], [0.0, 0.0]])
    present = torch.tensor([1.0, 1.0, 0.0])
    found = functions.head.apply({**state, "feature": feature, "prototypes": prototypes, "present": present})
    distances = torch.cdist(feature, prototypes[:2]) ** 2
    expected = (distances[:, 1] - distances[:, 0]) / 2
    assert torch.allclose(found["logits"][:, 0] - found["logits"][:, 1], expected)
    assert found["probabilities"].argmax(dim=1).tolist() == [0, 1]
    assert found["logits"][:, 2].tolist() == [ABSENT_LOGIT] * 2


def test_every_device_starts_from_the_model_of_the_seed() -> None:
    """The initial parameters depend on the seed, not on a device's images."""
    weights = [
        SETTINGS.functions(feature_size=3, num_classes=2, seed=seed).init.apply({"feature": feature})
        for seed, feature in ((0, torch.zeros(0, 3)), (0, torch.ones(4, 3)), (1, torch.zeros(0, 3)))
    ]
    first, same, other = (state["adapter_weight"] for state in weights)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("wrong", [{"pull": -1}, {"momentum": 1}, {"lambda": 1}])
def test_settings_out_of_bounds_are_refused(wrong: dict[str, object]) -> None:
    """A table of the task file with a wrong or unknown value does not become settings."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, FedProto)
