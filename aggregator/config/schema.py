"""The tables of the task file, except those defined where they are used.

The others are `[rollout]`, `[privacy.perturbation]` and those of the algorithms of rounds.
"""

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from aggregator.algorithms.algorithm import Algorithm
from aggregator.algorithms.registry import ALGORITHMS
from aggregator.coordination.rollout_state import Settings as RolloutSettings
from aggregator.coordination.round_state import Settings as RoundSettings
from protocol.wire.messages import MAX_CLASSES, MAX_MAPPED_SIZE, ClassName, Name, Natural, Perturbation


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """`[client]`: how devices make prototypes."""

    alpha: Annotated[float, Meta(gt=0, le=1)] = 0.99
    batch_size: Annotated[int, Meta(ge=1, le=65535)] = 5
    min_images: Annotated[int, Meta(ge=1, le=65535)] = 2
    seed: Natural = 0


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """`[training]`: how the aggregator trains a head. None means the recipe's own value."""

    timeout_s: Annotated[float, Meta(gt=0, le=1e9)] = 3600.0
    """Seconds after which a training, the closing of a round or an export of graphs is ended, and has failed."""

    engine: Literal["local", "ray"] = "local"
    """With `statistics`, where submissions are added: in one process, or by workers of a Ray cluster."""

    recipe: Literal["default", "paper"] = "default"
    calibrate: bool = True
    """Without rounds: make a calibrated version of each head, by the devices' held-out images."""
    restore: bool | None = None
    epochs: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)\Z")] = "auto"
    seed: Natural = 0


MAX_MULTIPLE = 3.0


class StatisticsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`[statistics]`: the features whose sums devices upload."""

    features: Annotated[int, Meta(ge=0, le=MAX_MAPPED_SIZE)] = 1024
    """Random features beside those of the backbones."""


class Robust(msgspec.Struct, frozen=True, kw_only=True):
    """`[robust]`: protection against wrong prototypes and, in rounds, wrong changes of parameters."""

    detect_outliers: bool = True
    """Quarantine devices whose prototypes are far from the other devices'."""
    false_alarm_rate: Annotated[float, Meta(gt=0, le=0.5)] = 0.01
    """Greatest share of trainings of honest devices in which one of them is quarantined."""
    max_multiple: Annotated[float, Meta(ge=0, le=1e6)] = MAX_MULTIPLE
    """Times the images of the median device that a device's images count at most; 0 is without limit."""
    clip_multiple: Annotated[float, Meta(ge=0, le=1e6)] = 3.0
    """In rounds, the distance from the others', in that of the median device, to which prototypes are limited; 0 is
    without limit, also of changes of parameters."""


