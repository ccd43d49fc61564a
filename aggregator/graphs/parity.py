"""Verifies the graphs of a program against eager PyTorch, with autograd and PyTorch's own optimizer."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor

from aggregator.algorithms.algorithm import Algorithm, Contribution, Function, Functions, class_means
from aggregator.graphs.tracing import to_torch
from protocol.errors import ProtofleetError
from protocol.models.onnx_metadata import Basis

BATCHES = (1, 5, 32)
"""Images in a step."""
CLIENTS = (1, 3, 17)
"""Contributions aggregated into the previous round."""
STEPS = 10
TOLERANCE = {"outputs": 1e-5, "loss": 1e-5, "gradients": 1e-5, "steps": 1e-4}
"""Greatest difference relative to the largest value or 1; `steps`: ten losses, and the parameters after them."""
ROUNDING = 10
"""Tolerance as a multiple of PyTorch's own rounding error, if that is more, as at a low temperature or a high rate."""

Tensors = Mapping[str, Tensor]
_Graph = Callable[[Tensors], dict[str, Tensor]]
"""An ONNX file to run."""
Values = Mapping[tuple[str, str], Tensor]
"""Values to compare, by a key of TOLERANCE and the name of an output or parameter."""


def check(
    files: Mapping[str, bytes],
    algorithm: Algorithm,
    functions: Functions,
    *,
    feature_size: int,
    num_classes: int,
) -> None:
    """Compare graphs with eager PyTorch on random features, for several batches and fleets, with classes missing.

    Compared are `outputs`, `loss` and `gradients` of the first step, and ten `steps`.

    Raises:
        ProtofleetError: a difference exceeds its tolerance, or a value is not finite.
    """
    graphs = {role: _opened(file) for role, file in files.items()}
    fleet = _RandomFleet(algorithm, functions, feature_size, num_classes)
    for ours, theirs, exact in _runs(graphs, functions, fleet):
        if list(ours) != list(theirs):
            raise ProtofleetError(f"a graph has outputs {list(ours)}, expected {list(theirs)}")
        for (what, name), value in theirs.items():
            measure = _drift if what == "steps" and name else _difference
            difference = measure(ours[what, name], value)
            limit = max(TOLERANCE[what], ROUNDING * measure(value, exact[what, name]))
            if not difference <= limit:
                raise ProtofleetError(
                    f"the {algorithm.name} graphs differ from PyTorch in {what} by {difference:.3g}, "
                    f"more than {limit:.3g}: not published"
                )


def _runs(
    graphs: Mapping[str, _Graph], functions: Functions, fleet: "_RandomFleet"
) -> Iterator[tuple[Values, Values, Values]]:
    """Yield what a graph computes, PyTorch, and PyTorch in float64."""
    for rows in (0, *BATCHES):
        yield _outputs(graphs["init"], functions.init, fleet.images(rows))
    for tensors in fleet.cases():
        for role in ("project", "head") if functions.parameters else ("project", "head", "step"):
            yield _outputs(graphs[role], getattr(functions, role), tensors)
        if functions.parameters:
            yield (
                _steps_of_graph(graphs["step"], functions, tensors),
                _steps_of_torch(functions, tensors),
                _steps_of_torch(functions, _precise(tensors)),
            )
        if functions.basis is not None:
            yield from _rotated_steps(graphs["step"], functions, functions.basis, tensors)


def _outputs(graph: _Graph, function: Function, tensors: Tensors) -> tuple[Values, Values, Values]:
    runs = graph(tensors), function.apply(tensors), function.apply(_precise(tensors))
    ours, theirs, exact = ({("outputs", name): value for name, value in run.items()} for run in runs)
    return ours, theirs, exact


def _rotated_steps(
    graph: _Graph, functions: Functions, basis: Basis, tensors: Tensors
) -> Iterator[tuple[Values, Values, Values]]:
    """Yield the first two steps in another basis, and what they must be by the law of `Basis`."""
    for _ in range(2):
        rotate = _rotation(tensors, basis)
        values = functions.step.apply(tensors), functions.step.apply(_precise(tensors))
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
        yield {("outputs", name): value for name, value in graph(rotated).items()}, theirs, exact
        after = {name.removeprefix("next_"): value for name, value in values[0].items()}
        tensors = {**tensors, **after}


def _standardized(tensors: Tensors, basis: Basis) -> Tensor:
    return (tensors["feature"] - tensors[basis.mean]) / tensors[basis.deviation]


def _rotation(tensors: Tensors, basis: Basis) -> Callable[[Tensor], Tensor]:
    """Return a map of rows (..., L) to L + 1 axes that keeps products with features, and lengths.

    It reflects all of them alike, and each row of a tensor also in a direction of its own that no feature has.
    """
    inputs = _standardized(_precise(tensors), basis)
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


def _opened(file: bytes) -> _Graph:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = [value.name for value in session.get_inputs()]
    outputs = [value.name for value in session.get_outputs()]

    def run(tensors: Tensors) -> dict[str, Tensor]:
        values = session.run(None, {name: tensors[name].numpy() for name in inputs})
        arrays = zip(outputs, map(np.asarray, values), strict=True)
        return {name: torch.from_numpy(array) for name, array in arrays}

    return run


