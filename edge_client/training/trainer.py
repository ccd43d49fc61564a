"""Training on the device: runs a step graph over batches.

It knows no algorithm. Tensors are bound by name, and the output `next_NAME` of a step is the input `NAME` of the next.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from edge_client.graphs.onnx_model import Tensors, fit
from edge_client.graphs.program_graph import FREE, Graph
from protocol.errors import GraphRefused, ProtofleetError
from protocol.models.slots import Slot

CHUNK_ROWS = 64
"""Features projected at once."""

_LOSS, _NEXT = "loss", "next_"


class Diverged(ProtofleetError):
    """The loss or the state is not finite."""


@dataclass(frozen=True)
class TrainingSet:
    """Features of the training images, float32 (n, L), and their classes, int64 (n,); n may be 0."""

    feature: NDArray[np.float32]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Schedule:
    """How to iterate over the images."""

    epochs: int
    """Passes over all images; may be 0."""
    batch_size: int
    """Images in a step; the last one of an epoch has the remainder."""
    seed: tuple[int, ...]
    """Seed of the shuffles: the same seed and images give the same state, bit for bit."""


@dataclass(frozen=True)
class Checkpoint:
    """An unfinished training; continued with the same schedule, it gives the same result as without interruption."""

    state: Tensors
    steps: Annotated[int, Meta(ge=0)] = 0
    loss_sum: float = 0.0
    """Sum over the images of the current epoch."""


@dataclass(frozen=True)
class Trained:
    """A finished training."""

    state: dict[str, NDArray[Any]]
    loss: float | None
    """Mean over the images of the last epoch; None without epochs."""


@dataclass(frozen=True)
class TrainingHooks:
    """Callbacks of a training."""

    on_checkpoint: Callable[[Checkpoint], None]
    """Stores a checkpoint; later steps overwrite its arrays."""
    on_progress: Callable[[int, int], None]
    """Called with the steps done and in total."""
    checkpoint_s: float = 30.0
    clock: Callable[[], float] = time.monotonic


def initial_state(
    init: Graph, data: TrainingSet, *, kept: Tensors, tensors: Tensors
) -> dict[str, NDArray[Any]]:
    """Return the state at the start of a round, computed by `init`.

    The persistent tensors that were kept from the last round replace those of `init`, and the round's replace both.

    Raises:
        GraphRefused: the graph fails, or a tensor has another shape than the one it replaces, or is not finite.
    """
    free: Tensors = {"feature": data.feature, "labels": data.labels}
    state = {}
    for name, made in init.model.run(
        {name: free[name] for name in FREE if name in init.model.inputs}
    ).items():
        array = fit(name, tensors.get(name, kept.get(name, made)), Slot(made.dtype, made.shape))
        # Outputs of ONNX Runtime lie in the session's memory, which a view would keep alive as a whole.
        state[name] = array.copy()
    if broken := _not_finite(state):
        raise GraphRefused(f"the initial state is not finite: {broken}")
    return state


def train(
    step: Graph,
    start: Checkpoint,
    data: TrainingSet,
    *,
    tensors: Tensors,
    schedule: Schedule,
    hooks: TrainingHooks,
) -> Trained:
    """Run the remaining steps of a schedule; the arrays of `start` are not changed.

    `step` maps state, batch and the round's tensors to the loss and the next state.
    Law: interrupted at any step and continued from the checkpoint, it gives the same bits.

    Raises:
        Diverged: the loss or the state is not finite.
        GraphRefused: the graph fails, or does not fit the state and the tensors.
    """
    slot = Slot(np.dtype(np.float32), (None, step.metadata.feature_size))
    feature = fit("feature", data.feature, slot)
    labels = fit("labels", data.labels, Slot(np.dtype(np.int64), (len(feature),)))
    shape = min(schedule.batch_size, len(feature)), feature.shape[1]
    stepper = _Stepper(step, start.state, tensors, shape=shape)
    per_epoch = -(-len(feature) // schedule.batch_size)
    total = schedule.epochs * per_epoch
    loss_sum, due_s = start.loss_sum, hooks.clock() + hooks.checkpoint_s
    for done, rows in enumerate(_batches(len(feature), schedule, done=start.steps), start.steps):
        if hooks.clock() >= due_s:
            hooks.on_checkpoint(Checkpoint(stepper.state(), done, loss_sum))
            due_s = hooks.clock() + hooks.checkpoint_s
        loss = stepper.take(feature, labels, rows)
        if not np.isfinite(loss):
            raise Diverged(f"the loss is {loss} after {done + 1} steps of {total}")
        loss_sum = loss * len(rows) + (loss_sum if done % per_epoch else 0.0)
        hooks.on_progress(done + 1, total)
    return Trained(stepper.state(), loss_sum / len(feature) if total else None)


def project(
    graph: Graph, feature: NDArray[np.float32], *, state: Tensors, tensors: Tensors
) -> NDArray[np.float32]:
    """Return the projections float32 (n, D) of features float32 (n, L), which are averaged into prototypes.

    Raises:
        GraphRefused: the graph fails or does not fit.
        Diverged: a projection is not finite.
    """
    bound = graph.bind({**tensors, **state})
    projections = np.empty((len(feature), graph.metadata.projection_size), np.float32)
    for start in range(0, len(feature), CHUNK_ROWS):
        into = projections[start : start + CHUNK_ROWS]
        made = graph.model.run({"feature": feature[start : start + CHUNK_ROWS], **bound})["projection"]
        into[:] = fit("projection", made, Slot(into.dtype, into.shape))
    if not np.isfinite(projections).all():
        raise Diverged("the projection of an image is not finite")
    return projections


def _batches(images: int, schedule: Schedule, *, done: int) -> Iterator[NDArray[np.intp]]:
    """Yield the rows of each remaining step."""
    per_epoch = -(-images // schedule.batch_size)
    for epoch in range(done // max(per_epoch, 1), schedule.epochs):
        order = np.random.default_rng([*schedule.seed, epoch]).permutation(images)
        batches = (order[at : at + schedule.batch_size] for at in range(0, images, schedule.batch_size))
        yield from itertools.islice(batches, max(done - epoch * per_epoch, 0), None)


class _Stepper:
    """A step graph with two sets of buffers: a step reads the state from one set and writes it to the other.

    ONNX Runtime works on these arrays themselves: only the batch is copied in each step.
    """

    def __init__(self, step: Graph, state: Tensors, tensors: Tensors, *, shape: tuple[int, int]) -> None:
        changing = [name.removeprefix(_NEXT) for name in step.model.outputs if name != _LOSS]
        unknown = ", ".join(name for name in changing if name not in state)
        if unknown:
            raise GraphRefused(
                f"the step graph changes {unknown}; the state has {', '.join(state) or 'nothing'}"
            )
        self._step = step
        self._fixed = {name: array for name, array in state.items() if name not in changing}
        self._bound = step.bind({**tensors, **state})
        first = {name: np.array({**state, **self._bound}[name], order="C") for name in changing}
        self._sides = (first, {name: np.empty_like(array) for name, array in first.items()})
        self._turn = 0
        self._batch: dict[str, NDArray[Any]] = {
            "feature": np.empty(shape, np.float32),
            "labels": np.empty(shape[0], np.int64),
        }
        self._loss = np.zeros((), np.float32)
        self._runs: dict[tuple[int, int], Callable[[], None]] = {}

    def take(self, feature: NDArray[np.float32], labels: NDArray[np.int64], rows: NDArray[np.intp]) -> float:
        for name, array in (("feature", feature), ("labels", labels)):
            # In any other mode numpy would fill a copy first; these indices are in range.
            np.take(array, rows, axis=0, out=self._batch[name][: len(rows)], mode="clip")
        key = (self._turn, len(rows))
        if key not in self._runs:
            self._runs[key] = self._bind(len(rows))
        self._runs[key]()
        self._turn = 1 - self._turn
        return float(self._loss)

    def state(self) -> dict[str, NDArray[Any]]:
        state = {**self._fixed, **self._sides[self._turn]}
        if broken := _not_finite(state):
            raise Diverged(f"not finite after a step: {broken}")
        return state

    def _bind(self, rows: int) -> Callable[[], None]:
        read, write = self._sides[self._turn], self._sides[1 - self._turn]
        batch = {name: array[:rows] for name, array in self._batch.items()}
        written = {_NEXT + name: array for name, array in write.items()}
        return self._step.model.bind({**self._bound, **read, **batch}, {**written, _LOSS: self._loss})


def _not_finite(state: Tensors) -> str:
    return ", ".join(name for name, array in state.items() if not np.isfinite(array).all())
