"""FedPCL: pooling worked out by hand, and the loss against the paper's formulas written out."""

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import ABSENT_LOGIT, Contribution
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fedpcl_step import contrast
from aggregator.graphs.tracing import to_torch
from tests.support.messages.prototype_sets import uploaded


def small(**settings: object) -> FedPCL:
    """The default has a temperature that float64 can take without logsumexp."""
    return msgspec.convert({"tau": 0.3, "projection_size": 2, **settings}, FedPCL)


SMALL = small()


def some_devices(count: int, *, classes: int, size: int = 2) -> list[Contribution]:
    random = np.random.default_rng(count)
    return [
        uploaded(
            f"device-{number:03}",
            {label: random.normal(size=size).tolist() for label in range(classes) if random.random() < 0.6},
            {label: int(random.integers(1, 9)) for label in range(classes)},
        )
        for number in range(count)
    ]


def test_global_prototypes_and_padded_sets_by_hand() -> None:
    """Class 0 is (1*[4,0] + 3*[0,4]) / 4 = [1,3]; device b lacks class 1, so its set points at the global one."""
    tensors = SMALL.aggregate(
        [uploaded("b", {0: [0, 4]}, {0: 3}), uploaded("a", {0: [4, 0], 1: [2, 2]})], {}, num_classes=3, seed=0
    )
    assert tensors["prototypes"].tolist() == [[1, 3], [2, 2], [0, 0], [4, 0], [2, 2], [0, 4]]
    assert tensors["index"].tolist() == [[3, 4, 2], [5, 1, 2]]
    assert tensors["present"].tolist() == [1, 1, 0]
    assert {name: value.dtype.name for name, value in tensors.items()} == {
        "prototypes": "float16",
        "index": "uint32",
        "present": "uint8",
    }


def test_no_prototypes_make_one_empty_set() -> None:
    """All of its classes are absent."""
    for tensors in (
        SMALL.first_tensors(feature_size=5, num_classes=3, seed=1),
        SMALL.aggregate([uploaded("a", {})], {}, num_classes=3, seed=0),
    ):
        assert tensors["prototypes"].tolist() == [[0, 0]] * 3
        assert tensors["index"].tolist() == [[0, 1, 2]]
        assert tensors["present"].tolist() == [0, 0, 0]


@given(st.integers(1, 12), st.integers(1, 5))
def test_rows_point_to_prototypes_of_their_class(count: int, classes: int) -> None:
    """Global prototypes are means over all devices, with or without a limit on sets."""
    devices = some_devices(count, classes=classes)
    settings = small(max_sets=3)
    capped = settings.aggregate(devices, {}, num_classes=classes, seed=0)
    full = SMALL.aggregate(devices, {}, num_classes=classes, seed=0)
    np.testing.assert_array_equal(capped["prototypes"][:classes], full["prototypes"][:classes])
    np.testing.assert_array_equal(capped["present"], full["present"])
    owners = sum(1 for device in devices if len(device.labels))
    assert len(full["index"]) == max(owners, 1)
    assert 1 <= len(capped["index"]) <= 3
    for tensors in (capped, full):
        rows = tensors["index"]
        assert rows.max() < len(tensors["prototypes"])
        assert sorted(rows[rows >= classes].tolist()) == list(range(classes, len(tensors["prototypes"])))
        np.testing.assert_array_equal(
            rows[rows < classes], np.broadcast_to(np.arange(classes), rows.shape)[rows < classes]
        )


def test_seed_decides_which_sets_are_sampled() -> None:
    """All sampled sets are sets of devices."""
    devices = some_devices(30, classes=3)
    settings = small(max_sets=4)
    drawn = [settings.aggregate(devices, {}, num_classes=3, seed=seed)["prototypes"][3:] for seed in range(5)]
    assert len({rows.tobytes() for rows in drawn}) > 1
    of_all_devices = SMALL.aggregate(devices, {}, num_classes=3, seed=0)["prototypes"][3:].tolist()
    assert all(row in of_all_devices for rows in drawn for row in rows.tolist())


def written_out(
    z: NDArray[np.float64], labels: list[int], sets: NDArray[np.float64], present: list[int], tau: float
) -> float:
    """-(1/m) sum_p log( exp(z.C_p^y / tau) / sum_a exp(z.C_p^a / tau) ), mean over the samples (eq. 8, 9, with y)."""
    total = 0.0
    for sample, label in zip(z, labels, strict=True):
        classes = [a for a, there in enumerate(present) if there]
        if not present[label] or len(classes) < 2:
            continue
        for prototypes in sets:
            against = sum(math.exp(sample @ prototypes[a] / tau) for a in classes)
            total -= math.log(math.exp(sample @ prototypes[label] / tau) / against) / len(sets)
    return total / len(z)


@pytest.mark.parametrize("devices", [1, 3, 17])
@pytest.mark.parametrize("missing", [0, 2])
def test_loss_equals_the_formula_of_the_small(devices: int, missing: int) -> None:
    """Eq. 8 to 10 in float64, with an absent class and sets that lack classes."""
    settings = small(projection_size=6)
    classes = 5
    pooled = settings.aggregate(
        some_devices(devices, classes=classes - missing, size=6), {}, num_classes=classes, seed=0
    )
    random = np.random.default_rng(0)
    z = random.normal(size=(7, 6))
    labels = random.integers(0, classes, size=7)
    tensors = {**to_torch(pooled), "labels": torch.from_numpy(labels)}
    found = float(contrast(settings, tensors, torch.from_numpy(z.astype(np.float32)), classes))

    prototypes = pooled["prototypes"].astype(np.float64)
    present = pooled["present"].tolist()
    expected = sum(
        written_out(z, labels.tolist(), sets, present, settings.tau)
        for sets in (prototypes[None, :classes], prototypes[pooled["index"]])
    )
    assert expected != 0
    assert found == pytest.approx(expected, abs=1e-5)


