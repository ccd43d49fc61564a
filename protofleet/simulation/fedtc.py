"""Prototypes in process: the devices' and the aggregator's own functions and messages, without a network."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.intake.validation import Expectation, Prototypes, check_submission, read_message
from aggregator.training.robust.training_set import pool
from protocol.wire.codec import digest_of, encode, to_unsigned
from protocol.wire.messages import BlobRef, Submission, TaskManifest
from protocol.wire.quantization import prototype_fields
from protofleet.prototypes import average_class
from protofleet.simulation.fleet import Features


def task_manifest(algorithm: str, classes: int, **settings: Any) -> TaskManifest:
    """Return the manifest of a task whose features are given."""
    return TaskManifest(
        fleet="simulation",
        algorithm=algorithm,
        classes=tuple(map(str, range(classes))),
        backbones=(BlobRef(digest=bytes(32), size_bytes=1, name="features are given"),),
        **settings,
    )


def expectation_of(features: Features, *, alpha: float, batch_size: int) -> Expectation:
    """Return a task of prototypes as the aggregator would publish it."""
    manifest = task_manifest(
        "fedtc",
        features.classes,
        alpha=alpha,
        batch_size=batch_size,
        min_images=min(2, batch_size),
        seed=0,
    )
    return Expectation(digest_of(encode(manifest)), manifest, features.train.shape[1])


def fleet_submissions(
    features: Features, owners: NDArray[np.int64], expectation: Expectation, *, seed: int
) -> dict[str, bytes]:
    """Return each client's encoded submission, except of clients with nothing to send.

    `owners` are the clients of the training images, (n,).
    """
    return {
        client: encode(
            submission_of(
                mine.labels,
                mine.counts,
                task=expectation.task,
                images=int(np.count_nonzero(owners == int(client))),
                **prototype_fields(mine.values.astype(np.float16)),
            )
        )
        for client, mine in client_prototypes(features, owners, expectation, seed=seed).items()
    }


def submission_of(
    labels: NDArray[np.integer], counts: NDArray[np.integer], *, task: bytes, images: int, **fields: Any
) -> Submission:
    """Return a client's submission, with the values of its prototypes as `fields`."""
    return Submission(
        task=task,
        sequence=1,
        labels=to_unsigned(labels),
        counts=to_unsigned(counts),
        images=images,
        **fields,
    )


def client_prototypes(
    features: Features, owners: NDArray[np.int64], expectation: Expectation, *, seed: int
) -> dict[str, Prototypes]:
    """Return the prototypes of each client that has any, before they are rounded for the wire."""
    made = {}
    for client in np.unique(owners):
        rng = np.random.default_rng([seed, int(client)])
        of_class = [
            _prototypes(
                features.train[(owners == client) & (features.train_labels == label)], label, expectation, rng
            )
            for label in range(features.classes)
        ]
        mine = pool(of_class)
        if len(mine.labels):
            made[str(client)] = mine
    return made


def _prototypes(
    features: NDArray[np.float32], label: int, expectation: Expectation, rng: np.random.Generator
) -> Prototypes:
    """Return a client's prototypes of one class."""
    task = expectation.manifest
    values, counts = average_class(features, batch=task.batch_size, rng=rng, alpha=task.alpha)
    return Prototypes(values, np.full(len(counts), label), counts.astype(np.int64))


def decoded(payload: bytes, expectation: Expectation) -> Prototypes:
    """Return the checked prototypes of an encoded submission."""
    message = read_message(payload)
    if not isinstance(message, Submission):
        raise TypeError(f"a simulated client sent {type(message).__name__}")
    return check_submission(message, expectation)
