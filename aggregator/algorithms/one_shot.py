"""The interface of a one-shot algorithm: a head of one upload of each device."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from aggregator.algorithms.algorithm import Algorithm
from protocol.wire.messages import Natural

if TYPE_CHECKING:
    from aggregator.algorithms.fedtc.train_head import TrainedHead
    from aggregator.algorithms.fedtc.training_set import TrainingSet
    from aggregator.algorithms.statistics.feature_map import FeatureMap


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """`[training]`: how the aggregator trains a head. None means the recipe's own value."""

    recipe: Literal["default", "paper"] = "default"
    calibrate: bool = True
    """A second version of each head, whose confidence is its accuracy. Without rounds."""
    restore: Annotated[bool | None, Meta(examples=[True])] = None
    """Default: the recipe's."""
    epochs: Annotated[Annotated[int, Meta(ge=1, le=100_000)] | None, Meta(examples=[15])] = None
    """Default: the recipe's."""
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)\Z")] = "auto"
    """Or "cpu", "cuda", "cuda:1"."""
    seed: Natural = 0
    timeout_s: Annotated[float, Meta(gt=0, le=1e9)] = 3600.0
    """Seconds after which a training, the closing of a round or an export of graphs is ended, and repeated."""
    engine: Literal["local", "ray"] = "local"
    """With `statistics`: add the sums of many devices on a Ray cluster. Otherwise in one process."""


class OneShot(Algorithm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A one-shot algorithm. Its head is made of prototypes, or of sums if it has a map of features."""

    unused: ClassVar[frozenset[tuple[str, ...]]] = frozenset({("rounds",), ("robust", "clip_multiple")})

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
        private: bool = False,
        half_memory: bool = False,
        report: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> "TrainedHead":
        """Make a head of the prototypes of all devices; the same data in the same order give the same head on the CPU.

        Args:
            data: of all devices.
            training: the table of the task file.
            private: the prototypes contain noise.
            half_memory: trainings have failed before, perhaps because memory ran out.
            report: called with the progress: `epoch` from 1, `epochs` and `loss`.

        Raises:
            ProtofleetError: the data cannot be trained on.
        """
        raise NotImplementedError
