"""Training on the device: runs a step graph over batches, whatever it learns.

Nothing here knows an algorithm. Tensors are bound by name, and what a step gives as `next_NAME` is `NAME` in the
step after it.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.data.extraction import Interrupted
from edge_client.runtime.backbone import require_runtime
from edge_client.runtime.graph import FREE, Graph, Slot, Tensors, bind, failed, fit
from edge_client.runtime.watchdog import ending
from protocol.errors import GraphRefused, ProtofleetError

CHUNK_ROWS = 64
"""Features projected at once."""

_LOSS, _NEXT = "loss", "next_"


class Diverged(ProtofleetError):
    """A loss or a state is no longer finite; what came before the training stands."""


@dataclass(frozen=True)
class Schedule:
    """How to go over the images.

    Args:
        epochs: passes over all of them; may be 0.
        batch_size: images in a step; the last one of an epoch has what remains.
        seed: of the shuffles: the same seed and images give the same state, bit for bit.
    """

    epochs: int
    batch_size: int
    seed: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A training on its way: with this and its schedule it goes on as if it had not been interrupted.

    Args:
        state: the state's tensors.
        steps: steps done.
        loss_sum: sum over the images of the current epoch.
    """

    state: Tensors
    steps: int = 0
    loss_sum: float = 0.0


@dataclass(frozen=True)
class Trained:
    """A training that is done.

    Args:
        state: the state's tensors.
        loss: mean over the images of the last epoch; None if there was none.
        steps: steps done, those before an interruption included.
    """

    state: dict[str, NDArray[Any]]
    loss: float | None
    steps: int


@dataclass(frozen=True)
class TrainingHooks:
    """What happens beside a training.

    Args:
        on_checkpoint: keeps a checkpoint; its arrays are overwritten by the steps that follow.
        should_stop: asked before every step.
        on_progress: called with the steps done and those of the whole training.
        checkpoint_s: seconds from one checkpoint to the next.
        clock: gives seconds and never goes back.
    """

    on_checkpoint: Callable[[Checkpoint], None]
    should_stop: Callable[[], bool]
    on_progress: Callable[[int, int], None]
    checkpoint_s: float = 30.0
    clock: Callable[[], float] = time.monotonic


def initial_state(
    init: Graph,
    *,
    feature: NDArray[np.float32],
    labels: NDArray[np.int64],
    kept: Tensors,
    tensors: Tensors,
) -> dict[str, NDArray[Any]]:
    """The state to begin a round with.

    Args:
        init: makes a state out of nothing but features and their classes.
        feature: all of the device's, float32 (n, L); n may be 0.
        labels: their classes, int64 (n,).
        kept: what stays of the last round's state, in place of what `init` made.
        tensors: the round's; those named like a tensor of the state take its place in turn.

    Raises:
        GraphRefused: the graph fails, or a tensor is not like the one it replaces, or not finite.
    """
    free: Tensors = {"feature": feature, "labels": labels}
    state = {}
    for name, made in init.run({name: free[name] for name in FREE if name in init.inputs}).items():
        array = fit(name, tensors.get(name, kept.get(name, made)), Slot(made.dtype, made.shape))
        # What ONNX Runtime made lies in memory of the session, which a view would keep alive, all of it.
        state[name] = array.copy()
    broken = _not_finite(state)
    if broken:
        raise GraphRefused(f"the state to begin with is not finite: {broken}")
    return state


