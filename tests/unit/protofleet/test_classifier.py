"""The classifier by scikit-learn's conventions: scikit-learn's own checks, and what it trains."""

from typing import Any, cast

import numpy as np
import onnxruntime
import pytest
import sklearn
from numpy.typing import NDArray
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.utils.estimator_checks import check_estimator

import protofleet
from aggregator.config.schema import Robust
from protocol.errors import ConfigError
from protofleet import FederatedClassifier
from protofleet.simulation.fleet import Features
from protofleet.simulation.statistics import map_features, run_fleet

CHECKED: dict[str, tuple[FederatedClassifier, dict[str, str]]] = {
    "fedtc": (FederatedClassifier(), {}),
    "fedncm": (FederatedClassifier("fedncm"), {}),
    "statistics": (
        FederatedClassifier("statistics", features=16),
        {
            "check_no_attributes_set_in_init": "the settings of an algorithm are in no signature",
            "check_classifiers_train": "rows are normalized, and of two features nothing is left",
        },
    ),
}
"""Classifiers, and the checks of scikit-learn that they do not pass, with reasons."""


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_checks_pass(name: str) -> None:
    classifier, expected = CHECKED[name]
    results = check_estimator(classifier, on_fail=None)
    failed = {each["check_name"]: each["exception"] for each in results if each["status"] == "failed"}
    assert failed.keys() == expected.keys(), failed
    assert len(results) > 40


Arrays = tuple[NDArray[np.float32], NDArray[np.str_], NDArray[np.str_]]


@pytest.fixture(scope="module")
def images() -> Arrays:
    """Features of 300 images of three classes, their classes, and their devices."""
    random = np.random.default_rng(0)
    numbers = np.arange(300) % 3
    features = random.normal(size=(3, 12))[numbers] + random.normal(size=(300, 12))
    devices = np.array(["barn", "hall", "porch", "shed"])[random.integers(0, 4, 300)]
    return features.astype(np.float32), np.array(["wasp", "ant", "bee"])[numbers], devices


def test_head_is_that_of_the_devices_uploads(images: Arrays) -> None:
    """It is `train_head` of each group's own prototypes, with the labels as classes."""
    features, labels, devices = images
    classifier = FederatedClassifier(batch_size=7, seed=3).fit(features, labels, groups=devices)
    assert classifier.classes_.tolist() == ["ant", "bee", "wasp"]
    numbers = np.searchsorted(classifier.classes_, labels)
    parts = {
        str(name): protofleet.device_prototypes(
            features[devices == name], numbers[devices == name], batch_size=7, seed=(3, number)
        )
        for number, name in enumerate(np.unique(devices))
    }
    expected = protofleet.train_head(parts, classes=3, seed=3)
    np.testing.assert_array_equal(classifier.head_.layers[0].weight, expected.layers[0].weight)
    np.testing.assert_array_equal(classifier.predict_proba(features), expected.predict_proba(features))
    accuracy = (classifier.predict(features) == labels).mean()
    assert classifier.score(features, labels) == accuracy > 0.85
    with pytest.warns(UserWarning, match="column-vector"):
        assert classifier.score(features, labels[:, None]) == accuracy
    alone = FederatedClassifier(batch_size=7, seed=3).fit(features, labels)
    assert not np.array_equal(alone.head_.layers[0].weight, expected.layers[0].weight)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_statistics_are_those_of_a_simulated_fleet(images: Arrays, batch_size: int) -> None:
    """The head's ONNX file, with the map, gives the same probabilities."""
    features, labels, devices = images
    classifier = FederatedClassifier("statistics", batch_size=batch_size, features=8)
    classifier.fit(features, labels, groups=devices)
    numbers = np.searchsorted(classifier.classes_, labels).astype(np.int64)
    owners = np.unique(devices, return_inverse=True)[1]
    data = map_features(Features(features, numbers, features, numbers), random_features=8, seed=0)
    fleet = run_fleet(data, owners, batch_size=batch_size, seed=0, robust=Robust())
    np.testing.assert_allclose(classifier.head_.logits(features), fleet.logits, atol=1e-4)
    session = onnxruntime.InferenceSession(classifier.head_.to_onnx())
    (probabilities,) = session.run(["probabilities"], {"feature": features})
    np.testing.assert_allclose(classifier.predict_proba(features), probabilities, atol=1e-5)


