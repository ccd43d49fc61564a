"""Other classifiers from the demo's images, to compare the fleet's head with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import pairwise_distances_argmin
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from aggregator.algorithms.fedtc.head import Dense, logits_of
from aggregator.algorithms.fedtc.recipe import recipe_of
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.algorithms.statistics.moments import moments_of
from aggregator.algorithms.statistics.ridge import solve
from aggregator.config.schema import TaskFile
from aggregator.config.task_file import load_task
from aggregator.graphs.head_export import mapped
from aggregator.intake.validation import Prototypes
from aggregator.storage.open_store import open_store
from aggregator.tasks.task_preparation import feature_map_of
from aggregator.training.robust.training_set import pool
from edge_client.data.decoding import decode as decode_image
from edge_client.runtime.backbone import Backbone, open_backbone
from examples.quickstart.digits import CLASSES
from examples.quickstart.folder import Folder
from protocol.models.preprocessing import preprocess
from protocol.storage.blobstore import BlobStore
from protocol.wire.codec import decode, to_array
from protocol.wire.messages import Submission
from protocol.wire.quantization import RANGE, dequantize

REGULARIZATIONS = (1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Inverse strengths of the L2 penalty that cross-validation chooses from."""


@dataclass(frozen=True)
class Images:
    """Features (n, L) and classes (n,) of images."""

    features: NDArray[np.float32]
    labels: NDArray[np.intp]


@dataclass(frozen=True)
class Comparison:
    """Accuracy of other classifiers on the images that no device has.

    Attributes:
        nearest_mean: the nearest class mean of the prototypes of all devices; None after rounds, whose prototypes are
            not of features.
        logistic_regression: on the features of all devices' images in one place.
        alone: by device, a head trained on its prototypes only; empty after rounds.
    """

    nearest_mean: float | None
    logistic_regression: float
    alone: dict[str, float]


def compare(folder: Folder, on_step: Callable[[str], None]) -> Comparison:
    """Make and evaluate the other classifiers.

    The folder is that of a fleet that has its head; `on_step` is called with a text at each step.
    """
    task, (file,) = load_task(folder.task)
    backbone = open_backbone(file, provider="cpu")
    held_out = features_of(folder.held_out_images(), backbone)
    sent = submissions(folder) if task.learning is None else {}
    on_step("computing the features of all devices' images in one place")
    pooled = features_of(folder.device_images(), backbone)
    on_step("training logistic regression on the features of all devices' images")
    logistic_regression = accuracy_of_logistic_regression(pooled, held_out)
    averaged = as_averaged(held_out, task)
    alone = {}
    for device, prototypes in sent.items():
        on_step(f"training a head on the prototypes of {device} alone")
        alone[device] = accuracy_alone(prototypes, averaged, task=task)
    return Comparison(
        nearest_mean=accuracy_of_nearest_mean(pool(list(sent.values())), averaged) if sent else None,
        logistic_regression=logistic_regression,
        alone=alone,
    )


def accuracy_of_nearest_mean(prototypes: Prototypes, held_out: Images) -> float:
    """Return the accuracy of the nearest class mean; a prototype counts as often as it has images."""
    data = TrainingSet(prototypes.values, prototypes.labels, prototypes.counts, len(CLASSES), restore=True)
    present = np.flatnonzero(data.samples)
    nearest = pairwise_distances_argmin(held_out.features, data.centers[present])
    return float((present[nearest] == held_out.labels).mean())


def accuracy_of_logistic_regression(training: Images, held_out: Images) -> float:
    """Return the accuracy of logistic regression on standardized features, its penalty from cross-validation."""
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    search = GridSearchCV(model, {"logisticregression__C": REGULARIZATIONS}, cv=folds)
    search.fit(training.features, training.labels)
    return float(search.score(held_out.features, held_out.labels))


def as_averaged(images: Images, task: TaskFile) -> Images:
    """Return what the task's devices average: the images' features, or what the task's map makes of them."""
    feature_map = feature_map_of(task, images.features.shape[1])
    return images if feature_map is None else Images(mapped(feature_map, images.features), images.labels)


def accuracy_alone(prototypes: Prototypes, held_out: Images, *, task: TaskFile) -> float:
    """Return the accuracy of a head made of the prototypes of one device."""
    predicted = logits_of(_head_of(prototypes, task), held_out.features).argmax(axis=1)
    return float((predicted == held_out.labels).mean())


def _head_of(prototypes: Prototypes, task: TaskFile) -> Sequence[Dense]:
    values, labels, counts = prototypes.values, prototypes.labels, prototypes.counts
    if task.algorithm == "statistics":
        total = moments_of(values.astype(np.int64), labels, counts, num_classes=len(CLASSES))
        return [solve(total).layer]
    data = TrainingSet(values, labels, counts, len(CLASSES))
    return train_head(data, recipe_of(task.training), seed=task.training.seed, device="cpu").layers


def features_of(paths: Sequence[Path], backbone: Backbone) -> Images:
    """Return features and classes of images, by the device's functions."""
    images = np.stack([preprocess(decode_image(path), backbone.metadata.preprocessing) for path in paths])
    labels = np.array([CLASSES.index(path.parent.name) for path in paths])
    return Images(backbone.features(images), labels)


def submissions(folder: Folder) -> dict[str, Prototypes]:
    """Return the newest head's training data by device, from the aggregator's state."""
    store = open_store(folder.aggregator, read_only=True)
    members = store.heads.all(store.served_task().digest)[-1].members
    store.close()
    blobs = BlobStore(folder.aggregator / "blobs")
    found = {}
    for device, digest in sorted(members.items()):
        payload = blobs.read(bytes.fromhex(digest))
        message = decode(payload, Submission, max_bytes=len(payload))
        values = to_array(message.prototypes)
        if RANGE in message.tensors:  # statistics have none
            values = dequantize(values, to_array(message.tensors[RANGE]))
        found[device] = Prototypes(values, to_array(message.labels), to_array(message.counts))
    return found