def train(
    step: Graph,
    start: Checkpoint,
    *,
    feature: NDArray[np.float32],
    labels: NDArray[np.int64],
    tensors: Tensors,
    schedule: Schedule,
    hooks: TrainingHooks,
) -> Trained:
    """Take every step that the schedule has left.

    Law: stopped at any step and begun again from the checkpoint, it ends in the same bits.

    Args:
        step: the state, a batch and the round's tensors to the loss and the next state.
        start: where to begin; its arrays are left as they are.
        feature: of all images to learn from, float32 (n, L).
        labels: their classes, int64 (n,).
        tensors: the round's.
        schedule: how to go over the images.
        hooks: what happens beside it.

    Raises:
        Diverged: the loss or the state is not finite.
        Interrupted: `should_stop` said so; a checkpoint was made.
        GraphRefused: the graph does not fit the state and the tensors, or fails.
    """
    feature = fit("feature", feature, step.inputs["feature"])
    labels = fit("labels", labels, Slot(np.dtype(np.int64), (len(feature),)))
    machine = _Machine(step, start.state, tensors, rows=min(schedule.batch_size, len(feature)))
    per_epoch = -(-len(feature) // schedule.batch_size)
    total = schedule.epochs * per_epoch
    loss_sum, due_s = start.loss_sum, hooks.clock() + hooks.checkpoint_s
    for done, rows in enumerate(_batches(len(feature), schedule, done=start.steps), start.steps):
        stop = hooks.should_stop()
        if stop or hooks.clock() >= due_s:
            hooks.on_checkpoint(Checkpoint(machine.state(), done, loss_sum))
            due_s = hooks.clock() + hooks.checkpoint_s
        if stop:
            raise Interrupted("training was interrupted; it goes on from where it was")
        loss = machine.take(feature, labels, rows)
        if not np.isfinite(loss):
            raise Diverged(f"the loss is {loss} after {done + 1} steps of {total}")
        loss_sum = loss * len(rows) + (loss_sum if done % per_epoch else 0.0)
        hooks.on_progress(done + 1, total)
    return Trained(machine.state(), loss_sum / len(feature) if total else None, total)


def project(
    graph: Graph, *, feature: NDArray[np.float32], state: Tensors, tensors: Tensors
) -> NDArray[np.float32]:
    """What is averaged into prototypes.

    Args:
        graph: features to projections.
        feature: float32 (n, L).
        state: the device's.
        tensors: the round's.

    Returns:
        float32 (n, D), finite.

    Raises:
        GraphRefused: the graph does not fit, or fails.
        Diverged: a projection is not finite.
    """
    bound = bind(graph, {**tensors, **state})
    projections = np.empty((len(feature), graph.metadata.projection_size), np.float32)
    for start in range(0, len(feature), CHUNK_ROWS):
        into = projections[start : start + CHUNK_ROWS]
        made = graph.run({"feature": feature[start : start + CHUNK_ROWS], **bound})["projection"]
        into[:] = fit("projection", made, Slot(into.dtype, into.shape))
    if not np.isfinite(projections).all():
        raise Diverged("the projection of an image is not finite")
    return projections


def _batches(images: int, schedule: Schedule, *, done: int) -> Iterator[NDArray[np.intp]]:
    """Which images each step that is left learns from."""
    per_epoch = -(-images // schedule.batch_size)
    for epoch in range(done // max(per_epoch, 1), schedule.epochs):
        order = np.random.default_rng([*schedule.seed, epoch]).permutation(images)
        batches = (order[at : at + schedule.batch_size] for at in range(0, images, schedule.batch_size))
        yield from itertools.islice(batches, max(done - epoch * per_epoch, 0), None)


class _Machine:
    """A step graph with two sets of buffers: a step reads the state from one and writes it to the other.

    ONNX Runtime works on these arrays themselves, and nothing but the batch is copied from step to step.
    """

    def __init__(self, step: Graph, state: Tensors, tensors: Tensors, *, rows: int) -> None:
        changing = [name.removeprefix(_NEXT) for name in step.outputs if name != _LOSS]
        unknown = ", ".join(name for name in changing if name not in state)
        if unknown:
            raise GraphRefused(
                f"the step graph changes {unknown}; the state has {', '.join(state) or 'nothing'}"
            )
        self._step = step
        self._fixed = {name: array for name, array in state.items() if name not in changing}
        self._bound = bind(step, {**tensors, **state})
        first = {name: np.array({**state, **self._bound}[name], order="C") for name in changing}
        self._sides = (first, {name: np.empty_like(array) for name, array in first.items()})
        self._turn = 0
        self._feature = np.empty((rows, step.metadata.feature_size), np.float32)
        self._labels = np.empty(rows, np.int64)
        self._loss = np.zeros((), np.float32)
        self._bindings: dict[tuple[int, int], Any] = {}

    def take(self, feature: NDArray[np.float32], labels: NDArray[np.int64], rows: NDArray[np.intp]) -> float:
        """Take a step on some rows; returns the loss."""
        # In any other mode numpy would fill a copy first; these indices are in range.
        np.take(feature, rows, axis=0, out=self._feature[: len(rows)], mode="clip")
        np.take(labels, rows, out=self._labels[: len(rows)], mode="clip")
        try:
            with ending() as options:
                self._step.session.run_with_iobinding(self._binding(len(rows)), options)
        except Exception as error:  # ONNX Runtime has no error of its own to catch
            raise failed(self._step.metadata.role, error) from error
        self._turn = 1 - self._turn
        return float(self._loss)

    def state(self) -> dict[str, NDArray[Any]]:
        """The whole state.

        Raises:
            Diverged: it is not finite.
        """
        state = {**self._fixed, **self._sides[self._turn]}
        broken = _not_finite(state)
        if broken:
            raise Diverged(f"not finite after a step: {broken}")
        return state

    def _binding(self, rows: int) -> Any:
        """The arrays bound for a step of so many rows from the one side to the other; made once each."""
        key = (self._turn, rows)
        if key not in self._bindings:
            read, write = self._sides[self._turn], self._sides[1 - self._turn]
            batch = {"feature": self._feature[:rows], "labels": self._labels[:rows]}
            binding = self._step.session.io_binding()
            to_value = require_runtime().OrtValue.ortvalue_from_numpy
            for name in self._step.inputs:
                binding.bind_ortvalue_input(name, to_value({**self._bound, **read, **batch}[name]))
            for name in self._step.outputs:
                into = self._loss if name == _LOSS else write[name.removeprefix(_NEXT)]
                binding.bind_ortvalue_output(name, to_value(into))
            self._bindings[key] = binding
        return self._bindings[key]


def _not_finite(state: Tensors) -> str:
    """Names of the tensors that are not finite."""
    return ", ".join(name for name, array in state.items() if not np.isfinite(array).all())
