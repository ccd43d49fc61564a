"""FPL, FedProto and FedNCM: pooling worked out by hand, losses and heads against independent formulas."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.neighbors import NearestCentroid

from aggregator.algorithms.algorithm import ABSENT_LOGIT, Contribution, Training
from aggregator.algorithms.fedncm import FedNCM
from aggregator.algorithms.fedproto import FedProto
from aggregator.algorithms.fedproto import loss as fedproto_loss
from aggregator.algorithms.fedtc.head import Dense, logits_of, require_layers
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.algorithms.fpl import FPL, cluster_means, loss
from aggregator.algorithms.local_model import PARAMETERS
from aggregator.graphs.tracing import to_torch
from aggregator.storage.blobs import FolderBlobs
from aggregator.training.head_job import run
from protocol.errors import ProtofleetError
from tests.support.messages.jobs import head_job, workspace
from tests.support.messages.prototype_sets import uploaded
from tests.support.messages.submissions import submission

SETTINGS = FPL(projection_size=4, tau=0.02, regularization=0.7)
CLASSES = 3
SHARED = SETTINGS.first_tensors(feature_size=5, num_classes=CLASSES, seed=0)


def device(
    name: str, *, classes: list[int], images: int = 2, change: float = 0.0, seed: int = 0
) -> Contribution:
    """Random prototypes of some classes, and the same change of every parameter."""
    random = np.random.default_rng(seed)
    return Contribution(
        device=name,
        values=random.normal(size=(len(classes), 4)).astype(np.float32),
        labels=np.array(classes, dtype=np.int64),
        counts=np.full(len(classes), images, dtype=np.int64),
        tensors={key: np.full_like(SHARED[key], change) for key in PARAMETERS},
    )


def pool(*contributions: Contribution) -> dict[str, NDArray[Any]]:
    return SETTINGS.aggregate(contributions, SHARED, num_classes=CLASSES, seed=0)


def test_models_are_averaged_by_their_images() -> None:
    """Changes of 1 by 6 images, -2 by 2, and 8 by a device without a prototype: (6*1 - 2*2) / 8 = 0.25."""
    tensors = pool(
        device("a", classes=[0, 1], images=3, change=1),
        device("b", classes=[1], images=2, change=-2),
        device("c", classes=[], change=8),
    )
    for name in PARAMETERS:
        assert tensors[name].dtype == np.float32
        np.testing.assert_allclose(tensors[name] - SHARED[name], 0.25, atol=1e-6)


def test_clusters_and_unbiased_prototypes_by_hand() -> None:
    """Four devices at 0 and 2 degrees and one at 90: two clusters, which count the same in the unbiased prototype.

    FINCH: 0 <-> 0, 2 <-> 2 at first, and 90 -> 2 as the nearest: {0, 0} and {2, 2, 90}. The last partition with two
    clusters is that one, for the next joins them. Means: [1, 0], and [(2 cos 2 + 0) / 3, (2 sin 2 + 1) / 3].
    """
    angles = np.deg2rad([0, 0, 2, 2, 90])
    values = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    second = [float(2 * np.cos(angles[2]) / 3), float((2 * np.sin(angles[2]) + 1) / 3)]
    means = np.array([[1, 0], second])
    np.testing.assert_allclose(cluster_means(values), means, atol=1e-6)

    settings = FPL(projection_size=2)
    first = settings.first_tensors(feature_size=5, num_classes=2, seed=0)
    changes = {name: np.zeros_like(first[name]) for name in PARAMETERS}
    one = np.ones(1, dtype=np.int64)
    parts = [
        Contribution(device=str(number), values=value[None], labels=one, counts=one, tensors=changes)
        for number, value in enumerate(values)
    ]
    tensors = settings.aggregate(parts, first, num_classes=2, seed=0)
    np.testing.assert_allclose(tensors["clusters"], means, atol=1e-3)
    assert tensors["cluster_labels"].tolist() == [1, 1]
    np.testing.assert_allclose(tensors["unbiased"], [np.zeros(2), means.mean(axis=0)], atol=1e-3)
    assert tensors["present"].tolist() == [0, 1]


def test_prototypes_of_length_zero_change_no_cluster() -> None:
    """A device that sends zeros would otherwise leave one cluster of all others, and halve the unbiased prototype."""
    angles = np.deg2rad([0, 2, 90, 92])
    honest = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    zeros = np.zeros((1, 2), dtype=np.float32)
    np.testing.assert_array_equal(cluster_means(np.concatenate([honest, zeros])), cluster_means(honest))
    np.testing.assert_array_equal(cluster_means(zeros), zeros)


def test_one_prototype_is_its_own_cluster() -> None:
    """Cluster and unbiased prototype equal it."""
    part = device("a", classes=[2])
    tensors = pool(part)
    np.testing.assert_allclose(tensors["clusters"], part.values, atol=1e-3)
    np.testing.assert_array_equal(tensors["unbiased"][2], tensors["clusters"][0])
    assert tensors["cluster_labels"].tolist() == [2]


@pytest.mark.parametrize("parts", [(), (device("a", classes=[]),)])
def test_model_is_unchanged_without_prototypes(parts: tuple[Contribution, ...]) -> None:
    """There is one cluster of zeros, since no tensor may be empty, and no class is present."""
    for tensors in (pool(*parts), SHARED):
        assert tensors["clusters"].tolist() == [[0, 0, 0, 0]]
        assert tensors["cluster_labels"].tolist() == [0]
        assert tensors["present"].tolist() == [0, 0, 0]
        assert all(np.array_equal(tensors[name], SHARED[name]) for name in PARAMETERS)


def test_change_of_another_shape_is_refused() -> None:
    """A missing or misshapen parameter is named with its device."""
    whole = device("pi", classes=[0])
    for wrong in ({}, {**whole.tensors, "adapter_bias": np.zeros(9, dtype=np.float32)}):
        broken = Contribution(
            device="pi", values=whole.values, labels=whole.labels, counts=whole.counts, tensors=wrong
        )
        with pytest.raises(ProtofleetError, match=r"device pi must upload the change of adapter_\w+ as \("):
            pool(broken)


def written_out(
    features: NDArray[np.float64],
    logits: NDArray[np.float64],
    labels: list[int],
    shared: dict[str, list[float]],
) -> float:
    """CE + CPCL + UPCR of each sample (eq. 7 to 12), in plain sums; the mean of them."""

    def cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    total = 0.0
    clusters, owners = np.array(shared["clusters"]), shared["cluster_labels"]
    for feature, scores, label in zip(features, logits, labels, strict=True):
        total -= math.log(math.exp(scores[label]) / sum(math.exp(score) for score in scores))
        if label in owners:
            near = [math.exp(cosine(feature, cluster) / SETTINGS.tau) for cluster in clusters]
            mine = sum(value for value, owner in zip(near, owners, strict=True) if owner == label)
            total -= math.log(mine / sum(near))
            total += SETTINGS.regularization * float(
                np.mean((feature - np.array(shared["unbiased"])[label]) ** 2)
            )
    return total / len(labels)


@pytest.mark.parametrize("owned", [[[0, 1], [0], [0, 1], [1]], [[1]], [[]]])
def test_loss_equals_the_formula_of_the_paper(owned: list[list[int]]) -> None:
    """Eq. 7 to 12 in float64, with one, two or all classes absent."""
    pooled = pool(*(device(str(n), classes=classes, seed=n) for n, classes in enumerate(owned)))
    random = np.random.default_rng(0)
    hidden = random.normal(size=(6, 4)) + 0.5
    weight, bias = random.normal(size=(CLASSES, 4)), random.normal(size=CLASSES)
    labels = [0, 1, 2, 0, 1, 2]
    features = np.maximum(hidden, 0)
    logits = features @ weight.T + bias
    found = loss(
        SETTINGS,
        {**to_torch(pooled), "labels": torch.tensor(labels)},
        torch.tensor(features, dtype=torch.float32),
        torch.tensor(logits, dtype=torch.float32),
    )
    shared = {
        "clusters": pooled["clusters"].tolist(),
        "cluster_labels": pooled["cluster_labels"].tolist() if any(owned) else [],
        "unbiased": pooled["unbiased"].tolist(),
    }
    expected = written_out(features, logits, labels, shared)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_loss_of_zero_features_is_finite() -> None:
    """Loss and gradient, at the lowest temperature."""
    settings = FPL(projection_size=4, tau=0.001, regularization=1)
    pooled = to_torch(pool(device("a", classes=[0, 1]), device("b", classes=[1], seed=1)))
    hidden = torch.full((2, 4), -1.0).requires_grad_()
    value = loss(settings, {**pooled, "labels": torch.tensor([1, 2])}, hidden.relu(), torch.ones(2, CLASSES))
    torch.autograd.backward(value)
    assert math.isfinite(value.item())
    assert hidden.grad is not None
    assert bool(torch.isfinite(hidden.grad).all())


FEDPROTO = FedProto(projection_size=2, pull=0.5)


def test_global_prototypes_are_means_over_devices_by_images() -> None:
    """Class 0 is (1*[4,0] + 3*[0,4]) / 4 = [1,3]; class 1 is device a's; class 2 is absent."""
    parts = [uploaded("b", {0: [0, 4]}, {0: 3}), uploaded("a", {0: [4, 0], 1: [2, 2]})]
    tensors = FEDPROTO.aggregate(parts, {}, num_classes=3, seed=0)
    assert tensors["prototypes"].tolist() == [[1, 3], [2, 2], [0, 0]]
    assert tensors["present"].tolist() == [1, 1, 0]
    assert [value.dtype.name for value in tensors.values()] == ["float16", "uint8"]
    empty = FEDPROTO.first_tensors(feature_size=5, num_classes=3, seed=0)
    assert (empty["prototypes"].tolist(), empty["present"].tolist()) == ([[0, 0]] * 3, [0, 0, 0])