def test_device_far_from_the_others_is_quarantined_by_its_name(images: Arrays) -> None:
    features, labels, _ = images
    devices = np.array([f"shed-{number % 7}" for number in np.arange(300) // 3])
    far = features + 50 * (devices == "shed-3")[:, None]
    assert set(FederatedClassifier().fit(far, labels, groups=devices).head_.quarantined) == {"shed-3"}
    trusting = FederatedClassifier(robust=Robust(detect_outliers=False)).fit(far, labels, groups=devices)
    assert not trusting.head_.quarantined


def test_scikit_learn_passes_the_devices_on(images: Arrays) -> None:
    """With metadata routing, a search trains each candidate on the devices of its folds."""
    features, labels, devices = images
    seen: list[set[str]] = []

    class Recorded(FederatedClassifier):
        def fit(self, X: Any, y: Any, groups: Any = None) -> "Recorded":  # noqa: N803
            seen.append(set() if groups is None else set(groups.tolist()))
            super().fit(X, y, groups)
            return self

    with sklearn.config_context(enable_metadata_routing=True):
        search = GridSearchCV(Recorded(), {"batch_size": [2, 5], "recipe": ["default"]}, cv=3)
        search.fit(features, labels, groups=devices)
        assert seen == [set(devices.tolist())] * 7
        seen.clear()
        cross_val_score(Recorded(), features, labels, cv=GroupKFold(4), params={"groups": devices})
    assert [len(each) for each in seen] == [3] * 4


def test_settings_are_parameters() -> None:
    """Settings of an algorithm are parameters as the others are; all are checked by `fit`."""
    classifier = FederatedClassifier("statistics", features=8, alpha=1.0)
    assert classifier.get_params()["features"] == 8
    assert repr(classifier) == "FederatedClassifier(algorithm='statistics', alpha=1.0, features=8)"
    assert sklearn.clone(classifier).get_params() == classifier.get_params()
    assert classifier.set_params(features=4).get_params()["features"] == 4
    assert sklearn.base.is_classifier(classifier)


def test_parameters_and_arrays_that_do_not_fit_are_refused(images: Arrays) -> None:
    """Each error is one of protofleet and, of arrays, a ValueError."""
    features, labels, devices = images
    refused: list[tuple[dict[str, Any], str]] = [
        ({"algorithm": "fedpcl"}, "one head for all devices, got 'fedpcl': use protofleet.simulate"),
        ({"algorithm": "fedxy"}, "no algorithm 'fedxy'"),
        ({"features": 8}, "fedtc cannot be used with these parameters: .*unknown field `features`"),
        ({"algorithm": "statistics", "features": -1}, "statistics cannot be used .*`int` >= 0"),
        ({"algorithm": "statistics", "batch_size": 0}, "batch_size from 1, got 0"),
        ({"recipe": "x"}, "expected a recipe out of"),
        ({"batch_size": 0}, "batch_size from 1, got 0"),
        ({"widths": (3, 4)}, "widths that add up to 12, got 7"),
        ({"min_images": 500, "batch_size": 500}, "prototypes of at least one device, got none"),
    ]
    for parameters, expected in refused:
        with pytest.raises(ConfigError, match=expected):
            FederatedClassifier(**parameters).fit(features, labels, groups=devices)
    one_each = np.array([number // 2 for number in range(4)])
    with pytest.raises(ConfigError, match="several images of a class, got none"):
        FederatedClassifier("statistics").fit(features[:4], ["a", "b", "a", "b"], groups=one_each)
    arrays: list[tuple[Any, Any, Any, str]] = [
        (features, labels[:9], None, r"y of shape \(300,\)"),
        (features, labels, devices[:9], r"groups of shape \(300,\)"),
        (features, ["ant"] * 300, None, "at least 2 classes"),
        (features * np.inf, labels, None, "NaN or infinity"),
        (
            features,
            labels,
            np.where(devices == "shed", np.nan, 1),
            "device for each feature in groups, got NaN",
        ),
        (features, labels, [None, *devices[1:]], "one type in groups"),
        (features, [None, *labels[1:]], None, "one type in y"),
    ]
    for rows, classes, groups, expected in arrays:
        with pytest.raises(ConfigError, match=expected) as caught:
            FederatedClassifier().fit(rows, classes, groups=groups)
        assert isinstance(caught.value, ValueError)
    with pytest.raises(ValueError, match="is not fitted yet: call fit first"):
        FederatedClassifier().predict(cast("Any", features))