class _RandomFleet:
    """Random devices, whose rounds the algorithm aggregates."""

    def __init__(
        self, algorithm: Algorithm, functions: Functions, feature_size: int, num_classes: int
    ) -> None:
        self._algorithm, self._functions = algorithm, functions
        self._feature_size, self._classes = feature_size, num_classes
        self._random = np.random.default_rng(0)

    def images(self, rows: int) -> Tensors:
        values = np.abs(self._random.normal(size=(rows, self._feature_size)))
        labels = self._random.integers(0, self._classes, size=rows)
        return {"feature": torch.from_numpy(values.astype(np.float32)), "labels": torch.from_numpy(labels)}

    def cases(self) -> Iterator[Tensors]:
        """Yield inputs: batches and fleets of each size, which lack the last class."""
        first = self._algorithm.first_tensors(
            feature_size=self._feature_size, num_classes=self._classes, seed=0
        )
        yield self._case(first, batch=BATCHES[1])
        for clients in CLIENTS:
            contributions = [self._contribution(number, first) for number in range(clients)]
            pooled = self._algorithm.aggregate(contributions, first, num_classes=self._classes, seed=0)
            for batch in BATCHES:
                yield self._case(pooled, batch=batch)

    def _owned(self) -> NDArray[np.int64]:
        """Return the classes of a device, never the last one of several."""
        known = max(1, self._classes - 1)
        return np.sort(self._random.choice(known, size=self._random.integers(1, known + 1), replace=False))

    def _prototypes(self, count: int) -> NDArray[np.float32]:
        shape = (count, self._algorithm.prototype_size(self._feature_size))
        values: NDArray[np.float32] = np.abs(self._random.normal(size=shape)).astype(np.float32)
        values /= np.linalg.norm(values, axis=1, keepdims=True)
        return values

    def _contribution(self, number: int, first: Mapping[str, Any]) -> Contribution:
        if not self._functions.parameters:
            return self._contribution_of_images(number, first)
        labels = self._owned()
        return Contribution(
            device=f"device-{number}",
            values=self._prototypes(len(labels)),
            labels=labels,
            counts=self._random.integers(2, 20, size=len(labels)),
            tensors={
                name: (self._random.normal(size=first[name].shape) / 100).astype(np.float32)
                for name in self._algorithm.uploaded
            },
        )

    def _contribution_of_images(self, number: int, first: Mapping[str, Any]) -> Contribution:
        """Return what a device uploads whose step trains nothing: random values would not fit together."""
        images = self.images(max(BATCHES))
        images = {**images, "labels": images["labels"] % max(1, self._classes - 1)}
        after = self._functions.step.apply({**to_torch(first), **images})
        means, counts = class_means(
            self._functions.project.apply(images)["projection"].numpy(),
            images["labels"].numpy(),
            np.ones(max(BATCHES), np.int64),
            num_classes=self._classes,
        )
        return Contribution(
            device=f"device-{number}",
            values=means[counts > 0],
            labels=np.flatnonzero(counts),
            counts=counts[counts > 0].astype(np.int64),
            tensors={name: after[f"next_{name}"].numpy() - first[name] for name in self._algorithm.uploaded},
        )

    def _case(self, pooled: Mapping[str, Any], *, batch: int) -> Tensors:
        shared = to_torch(pooled)
        state = self._functions.init.apply(self.images(max(BATCHES)))
        own = self._owned()
        local = torch.zeros(self._classes, self._algorithm.prototype_size(self._feature_size))
        local[own] = torch.from_numpy(self._prototypes(len(own)))
        counts = torch.zeros(self._classes)
        counts[own] = 3
        own_tensors = {"local_prototypes": local, "local_counts": counts}
        return {**state, **shared, **self.images(batch), **own_tensors}


def _steps_of_torch(functions: Functions, tensors: Tensors) -> Values:
    parameters = {name: tensors[name].clone().requires_grad_() for name in functions.parameters}
    optimizer = functions.optimizer(list(parameters.values()))
    losses, gradients = [], {}
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = functions.objective({**tensors, **parameters})
        torch.autograd.backward(loss)
        losses.append(loss.detach())
        if number == 0:
            gradients = {
                name: value.grad.clone() for name, value in parameters.items() if value.grad is not None
            }
        optimizer.step()
    return _steps(losses, gradients, {name: value.detach() for name, value in parameters.items()})


def _steps_of_graph(graph: _Graph, functions: Functions, tensors: Tensors) -> Values:
    state = dict(tensors)
    losses, gradients = [], {}
    for number in range(STEPS):
        after = graph(state)
        losses.append(after.pop("loss"))
        state |= {name.removeprefix("next_"): value for name, value in after.items()}
        if number == 0:
            gradients = functions.gradients(tensors, state)
    return _steps(losses, gradients, {name: state[name] for name in functions.parameters})


def _steps(losses: list[Tensor], gradients: Tensors, parameters: Tensors) -> Values:
    """Return the values to compare after steps on one batch: the gradients are those of the first step."""
    return {
        ("loss", ""): losses[0],
        ("steps", ""): torch.stack(losses[1:]),
        **{("gradients", name): value for name, value in gradients.items()},
        **{("steps", name): value for name, value in parameters.items()},
    }


def _drift(ours: Tensor, theirs: Tensor) -> float:
    """Return the 99th percentile of a parameter's differences relative to its root mean square.

    Not the maximum: Adam takes a whole step by the sign of a gradient even if that is only rounding, on which no two
    programs agree.
    """
    differences = (ours - theirs).abs().flatten()
    most = differences.kthvalue(math.ceil(0.99 * len(differences))).values
    return float(most / theirs.square().mean().sqrt().clamp_min(1e-12))


def _precise(tensors: Tensors) -> Tensors:
    return {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the maximum difference relative to the largest value or 1; infinite for non-finite values or shapes."""
    if ours.shape != theirs.shape or not bool(torch.isfinite(ours).all()):
        return math.inf
    if not theirs.numel():
        return 0.0
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1.0))
