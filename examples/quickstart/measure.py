"""Accuracy of the devices' heads, and of other classifiers of the same images, on images that no device has."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.neighbors import NearestCentroid
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.algorithms.fedtc.training_set import TrainingSet
from edge_client.cli.options import open_state
from edge_client.graphs.backbone import Backbone, open_backbone
from edge_client.heads.classifier import open_adjuster, open_classifier, predictions
from edge_client.images.decoding import decode
from edge_client.images.images import LabeledImage, find_images
from edge_client.prototypes.holdout import held_out
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import Holdout
from examples.quickstart.digits import CLASSES
from examples.quickstart.folder import BACKBONE, FLEET, Folder
from examples.quickstart.report import Accuracy
from protocol.models.preprocessing import preprocess

Classify = Callable[[NDArray[np.float32]], NDArray[np.integer]]
"""Takes features (n, L) to classes (n,)."""

REGULARIZATIONS = (1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Inverse strengths of the L2 penalty that cross-validation chooses from."""

ALONE = replace(RECIPES["default"], restore=False, mix=False, adapter=False)
"""Trains a linear head on features of single images."""


@dataclass(frozen=True)
class Images:
    """Features (n, L) and classes (n,) of images."""

    features: NDArray[np.float32]
    labels: NDArray[np.intp]


@dataclass(frozen=True)
class Comparison:
    """Accuracy on the images that no device has. All are trained on the same images.

    Attributes:
        nearest_mean: of the nearest class mean, with all images in one place.
        logistic_regression: of logistic regression, with all images in one place.
        fleet: by device, of its head from the fleet, with the prior that `predict` has by default.
        alone: by device, of a head that is trained on its own images only.
    """

    nearest_mean: float
    logistic_regression: float
    fleet: dict[str, Accuracy]
    alone: dict[str, Accuracy]


def compare(folder: Folder, names: Sequence[str], on_step: Callable[[str], None]) -> Comparison:
    """Evaluate the devices' heads, and make and evaluate the other classifiers.

    The folder is that of a fleet that has its head; `on_step` is called with a text at each step.
    """
    backbone = open_backbone(BACKBONE, provider="cpu")
    test = features_of(find_images(folder.held_out, CLASSES), backbone)
    training, fleet, alone = {}, {}, {}
    for name in names:
        on_step(f"evaluating the head of {name}, and one that it trains alone")
        with closing(open_state(folder.state(name), FLEET, read_only=True)) as store:
            images = find_images(folder.images(name), CLASSES)
            kept = held_out(images, store.get(Holdout).fraction)
            own = features_of([each for each in images if each.relative not in kept], backbone)
            fleet[name] = accuracy_on(test, classifier_of(store), own.labels)
        training[name] = own
        alone[name] = accuracy_on(test, trained_alone(own), own.labels)
    on_step("training other classifiers on the images of all devices in one place")
    pooled = Images(
        np.concatenate([each.features for each in training.values()]),
        np.concatenate([each.labels for each in training.values()]),
    )
    return Comparison(
        nearest_mean=share_correct(test, NearestCentroid().fit(pooled.features, pooled.labels).predict),
        logistic_regression=share_correct(test, logistic_regression(pooled)),
        fleet=fleet,
        alone=alone,
    )


def accuracy_on(test: Images, classify: Classify, own: NDArray[np.intp]) -> Accuracy:
    """Return the accuracy of a device whose images have the classes `own`."""
    chosen = np.isin(test.labels, own)
    of_own = Images(test.features[chosen], test.labels[chosen])
    return Accuracy(own=share_correct(of_own, classify), all=share_correct(test, classify))


def share_correct(images: Images, classify: Classify) -> float:
    """Return the share of images that a classifier names correctly."""
    return float((classify(images.features) == images.labels).mean())


def classifier_of(store: DeviceState) -> Classify:
    """Return what `edge-client predict` does with a folder of images, as long as the device's state is open."""
    head = open_classifier(store, provider="cpu", threads=None).head

    def classify(features: NDArray[np.float32]) -> NDArray[np.integer]:
        found = predictions(head, open_adjuster(store, head, "auto"), head.run(features), top=1)
        return np.array([head.classes.index(each.label) for each in found])

    return classify


def trained_alone(images: Images) -> Classify:
    """Return a linear head of a device's images."""
    data = TrainingSet(images.features, images.labels, np.ones_like(images.labels), len(CLASSES))
    layers = train_head(data, ALONE, seed=0, device="cpu").layers
    return lambda features: logits_of(layers, features).argmax(axis=1)


def logistic_regression(images: Images) -> Classify:
    """Return logistic regression on standardized features, its penalty from cross-validation."""
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    search = GridSearchCV(model, {"logisticregression__C": REGULARIZATIONS}, cv=folds)
    return search.fit(images.features, images.labels).predict  # type: ignore[no-any-return]


def features_of(images: Sequence[LabeledImage], backbone: Backbone) -> Images:
    """Return features and classes of images, by the device's functions."""
    pixels = np.stack([preprocess(decode(each.path), backbone.metadata.preprocessing) for each in images])
    return Images(backbone.features(pixels), np.array([each.label for each in images]))
