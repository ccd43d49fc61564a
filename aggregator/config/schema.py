"""The tables of the task file, except those defined where they are used.

The others are `[limits]`, `[privacy]`, `[training]`, `[rollout]` and the tables of the algorithms. `aggregator init`
writes the first sentence below a setting as its comment, and for a setting without a default its example.
"""

import ast
import contextlib
import inspect
import keyword
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from aggregator.algorithms.algorithm import Algorithm, RoundAlgorithm, Training
from aggregator.algorithms.registry import ALGORITHMS, distributions, find_algorithm
from aggregator.config.limits import Limits
from aggregator.config.privacy import PrivacySettings
from aggregator.coordination.bounds import CLIP_MULTIPLE, MAX_MULTIPLE
from aggregator.coordination.minimums import MEDIAN_DEVICES
from aggregator.coordination.rollout_state import Settings as RolloutSettings
from aggregator.coordination.round_state import Settings as RoundSettings
from protocol.errors import ConfigError
from protocol.wire.messages import MAX_CLASSES, ClassName, Name, Natural


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """`[client]`: how devices make prototypes."""

    alpha: Annotated[float, Meta(gt=0, le=1)] = 0.99
    """Share of each class's images that outlier filtering keeps. Those farthest from the class's mean are omitted."""
    batch_size: Annotated[int, Meta(ge=1, le=65535)] = 5
    """Images averaged in one prototype. More: fewer bytes, less revealed, slightly lower accuracy.

    1 with `statistics` uploads the rows of single images.
    """
    min_images: Annotated[int, Meta(ge=1, le=65535)] = 2
    """A class with fewer images is not uploaded. With 1, the feature of a single image may leave the device."""
    prototypes: Literal["auto", "batches"] = "auto"
    """`batches` uploads nothing but means of `batch_size` images, as FedTC does.

    By default, a device with 50 new images or more uploads principal prototypes of them: the mean of each class, and
    the strongest directions of the scatter within classes. They are more accurate for fewer bytes, and no image has
    more than a `batch_size`-th of any combination of what is uploaded.
    """
    seed: Natural = 0
    """Seed of every shuffle on devices."""


class Robust(msgspec.Struct, frozen=True, kw_only=True):
    """`[robust]`: protection against wrong prototypes and, in rounds, wrong changes of parameters."""

    detect_outliers: bool = True
    """Quarantine devices whose prototypes are far from the other devices'."""
    false_alarm_rate: Annotated[float, Meta(gt=0, le=0.5)] = 0.01
    """Greatest share of trainings of honest devices in which one of them is quarantined."""
    max_multiple: Annotated[float, Meta(ge=0, le=1e6)] = MAX_MULTIPLE
    """A device counts for at most 3 times the median device's images; 0: no limit. It limits FedTC's means, too."""
    clip_multiple: Annotated[float, Meta(ge=0, le=1e6)] = CLIP_MULTIPLE
    """Limit prototypes to 3 times the median device's distance from the others'; 0: no limit.

    Unless it is 0, no device's change of parameters counts for more than the median device's.
    """


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """`[rounds]`: when a round closes, beside `quorum` and `deadline_s`."""

    grace_s: Annotated[float, Meta(ge=0, le=1e9)] = 5.0
    """Seconds for further devices once the quorum is reached."""
    min_devices: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(examples=[MEDIAN_DEVICES])] = None
    """Devices without which a round does not close; default 3, or the quorum if that is less. At most the quorum."""
    staleness: Annotated[int, Meta(ge=0, le=100_000)] = 1
    """Rounds that a submission may be behind and still count. With 0, only submissions for the open round count."""


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A task file without the tables of the algorithms."""

    classes: Annotated[tuple[ClassName, ...], Meta(min_length=1, max_length=MAX_CLASSES)]
    """Names of the classes, which are the names of the folders on the devices."""
    backbones: Annotated[tuple[str, ...], Meta(min_length=1, max_length=16)]
    """Paths of ONNX files, relative to the task file's folder. Their features are concatenated."""
    layers: Annotated[tuple[str, ...], Meta(min_length=1, max_length=256)] | None = None
    """The blocks of the backbones whose features are used; default: all."""
    continues: Annotated[str, Meta(pattern=r"^[0-9a-f]{8,64}\Z")] | None = None
    """An earlier task of this fleet, by its `task` in `aggregator status --json`, to which this one adds classes at the
    end, whose algorithm it changes to another that uses principal prototypes, or which had `prototypes = "batches"`.
    Its submissions stay valid."""
    fleet: Name = "default"
    """Name of the fleet. Fleets of other names can share the broker. A new name needs a new `--state`."""
    algorithm: str = "fedtc"
    """The algorithm, which may have a table of its own below."""
    quorum: Annotated[int, Meta(ge=1)] = 1
    """Devices that the first head, or each round, waits for."""
    deadline_s: Annotated[float, Meta(gt=0, le=1e9)] = 600.0
    """Seconds after the first new submission at which a head is trained, or a round closes, without the quorum."""
    retrain_after: Annotated[int, Meta(ge=1)] = 1
    """New or renewed submissions that trigger the next training."""
    max_submission_mb: Annotated[float, Meta(gt=0, le=2048)] = 64.0
    """MiB; a larger submission is refused."""
    devices: Annotated[
        Annotated[tuple[Name, ...], Meta(min_length=1)] | None,
        Meta(examples=[["shed-1", "shed-2", "shed-3"]]),
    ] = None
    """The only devices that may take part; default: any. In an open fleet this prevents mistakes, not attacks."""
    client: Client = Client()
    training: Training = Training()
    robust: Robust = Robust()
    limits: Limits = Limits()
    rounds: Rounds = Rounds()
    rollout: RolloutSettings = RolloutSettings()
    privacy: PrivacySettings = PrivacySettings()

    @property
    def method(self) -> Algorithm:
        found: Algorithm = getattr(self, self.algorithm, None) or find_algorithm(self.algorithm)()
        return found

    @property
    def learning(self) -> RoundAlgorithm | None:
        """The settings of an algorithm of rounds; None for a one-shot algorithm."""
        return method if isinstance(method := self.method, RoundAlgorithm) else None

    @property
    def is_personal(self) -> bool:
        """True if each device has a head of its own."""
        return self.learning is not None and bool(self.learning.persistent)

    @property
    def settings(self) -> RoundSettings:
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
        # The values of fewer devices are not limited.
        listed = MEDIAN_DEVICES if self.devices is None else len(self.devices)
        return self.rounds.min_devices or min(MEDIAN_DEVICES, self.quorum, listed)


