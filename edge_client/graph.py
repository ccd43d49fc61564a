"""The aggregator's graphs on the device: looked through, opened in ONNX Runtime, their inputs bound by name."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_client.backbone import first_line, open_session, require_runtime
from protocol.errors import BackboneMismatch, GraphRefused
from protocol.metadata import PROPERTY, GraphMetadata, graph_metadata

MAX_GRAPH_BYTES = 64 * 1024**2

MAX_FIELDS = 2**18
"""Fields of a graph's file: a tensor's values are one. So looking through it ends soon, whatever it is full of."""

MAX_ENTRY_FIELDS = 16
"""Of a property: it has two."""

MAX_DEPTH = 100
"""Messages in one another: protobuf's own limit, and so ONNX Runtime's."""

Role: TypeAlias = Literal["init", "step", "project", "head"]

Tensors: TypeAlias = Mapping[str, NDArray[Any]]
"""Arrays by the names under which graphs ask for them."""

FREE = ("feature", "labels")
"""Inputs of which every run brings its own."""

_DTYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}

# What holds what in ONNX's own format, by field number, as far as it leads to operators or tensors.
_DOMAIN, _EXTERNAL, _ENTRY = "domain", "external", "entry"
_NESTED: dict[str, dict[int, str]] = {
    "model": {7: "graph", 8: "opset", 14: _ENTRY, 20: "training", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute", 7: _DOMAIN},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "tensor": {13: _EXTERNAL, 14: _EXTERNAL},
    "sparse": {1: "tensor", 2: "tensor"},
    "opset": {1: _DOMAIN},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 9: "opset", 10: _DOMAIN, 11: "attribute"},
}


@dataclass(frozen=True)
class Slot:
    """What an array has to be like: an edge that is None may have any length."""

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join('any' if edge is None else str(edge) for edge in self.shape)})"


@dataclass(frozen=True)
class Graph:
    """A graph of a program in ONNX Runtime.

    Args:
        metadata: what the file says of itself.
        session: ONNX Runtime's.
        inputs: what it takes, by name.
        outputs: what it gives, by name.
    """

    metadata: GraphMetadata
    session: Any
    inputs: Mapping[str, Slot]
    outputs: Mapping[str, Slot]

    def run(self, feeds: Tensors) -> dict[str, NDArray[Any]]:
        """All of its outputs.

        Raises:
            GraphRefused: it fails on these arrays.
        """
        try:
            return dict(zip(self.outputs, self.session.run(list(self.outputs), dict(feeds)), strict=True))
        except Exception as error:  # ONNX Runtime has no error of its own to catch
            raise failed(self.metadata.role, error) from error


def failed(role: str, error: Exception) -> GraphRefused:
    """What to raise when a graph does not run."""
    return GraphRefused(f"the {role} graph fails on what it is given: {first_line(error)}")


def open_graph(file: bytes, *, role: Role, threads: int = 1) -> Graph:
    """Look a graph of a program through and load it.

    Args:
        file: the ONNX file's bytes.
        role: what it is to be for.
        threads: CPU threads of one run.

    Raises:
        GraphRefused: it is not such a graph, not one that this device runs, or needs a newer ONNX Runtime.
    """
    try:
        metadata = graph_metadata(check_graph(file))
    except BackboneMismatch as error:
        raise GraphRefused(str(error)) from error
    if metadata.role != role:
        raise GraphRefused(f"expected the graph for {role}, got the one for {metadata.role}")
    version = require_runtime().__version__
    if _numbers(version) < _numbers(metadata.runtime_min):
        raise GraphRefused(
            f"the {role} graph needs ONNX Runtime {metadata.runtime_min} or newer, here is {version}: upgrade it"
        )
    session = open_checked(file, threads=threads)
    graph = Graph(metadata, session, _slots(session.get_inputs()), _slots(session.get_outputs()))
    _check_ends(graph)
    return graph


def open_checked(file: bytes, *, threads: int = 1) -> Any:
    """An ONNX Runtime session, on the CPU, for a file that `check_graph` let pass.

    Raises:
        GraphRefused: ONNX Runtime cannot load it.
    """
    try:
        return open_session(file, provider="cpu", threads=threads).session
    except BackboneMismatch as error:
        raise GraphRefused(str(error)) from error


def check_graph(file: bytes) -> dict[str, str]:
    """Look through an ONNX file before ONNX Runtime sees it; returns what it says of itself, if it does.

    It is taken apart here, for there is no `onnx` on a device. Every occurrence of a field counts, also of one
    that a reader would overwrite with a later one, and what a reader could understand in two ways is refused.

    Raises:
        GraphRefused: it is too large, broken, uses operators outside ONNX's own, or refers to other files.
    """
    if len(file) > MAX_GRAPH_BYTES:
        raise GraphRefused(f"expected a graph of at most {MAX_GRAPH_BYTES} bytes, got {len(file)}")
    properties: dict[str, str] = {}
    seen = 0
    open_messages = [("model", _fields(memoryview(file)))]
    while open_messages:
        message, fields = open_messages[-1]
        for number, value in fields:
            seen += 1
            kind = _NESTED[message].get(number)
            if kind == _EXTERNAL and value:
                raise GraphRefused("expected a graph in one file, got one that keeps tensors in other files")
            if kind is None or isinstance(value, int):
                continue
            if kind == _DOMAIN:
                _check_domain(value)
            elif kind == _ENTRY:
                properties.update(_own_property(value))
            else:
                open_messages.append((kind, _fields(value)))
                break
        else:
            open_messages.pop()
        if seen > MAX_FIELDS or len(open_messages) > MAX_DEPTH:
            raise GraphRefused(f"expected a graph of at most {MAX_FIELDS} fields, {MAX_DEPTH} in one another")
    return properties


def bind(graph: Graph, tensors: Tensors) -> dict[str, NDArray[Any]]:
    """The arrays that a graph asks for, beside those of which every run brings its own.

    They are copied only where their dtype or layout has to change.

    Raises:
        GraphRefused: one is missing or does not fit.
    """
    wanted = [name for name in graph.inputs if name not in FREE]
    missing = ", ".join(name for name in wanted if name not in tensors)
    if missing:
        raise GraphRefused(
            f"the {graph.metadata.role} graph asks for {missing}; there are {', '.join(tensors) or 'none'}"
        )
    return {name: fit(name, tensors[name], graph.inputs[name]) for name in wanted}


def fit(name: str, array: NDArray[Any], slot: Slot) -> NDArray[Any]:
    """An array as a slot wants it, in memory as ONNX Runtime reads it.

    Raises:
        GraphRefused: it has another shape, or a dtype of another kind: no fraction becomes an integer.
    """
    same = len(array.shape) == len(slot.shape) and all(
        wanted in (None, edge) for edge, wanted in zip(array.shape, slot.shape, strict=True)
    )
    if not same or not np.can_cast(array.dtype, slot.dtype, "same_kind"):
        raise GraphRefused(f"tensor {name!r} must be {slot}, and is {Slot(array.dtype, array.shape)}")
    return np.require(array, slot.dtype, ["C", "A"])


def _check_ends(graph: Graph) -> None:
    """See that a graph takes features and gives what its role promises."""
    metadata, gives = graph.metadata, set(graph.outputs)
    feature = Slot(np.dtype(np.float32), (None, metadata.feature_size))
    if graph.inputs.get("feature") != feature:
        takes = ", ".join(f"{name} {slot}" for name, slot in graph.inputs.items())
        raise GraphRefused(f"the {metadata.role} graph must take feature {feature}, and takes {takes}")
    good = {
        "init": bool(gives),
        "step": "loss" in gives and all(name.startswith("next_") for name in gives - {"loss"}),
        "project": gives == {"projection"},
        "head": "probabilities" in gives,
    }
    if not good[metadata.role]:
        raise GraphRefused(f"a {metadata.role} graph does not give {', '.join(sorted(gives))}")


def _slots(values: list[Any]) -> dict[str, Slot]:
    for value in values:
        if value.type not in _DTYPES:
            raise GraphRefused(f"{value.name} is of {value.type}; expected one of {', '.join(_DTYPES)}")
    return {
        value.name: Slot(
            np.dtype(_DTYPES[value.type]),
            tuple(edge if isinstance(edge, int) else None for edge in value.shape),
        )
        for value in values
    }


def _numbers(version: str) -> tuple[int, ...]:
    """The two numbers of a version that say which operators there are."""
    return tuple(int(part) for part in version.split(".")[:2])


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Take a protobuf message apart: each field's number and its value, an integer or bytes.

    Raises:
        GraphRefused: it is none.
    """
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, encoding = tag >> 3, tag & 7
        if not 0 < tag < 2**32 or encoding not in (0, 1, 2, 5):
            raise GraphRefused("expected an ONNX file, got bytes that are none")
        if encoding == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        size, at = _varint(data, at) if encoding == 2 else ({1: 8, 5: 4}[encoding], at)
        if at + size > len(data):
            raise GraphRefused("expected an ONNX file, got one that ends in the middle, or none")
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """An integer of seven bits a byte, and where it ends."""
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise GraphRefused("expected an ONNX file, got one that ends in the middle, or none")


def _check_domain(value: memoryview) -> None:
    domain = _text(value)
    if domain not in {"", "ai.onnx"}:
        raise GraphRefused(f"expected ONNX's own operators alone, got some of {domain[:100]!r}")


def _own_property(value: memoryview) -> dict[str, str]:
    """The property in an entry, if it is ours."""
    fields = list(itertools.islice(_fields(value), MAX_ENTRY_FIELDS + 1))
    if len(fields) > MAX_ENTRY_FIELDS:
        raise GraphRefused(f"expected properties of at most {MAX_ENTRY_FIELDS} fields, got one of more")
    entry = dict(fields)
    return {PROPERTY: _text(entry.get(2))} if _text(entry.get(1)) == PROPERTY else {}


def _text(value: int | memoryview | None) -> str:
    return bytes(value).decode(errors="replace") if isinstance(value, memoryview) else ""
