"""The graphs of a program against PyTorch: many batches and fleets, ten steps, and the law of `Basis`."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from aggregator.algorithms.algorithm import Algorithm, Functions
from aggregator.graphs.parity import (
    Comparison,
    Graph,
    Tensors,
    comparisons,
    opened,
    precise,
    random_case,
    require_equal,
)
from aggregator.graphs.program_export import Graphs
from protocol.models.onnx_metadata import Basis

BATCHES = (1, 5, 32)
"""Images in a step."""
FLEETS = (0, 1, 3, 17)
"""Contributions aggregated into the previous round."""
STEPS = 10


def check_all_cases(graphs: Graphs, algorithm: Algorithm, *, feature_size: int, num_classes: int) -> None:
    """Raise ProtofleetError if a graph differs from PyTorch in any of the cases."""
    functions = algorithm.functions(feature_size=feature_size, num_classes=num_classes, seed=0)
    run = {role: opened(file) for role, file in vars(graphs).items()}
    sizes = {"feature_size": feature_size, "num_classes": num_classes}
    for devices in FLEETS:
        for batch in BATCHES:
            tensors = random_case(algorithm, functions, **sizes, batch=batch, devices=devices)
            for comparison in _all_comparisons(run, functions, tensors):
                require_equal(comparison, algorithm=algorithm.name)
    nothing = {
        "feature": torch.zeros(0, feature_size),
        "labels": torch.zeros(0, dtype=torch.int64),
    }
    for name, value in functions.init.apply(nothing).items():
        assert torch.equal(run["init"](nothing)[name], value)


def _all_comparisons(
    graphs: dict[str, Graph], functions: Functions, tensors: Tensors
) -> Iterator[Comparison]:
    yield from comparisons(graphs, functions, tensors, steps=STEPS)
    if functions.basis is not None:
        yield from rotated_steps(graphs["step"], functions, functions.basis, tensors)


def rotated_steps(graph: Graph, functions: Functions, basis: Basis, tensors: Tensors) -> Iterator[Comparison]:
    """Yield the first two steps in another basis, and what they must be by the law of `Basis`."""
    for _ in range(2):
        rotate = _rotation(tensors, basis)
        values = functions.step.apply(tensors), functions.step.apply(precise(tensors))
        rotated = {
            **tensors,
            **{name: rotate(tensors[name]) for name in (*basis.tensors, *basis.momenta)},
            "feature": rotate(_standardized(tensors, basis)),
            basis.mean: tensors[basis.mean].new_zeros(len(tensors[basis.mean]) + 1),
            basis.deviation: tensors[basis.deviation].new_ones(len(tensors[basis.deviation]) + 1),
        }
        axes = {f"next_{name}" for name in (*basis.tensors, *basis.momenta)}
        theirs, exact = (
            {("outputs", name): rotate(value) if name in axes else value for name, value in run.items()}
            for run in values
        )
        yield Comparison({("outputs", name): value for name, value in graph(rotated).items()}, theirs, exact)
        after = {name.removeprefix("next_"): value for name, value in values[0].items()}
        tensors = {**tensors, **after}


def _standardized(tensors: Tensors, basis: Basis) -> Tensor:
    return (tensors["feature"] - tensors[basis.mean]) / tensors[basis.deviation]


def _rotation(tensors: Tensors, basis: Basis) -> Callable[[Tensor], Tensor]:
    """Return a map of rows (..., L) to L + 1 axes that keeps products with features, and lengths.

    It reflects all of them alike, and each row of a tensor also in a direction of its own that no feature has.
    """
    inputs = _standardized(precise(tensors), basis)
    length = inputs.shape[1]
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(length + 1, generator=generator, dtype=torch.float64)
    normal /= normal.norm()
    span = torch.linalg.qr(inputs.T).Q if len(inputs) < length else None

    def rotate(values: Tensor) -> Tensor:
        rows = values.double().reshape(-1, length)
        if span is not None:  # features have nothing in that direction
            free = torch.randn(rows.shape, generator=generator.manual_seed(1), dtype=torch.float64)
            free -= free @ span @ span.T
            free /= free.norm(dim=1, keepdim=True)
            rows = rows - 2 * (rows * free).sum(dim=1, keepdim=True) * free
        rows = torch.nn.functional.pad(rows, (0, 1))
        rows = rows - 2 * torch.outer(rows @ normal, normal)
        return rows.reshape(*values.shape[:-1], length + 1).to(values.dtype)

    return rotate
