"""FedNCM's head is the nearest class mean, also as a job."""

from pathlib import Path

import numpy as np
from sklearn.neighbors import NearestCentroid

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.fedncm import FedNCM
from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.storage.blobs import FolderBlobs
from aggregator.training.head_job import run
from aggregator.training.jobs import HeadJob
from protocol.wire.codec import encode
from tests.support.messages.submissions import FEATURE_SIZE, MANIFEST, submission


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


def test_job_makes_a_head_by_the_algorithm_that_it_names(tmp_path: Path) -> None:
    """No other file knows of it."""
    blobs = FolderBlobs(tmp_path / "blobs")
    job = HeadJob(
        version=1,
        algorithm="fedncm",
        task=blobs.put(encode(MANIFEST)).hex(),
        members={"a": blobs.put(encode(submission(labels=(0, 1, 2) * 10))).hex()},
        blobs=str(blobs.folder),
        feature_size=FEATURE_SIZE,
        training=Training(),
        folder=str(tmp_path),
    )
    result = run(job)
    assert (result.prototypes, result.metrics["epochs"]) == (30, 0)
    assert (tmp_path / "head.onnx").is_file()
