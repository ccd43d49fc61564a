"""The graphs of a task's program: opened for a role, their inputs bound by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_client.graphs.onnx_model import OnnxModel, Tensors, fit, open_model
from edge_client.graphs.session import require_runtime
from protocol.errors import BackboneMismatch, GraphRefused
from protocol.models.onnx_metadata import GraphMetadata, read_metadata
from protocol.models.slots import Slot, describe

Role = Literal["init", "step", "project", "head"]

FREE = ("feature", "labels")
"""Inputs that every run brings itself."""

MAX_NAME = 128
"""Characters of an input's or output's name: names are stored with the state, as those of files in an archive."""


@dataclass(frozen=True)
class Graph:
    """A graph of a program: its metadata and its model."""

    metadata: GraphMetadata
    model: OnnxModel

    def bind(self, tensors: Tensors) -> dict[str, NDArray[Any]]:
        """Return the arrays for all inputs but FREE, as `fit` does; raises GraphRefused if one is missing."""
        wanted = [name for name in self.model.inputs if name not in FREE]
        missing = ", ".join(name for name in wanted if name not in tensors)
        if missing:
            raise GraphRefused(
                f"the {self.model.name} asks for {missing}; there are {', '.join(tensors) or 'none'}"
            )
        return {name: fit(name, tensors[name], self.model.inputs[name]) for name in wanted}


def open_graph(file: bytes, *, role: Role, threads: int = 1) -> Graph:
    """Open the graph of a program for a role, from the ONNX file's bytes.

    Raises:
        GraphRefused: it is not such a graph, cannot be run here, or needs a newer ONNX Runtime.
    """
    model = open_model(
        file,
        name=f"{role} graph",
        threads=threads,
        accept=lambda properties: _check_metadata(graph_metadata(properties), role),
    )
    graph = Graph(graph_metadata(model.properties), model)
    _check_ends(model, graph.metadata)
    return graph


def graph_metadata(properties: Mapping[str, str]) -> GraphMetadata:
    """Return the metadata in a graph's properties; raises GraphRefused if there is none, or it is malformed."""
    try:
        return read_metadata(properties, GraphMetadata)
    except BackboneMismatch as error:
        raise GraphRefused(str(error)) from error


def _check_metadata(metadata: GraphMetadata, role: Role) -> None:
    if metadata.role != role:
        raise GraphRefused(f"expected the graph for {role}, got the one for {metadata.role}")
    version = require_runtime().__version__
    if _numbers(version) < _numbers(metadata.runtime_min):
        raise GraphRefused(
            f"the {role} graph needs ONNX Runtime {metadata.runtime_min} or newer, here is {version}: upgrade it"
        )


def _check_ends(model: OnnxModel, metadata: GraphMetadata) -> None:
    if (longest := max(map(len, (*model.inputs, *model.outputs)), default=0)) > MAX_NAME:
        raise GraphRefused(f"expected names of at most {MAX_NAME} characters, got one of {longest}")
    feature, gives = Slot(np.dtype(np.float32), (None, metadata.feature_size)), set(model.outputs)
    # Steps that were exported by an earlier version take features of any length.
    any_length = Slot(np.dtype(np.float32), (None, None))
    if model.inputs.get("feature") not in (feature, any_length if metadata.role == "step" else feature):
        raise GraphRefused(
            f"the {model.name} must take feature {feature}, and takes {describe(model.inputs)}"
        )
    valid = {
        "init": bool(gives),
        "step": "loss" in gives and all(name.startswith("next_") for name in gives - {"loss"}),
        "project": gives == {"projection"},
        "head": "probabilities" in gives,
    }
    if not valid[metadata.role]:
        raise GraphRefused(f"a {model.name} does not give {', '.join(sorted(gives))}")


def _numbers(version: str) -> tuple[int, ...]:
    """Return major and minor version, which determine the supported operators."""
    return tuple(int(part) for part in version.split(".")[:2])
