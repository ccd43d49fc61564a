"""Write `docs/operations/task-settings.md` from the schema of the task file: `python -m docs.generate_task_file`.

Meanings come from the docstrings below the settings, values and defaults from annotations. What makes a new task, and
which algorithms use a setting, is tried.
"""

import ast
import contextlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.registry import ALGORITHMS
from aggregator.config.privacy import PrivacyBudget, PrivacySettings, SumsSettings
from aggregator.config.schema import TaskFile, described
from aggregator.config.template import hidden_settings
from aggregator.tasks.graph_cache import graphs_key
from aggregator.tasks.manifests import task_manifest
from docs.generate_wire import bounds, meanings, table
from protocol.wire.codec import encode
from protocol.wire.messages import BlobRef, Perturbation, SecondOperator, Statistics

PAGE = Path(__file__).parent / "operations" / "task-settings.md"

PREFACE = """\
# Settings of the task file

Every setting of the [task file](task-file.md), written by `python -m docs.generate_task_file` from the docstrings of
[schema.py](../../aggregator/config/schema.py) and of the [algorithms](../../aggregator/algorithms/).

A setting with the default *unset* does nothing until you set it, or its meaning says what then holds. *used by*: the
algorithms that use the setting; empty for all of them that use its table. *new task*: a change makes another task, as
[the task file](task-file.md#changes) explains.
"""
LINKS = {
    "algorithm": "[Which one](../which-algorithm.md)",
    "layers": "[How to export them](../export.md#layers)",
    "client.batch_size": "[Why](../without-noise.md#sums-of-single-images)",
    "training.recipe": "[Why](../adr/0076-choice-of-head.md)",
    "training.calibrate": "[Calibrated heads](heads.md#calibrated-heads)",
    "training.engine": "[Ray](ray.md)",
    "robust.detect_outliers": "[Quarantine](quarantine.md)",
    "robust.max_multiple": "[How](quarantine.md#how-much-a-device-counts)",
    "limits.max_devices": "[Quotas](many-fleets.md#quotas)",
    "rollout.canary_fraction": "[Rollout](heads.md)",
    "rollout.min_canaries": "[When](heads.md#after-the-activation)",
    "privacy.perturbation.on": "[Privacy](../without-noise.md#perturbation)",
    "privacy.dp.epsilon": "[Privacy](../privacy.md#differential-privacy)",
    "fedpcl.prior": "[Class prior](../rounds.md#the-class-prior)",
}
"""More about a setting, in a page."""

FILE = TaskFile(classes=("a", "b"), backbones=("b.onnx",))
NOISE = PrivacySettings(
    perturbation=Perturbation(on="prototypes", scale=0.1),
    dp=PrivacyBudget(epsilon=2.0, map="public.map", max_epsilon=8.0),
    sums=SumsSettings(operator="operator.toml", min_devices=10),
)

Place = tuple[str, ...]
"""The path of a table, or of a setting."""


def tables() -> dict[Place, Any]:
    """Return each table of the file by its path, with values for all required settings."""
    found: dict[Place, Any] = {(): FILE}
    for name in FILE.__struct_fields__:
        if isinstance(each := getattr(FILE, name), msgspec.Struct) and name != "privacy":
            found[name,] = each
    return found | {("privacy", name): getattr(NOISE, name) for name in NOISE.__struct_fields__}


