"""Verifies the graphs of a program against the functions that they were traced from, in eager PyTorch."""

import math
from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from aggregator.algorithms.algorithm import Contribution, Functions, RoundAlgorithm, class_means
from aggregator.graphs.tracing import to_torch
from protocol.errors import ProtofleetError
from protocol.models.cpu_session import cpu_session

IMAGES, DEVICES = 32, 3
"""Images of a device and in a step, and contributions aggregated into the previous round."""
TOLERANCE = 1e-5
"""Greatest difference relative to the largest value or 1."""
DRIFT = 1e-4
"""Greatest difference of trained parameters, as `_drift` measures it."""
ROUNDING = 10
"""Tolerance as a multiple of PyTorch's own rounding error, if that is more, as at a low temperature or a high rate."""

Tensors = Mapping[str, Tensor]
Graph = Callable[[Tensors], dict[str, Tensor]]
"""A function of tensors by name."""


def check(
    files: Mapping[str, bytes],
    algorithm: RoundAlgorithm,
    functions: Functions,
    *,
    feature_size: int,
    num_classes: int,
) -> None:
    """Compare each graph with eager PyTorch on random features, in a round of three devices; of `step`, two steps.

    Raises:
        ProtofleetError: a difference exceeds its tolerance, or a value is not finite.
    """
    tensors = random_case(algorithm, functions, feature_size=feature_size, num_classes=num_classes)
    parameters = [f"next_{name}" for name in functions.parameters]
    for role in ("init", "project", "head", "step", "step"):
        apply = getattr(functions, role).apply
        ours, theirs, exact = opened(files[role])(tensors), apply(tensors), apply(precise(tensors))
        require_equal(ours, theirs, exact, what=f"the {algorithm.name} graph {role}", parameters=parameters)
        if role == "step":
            tensors = {**tensors, **{name.removeprefix("next_"): value for name, value in theirs.items()}}


def require_equal(
    ours: Tensors, theirs: Tensors, exact: Tensors, *, what: str, parameters: Collection[str] = ()
) -> None:
    """Raise ProtofleetError if what a graph computes differs from PyTorch; `exact` is PyTorch's result in float64."""
    if list(ours) != list(theirs):
        raise ProtofleetError(f"{what} has outputs {list(ours)}, expected {list(theirs)}")
    for name, value in theirs.items():
        measure, tolerance = (_drift, DRIFT) if name in parameters else (_difference, TOLERANCE)
        difference = measure(ours[name], value)
        limit = max(tolerance, ROUNDING * measure(value, exact[name]))
        if not difference <= limit:
            raise ProtofleetError(
                f"{what} differs from PyTorch in {name} by {difference:.3g}, more than {limit:.3g}: not published"
            )


def opened(file: bytes) -> Graph:
    session = cpu_session(file)
    outputs = [value.name for value in session.get_outputs()]

    def run(tensors: Tensors) -> dict[str, Tensor]:
        values = session.run(
            None, {value.name: tensors[value.name].numpy() for value in session.get_inputs()}
        )
        return {name: torch.from_numpy(np.asarray(each)) for name, each in zip(outputs, values, strict=True)}

    return run


def random_case(
    algorithm: RoundAlgorithm,
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
    device: str, algorithm: RoundAlgorithm, functions: Functions, before: Tensors, *, num_classes: int
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
