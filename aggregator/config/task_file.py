"""Reads a task file. Errors name the line, the key's path, and what to write instead."""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from aggregator.config.checks import Problem, find_problems
from aggregator.config.schema import TaskFile
from protocol.errors import ConfigError

_TABLE = re.compile(r"\s*\[([\w.\"' \t-]+)\]")
_KEY = re.compile(r"\s*([\w.\"' \t-]+?)\s*=")

_HINTS = {
    "privacy.perturbation.scale": "the standard deviation of the noise, such as 0.05",
    "privacy.dp.clip_norm": "about the length of most features",
    "privacy.dp.max_epsilon": "how much a device may spend on all its submissions",
}
"""Examples of required keys, for error messages."""


def load_task(path: Path) -> tuple[TaskFile, list[Path]]:
    """Read a task file; return it with the paths of its backbones.

    Raises:
        ConfigError: it cannot be read, or a setting is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
        given = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the task file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text: {error}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    unknown = next(_unknown(given, TaskFile), None)
    try:
        task = msgspec.convert(given, TaskFile)
    except msgspec.ValidationError as error:
        raise _wrong(path, text, unknown or _explain(str(error))) from error
    backbones = [path.parent / backbone for backbone in task.backbones]
    if problem := unknown or next(find_problems(task, given, backbones), None):
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
        elif isinstance(value, dict) and (inner := _struct_in(hints[key])):
            yield from (((key, *path), what) for path, what in _unknown(value, inner))


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    """Return the struct in `Struct` or `Struct | None`."""
    choices = [each for each in (hint, *get_args(hint)) if isinstance(each, type)]
    return next((each for each in choices if issubclass(each, msgspec.Struct)), None)


def _explain(error: str) -> Problem:
    """Return the key and the reason of a validation error of msgspec."""
    reason, _, where = error.partition(" - at ")
    path = tuple(re.findall(r"\.([A-Za-z_]\w*)", where))
    if missing := re.search(r"missing required field `(\w+)`", reason):
        path = (*path, missing[1])
        hint = _HINTS.get(".".join(path))
        return path, "missing" + (f": set it to {hint}" if hint else "")
    if "Invalid enum value" in reason:
        reason += f"; expected {' or '.join(map(repr, get_args(_hint_of(path))))}"
    return path, reason


def _hint_of(path: tuple[str, ...]) -> Any:
    hint: Any = TaskFile
    for name in path:
        hint = get_type_hints(_struct_in(hint) or TaskFile)[name]
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