def test_loss_equals_an_independent_formula() -> None:
    """Cross entropy by PyTorch plus lambda times the mean squared distance; a class without prototype adds none."""
    random = np.random.default_rng(0)
    features = torch.from_numpy(random.normal(size=(6, 2)))
    logits = torch.from_numpy(random.normal(size=(6, 3)))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    pooled = FEDPROTO.aggregate([uploaded("a", {0: [4, 0], 1: [2, 2]})], {}, num_classes=3, seed=0)
    found = fedproto_loss(FEDPROTO, {**to_torch(pooled), "labels": labels}, features, logits)
    distances = [
        float(np.mean((feature - pooled["prototypes"][label]) ** 2)) if label < 2 else 0.0
        for feature, label in zip(features.numpy(), labels.tolist(), strict=True)
    ]
    entropy = torch.nn.functional.cross_entropy(logits, labels)
    assert float(found) == pytest.approx(float(entropy) + 0.5 * np.mean(distances), rel=1e-6)


def test_head_prefers_the_nearest_prototype() -> None:
    """Logit differences are those of -|f(x) - C|^2 / 2, and a class without prototype is never predicted."""
    functions = FEDPROTO.functions(feature_size=2, num_classes=3, seed=0)
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


def test_head_predicts_the_class_of_the_nearest_mean() -> None:
    """As scikit-learn does; a class without prototypes is never predicted."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 60)
    values = (random.normal(size=(60, 5)) + np.eye(5)[labels]).astype(np.float32)
    data = TrainingSet(values, labels, np.ones(60, np.int64), 4)
    made = FedNCM().train(data, Training())
    images = random.normal(size=(500, 5)).astype(np.float32)
    predicted = logits_of(made.layers, images).argmax(axis=1)
    np.testing.assert_array_equal(predicted, NearestCentroid().fit(values, labels).predict(images))


def test_mean_counts_images_as_often_as_their_device_counts() -> None:
    """A device that claims many images is limited by the weights of its prototypes."""
    values = np.array([[0.0], [4.0], [9.0]], np.float32)
    counts, labels = np.array([1, 300, 5]), np.array([0, 0, 1])
    data = TrainingSet(values, labels, counts, 2, weights=np.array([1.0, 0.01, 1.0]))
    (layer,) = FedNCM().train(data, Training()).layers
    middle = layer.bias[0] - layer.bias[1], layer.weight[1] - layer.weight[0]
    np.testing.assert_allclose(middle[0] / middle[1], [(3 + 9) / 2], rtol=1e-5)  # means 3 and 9


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "a head of 4 logits for 3 classes"),
        ((Dense(np.ones((2, 4)), np.ones(2, np.float32)),), "a head of 2 logits for 3 classes"),
        ((Dense(np.ones((3, 5)), np.ones(3, np.float32)),), "does not take 4 values"),
        ((Dense(np.ones((3, 4)), np.ones(2, np.float32)),), "does not take 4 values"),
        ((Dense(np.ones((3, 2)), np.ones(3, np.float32), np.ones((1, 4))),), "does not take 4 values"),
        ((Dense(np.full((3, 4), np.nan), np.ones(3, np.float32)),), "NaN or infinity"),
    ],
)
def test_head_of_another_shape_is_refused(layers: tuple[Dense, ...], message: str) -> None:
    with pytest.raises(ProtofleetError, match=message):
        require_layers(layers, features=4, classes=3)


def test_job_makes_a_head_by_the_algorithm_that_it_names(tmp_path: Path) -> None:
    """No other file knows of it."""
    sent = submission(labels=(0, 1, 2) * 10)
    blobs = FolderBlobs(tmp_path / "blobs")
    result = run(head_job(blobs, sent, algorithm="fedncm"), workspace(blobs, tmp_path))
    assert (result.prototypes, result.metrics["epochs"]) == (30, 0)
    assert (tmp_path / "head.onnx").is_file()
