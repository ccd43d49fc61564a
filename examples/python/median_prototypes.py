"""An algorithm in one file: FedProto with the median of the devices' prototypes in place of their mean.

Run: python examples/python/median_prototypes.py

The class is complete: an entry point of a package makes it one of the aggregator's algorithms
(docs/tutorial-algorithm.md), and devices need no new software.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import protofleet
from aggregator.algorithms.algorithm import Contribution
from aggregator.algorithms.fedproto import FedProto


class MedianProto(FedProto, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[medianproto]`: FedProto, whose global prototypes a single device cannot move far."""

    name: ClassVar[str] = "medianproto"

    def aggregate(
        self,
        contributions: Sequence[Contribution],
        previous: Mapping[str, NDArray[Any]],
        *,
        num_classes: int,
        seed: int,
    ) -> dict[str, NDArray[Any]]:
        """Return the median of each class's prototypes; the order of the contributions does not matter."""
        tensors = super().aggregate(contributions, previous, num_classes=num_classes, seed=seed)
        prototypes = np.array(tensors["prototypes"], copy=True)
        for label in range(num_classes):
            members = [part.values[part.labels == label] for part in contributions]
            if sum(map(len, members)):
                prototypes[label] = np.median(np.concatenate(members), axis=0)
        return {**tensors, "prototypes": prototypes}


def main() -> None:
    """Compare it with each device alone."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    data = protofleet.Dataset(
        features=(pixels[:600] / 16).astype(np.float32), labels=labels[:600], classes=tuple("0123456789")
    )
    algorithm = MedianProto(rounds=20, projection_size=64)
    made = protofleet.simulate(data, devices=5, partition="dirichlet:1", algorithms=(algorithm, "alone"))
    for result in made.results:
        print(f"{result.algorithm}: {result.device_mean:.1%} on each device's own classes")


if __name__ == "__main__":
    main()
