"""Reads and checks a task file. Errors name the line, the key's path, and what to write instead."""

import difflib
import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec.structs import replace

from aggregator.algorithms.registry import ALGORITHMS, find_algorithm
from aggregator.config.privacy import PrivacyBudget
from aggregator.config.schema import TaskFile, described, task_type
from protocol.answers import HOME_ASSISTANT, UNRECOGNIZED, UNSURE
from protocol.class_folders import is_of_system
from protocol.errors import ConfigError

Problem = tuple[tuple[str, ...], str]
"""The path of a key, and what is wrong with its value."""

_TABLE = re.compile(r"\s*\[([\w.\"' \t-]+)\]")
_KEY = re.compile(r"\s*([\w.\"' \t-]+?)\s*=")


def load_task(path: Path) -> tuple[TaskFile, list[Path]]:
    """Read a task file; return it with the paths of its backbones.

    Raises:
        ConfigError: it cannot be read, or a setting is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows writes a byte-order mark
        given = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the task file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text: {error}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        schema = task_type(name) if isinstance(name := given.get("algorithm"), str) else TaskFile
    except ConfigError as error:
        raise _wrong(path, text, (("algorithm",), str(error))) from error
    unknown = next(_unknown(given, schema), None)
    try:
        task = msgspec.convert(given, schema)
    except msgspec.ValidationError as error:
        raise _wrong(path, text, unknown or _explain(str(error), schema)) from error
    backbones = [path.parent / backbone for backbone in task.backbones]
    if (dp := task.privacy.dp) is not None:
        dp = replace(dp, map=str(path.parent / dp.map))
        task = replace(task, privacy=replace(task.privacy, dp=dp))
    if (sums := task.privacy.sums) is not None:
        sums = replace(sums, operator=str(path.parent / sums.operator))
        task = replace(task, privacy=replace(task.privacy, sums=sums))
    if problem := unknown or next(_contradictions(task, given, backbones), None):
        raise _wrong(path, text, problem)
    return task, backbones


def _wrong(path: Path, text: str, problem: Problem) -> ConfigError:
    key, what = problem
    return ConfigError(f"{path}:{_line_of(text, key)}: `{'.'.join(key)}`: {what}")


def _unknown(given: Mapping[str, Any], table: type[msgspec.Struct]) -> Iterator[Problem]:
    """Yield every key that a table does not have, with the closest one that it has."""
    hints = get_type_hints(table)
    for key, value in given.items():
        if key not in hints:
            close = difflib.get_close_matches(key, table.__struct_fields__, n=1)
            known = f"did you mean `{close[0]}`?" if close else f"known: {', '.join(table.__struct_fields__)}"
            yield (key,), f"unknown setting; {known}"
        elif isinstance(value, dict) and (inner := struct_in(hints[key])):
            yield from (((key, *path), what) for path, what in _unknown(value, inner))


def struct_in(hint: Any) -> type[msgspec.Struct] | None:
    """Return the struct in `Struct` or `Struct | None`."""
    choices = [each for each in (hint, *get_args(hint)) if isinstance(each, type)]
    return next((each for each in choices if issubclass(each, msgspec.Struct)), None)


def _explain(error: str, schema: type[TaskFile]) -> Problem:
    """Return the key and the reason of a validation error of msgspec."""
    reason, _, where = error.partition(" - at ")
    path = tuple(re.findall(r"\.([A-Za-z_]\w*)", where))
    if missing := re.search(r"missing required field `(\w+)`", reason):
        setting = described(struct_in(_hint_of(path, schema)) or schema)[missing[1]]
        hints = [setting.get("description"), *(f"such as {value!r}" for value in setting.get("examples", ()))]
        return (*path, missing[1]), ": ".join(filter(None, ["missing", ", ".join(filter(None, hints))]))
    if "Invalid enum value" in reason:
        reason += f"; expected {' or '.join(map(repr, get_args(_hint_of(path, schema))))}"
    return path, reason


def _hint_of(path: tuple[str, ...], schema: type[TaskFile]) -> Any:
    hint: Any = schema
    for name in path:
        hint = get_type_hints(struct_in(hint) or schema)[name]
    return hint


def _line_of(text: str, key: tuple[str, ...]) -> int:
    """Return the line of a key, else of the closest table that contains it, else 1."""
    table: tuple[str, ...] = ()
    lines: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _TABLE.match(line):
            lines.setdefault(table := _parts(match[1]), number)
        elif match := _KEY.match(line):
            lines.setdefault((*table, *_parts(match[1])), number)
    return next((lines[key[:end]] for end in range(len(key), 0, -1) if key[:end] in lines), 1)


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip(" \t\"'") for part in dotted.split("."))


def _contradictions(task: TaskFile, given: Mapping[str, Any], backbones: Sequence[Path]) -> Iterator[Problem]:
    """Yield the problems of a decoded file; `given`, its TOML values, distinguishes defaults from written values."""
    yield from _class_names(task.classes)
    yield from _unused(task, given)
    yield from _statistics(task, given)
    if task.training.gpus and task.training.engine != "ray":
        yield ("training", "gpus"), 'reserves GPUs of a Ray cluster: set engine = "ray", or remove it'
    yield from _thresholds(task)
    yield from _privacy(task, given)
    yield from _sums(task)
    yield from _backbones(backbones)


def _class_names(classes: Sequence[str]) -> Iterator[Problem]:
    """Class names are folder names and stand in lists of images."""
    times = Counter(unicodedata.normalize("NFC", name) for name in classes)
    if repeated := sorted(name for name, count in times.items() if count > 1):
        yield ("classes",), f"classes named twice: {', '.join(repeated)}"
    for name in classes:
        if name != name.strip() or any(unicodedata.category(c) == "Cc" for c in name):
            yield ("classes",), f"{name!r} begins or ends with a space, or contains a control character"


_NO_FOLDER = re.compile(r'\.|.*[/\\<>:"|?*]|.*\.\Z|(con|prn|aux|nul|com\d|lpt\d)(\..*)?\Z', re.IGNORECASE)
"""Names that a folder cannot have on some system, or that devices skip as hidden; see also `is_of_system`."""


def class_name_notes(classes: Sequence[str]) -> list[str]:
    """Return why some of the class names do not work on all devices; they are valid, as earlier tasks have them."""
    notes = []
    if ambiguous := sorted({UNRECOGNIZED, UNSURE, *HOME_ASSISTANT}.intersection(classes)):
        notes.append(
            f"an answer of devices or Home Assistant for an image of no class: {', '.join(ambiguous)}; rename the class"
        )
    if impossible := sorted(name for name in classes if _NO_FOLDER.match(name) or is_of_system(name)):
        notes.append(
            f"no name of a folder on some or all devices: {', '.join(impossible)}; rename the class, or let devices "
            "list its images in a CSV file"
        )
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault(unicodedata.normalize("NFC", name).casefold(), []).append(name)
    notes += [
        f"one folder on Windows, macOS and many USB sticks: {' and '.join(names)}; rename one of the classes"
        for names in alike.values()
        if len(names) > 1
    ]
    return notes


def unused_settings(algorithm: str) -> frozenset[tuple[str, ...]]:
    """Return the paths of the tables and settings that an algorithm does not use."""
    return find_algorithm(algorithm).unused | {(name,) for name in ALGORITHMS.keys() - {algorithm}}


def _unused(task: TaskFile, given: Mapping[str, Any]) -> Iterator[Problem]:
    for path in sorted(unused_settings(task.algorithm)):
        *tables, name = path
        if name in (given.get(tables[0], {}) if tables else given):
            yield path, f'algorithm = "{task.algorithm}" does not use this setting: remove it'


def _statistics(task: TaskFile, given: Mapping[str, Any]) -> Iterator[Problem]:
    if not task.method.sums:
        return
    algorithm = f'algorithm = "{task.algorithm}"'
    if given.get("client", {}).get("alpha", 1) != 1:
        yield (
            ("client", "alpha"),
            f"must be 1 with {algorithm}, because whether an image is an outlier depends on other images: remove it",
        )
    if (perturbation := task.privacy.perturbation) is not None and perturbation.on == "prototypes":
        yield ("privacy", "perturbation", "on"), f'{algorithm} uploads no prototypes: set on = "images"'


DIGITS = 64
"""Of a task's digest."""


