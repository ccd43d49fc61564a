"""The interface of an algorithm: of one upload of each device, or of rounds with their aggregation and torch functions.

Importing this module or an algorithm does not import torch: the aggregator closes rounds without it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from protocol.wire.messages import Natural

if TYPE_CHECKING:
    from torch import Tensor

Count = Annotated[int, Meta(ge=1, le=100_000)]
SmallCount = Annotated[int, Meta(ge=1, le=65535)]
Size = Annotated[int, Meta(ge=1, le=4096)]
Rate = Annotated[float, Meta(gt=0, le=10)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Weight = Annotated[float, Meta(ge=0, le=1000)]

ABSENT_LOGIT = -1e4
"""Logit of a class without prototypes: its probability is 0 in float32, and the number fits float16."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """One device's submission to a round; aggregation sorts by device, so that the order of arrival does not matter.

    Attributes:
        values: float32 (p, D) prototypes, finite.
        labels: int64 (p,), the class of each.
        counts: int64 (p,), the images averaged in each, at least 1.
        tensors: float32, the change of each uploaded tensor on the device, by name.
    """

    device: str
    values: NDArray[np.float32]
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]
    tensors: Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Function:
    """A torch function to be traced, pure: tensors by name in, float32 or int64, tensors by name out.

    `inputs` are the names that `apply` looks up.
    """

    inputs: tuple[str, ...]
    apply: "Callable[[Mapping[str, Tensor]], dict[str, Tensor]]"


@dataclass(frozen=True, kw_only=True)
class Functions:
    """The four functions of `protocol.wire.messages.Program`.

    Attributes:
        init: `feature`, and optionally `labels`, to every tensor of the state, for any number of rows, also 0.
        step: a batch, the state and the round's tensors to `loss` and a `next_NAME` for each tensor that changes.
        project: `feature` and the state to `projection` (n, D).
        head: `feature`, the state, the round's tensors and the local prototypes to `logits` and `probabilities`
            (n, C).
        dimensions: names of the dynamic axes of each tensor that has any, None for an axis of fixed length.
        parameters: the tensors of the state that `step` trains by gradients.
    """

    init: Function
    step: Function
    project: Function
    head: Function
    dimensions: Mapping[str, tuple[str | None, ...]]
    parameters: tuple[str, ...] = ()


class Algorithm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An algorithm: its fields are its table in the task file, its methods what it computes."""

    name: ClassVar[str]
    """Value of `algorithm` in the task file, and name of its table."""
    unused: ClassVar[frozenset[tuple[str, ...]]]
    """Paths of the task file's settings and tables that it does not use, beside the tables of other algorithms."""
    sums: ClassVar[bool] = False
    """Devices upload sums of mapped features in place of prototypes."""


