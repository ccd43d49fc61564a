"""The task file: what the fleet works on, read from TOML; a wrong one is refused with the line and the reason."""

import difflib
import itertools
import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fpl import FPL
from aggregator.coordination.rollout import Settings as RolloutSettings
from aggregator.coordination.rounds import Settings
from protocol.errors import ConfigError
from protocol.metadata import BackboneMetadata, backbone_metadata
from protocol.wire.messages import MAX_CLASSES, ClassName, Name, Natural

_TABLE = re.compile(r"\s*\[([\w.\"' \t-]+)\]")
_KEY = re.compile(r"\s*([\w.\"' \t-]+?)\s*=")


class Client(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[client]`: what every device is told about making prototypes."""

    alpha: Annotated[float, Meta(gt=0, le=1)] = 0.99
    batch_size: Annotated[int, Meta(ge=1, le=65535)] = 5
    min_images: Annotated[int, Meta(ge=1, le=65535)] = 2
    seed: Natural = 0


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[training]`: how the aggregator makes a head. What is not set is the recipe's own."""

    recipe: Literal["default", "paper"] = "default"
    restore: bool | None = None
    epochs: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    robust: Literal["none", "trimmed", "median"] = "none"
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)\Z")] = "auto"
    seed: Natural = 0


class Rounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rounds]`: when a round closes, beside `quorum` and `deadline_s`."""

    grace_s: Annotated[float, Meta(ge=0, le=1e9)] = 5.0
    min_devices: Annotated[int, Meta(ge=1)] = 1
    staleness: Annotated[int, Meta(ge=0, le=100_000)] = 1


class Rollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rollout]`: which devices try a new head first, and when the others get it."""

    canary: Annotated[float, Meta(ge=0, le=1)] = 0.0
    margin: Annotated[float, Meta(ge=0, le=1)] = 0.02
    patience_s: Annotated[float, Meta(gt=0, le=1e9)] = 600.0


class PrivacySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[privacy]`: what devices do to their images or prototypes before anything leaves them."""

    perturb: Literal["prototypes", "images"] | None = None
    noise: Literal["gaussian", "laplace"] = "gaussian"
    scale: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    shrink: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    epsilon: Annotated[float, Meta(gt=0, le=20)] | None = None
    """Of one submission."""
    delta: Annotated[float, Meta(gt=0, le=1e-3)] = 1e-5
    clip_norm: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    max_epsilon: Annotated[float, Meta(gt=0, le=40)] | None = None
    """Of all submissions of a device together."""


class Poisoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[poisoning]`: which devices are quarantined because of what they upload."""

    check: bool = True
    threshold: Annotated[float, Meta(gt=0, le=1e9)] = 8.0
    """Robust standard deviations."""


class TaskFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    classes: Annotated[tuple[ClassName, ...], Meta(min_length=1, max_length=MAX_CLASSES)]
    backbones: Annotated[tuple[str, ...], Meta(min_length=1, max_length=16)]
    """Paths of ONNX files, from the task file's own folder."""
    fleet: Name = "default"
    algorithm: Literal["fedtc", "fedpcl", "fpl"] = "fedtc"
    quorum: Annotated[int, Meta(ge=1)] = 1
    deadline_s: Annotated[float, Meta(gt=0, le=1e9)] = 600.0
    retrain_after: Annotated[int, Meta(ge=1)] = 1
    max_submission_mb: Annotated[float, Meta(gt=0, le=2048)] = 64.0
    unfinished_h: Annotated[float, Meta(gt=0, le=100_000)] = 24.0
    devices: Annotated[tuple[Name, ...], Meta(min_length=1)] | None = None
    """The only devices that may take part; left out, any may."""
    client: Client = Client()
    training: Training = Training()
    rounds: Rounds = Rounds()
    rollout: Rollout = Rollout()
    privacy: PrivacySettings = PrivacySettings()
    poisoning: Poisoning = Poisoning()
    fedpcl: FedPCL = FedPCL()
    fpl: FPL = FPL()

    @property
    def learning(self) -> FedPCL | FPL | None:
        """How devices learn in rounds; None if they do not."""
        algorithms: dict[str, FedPCL | FPL] = {"fedpcl": self.fedpcl, "fpl": self.fpl}
        return algorithms.get(self.algorithm)

    @property
    def settings(self) -> Settings:
        """What the round logic needs of it."""
        if self.learning is None:
            return Settings(quorum=self.quorum, deadline_s=self.deadline_s, retrain_after=self.retrain_after)
        return Settings(
            quorum=self.quorum,
            deadline_s=self.deadline_s,
            grace_s=self.rounds.grace_s,
            min_devices=self.rounds.min_devices,
            staleness=self.rounds.staleness,
            rounds=self.learning.rounds,
            devices=None if self.devices is None else frozenset(self.devices),
        )

    @property
    def rollout_settings(self) -> RolloutSettings:
        """What the rollout of heads needs of it."""
        return RolloutSettings(
            canary_fraction=self.rollout.canary,
            margin=self.rollout.margin,
            canary_timeout_s=self.rollout.patience_s,
        )


def load_task(path: Path) -> tuple[TaskFile, list[Path]]:
    """Read a task file; returns it with the paths of its backbones.

    Raises:
        ConfigError: it cannot be read, or is wrong: the message names the line and what to write instead.
    """
    try:
        text = path.read_text(encoding="utf-8")
        given = tomllib.loads(text)
        task = msgspec.convert(given, TaskFile)
    except OSError as error:
        raise ConfigError(f"cannot read the task file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text: {error}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(path, text, str(error))) from error
    backbones = [path.parent / backbone for backbone in task.backbones]
    problems = itertools.chain(
        _wrong_names(task.classes),
        _out_of_place(task, given),
        _contradictions(task),
        _wrong_privacy(task, given),
        _wrong_backbones(backbones),
    )
    if (found := next(problems, None)) is not None:
        (*tables, key), problem = found
        raise ConfigError(f"{path}:{_line_of(text, tuple(tables), key)}: {problem}")
    return task, backbones


Problems = Iterator[tuple[tuple[str, ...], str]]
"""Tables and key where something is wrong, and what."""


def _out_of_place(task: TaskFile, given: Mapping[str, Any]) -> Problems:
    """Settings that the algorithm has no use for."""
    no_use = {
        "fedpcl",
        "fpl",
        *({"rounds"} if task.learning is None else {"training", "retrain_after", "poisoning"}),
    }
    for name in sorted(no_use & given.keys() - {task.algorithm}):
        yield (name,), f'`{name}` says nothing to algorithm = "{task.algorithm}": leave it out'
    if task.learning is not None:
        for name in sorted({"alpha", "batch_size"} & given.get("client", {}).keys()):
            problem = f'`client.{name}` says nothing to algorithm = "{task.algorithm}": leave it out'
            yield ("client", name), problem


def _contradictions(task: TaskFile) -> Problems:
    """Settings that are right by themselves, but not together."""
    client, rounds = task.client, task.rounds
    if task.learning is None and client.min_images > client.batch_size:
        problem = f"min_images ({client.min_images}) must not exceed batch_size ({client.batch_size})"
        yield ("client", "min_images"), f"{problem}: no prototype would be large enough"
    if task.learning is not None and rounds.min_devices > task.quorum:
        problem = f"min_devices ({rounds.min_devices}) must not exceed quorum ({task.quorum})"
        yield ("rounds", "min_devices"), problem
    if task.devices is not None and rounds.min_devices > len(task.devices):
        problem = f"min_devices ({rounds.min_devices}) is more than there are devices ({len(task.devices)})"
        yield ("rounds", "min_devices"), f"{problem}: no round would ever close"


def _wrong_privacy(task: TaskFile, given: Mapping[str, Any]) -> Problems:
    """Settings of `[privacy]` that say nothing, or promise what cannot be kept."""
    privacy, written = task.privacy, given.get("privacy", {})
    if privacy.perturb is None:
        for name in sorted({"noise", "scale", "shrink"} & written.keys()):
            yield ("privacy", name), f"`privacy.{name}` says nothing without `perturb`: leave it out"
    elif privacy.scale is None:
        yield ("privacy", "perturb"), "`perturb` wants to know how much noise: set `scale`"
    if privacy.perturb == "prototypes" and task.learning is not None and task.learning.uploaded:
        problem = (
            f'algorithm = "{task.algorithm}" uploads parameters beside prototypes, which would be as they are'
        )
        yield ("privacy", "perturb"), f'{problem}: set perturb = "images", of which both are made'
    if privacy.epsilon is None:
        for name in sorted({"delta", "clip_norm", "max_epsilon"} & written.keys()):
            yield ("privacy", name), f"`privacy.{name}` says nothing without `epsilon`: leave it out"
    else:
        yield from _wrong_differential_privacy(task, given)


def _wrong_differential_privacy(task: TaskFile, given: Mapping[str, Any]) -> Problems:
    """Where differential privacy could not be what it says."""
    privacy, where = task.privacy, ("privacy", "epsilon")
    if privacy.clip_norm is None:
        yield (
            where,
            "`epsilon` wants features to be clipped: set `clip_norm`, about as long as most of them are",
        )
    if privacy.max_epsilon is None:
        yield where, "`epsilon` is of one submission: set `max_epsilon`, what a device may spend in all"
    elif privacy.epsilon is not None and privacy.max_epsilon < privacy.epsilon:
        problem = f"max_epsilon ({privacy.max_epsilon:g}) is less than epsilon ({privacy.epsilon:g})"
        yield ("privacy", "max_epsilon"), f"{problem}: no device could upload anything"
    if privacy.perturb is not None:
        yield ("privacy", "perturb"), "perturbation and differential privacy exclude each other: take one"
    if given.get("client", {}).get("alpha", 1) != 1:
        problem = (
            "with differential privacy alpha must be 1: which outliers are left out hangs on other images"
        )
        yield ("client", "alpha"), f"{problem}; leave it out"
    if task.learning is not None:
        problem = f'algorithm = "{task.algorithm}" learns a projection from a device\'s own images'
        yield where, f"{problem}, so that what one of them changes has no bound: only fedtc can be private"


def _wrong_backbones(paths: Sequence[Path]) -> Problems:
    """Backbones that are not there, or there twice."""
    for path in paths:
        if not path.is_file():
            yield (
                ("backbones",),
                f"no backbone at {path}; make one with: export-backbone MODEL --out {path.parent}",
            )
    if len({path.resolve() for path in paths}) < len(paths):
        yield ("backbones",), "a backbone named twice adds nothing: leave one out"


def _wrong_names(classes: Sequence[str]) -> Problems:
    """What is wrong with the class names; they are folders' names and lie in lists of images."""
    repeated = [
        name
        for name, times in Counter(unicodedata.normalize("NFC", name) for name in classes).items()
        if times > 1
    ]
    if repeated:
        yield ("classes",), f"classes named twice: {', '.join(sorted(repeated))}"
    odd = [
        name for name in classes if name != name.strip() or any(unicodedata.category(c) == "Cc" for c in name)
    ]
    if odd:
        yield (
            ("classes",),
            f"class {odd[0]!r} begins or ends with a space, or holds a line break or another control character",
        )


def read_backbone(path: Path) -> BackboneMetadata:
    """What a backbone file says of itself.

    Raises:
        ConfigError: it is no ONNX file.
        BackboneMismatch: it is not one that `export-backbone` wrote.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise ConfigError(f"cannot read the backbone {path}: {error}") from error
    return backbone_metadata({entry.key: entry.value for entry in model.metadata_props})


_TABLES: dict[str, type[msgspec.Struct]] = {
    "client": Client,
    "training": Training,
    "rounds": Rounds,
    "rollout": Rollout,
    "privacy": PrivacySettings,
    "poisoning": Poisoning,
    "fedpcl": FedPCL,
    "fpl": FPL,
}


def _explain(path: Path, text: str, error: str) -> str:
    """A validation error with its line, and the closest known name for an unknown one."""
    problem, _, where = error.partition(" - at ")
    tables = tuple(re.findall(r"\.([A-Za-z_]\w*)", where))
    field = re.search(r"field `(\w+)`", problem)
    if field and "unknown" in problem:
        known = _TABLES.get(".".join(tables), TaskFile).__struct_fields__
        close = difflib.get_close_matches(field[1], known, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else f"; known: {', '.join(known)}"
        return f"{path}:{_line_of(text, tables, field[1])}: unknown setting `{field[1]}`{hint}"
    if field:
        return f"{path}:{_line_of(text, tables, None)}: `{field[1]}` is missing"
    line, key = _line_of(text, tables[:-1], tables[-1] if tables else None), ".".join(tables)
    if "Invalid enum value" in problem:
        hints = get_args(get_type_hints(_TABLES.get(".".join(tables[:-1]), TaskFile))[tables[-1]])
        values = [value for hint in hints for value in get_args(hint) or [hint] if isinstance(value, str)]
        problem += f"; expected {' or '.join(map(repr, values))}"
    return f"{path}:{line}: `{key}`: {problem}"


def _line_of(text: str, tables: tuple[str, ...], key: str | None) -> int:
    """The line on which a table's key stands, or the table itself, or else what is nearest around it."""
    wanted = (*tables, key) if key else tables
    table: tuple[str, ...] = ()
    found = 1
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _TABLE.match(line):
            name = table = _parts(match[1])
        elif match := _KEY.match(line):
            name = (*table, *_parts(match[1]))
        else:
            continue
        if name == wanted:
            return number
        if name == wanted[: len(name)]:
            found = number
    return found


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip(" \t\"'") for part in dotted.split("."))