ROUND_DEVICES = 3
"""Devices of which a round is made by default, at least: the values of fewer are not limited."""


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """`[rounds]`: when a round closes, beside `quorum` and `deadline_s`."""

    grace_s: Annotated[float, Meta(ge=0, le=1e9)] = 5.0
    min_devices: Annotated[int, Meta(ge=1)] | None = None
    """None for ROUND_DEVICES, or fewer if the quorum or the list of devices is smaller."""
    staleness: Annotated[int, Meta(ge=0, le=100_000)] = 1


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """`[limits]`: how much work devices may cause, and how many of their heads are kept."""

    heads_per_hour: Annotated[int, Meta(ge=1, le=3600)] = 12
    """Trainings, without rounds: as many at once after a pause, and as many in each hour."""
    downloads_per_hour: Annotated[int, Meta(ge=1, le=3600)] = 4
    """Downloads of each blob by a device: as many at once, and as many in each hour."""
    kept_heads: Annotated[int, Meta(ge=10, le=1_000_000)] = 200
    """Newest heads in `status`; older ones are deleted."""
    max_devices: Annotated[int, Meta(ge=1)] | None = None
    """Quota of devices with a valid key; None for as many as the fleet takes."""
    max_storage_mb: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Quota of the submissions of all devices, MiB."""
    uploads_per_hour: Annotated[int, Meta(ge=1)] | None = None
    """Quota of the submissions accepted from all devices: as many at once, and as many in each hour."""

    @property
    def max_storage_bytes(self) -> int | None:
        """`max_storage_mb` in bytes."""
        return None if self.max_storage_mb is None else int(self.max_storage_mb * 1024**2)


class PrivacyBudget(msgspec.Struct, frozen=True, kw_only=True):
    """`[privacy.dp]`: differential privacy of everything that a device uploads."""

    epsilon: Annotated[float, Meta(gt=0, le=20)]
    """The privacy loss of one submission."""
    delta: Annotated[float, Meta(gt=0, le=1e-3)] = 1e-5
    clip_norm: Annotated[float, Meta(ge=1e-6, le=1e6)]
    max_epsilon: Annotated[float, Meta(gt=0, le=40)]
    """The privacy loss of all submissions of a device together."""


class PrivacySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`[privacy]`: noise that devices add before they upload, of one kind or the other."""

    perturbation: Perturbation | None = None
    dp: PrivacyBudget | None = None


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A task file without the tables of the algorithms of rounds."""

    classes: Annotated[tuple[ClassName, ...], Meta(min_length=1, max_length=MAX_CLASSES)]
    backbones: Annotated[tuple[str, ...], Meta(min_length=1, max_length=16)]
    """Paths of ONNX files, relative to the task file's folder."""
    layers: Annotated[tuple[str, ...], Meta(min_length=1, max_length=256)] | None = None
    """The blocks of the backbones whose features are used; None for all."""
    fleet: Name = "default"
    algorithm: str = "fedtc"
    quorum: Annotated[int, Meta(ge=1)] = 1
    deadline_s: Annotated[float, Meta(gt=0, le=1e9)] = 600.0
    retrain_after: Annotated[int, Meta(ge=1)] = 1
    max_submission_mb: Annotated[float, Meta(gt=0, le=2048)] = 64.0
    unfinished_h: Annotated[float, Meta(gt=0, le=100_000)] = 24.0
    devices: Annotated[tuple[Name, ...], Meta(min_length=1)] | None = None
    """The only devices that may take part; None for any device."""
    client: Client = Client()
    training: Training = Training()
    statistics: StatisticsSettings = StatisticsSettings()
    robust: Robust = Robust()
    limits: Limits = Limits()
    rounds: Rounds = Rounds()
    rollout: RolloutSettings = RolloutSettings()
    privacy: PrivacySettings = PrivacySettings()

    @property
    def learning(self) -> Algorithm | None:
        """The settings of the algorithm by which devices train in rounds; None for others, which have no rounds."""
        found: Algorithm | None = getattr(self, self.algorithm) if self.algorithm in ALGORITHMS else None
        return found

    @property
    def settings(self) -> RoundSettings:
        """The settings of `aggregator.coordination.rounds`."""
        if self.learning is None:
            return RoundSettings(
                quorum=self.quorum, deadline_s=self.deadline_s, retrain_after=self.retrain_after
            )
        return RoundSettings(
            quorum=self.quorum,
            deadline_s=self.deadline_s,
            rounds=self.learning.rounds,
            devices=None if self.devices is None else frozenset(self.devices),
            grace_s=self.rounds.grace_s,
            min_devices=self._min_devices(),
            staleness=self.rounds.staleness,
        )

    def _min_devices(self) -> int:
        listed = ROUND_DEVICES if self.devices is None else len(self.devices)
        return self.rounds.min_devices or min(ROUND_DEVICES, self.quorum, listed)


if TYPE_CHECKING:
    TaskFile = CommonSettings
else:
    TaskFile = msgspec.defstruct(
        "TaskFile",
        [
            ("algorithm", Literal["fedtc", "statistics", *ALGORITHMS], "fedtc"),
            *((name, kind, kind()) for name, kind in ALGORITHMS.items()),
        ],
        bases=(CommonSettings,),
        module=__name__,
        namespace={"__doc__": "A task file, with one table for each algorithm of rounds."},
        frozen=True,
        kw_only=True,
    )
