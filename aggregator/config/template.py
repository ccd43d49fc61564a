"""The text of a commented task file, as `aggregator init` writes it: from the schema."""

import json
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
from msgspec import structs

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.registry import find_algorithm
from aggregator.config.privacy import PrivacySettings
from aggregator.config.schema import TaskFile, described, task_type
from aggregator.config.task_file import struct_in, unused_settings

_WRITTEN = {"fleet", "classes", "backbones", "layers", "algorithm", "quorum", "deadline_s"}
"""Settings at the top of the file, and the one that only another backbone makes useful."""


def task_text(
    *, fleet: str, classes: Sequence[str], backbones: Sequence[str], algorithm: str, quorum: int, deadline_s: float,
    operator: str = "",
) -> str:  # fmt: skip
    """Return a task file with these settings, and the others of the algorithm as comments with defaults.

    With the path of a second operator's file, it has the tables of differential privacy with that operator.
    """
    hidden = hidden_settings(algorithm) | set(_SUMS_ONLY if operator else ())
    first = "a round" if issubclass(find_algorithm(algorithm), RoundAlgorithm) else "the first head"
    return f"""\
# A task: what the fleet learns. `aggregator run --task FILE` reads this file, and `aggregator check FILE` checks it;
# docs/operations/task-settings.md explains every setting. A line behind # shows the default.

fleet = {_toml(fleet)}
classes = {_toml(classes)}   # the names of the folders on the devices
backbones = {_toml(backbones)}   # from this file's folder; export-backbone makes them
algorithm = {_toml(algorithm)}   # docs/which-algorithm.md compares them

quorum = {quorum}   # devices that {first} waits for
deadline_s = {deadline_s!r}   # seconds after the first submission at which it no longer waits
{"".join(_others(task_type(algorithm), hidden))}{_private(operator, min_devices=quorum) if operator else ""}"""


def _private(operator: str, *, min_devices: int) -> str:
    return f"""
[privacy.dp]
epsilon = 1.0   # of one submission
max_epsilon = 4.0   # of all submissions of a device
map = "public.map"   # of public images, by `protofleet public-map`

[privacy.sums]
operator = {_toml(operator)}   # of the second operator, by `protofleet-sums new-task`
min_devices = {min_devices}
"""


_SUMS_ONLY = (("privacy", "dp"), ("privacy", "sums"))


def hidden_settings(algorithm: str) -> AbstractSet[tuple[str, ...]]:
    """Return the paths of settings that an algorithm does not use, or accepts with one value only."""
    hidden: set[tuple[str, ...]] = set()
    kind = find_algorithm(algorithm)
    if issubclass(kind, RoundAlgorithm):
        hidden = {*_SUMS_ONLY}
    else:
        hidden = {("client", "alpha")} if kind.sums else {*_SUMS_ONLY}
    return unused_settings(algorithm) | hidden


def _others(schema: type[TaskFile], hidden: AbstractSet[tuple[str, ...]]) -> Iterator[str]:
    """Yield the settings that are neither hidden nor written, table by table."""
    settings = {each.name: each.type for each in structs.fields(schema) if (each.name,) not in hidden}
    tables = {name: table for name, kind in settings.items() if (table := struct_in(kind)) is not None}
    yield from _lines(schema, settings.keys() - tables.keys() - _WRITTEN)
    for name, table in tables.items():
        if table is PrivacySettings:
            yield from _privacy(hidden)
        else:
            yield f"\n[{name}]\n"
            yield from _lines(table, {each for each in table.__struct_fields__ if (name, each) not in hidden})


def _privacy(hidden: AbstractSet[tuple[str, ...]]) -> Iterator[str]:
    yield f"\n# {PrivacySettings.__doc__}\n"
    texts = described(PrivacySettings)
    for field in structs.fields(PrivacySettings):
        table = struct_in(field.type)
        if table is not None and ("privacy", field.name) not in hidden:
            yield f"# [privacy.{field.name}]   # {texts[field.name]['description']}\n"
            yield from _lines(table, set(table.__struct_fields__), indent="  ")


def _lines(table: type[msgspec.Struct], names: AbstractSet[str], indent: str = "") -> Iterator[str]:
    """Yield a comment for each named setting of a table that has a default or an example."""
    settings = {name: each for name, each in described(table).items() if name in names}
    shown = {name: f"# {indent}{name} = {_toml(_value(each))}" for name, each in settings.items()}
    width = max(map(len, shown.values()), default=0)
    for name, setting in settings.items():
        if (value := _value(setting)) is not None:
            others = ", ".join(_toml(other) for other in setting.get("enum", []) if other != value)
            comment = ": ".join(filter(None, [others and f"or {others}", setting.get("description")]))
            yield (f"{shown[name]:{width}}   # {comment}" if comment else shown[name]) + "\n"


def _value(setting: Mapping[str, Any]) -> Any:
    """Return the default, without one an example, and None without that."""
    default = setting.get("default")
    return default if default is not None else next(iter(setting.get("examples", [])), None)


def _toml(value: Any) -> str:
    # JSON of a string, a number, a truth value or a list of them is TOML.
    return json.dumps(value, ensure_ascii=False)
