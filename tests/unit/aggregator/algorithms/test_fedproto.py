"""FedProto and FedNCM: aggregation by hand, loss and head against independent formulas."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestCentroid

from aggregator.algorithms.algorithm import ABSENT_LOGIT, Training
from aggregator.algorithms.fedncm import FedNCM
from aggregator.algorithms.fedproto import FedProto, loss
from aggregator.algorithms.fedtc.head import Dense, logits_of, require_layers
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.graphs.tracing import to_torch
from aggregator.storage.blobs import FolderBlobs
from aggregator.training.head_job import run
from protocol.errors import ProtofleetError
from tests.support.messages.jobs import head_job
from tests.support.messages.prototype_sets import uploaded
from tests.support.messages.submissions import submission

SETTINGS = FedProto(projection_size=2, pull=0.5)


def test_global_prototypes_are_means_over_devices_by_images() -> None:
    """Class 0 is (1*[4,0] + 3*[0,4]) / 4 = [1,3]; class 1 is device a's; class 2 is absent."""
    parts = [uploaded("b", {0: [0, 4]}, {0: 3}), uploaded("a", {0: [4, 0], 1: [2, 2]})]
    tensors = SETTINGS.aggregate(parts, {}, num_classes=3, seed=0)
    assert tensors["prototypes"].tolist() == [[1, 3], [2, 2], [0, 0]]
    assert tensors["present"].tolist() == [1, 1, 0]
    assert [value.dtype.name for value in tensors.values()] == ["float16", "uint8"]
    empty = SETTINGS.first_tensors(feature_size=5, num_classes=3, seed=0)
    assert (empty["prototypes"].tolist(), empty["present"].tolist()) == ([[0, 0]] * 3, [0, 0, 0])


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
    result = run(head_job(FolderBlobs(tmp_path / "blobs"), tmp_path, sent, algorithm="fedncm"))
    assert (result.prototypes, result.metrics["epochs"]) == (30, 0)
    assert (tmp_path / "head.onnx").is_file()
