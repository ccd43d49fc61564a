"""A simulated fleet: features that are divided among its devices, and images to evaluate its heads on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Features:
    """Features float32 and classes int64, (n, L) and (n,) for training and (m, L) and (m,) for evaluation."""

    train: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test: NDArray[np.float32]
    test_labels: NDArray[np.int64]
    normalized: bool = False
    """Whether the backbones have normalized them."""
    widths: tuple[int, ...] = ()
    """The number of values of each backbone; empty for one."""
    layers: tuple[int, ...] = ()
    """The number of values of each layer; empty for one."""

    @property
    def classes(self) -> int:
        """Return C; labels run from 0 to C - 1."""
        return int(self.train_labels.max()) + 1


@dataclass(frozen=True, kw_only=True)
class Client(Features):
    """A device's features, and the images on which its head is evaluated."""

    domain: str
    weights: NDArray[np.float64]
    """Weight of each test image, (m,); they add up to 1."""

    def accuracy(self, predicted: NDArray[np.int64]) -> float:
        """Return the weighted share of the test images that are predicted correctly."""
        return float(self.weights[predicted == self.test_labels].sum())

    def balanced_accuracy(self, predicted: NDArray[np.int64]) -> float:
        """Return the mean over all classes of the share of their test images that are predicted correctly."""
        correct, labels = predicted == self.test_labels, self.test_labels
        return float(np.mean([correct[labels == label].mean() for label in np.unique(labels)]))


def pooled(clients: Sequence[Client]) -> tuple[Features, NDArray[np.int64]]:
    """Return the images of all clients, which have the same test images, as one data set, and the client of each."""
    features = Features(
        train=np.concatenate([client.train for client in clients]),
        train_labels=np.concatenate([client.train_labels for client in clients]),
        test=clients[0].test,
        test_labels=clients[0].test_labels,
        normalized=clients[0].normalized,
        widths=clients[0].widths,
        layers=clients[0].layers,
    )
    return features, np.repeat(np.arange(len(clients)), [len(client.train) for client in clients])
