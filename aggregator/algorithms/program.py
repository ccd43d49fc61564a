"""What an algorithm of rounds is: its settings, its pooling on the aggregator, and its torch functions for devices.

Importing this module, or an algorithm, does not import torch: the daemon pools without it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

ABSENT_LOGIT = -1e4
"""What a class that nobody has gets in a head: its probability is 0 in float32, and it fits a float16 runtime."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What one device uploaded to a round.

    Attributes:
        device: its name; pooling sorts by it, so that the order of arrival does not matter.
        values: float32 (p, D) prototypes, finite.
        labels: int64 (p,), the class of each.
        counts: int64 (p,), the images averaged in each, at least 1.
        tensors: float32, for each uploaded name the change of that tensor on the device.
    """

    device: str
    values: NDArray[np.float32]
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]
    tensors: Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Function:
    """A torch function to be traced: tensors by name in, tensors by name out.

    Attributes:
        inputs: the names that `apply` looks up.
        apply: pure; every float is float32, every integer int64.
    """

    inputs: tuple[str, ...]
    apply: "Callable[[Mapping[str, Tensor]], dict[str, Tensor]]"


@dataclass(frozen=True, kw_only=True)
class Functions:
    """The four functions of `protocol.wire.messages.Program`.

    Attributes:
        init: `feature`, and `labels` if it likes, to every tensor of the state, for any number of rows, 0 among them.
        step: a batch, the state and the round to `loss` and a `next_NAME` for each tensor that changes.
        project: `feature` and the state to `projection` (n, D).
        head: `feature`, the state, the round and the local prototypes to `logits` and `probabilities` (n, C).
        dimensions: the axes that differ from device to device or from round to round, by tensor: the name of
            each axis, or None where its length is fixed. A tensor that is not in it has fixed axes alone.
        parameters: the tensors of the state that are learned.
        objective: what `step` descends, for torch to differentiate: the tensors that `step` takes to its loss.
        optimizer: the torch optimizer that `step` writes out.
        gradients: the state before and after the very first step, to the gradient of each parameter, without
            weight decay.
    """

    init: Function
    step: Function
    project: Function
    head: Function
    dimensions: Mapping[str, tuple[str | None, ...]]
    parameters: tuple[str, ...]
    objective: "Callable[[Mapping[str, Tensor]], Tensor]"
    optimizer: "Callable[[Sequence[Tensor]], Optimizer]"
    gradients: "Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]]"


class Algorithm(Protocol):
    """An algorithm's settings, which are its table in the task file, and what they make of it."""

    @property
    def name(self) -> str:
        """What the task file calls it."""

    @property
    def rounds(self) -> int:
        """Rounds until the end."""

    @property
    def batch_size(self) -> int:
        """Images in one step."""

    @property
    def projection_size(self) -> int:
        """D, of what is averaged into prototypes."""

    @property
    def persistent(self) -> tuple[str, ...]:
        """State that a device keeps from round to round."""

    @property
    def uploaded(self) -> tuple[str, ...]:
        """State whose change is uploaded with the prototypes."""

    def epochs_of(self, number: int) -> int:
        """Passes over a device's images in a round; rounds are numbered from 0."""

    def first_tensors(self, *, feature_size: int, num_classes: int, seed: int) -> dict[str, NDArray[Any]]:
        """Return the tensors of round 0, by name, in the dtypes in which they cross the wire."""

    def aggregate(
        self,
        contributions: Sequence[Contribution],
        previous: Mapping[str, NDArray[Any]],
        *,
        num_classes: int,
        seed: int,
    ) -> dict[str, NDArray[Any]]:
        """Pool what a round brought into the tensors of the next one.

        Law: the order of the contributions does not matter.

        Args:
            contributions: at most one a device; none is an empty round.
            previous: the tensors of the round that closes.
            num_classes: C.
            seed: of this pooling, should it draw: another one for every round.
        """

    def functions(self, *, feature_size: int, num_classes: int, seed: int) -> Functions:
        """Return what devices run; imports torch."""


def by_device(contributions: Sequence[Contribution]) -> list[Contribution]:
    """Sort contributions by device."""
    return sorted(contributions, key=lambda contribution: contribution.device)


def class_means(
    values: NDArray[np.float32],
    labels: NDArray[np.integer],
    weights: NDArray[np.integer],
    *,
    num_classes: int,
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Return the weighted mean of each class, (C, D), zeros for a class without any, and its weight, (C,)."""
    sums = np.zeros((num_classes, values.shape[1]))
    totals = np.zeros(num_classes)
    np.add.at(sums, labels, values * weights[:, None].astype(np.float64))
    np.add.at(totals, labels, weights)
    return (sums / np.maximum(totals, 1)[:, None]).astype(np.float32), totals
