"""Verifies the graphs of a program against eager PyTorch, with autograd and PyTorch's own optimizer."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from aggregator.algorithms.algorithm import Algorithm, Contribution, Functions, class_means
from aggregator.graphs.tracing import to_torch
from protocol.errors import ProtofleetError

IMAGES, DEVICES, STEPS = 32, 3, 2
"""Images of a device and in a step, contributions aggregated into the previous round, and steps."""
TOLERANCE = {"outputs": 1e-5, "loss": 1e-5, "gradients": 1e-5, "steps": 1e-4}
"""Greatest difference relative to the largest value or 1; `steps`: later losses, and the parameters after them."""
ROUNDING = 10
"""Tolerance as a multiple of PyTorch's own rounding error, if that is more, as at a low temperature or a high rate."""

Tensors = Mapping[str, Tensor]
Graph = Callable[[Tensors], dict[str, Tensor]]
"""A function of tensors by name."""
Values = Mapping[tuple[str, str], Tensor]
"""Values to compare, by a key of TOLERANCE and the name of an output or parameter."""


class Comparison(NamedTuple):
    """Results of a graph, of PyTorch, and of PyTorch in float64."""

    ours: Values
    theirs: Values
    exact: Values


def check(
    files: Mapping[str, bytes],
    algorithm: Algorithm,
    functions: Functions,
    *,
    feature_size: int,
    num_classes: int,
) -> None:
    """Compare graphs with eager PyTorch on one batch of random features, in a round of three devices.

    Raises:
        ProtofleetError: a difference exceeds its tolerance, or a value is not finite.
    """
    graphs = {role: opened(file) for role, file in files.items()}
    tensors = random_case(algorithm, functions, feature_size=feature_size, num_classes=num_classes)
    for comparison in comparisons(graphs, functions, tensors):
        require_equal(comparison, algorithm=algorithm.name)


def require_equal(comparison: Comparison, *, algorithm: str) -> None:
    """Raise ProtofleetError if a graph differs from PyTorch."""
    ours, theirs, exact = comparison
    if list(ours) != list(theirs):
        raise ProtofleetError(f"a graph has outputs {list(ours)}, expected {list(theirs)}")
    for (what, name), value in theirs.items():
        measure = _drift if what == "steps" and name else _difference
        difference = measure(ours[what, name], value)
        limit = max(TOLERANCE[what], ROUNDING * measure(value, exact[what, name]))
        if not difference <= limit:
            raise ProtofleetError(
                f"the {algorithm} graphs differ from PyTorch in {what} by {difference:.3g}, "
                f"more than {limit:.3g}: not published"
            )


def comparisons(
    graphs: Mapping[str, Graph], functions: Functions, tensors: Tensors, *, steps: int = STEPS
) -> Iterator[Comparison]:
    """Compare the graphs' outputs for these inputs; of trained parameters, the first loss and gradients, and steps."""
    for role in ("init", "project", "head") if functions.parameters else graphs:
        apply = getattr(functions, role).apply
        runs = graphs[role](tensors), apply(tensors), apply(precise(tensors))
        yield Comparison(*({("outputs", name): value for name, value in run.items()} for run in runs))
    if functions.parameters:
        yield Comparison(
            _steps_of_graph(graphs["step"], functions, tensors, steps),
            _steps_of_torch(functions, tensors, steps),
            _steps_of_torch(functions, precise(tensors), steps),
        )


def opened(file: bytes) -> Graph:
    """Return an ONNX file as a function."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    outputs = [value.name for value in session.get_outputs()]

    def run(tensors: Tensors) -> dict[str, Tensor]:
        values = session.run(
            None, {value.name: tensors[value.name].numpy() for value in session.get_inputs()}
        )
        return {name: torch.from_numpy(np.asarray(each)) for name, each in zip(outputs, values, strict=True)}

    return run


def random_case(
    algorithm: Algorithm,
    functions: Functions,
    *,
    feature_size: int,
    num_classes: int,
    batch: int = IMAGES,
    devices: int = DEVICES,
) -> Tensors:
    """Return a batch, a device's state and prototypes, and the tensors of a round whose devices lack the last class."""
    random = np.random.default_rng(devices)
    first = algorithm.first_tensors(feature_size=feature_size, num_classes=num_classes, seed=0)

    def contribution(number: int) -> Contribution:
        own = _images(random, IMAGES, feature_size, classes=1 + number % max(1, num_classes - 1))
        before = {**functions.init.apply(own), **to_torch(first), **own}
        return _contribution(f"device-{number}", algorithm, functions, before, num_classes=num_classes)

    contributions = [contribution(number) for number in range(devices)]
    pooled = algorithm.aggregate(contributions, first, num_classes=num_classes, seed=0)
    mine = contribution(devices)
    local = torch.zeros(num_classes, algorithm.prototype_size(feature_size))
    local[mine.labels] = torch.from_numpy(mine.values)
    return {
        **functions.init.apply(_images(random, IMAGES, feature_size, classes=num_classes)),
        **to_torch(pooled if devices else first),
        **_images(random, batch, feature_size, classes=num_classes),
        "local_prototypes": local,
        "local_counts": torch.from_numpy(np.bincount(mine.labels, mine.counts, num_classes)).float(),
    }