def texts(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstring below each setting of a table; that of the base class, if a class repeats a setting."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        with contextlib.suppress(OSError, TypeError):  # TaskFile and builtins have no source
            found |= meanings(ast.parse(inspect.getsource(each)).body)
    return {name.rpartition(".")[2]: text for name, text in found.items()}


def users(path: Place) -> list[str]:
    """Return the algorithms that use a table or a setting."""
    prefixes = {path[:end] for end in range(1, len(path) + 1)}
    return [name for name in ALGORITHMS if not prefixes & hidden_settings(name)]


def group(names: list[str]) -> str:
    """Return a list of algorithms in words."""
    rounds = [name for name, kind in ALGORITHMS.items() if issubclass(kind, RoundAlgorithm)]
    words = {tuple(rounds): "rounds", tuple(name for name in ALGORITHMS if name not in rounds): "one-shot"}
    return words.get(tuple(names)) or ", ".join(f"`{name}`" for name in names)


def identity(file: TaskFile) -> bytes:
    """Return everything in a file that the sha256 of its task depends on."""
    names = file.backbones
    blobs = [BlobRef(digest=name.encode().ljust(32), size_bytes=1, name=name) for name in names]
    method, learning = file.method, file.learning
    graphs = None if learning is None else (graphs_key(file, 1), learning.batch_size)
    sums = msgspec.to_builtins(method) if method.sums else None
    public = None
    if (dp := file.privacy.dp) is not None:
        blob = BlobRef(digest=dp.map.encode().ljust(32), size_bytes=1, name=dp.map)
        public = Statistics(map=blob, size=256)
    if (asked := file.privacy.sums) is not None:
        key = asked.operator.encode().ljust(32)
        operator = SecondOperator(
            seal_key=key,
            seal_key_signature=key * 2,
            sign_key=key,
            aggregator_key=key,
            min_devices=asked.min_devices,
            honest=asked.honest,
        )
        blob = BlobRef(digest=bytes(32), size_bytes=1, name="public.map")
        public = Statistics(map=blob, size=256, second_operator=operator)
    return encode(task_manifest(file, blobs, statistics=public)) + msgspec.msgpack.encode(
        (file.layers, file.continues, graphs, sums)
    )


def with_table(path: Place, value: Any) -> TaskFile:
    """Return a file with one table, of an algorithm that uses it."""
    if isinstance(value, TaskFile):
        return value
    file = replace(FILE, algorithm=users(path)[0])
    if path[0] == "privacy":
        value = replace(PrivacySettings(), **{path[1]: value})
    return replace(file, **{path[0]: value})


def others(value: msgspec.Struct, name: str, schema: dict[str, Any]) -> Iterator[Any]:
    """Yield tables with other values of a setting, as far as they are valid."""
    now = getattr(value, name)
    guesses = [
        *schema.get("enum", ()),
        *schema.get("examples", ()),
        not now,
        1,
        "x",
        "cpu",
        ["x", "y"],
        "0" * 64,
    ]
    guesses += [now + 1, now - 1, now / 2, now + 0.25] if isinstance(now, int | float) else []
    given = msgspec.to_builtins(value)
    for guess in guesses:
        with contextlib.suppress(msgspec.ValidationError):
            other = msgspec.convert({**given, name: guess}, type(value))
            if getattr(other, name) != now:
                yield other


def makes_new_task(path: Place, value: Any, name: str, schema: dict[str, Any]) -> bool:
    """Return True if another value of a setting makes another task."""
    return identity(with_table(path, next(others(value, name, schema)))) != identity(with_table(path, value))


def values(schema: dict[str, Any]) -> str:
    """Return the values that a setting accepts."""
    schema = next((each for each in schema.get("anyOf", ()) if each["type"] != "null"), schema)
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(each)}`" for each in schema["enum"])
    if schema["type"] == "array":
        return bounds(
            msgspec.Meta(min_length=schema["minItems"], max_length=schema.get("maxItems")), " items"
        ).removeprefix(", ")
    if schema["type"] == "boolean":
        return "`true` or `false`"
    keys = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    limits = bounds(msgspec.Meta(**{name: schema[key] for name, key in keys.items() if key in schema}), "")
    return {"integer": "integer", "number": "number", "string": "text"}[schema["type"]] + limits


def default(schema: dict[str, Any], *, required: bool) -> str:
    """Return a setting's default as TOML, *unset* or required."""
    if required:
        return "required"
    return "*unset*" if schema["default"] is None else f"`{json.dumps(schema['default'])}`"


def section(path: Place, value: Any) -> str:
    """Return a table's title, its docstring and its settings."""
    kind = type(value)
    meaning, schemas = texts(kind), described(kind)
    required = {field.name for field in msgspec.structs.fields(kind) if field.required}
    rows = []
    for name, schema in schemas.items():
        if "$ref" in schema:  # a table of its own
            continue
        place = (*path, name)
        used = group(used_by) if (used_by := users(place)) != users(path) else ""
        text = f"{meaning[name]} {LINKS.get('.'.join(place), '')}".strip()
        new = "yes" if makes_new_task(path, value, name, schema) else ""
        rows.append(
            (f"`{name}`", default(schema, required=name in required), values(schema), text, used, new)
        )
    text = re.sub(r"^`\[[\w.]+\]`: (.)", lambda found: found[1].upper(), inspect.getdoc(kind) or "")
    own = f"\n\nUsed by: {group(users(path))}." if users(path) not in ([*ALGORITHMS], [*path]) else ""
    head = ("setting", "default", "values", "meaning", "used by", "new task")
    title = f"## `[{'.'.join(path)}]`\n\n{text}{own}" if path else "## Top of the file"
    return f"\n{title}\n\n" + table(*head, rows=rows)


def render() -> str:
    """Return the whole page; raises KeyError if a setting has no docstring."""
    return PREFACE + "".join(section(path, value) for path, value in tables().items())


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
