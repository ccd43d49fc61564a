"""The heads of a fleet's rounds, and their accuracy at each client."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.config.schema import Robust
from protofleet.simulation import rounds
from protofleet.simulation.fleet import Client


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundsResult:
    """The heads of a fleet's rounds."""

    accuracies: NDArray[np.float64]
    """The accuracy of each client with its own head, on its own mixture of classes, (K,)."""
    balanced: NDArray[np.float64]
    """The accuracy over all classes alike, (K,)."""
    reported: NDArray[np.float64]
    """`balanced` as `status` shows it: classes of which the client has no images count as not recognized."""
    up_bytes: NDArray[np.float64]
    """The size of an encoded submission, mean over the devices, (rounds,)."""
    down_bytes: NDArray[np.int64]
    """The size of the blob of tensors that a round starts from, (rounds,)."""


def run_rounds(
    algorithm: RoundAlgorithm,
    clients: Sequence[Client],
    *,
    classes: int,
    seed: int,
    robust: Robust = rounds.ROBUST,
    falsify: rounds.Falsify = rounds.honest,
) -> RoundsResult:
    """Run all rounds of a fleet, whose submissions `falsify` changes, and evaluate every client's head."""
    outcome = rounds.run_rounds(
        algorithm, clients, classes=classes, seed=seed, robust=robust, falsify=falsify
    )
    figures = [_figures(client, mine) for client, mine in zip(clients, outcome.probabilities, strict=True)]
    accuracies, balanced, reported = np.array(figures, dtype=np.float64).T
    return RoundsResult(
        accuracies=accuracies,
        balanced=balanced,
        reported=reported,
        up_bytes=outcome.up_bytes,
        down_bytes=outcome.down_bytes,
    )


def _figures(client: Client, probabilities: NDArray[np.float32]) -> tuple[float, float, float]:
    """Return the client's accuracies, as in `RoundsResult`."""
    predicted = probabilities.argmax(axis=1)
    owned = np.isin(client.test_labels, client.train_labels)
    reported = client.balanced_accuracy(np.where(owned, predicted, -1))
    return client.accuracy(predicted), client.balanced_accuracy(predicted), reported