def _thresholds(task: TaskFile) -> Iterator[Problem]:
    client, rounds = task.client, task.rounds
    if task.continues is not None and len(task.continues) < DIGITS:
        text = f"has {len(task.continues)} of {DIGITS} digits: take `task` of `aggregator status --json`"
        yield ("continues",), text
    if task.learning is None and client.min_images > client.batch_size:
        problem = f"{client.min_images} is more than client.batch_size ({client.batch_size})"
        yield ("client", "min_images"), f"{problem}: no prototype would have that many images"
    least = rounds.min_devices or 1
    if task.learning is not None and least > task.quorum:
        yield ("rounds", "min_devices"), f"{least} is more than quorum ({task.quorum})"
    if task.devices is not None and least > len(task.devices):
        yield (
            ("rounds", "min_devices"),
            f"{least} is more than the {len(task.devices)} devices: no round would ever close",
        )


UNUSED_WITH_NOISE = (
    *(("layers",), ("continues",), ("robust",), ("statistics", "features")),
    *(("client", "batch_size"), ("client", "min_images"), ("training", "calibrate")),
)
"""The settings and tables that a task with `[privacy.dp]` does not use."""


def _privacy(task: TaskFile, given: Mapping[str, Any]) -> Iterator[Problem]:
    perturbation, dp = task.privacy.perturbation, task.privacy.dp
    algorithm = f'algorithm = "{task.algorithm}"'
    if perturbation and perturbation.on == "prototypes" and task.learning and task.learning.uploaded:
        yield (
            ("privacy", "perturbation", "on"),
            f'{algorithm} uploads more than prototypes, which would stay unperturbed: set on = "images"',
        )
    if dp is None:
        return
    if dp.max_epsilon < dp.epsilon:
        yield (
            ("privacy", "dp", "max_epsilon"),
            f"{dp.max_epsilon:g} is less than epsilon ({dp.epsilon:g}): no device could upload anything",
        )
    yield from _unit(dp)
    if perturbation is not None:
        yield ("privacy", "perturbation"), "excludes [privacy.dp]: remove one of the two tables"
    if not task.method.sums:
        problem = f"{algorithm} has no noise that bounds an image's influence on what its device uploads"
        yield ("privacy", "dp"), f'{problem}: use algorithm = "statistics"'
    for path in UNUSED_WITH_NOISE:
        *tables, name = path
        if (given.get(tables[0], {}) if tables else given).get(name) not in (None, {}):
            yield path, "[privacy.dp] does not use this setting: remove it"
    if not Path(dp.map).is_file():
        yield ("privacy", "dp", "map"), f"no file {Path(dp.map).name}: make it with `protofleet public-map`"


