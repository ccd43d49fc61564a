"""The graphs of a program against PyTorch: many batches and fleets, ten steps, and the law of `Basis`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aggregator.algorithms.algorithm import Functions, RoundAlgorithm
from aggregator.graphs.parity import Graph, Tensors, opened, precise, random_case, require_equal
from aggregator.graphs.program_export import Graphs
from protocol.models.onnx_metadata import Basis

BATCHES = (1, 5, 32)
"""Images in a step."""
FLEETS = (0, 1, 3, 17)
"""Contributions aggregated into the previous round."""
STEPS = 10


def check_all_cases(
    graphs: Graphs, algorithm: RoundAlgorithm, *, feature_size: int, num_classes: int
) -> None:
    """Raise ProtofleetError if a graph differs from PyTorch in any of the cases."""
    functions = algorithm.functions(feature_size=feature_size, num_classes=num_classes, seed=0)
    run = {role: opened(file) for role, file in vars(graphs).items()}
    for devices in FLEETS:
        for batch in BATCHES:
            tensors = random_case(
                algorithm,
                functions,
                feature_size=feature_size,
                num_classes=num_classes,
                batch=batch,
                devices=devices,
            )
            for role in ("init", "project", "head", *([] if functions.parameters else ["step"])):
                apply = getattr(functions, role).apply
                require_equal(run[role](tensors), apply(tensors), apply(precise(tensors)), what=role)
            if functions.parameters:
                _check_training(run["step"], functions, tensors)
            if functions.basis is not None:
                _check_basis(run["step"], functions, functions.basis, tensors)
    nothing = {"feature": torch.zeros(0, feature_size), "labels": torch.zeros(0, dtype=torch.int64)}
    for name, value in functions.init.apply(nothing).items():
        assert torch.equal(run["init"](nothing)[name], value)


def _check_training(step: Graph, functions: Functions, tensors: Tensors) -> None:
    """Compare the first loss and gradients, and the losses and parameters of ten steps, with PyTorch's optimizer."""
    ours = _steps_of_graph(step, functions, tensors)
    theirs, exact = (_steps_of_torch(functions, each) for each in (tensors, precise(tensors)))
    require_equal(*(each.first for each in (ours, theirs, exact)), what="the first step")
    rest = [each.rest for each in (ours, theirs, exact)]
    require_equal(*rest, what="ten steps", parameters=rest[0])


@dataclass(frozen=True)
class Steps:
    """The first loss and its gradients; the later losses, and the parameters after them."""

    first: Tensors
    rest: Tensors


def _steps_of_torch(functions: Functions, tensors: Tensors) -> Steps:
    parameters = {name: tensors[name].clone().requires_grad_() for name in functions.parameters}
    optimizer = functions.optimizer(list(parameters.values()))
    losses, gradients = [], list[dict[str, Tensor]]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(functions.objective({**tensors, **parameters}))
        torch.autograd.backward(losses[-1])
        gradients.append(
            {name: each.grad.clone() for name, each in parameters.items() if each.grad is not None}
        )
        optimizer.step()
    first, *later = (loss.detach() for loss in losses)
    after = {name: value.detach() for name, value in parameters.items()}
    return Steps({"loss": first, **gradients[0]}, {"losses": torch.stack(later), **after})


def _steps_of_graph(step: Graph, functions: Functions, tensors: Tensors) -> Steps:
    states, losses = [dict(tensors)], []
    for _ in range(STEPS):
        after = step(states[-1])
        losses.append(after.pop("loss"))
        changed = {name.removeprefix("next_"): value for name, value in after.items()}
        states.append({**states[-1], **changed})
    gradients = functions.gradients(states[0], states[1])
    parameters = {name: states[-1][name] for name in functions.parameters}
    return Steps({"loss": losses[0], **gradients}, {"losses": torch.stack(losses[1:]), **parameters})


def _check_basis(step: Graph, functions: Functions, basis: Basis, tensors: Tensors) -> None:
    """Compare the first two steps in another basis with what they must be by the law of `Basis`."""
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
            {name: rotate(value) if name in axes else value for name, value in run.items()} for run in values
        )
        require_equal(step(rotated), theirs, exact, what="a step in another basis")
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