def test_loss_includes_the_own_class() -> None:
    """With z.C/tau = (2, 1) and label 0 it is log(1 + e^-1), for the global prototypes and for the set."""
    tensors = {
        "labels": torch.tensor([0]),
        "prototypes": torch.tensor([[2.0, 0.0], [1.0, 0.0]]),
        "index": torch.tensor([[0, 1]]),
        "present": torch.ones(2),
    }
    loss = float(contrast(small(tau=1), tensors, torch.tensor([[1.0, 0.0]]), 2))
    assert loss == pytest.approx(2 * math.log(1 + math.exp(-1)))


@pytest.mark.parametrize("present", [[0, 0, 0], [1, 0, 0], [0, 1, 0]])
def test_loss_is_zero_without_other_classes(present: list[int]) -> None:
    """Loss and gradient are 0, not NaN, with at most one class, at the lowest temperature."""
    settings = small(tau=0.001)
    z = torch.eye(2).requires_grad_()
    tensors = {
        "labels": torch.tensor([0, 0]),
        "prototypes": torch.ones(3, 2),
        "index": torch.tensor([[0, 1, 2]]),
        "present": torch.tensor(present, dtype=torch.float32),
    }
    value = contrast(settings, tensors, z, 3)
    torch.autograd.backward(value)
    assert value == 0
    assert z.grad is not None
    assert z.grad.abs().sum() == 0


def test_head_uses_the_devices_own_prototypes() -> None:
    """Where it has none, the global ones are used; an absent class is never predicted."""
    functions = SMALL.functions(feature_size=2, num_classes=3, seed=0)
    state = functions.init.apply({"feature": torch.zeros(0, 2)})
    state |= {"weight": torch.eye(2)[None], "bias": torch.zeros(2)}
    tensors = {
        **state,
        "feature": torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        "prototypes": torch.tensor([[0.0, 1.0], [0.0, 0.5], [9.0, 9.0], [7.0, 7.0]]),
        "present": torch.tensor([1.0, 1.0, 0.0]),
        "local_prototypes": torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]),
        "local_counts": torch.tensor([3.0, 0.0, 0.0]),
    }
    logits = functions.head.apply(tensors)["logits"] * SMALL.tau
    np.testing.assert_allclose(logits[:, :2], np.array([[1, 0], [0, 0.5]]), atol=1e-6)
    assert logits[:, 2].tolist() == pytest.approx([ABSENT_LOGIT * SMALL.tau] * 2)
    own = functions.head.apply({**tensors, "local_counts": torch.tensor([3.0, 0.0, 1.0])})["logits"]
    assert own[:, 2].tolist() == [0, 0]


def test_a_prior_counts_in_the_loss_and_in_the_head() -> None:
    """With 3 images and 1, each class is expected as often as its count and a tenth of their mean: 3.2 and 1.2.

    At equal similarities the probabilities are these shares, and each of both losses of class 0 is -log(3.2 / 4.4).
    """
    settings = small(prior=True)
    tensors = {
        "labels": torch.tensor([0]),
        "prototypes": torch.ones(2, 2),
        "index": torch.tensor([[0, 1]]),
        "present": torch.ones(2),
        "class_counts": torch.tensor([3.0, 1.0]),
    }
    loss = contrast(settings, tensors, torch.ones(1, 2), 2)
    assert float(loss) == pytest.approx(-2 * math.log(3.2 / 4.4), abs=1e-5)

    functions = settings.functions(feature_size=2, num_classes=2, seed=0)
    images = {"feature": torch.ones(4, 2), "labels": torch.tensor([0, 0, 1, 0])}
    state = functions.init.apply(images)
    assert state["class_counts"].tolist() == [3, 1]
    assert "class_counts" not in settings.persistent
    local = {"local_prototypes": torch.ones(2, 2), "local_counts": state["class_counts"]}
    shares = functions.head.apply({**images, **state, **tensors, **local})["probabilities"]
    np.testing.assert_allclose(shares, [[3.2 / 4.4, 1.2 / 4.4]] * 4, atol=1e-6)
    local["local_counts"] = torch.zeros(2)
    shares = functions.head.apply({**images, **state, **tensors, **local})["probabilities"]
    np.testing.assert_allclose(shares, 0.5, atol=1e-6)


def test_features_are_standardized_on_the_device() -> None:
    """Mean 0 on its own images, and deviation 1 over all features, also for a constant one."""
    functions = SMALL.functions(feature_size=3, num_classes=2, seed=0)
    feature = torch.tensor([[1.0, 10.0, 5.0], [3.0, 30.0, 5.0]])
    state = functions.init.apply({"feature": feature})
    assert state["mean"].tolist() == [2, 20, 5]
    np.testing.assert_allclose(state["std"], [math.sqrt(101 / 3)] * 3, rtol=1e-6)
    plain = small(standardize=False).functions(feature_size=3, num_classes=2, seed=0)
    untouched = plain.init.apply({"feature": feature})
    assert (untouched["mean"].tolist(), untouched["std"].tolist()) == ([0, 0, 0], [1, 1, 1])


@pytest.mark.parametrize("rows", [0, 1])
def test_state_of_at_most_one_image_is_valid(rows: int) -> None:
    """The deviation is 1, and the projection finite."""
    functions = SMALL.functions(feature_size=3, num_classes=2, seed=0)
    state = functions.init.apply({"feature": torch.ones(rows, 3)})
    assert state["std"].tolist() == [1, 1, 1]
    projection = functions.project.apply({**state, "feature": torch.zeros(2, 3)})["projection"]
    np.testing.assert_allclose(projection.norm(dim=1), 1, rtol=1e-5)