def _images(random: np.random.Generator, rows: int, feature_size: int, *, classes: int) -> Tensors:
    feature = np.abs(random.normal(size=(rows, feature_size))).astype(np.float32)
    labels = random.integers(0, classes, size=rows)
    return {"feature": torch.from_numpy(feature), "labels": torch.from_numpy(labels)}


def _contribution(
    device: str, algorithm: Algorithm, functions: Functions, before: Tensors, *, num_classes: int
) -> Contribution:
    """Return what a device uploads after one step."""
    after = functions.step.apply(before)
    projection, labels = functions.project.apply(before)["projection"].numpy(), before["labels"].numpy()
    means, counts = class_means(projection, labels, np.ones_like(labels), num_classes=num_classes)
    return Contribution(
        device=device,
        values=means[counts > 0],
        labels=np.flatnonzero(counts),
        counts=counts[counts > 0].astype(np.int64),
        tensors={name: (after[f"next_{name}"] - before[name]).numpy() for name in algorithm.uploaded},
    )


def _steps_of_torch(functions: Functions, tensors: Tensors, steps: int) -> Values:
    parameters = {name: tensors[name].clone().requires_grad_() for name in functions.parameters}
    optimizer = functions.optimizer(list(parameters.values()))
    losses, gradients = [], dict[str, Tensor]()
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(functions.objective({**tensors, **parameters}))
        torch.autograd.backward(losses[-1])
        current = {name: each.grad.clone() for name, each in parameters.items() if each.grad is not None}
        gradients = gradients or current
        optimizer.step()
    after = {name: value.detach() for name, value in parameters.items()}
    return _values([loss.detach() for loss in losses], gradients, after)


def _steps_of_graph(graph: Graph, functions: Functions, tensors: Tensors, steps: int) -> Values:
    states, losses = [dict(tensors)], []
    for _ in range(steps):
        after = graph(states[-1])
        losses.append(after.pop("loss"))
        changed = {name.removeprefix("next_"): value for name, value in after.items()}
        states.append({**states[-1], **changed})
    gradients = functions.gradients(states[0], states[1])
    return _values(losses, gradients, {name: states[-1][name] for name in functions.parameters})


def _values(losses: list[Tensor], gradients: Tensors, parameters: Tensors) -> Values:
    """Return the values to compare after steps on one batch: the gradients are those of the first step."""
    return {
        ("loss", ""): losses[0],
        ("steps", ""): torch.stack(losses[1:]),
        **{("gradients", name): value for name, value in gradients.items()},
        **{("steps", name): value for name, value in parameters.items()},
    }


def precise(tensors: Tensors) -> Tensors:
    """Return the tensors in float64, those of integers as they are."""
    return {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}


def _drift(ours: Tensor, theirs: Tensor) -> float:
    """Return the 99th percentile of a parameter's differences relative to its root mean square.

    Not the maximum: Adam takes a whole step by the sign of a gradient even if that is only rounding, on which no two
    programs agree.
    """
    differences = (ours - theirs).abs().flatten()
    most = differences.kthvalue(math.ceil(0.99 * len(differences))).values
    return float(most / theirs.square().mean().sqrt().clamp_min(1e-12))


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the maximum difference relative to the largest value or 1; infinite for non-finite values or shapes."""
    if ours.shape != theirs.shape or not bool(torch.isfinite(ours).all()):
        return math.inf
    if not theirs.numel():
        return 0.0
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1.0))