if TYPE_CHECKING:
    TaskFile = CommonSettings
else:
    TaskFile = msgspec.defstruct(
        "TaskFile",
        [
            ("algorithm", Literal[*ALGORITHMS], "fedtc"),
            *((name, kind, kind()) for name, kind in ALGORITHMS.items() if kind.__struct_fields__),
        ],
        bases=(CommonSettings,),
        module=__name__,
        namespace={
            "__doc__": "A task file, with a table for each algorithm of this package that has settings."
        },
        frozen=True,
        kw_only=True,
    )


@cache
def task_type(algorithm: str) -> type[TaskFile]:
    """Return the task file with the table of an algorithm, which another distribution may have installed.

    Raises:
        ConfigError: there is no such algorithm, or it cannot be used.
    """
    if algorithm in ALGORITHMS:
        return TaskFile
    kind = find_algorithm(algorithm)
    if not algorithm.isidentifier() or keyword.iskeyword(algorithm) or hasattr(TaskFile, algorithm):
        raise ConfigError(
            f"cannot use algorithm {algorithm!r} of {distributions(algorithm)}: a task file cannot have a table of "
            "that name beside its settings; ask the package's authors for another name"
        )
    fields = [("algorithm", Literal[algorithm], algorithm), (algorithm, kind, kind())]
    made: Any = msgspec.defstruct(
        "TaskFile", fields, bases=(TaskFile,), module=__name__, frozen=True, kw_only=True
    )
    return cast("type[TaskFile]", made)


def described(table: type[msgspec.Struct]) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each setting of a table, with the first sentence below the setting as description."""
    (reference,), schemas = msgspec.json.schema_components([table], ref_template="{name}")
    settings: dict[str, dict[str, Any]] = schemas[reference["$ref"]]["properties"]
    for kind in reversed(table.__mro__[: table.__mro__.index(msgspec.Struct)]):
        with contextlib.suppress(OSError):  # TaskFile has no source
            for name, text in _texts(inspect.getsource(kind)):
                settings.get(name, {})["description"] = text  # a class variable is no setting
    return settings


def _texts(source: str) -> Iterator[tuple[str, str]]:
    """Yield each field of a class that has a text below it, and the first sentence of that."""
    (definition,) = ast.parse(textwrap.dedent(source)).body
    for field, text in pairwise(getattr(definition, "body", [])):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(words))),
            ):
                yield name, re.split(r"\.\s+(?=[A-Z])", " ".join(words.split()))[0].removesuffix(".")
