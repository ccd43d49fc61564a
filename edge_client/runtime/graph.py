"""The aggregator's graphs on the device: looked through, opened in ONNX Runtime, their inputs bound by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_client.runtime.backbone import first_line, open_session, require_runtime
from edge_client.runtime.onnx_validation import check_graph
from edge_client.runtime.watchdog import ending
from protocol.errors import BackboneMismatch, GraphRefused
from protocol.metadata import GraphMetadata, graph_metadata

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
            with ending() as options:
                given = self.session.run(list(self.outputs), dict(feeds), options)
            return dict(zip(self.outputs, given, strict=True))
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