class RoundAlgorithm(Algorithm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An algorithm of rounds, of numpy functions for the aggregator and torch functions for devices."""

    unused: ClassVar[frozenset[tuple[str, ...]]] = frozenset(
        {
            *(("retrain_after",), ("layers",), ("client", "alpha"), ("client", "batch_size")),
            ("client", "prototypes"),
            *(("limits", "heads_per_hour"), ("robust", "detect_outliers"), ("robust", "false_alarm_rate")),
            *(
                ("training", name)
                for name in ("recipe", "calibrate", "restore", "epochs", "device", "seed", "gpus")
            ),
        }
    )
    version: ClassVar[int] = 1
    """Raise it with a change of code that changes the graphs: stored ones are used as long as it is the same."""
    persistent: ClassVar[tuple[str, ...]] = ()
    """State that a device keeps from round to round."""
    uploaded: ClassVar[tuple[str, ...]] = ()
    """State whose change is uploaded with the prototypes."""
    power: ClassVar[Literal[1, 2]] = 1
    """2 if aggregation adds up squares of the changes, such as a scatter, and not the changes themselves."""
    max_norm: ClassVar[float] = math.inf
    """Greatest Euclidean length that a prototype can have."""

    rounds: Count = 40
    """Rounds until the end. Raise it to continue where the fleet ended."""
    epochs: SmallCount = 1
    """Passes over a device's images in a round."""
    batch_size: SmallCount = 32
    """Images in a step."""

    def prototype_size(self, feature_size: int) -> int:
        """Return D, the length of a prototype, for backbones whose features have the length L together."""
        raise NotImplementedError

    def epochs_of(self, number: int) -> int:
        """Return the passes over a device's images in a round, numbered from 0."""
        del number
        return self.epochs

    def first_tensors(self, *, feature_size: int, num_classes: int, seed: int) -> dict[str, NDArray[Any]]:
        """Return the tensors of round 0 by name, in the dtypes in which they are sent."""
        del feature_size
        return self.aggregate([], {}, num_classes=num_classes, seed=seed)

    def aggregate(
        self,
        contributions: Sequence[Contribution],
        previous: Mapping[str, NDArray[Any]],
        *,
        num_classes: int,
        seed: int,
    ) -> dict[str, NDArray[Any]]:
        """Return the tensors of the next round from those of the round that closes.

        There is at most one contribution per device; none is an empty round. Every round has another seed.

        Law: the order of the contributions does not matter.
        """
        raise NotImplementedError

    def functions(self, *, feature_size: int, num_classes: int, seed: int) -> Functions:
        """Return what devices run; imports torch. The seed is that of the initial weights, the same on every device."""
        raise NotImplementedError


def by_device(contributions: Sequence[Contribution]) -> list[Contribution]:
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


if TYPE_CHECKING:
    from aggregator.algorithms.fedtc.train_head import TrainedHead
    from aggregator.algorithms.fedtc.training_set import TrainingSet
    from aggregator.algorithms.statistics.feature_map import FeatureMap


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """`[training]`: how the aggregator trains a head. An unset value is the recipe's."""

    recipe: Literal["default", "paper"] = "default"
    """`paper` trains the adapter by SGD over 200 epochs.

    By default the head is a linear discriminant or a ridge regression, and of many batches the adapter. Principal
    prototypes make a linear discriminant; with `paper`, devices upload batches alone.
    """
    calibrate: bool = True
    """A second version of each head, whose confidence is its accuracy. Devices download both."""
    restore: Annotated[bool | None, Meta(examples=[True])] = None
    """Restore the variance that averaging removed; default: the recipe's."""
    epochs: Annotated[Annotated[int, Meta(ge=1, le=100_000)] | None, Meta(examples=[15])] = None
    """Passes over the prototypes, where the adapter is trained; default: the recipe's."""
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)\Z")] = "auto"
    """Or "cpu", "cuda", "cuda:1". The default uses CUDA if it is available."""
    seed: Natural = 0
    """Seed of the initial weights, the shuffling and the mixing."""
    timeout_s: Annotated[float, Meta(gt=0, le=1e9)] = 3600.0
    """Seconds after which a training, the closing of a round or an export of graphs is ended, and repeated."""
    engine: Literal["local", "ray"] = "local"
    """Where heads are made: on this machine, or on one of the Ray cluster at RAY_ADDRESS."""
    gpus: Annotated[int, Meta(ge=0, le=64)] = 0
    """GPUs that a training reserves on the Ray cluster; with 0 it runs on any machine, on processors."""


class OneShot(Algorithm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A one-shot algorithm. Its head is made of prototypes, or of sums if it has a map of features."""

    unused: ClassVar[frozenset[tuple[str, ...]]] = frozenset(
        {("rounds",), ("robust", "clip_multiple"), ("client", "prototypes")}
    )
    blocks: ClassVar[bool] = False
    """It uses principal prototypes. To an algorithm that does not, devices upload means of batches alone."""

    def feature_map(
        self, feature_size: int, *, seed: int, columns: tuple[tuple[int, int], ...], normalized: bool
    ) -> "FeatureMap | None":
        """Return the map whose rows devices sum up; None for an algorithm of prototypes."""
        del feature_size, seed, columns, normalized
        return None

    def train(
        self,
        data: "TrainingSet",
        training: Training,
        *,
        report: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> "TrainedHead":
        """Make a head of the prototypes of all devices; the same data in the same order give the same head on the CPU.

        Args:
            data: of all devices.
            training: the table of the task file.
            report: called with the progress: `epoch` from 1, `epochs` and `loss`.

        Raises:
            ProtofleetError: the data cannot be trained on.
        """
        raise NotImplementedError
