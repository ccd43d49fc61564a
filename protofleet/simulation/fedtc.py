"""Prototypes in process: the devices' and the aggregator's own functions and messages, without a network."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from aggregator.intake.validation import Expectation
from protocol.wire.codec import digest_of, encode
from protofleet.prototypes import batch_prototypes, device_prototypes
from protofleet.simulation.engine import LOCAL, Engine
from protofleet.simulation.fleet import Features
from protofleet.submissions import prototypes_submission, task_manifest


def expectation_of(
    features: Features, *, alpha: float, batch_size: int, prototypes: Literal["auto", "batches"] = "auto"
) -> Expectation:
    """Return a task of prototypes as the aggregator would publish it."""
    manifest = task_manifest(
        "fedtc",
        tuple(map(str, range(features.classes))),
        alpha=alpha,
        batch_size=batch_size,
        min_images=min(2, batch_size),
        seed=0,
        prototypes="auto" if prototypes == "auto" else UNSET,
    )
    return Expectation(digest_of(encode(manifest)), manifest, features.train.shape[1])


def fleet_submissions(
    features: Features,
    owners: NDArray[np.int64],
    expectation: Expectation,
    *,
    seed: int,
    engine: Engine = LOCAL,
) -> dict[str, bytes]:
    """Return each client's encoded submission, except of clients with nothing to send.

    `owners` are the clients of the training images, (n,).
    """
    numbers = np.unique(owners).tolist()
    rows = ((number, owners == number) for number in numbers)
    items = ((number, features.train[mine], features.train_labels[mine]) for number, mine in rows)
    shared = (expectation, features.layers, seed)
    made = engine.map(_encoded, shared, items, count=len(numbers))
    return {str(number): payload for number, payload in zip(numbers, made, strict=True) if payload}


def _encoded(
    shared: tuple[Expectation, Sequence[int], int],
    device: tuple[int, NDArray[np.float32], NDArray[np.int64]],
) -> bytes:
    """Return a client's encoded submission; empty if it has nothing to send."""
    (expectation, layers, seed), (number, features, labels) = shared, device
    task = expectation.manifest
    options: dict[str, Any] = {"batch_size": task.batch_size, "alpha": task.alpha, "seed": (seed, number)}
    mine = (
        device_prototypes(features, labels, widths=layers, **options)
        if task.accepts_blocks
        else batch_prototypes(features, labels, **options)
    )
    if not len(mine.labels) and mine.block is None:
        return b""
    return encode(prototypes_submission(mine, expectation, images=len(labels)))