def _unit(dp: PrivacyBudget) -> Iterator[Problem]:
    if dp.unit == "person" and dp.images_per_person is None:
        yield ("privacy", "dp", "images_per_person"), "missing: images of one person that count at most"
    for name in ("images_per_person", "person_level"):
        if dp.unit == "image" and getattr(dp, name) is not None:
            yield ("privacy", "dp", name), 'needs unit = "person"'


def _sums(task: TaskFile) -> Iterator[Problem]:
    sums = task.privacy.sums
    if sums is None:
        return
    if task.privacy.dp is None:
        yield ("privacy", "sums"), "needs [privacy.dp]: add that table"
    if not Path(sums.operator).is_file():
        what = "the second operator makes it with `protofleet-sums new-task`"
        yield ("privacy", "sums", "operator"), f"no file {Path(sums.operator).name}: {what}"
    if task.quorum < sums.min_devices:
        yield (
            ("privacy", "sums", "min_devices"),
            f"{sums.min_devices} is more than quorum ({task.quorum}): set quorum",
        )


def _backbones(paths: Sequence[Path]) -> Iterator[Problem]:
    for path in paths:
        if not path.is_file():
            yield ("backbones",), f"no file {path}: make it with `export-backbone MODEL --out {path.parent}`"
    if len({path.resolve() for path in paths}) < len(paths):
        yield ("backbones",), "a backbone is named twice: remove one"
