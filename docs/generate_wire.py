"""Write `docs/wire-fields.md` from the structs of the messages: `python -m docs.generate_wire`.

Types, bounds and defaults come from annotations, meanings from docstrings, and those of reasons from comments.
"""

import ast
import inspect
import itertools
import re
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from protocol.wire import messages

PAGE = Path(__file__).with_name("wire-fields.md")
SOURCE = inspect.getsource(messages)
NAMED = {name: kind for name, kind in vars(messages).items() if get_origin(kind) in (Annotated, Literal)}
del NAMED["Version"]  # its bounds are those of other numbers, too
STRUCTS: list[Any] = [each for each in vars(messages).values() if isinstance(each, msgspec.StructMeta)]
STRUCTS.remove(messages.Message)
WORDS = {str: "text", bytes: "bytes", int: "integer", float: "float", type(None): "nil"}
UNITS = {str: " characters", tuple: " items", dict: " entries"}
POWERS: dict[float, str] = {2**32: "2^32", 2**62: "2^62", 2**63 - 1: "2^63 - 1"}

PREFACE = """\
# Fields of the wire protocol

The fields of every message of the [protocol](protocol.md), written by `python -m docs.generate_wire` from
[messages.py](../protocol/wire/messages.py).

A field without a default is required. One with the default *absent* is left out, and is never nil. A float may be
encoded as an integer; it is never NaN or infinite. Text is UTF-8, and its characters are Unicode code points. (A, B)
is an array of exactly these two. A missing field, another type or a value out of its bounds makes the message
malformed.
"""
MESSAGES = """\
Each is a map of these fields, `type`, and `v`: the protocol version (integer, 0 to 65,535, required). `Frame` is an
array: its type, and then the fields in the order of its table.
"""
PARTS = """\
Maps inside messages, without `type` and `v`. `Tensor`, `Confused` and `Released` are arrays of their fields, in the
order of their tables.
"""


def meanings(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each name (`NAME` or `Struct.field`) with the docstring below its assignment."""
    for node, below in itertools.pairwise([*body, ast.Pass()]):
        if isinstance(node, ast.ClassDef):
            yield from meanings(node.body, f"{node.name}.")
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield prefix + ast.unparse(target), " ".join(ast.literal_eval(below.value).split())


MEANINGS = dict(meanings(ast.parse(SOURCE).body))


def number(value: float) -> str:
    """Return a number with separators, or as a power of two."""
    return POWERS.get(value) or f"{value:,}".removesuffix(".0")


def bounds(meta: msgspec.Meta, unit: str) -> str:
    """Return the bounds of an annotation in words, each after a comma."""
    if meta.pattern is not None:
        return f", `{meta.pattern}`".replace(r"\Z", "$")
    least = meta.ge if meta.min_length is None else meta.min_length
    most = meta.le if meta.max_length is None else meta.max_length
    if least is not None and most is not None:
        return f", {number(least)}{unit}" if least == most else f", {number(least)} to {number(most)}{unit}"
    words = (("above", meta.gt), ("at least", least), ("at most", most), ("below", meta.lt))
    return "".join(f", {word} {number(bound)}{unit}" for word, bound in words if bound is not None)


def describe(kind: Any) -> str:
    """Return a type in words, in terms of named types."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner = arguments[0]
        return name_of(inner) + bounds(arguments[1], UNITS.get(get_origin(inner) or inner, ""))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    names = [name_of(each) for each in arguments if each not in (Ellipsis, msgspec.UnsetType)]
    if origin in (Union, types.UnionType):
        return " or ".join(names)
    if origin is tuple:
        return f"list of {names[0]}" if Ellipsis in arguments else f"({', '.join(names)})"
    if origin is dict:
        return f"map of {names[0]} to {names[1]}"
    return WORDS.get(kind) or f"[{kind.__name__}](#{kind.__name__.lower()})"


def name_of(kind: Any) -> str:
    """Return the name of a type, or its description if it has none."""
    return next((name for name, each in NAMED.items() if each == kind), None) or describe(kind)


def default(field: msgspec.structs.FieldInfo) -> str:
    """Return a field's default as JSON; empty if it is required."""
    if field.default is msgspec.UNSET:
        return "*absent*"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()}`"
    return "" if field.required else f"`{msgspec.json.encode(field.default).decode()}`".replace("null", "nil")


def table(*head: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ("---",) * len(head), *rows))


def section(struct: type[msgspec.Struct]) -> str:
    """Return a struct's name, docstring and table; raises KeyError if a field has no docstring."""
    hints, tag = get_type_hints(struct, include_extras=True), struct.__struct_config__.tag
    rows = [
        (f"`{name}`", name_of(hints[name]), default(field), MEANINGS[f"{struct.__name__}.{name}"])
        for field in msgspec.structs.fields(struct)
        if (name := field.name) != "v" or struct is messages.Frame
    ]
    title = f"\n### {struct.__name__}\n" + (f"\n`type`: `{tag}`\n" if tag else "")
    return f"{title}\n{inspect.getdoc(struct)}\n\n" + table("field", "type", "default", "meaning", rows=rows)


def render() -> str:
    """Return the whole page; raises KeyError if a constant, a field or a reason has no meaning."""
    names = vars(messages).items()
    limits = ((f"`{name}`", number(each), MEANINGS[name]) for name, each in names if isinstance(each, int))
    kinds = (
        (name, describe(each), MEANINGS.get(name, "")) for name, each in NAMED.items() if name != "Reason"
    )
    comments = dict(re.findall(r'^    "(\w+)",  # (.+)$', SOURCE, re.MULTILINE))
    reasons = ((f"`{each}`", comments[each]) for each in get_args(messages.Reason))
    sections = {
        "Types": table("type", "values", "meaning", rows=kinds),
        "Messages": MESSAGES + "".join(section(each) for each in STRUCTS if each.__struct_config__.tag),
        "Parts of messages": PARTS
        + "".join(section(each) for each in STRUCTS if not each.__struct_config__.tag),
        "Reasons": table("reason", "why a message is refused", rows=reasons),
        "Limits": table("constant", "value", "meaning", rows=limits),
    }
    return PREFACE + "".join(f"\n## {title}\n\n{text}" for title, text in sections.items())


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
