"""Annotations of the status's fields beside `msgspec.Meta`: what Prometheus and the terminal get of them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

Samples = float | Mapping[str, float] | None
"""The sample of a metric, or one for each value of its label; None for no sample."""


@dataclass(frozen=True)
class Metric:
    """A metric of Prometheus, computed from a field. Fields with the same metric add up."""

    name: str
    """Without the prefix `protofleet_`."""
    text: str = ""
    """Its help text; the field's description if empty."""
    value: Callable[[Any], Samples] = lambda value: value
    """Gets the field's value; of a struct in a tuple, such as a device, a list of the values of all."""
    label: str = ""
    """The label of the samples, where `value` returns several."""
    is_counter: bool = False


@dataclass(frozen=True)
class Line:
    """A line of `aggregator status`, of a field that is not None and whose text is not empty."""

    label: str
    text: Callable[[Any], str] = str
    style: str = ""


@dataclass(frozen=True)
class Field:
    """A field of a struct, with its annotations."""

    name: str
    description: str
    metrics: Sequence[Metric]
    lines: Sequence[Line]
    struct: type[msgspec.Struct] | None
    """Of the value, or of each one of a tuple."""
    is_tuple: bool


@cache
def fields_of(struct: type[msgspec.Struct]) -> tuple[Field, ...]:
    """Return the fields of a struct in their order."""
    hints = get_type_hints(struct, include_extras=True)
    return tuple(_field(name, hints[name]) for name in struct.__struct_fields__)


def _field(name: str, hint: Any) -> Field:
    kind, *annotations = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    options = () if get_origin(kind) is dict else get_args(kind) or (kind,)
    structs = (each for each in options if isinstance(each, type) and issubclass(each, msgspec.Struct))
    return Field(
        name,
        next((each.description or "" for each in annotations if isinstance(each, Meta)), ""),
        [each for each in annotations if isinstance(each, Metric)],
        [each for each in annotations if isinstance(each, Line)],
        next(structs, None),
        is_tuple=get_origin(kind) is tuple,
    )


def metrics_of(
    struct: type[msgspec.Struct], objects: Sequence[msgspec.Struct], *, are_all: bool = False
) -> Iterator[tuple[Metric, str, Samples]]:
    """Yield each metric of a struct and of those in it, with its help text and its samples.

    They are of one object, or of none, whose metrics have no samples; with `are_all`, of any number of objects.
    """
    for field in fields_of(struct):
        values = [getattr(each, field.name) for each in objects]
        for metric in field.metrics:
            found = metric.value(values) if are_all else metric.value(values[0]) if values else None
            yield metric, metric.text or field.description, found
        if field.struct is not None:
            inner = [each for value in values for each in (value if field.is_tuple else [value])]
            present = [each for each in inner if each is not None]
            yield from metrics_of(field.struct, present, are_all=are_all or field.is_tuple)


def lines_of(struct: msgspec.Struct) -> Iterator[tuple[str, str, str]]:
    """Yield label, text and style of the lines of a struct's own fields."""
    for field in fields_of(type(struct)):
        for line in field.lines:
            value = getattr(struct, field.name)
            if value is not None and (text := line.text(value)):
                yield line.label, text, line.style


def total(counts: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    """Return the sum of each key's counts."""
    counter: Counter[str] = Counter()
    for each in counts:
        counter.update(each)
    return counter


def number(values: Sequence[Any]) -> int:
    """Return how many of the values are not empty."""
    return sum(bool(each) for each in values)


def greatest(values: Sequence[float | None]) -> float | None:
    """Return the greatest of the values that are known."""
    return max((each for each in values if each is not None), default=None)
