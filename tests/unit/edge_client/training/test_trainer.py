"""Training by a step graph: correct steps, and the same bits after any interruption."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_client.runtime.onnx_model import Tensors
from edge_client.runtime.program_graph import Graph
from edge_client.training.trainer import (
    Checkpoint,
    Diverged,
    Schedule,
    Trained,
    TrainingHooks,
    TrainingSet,
    initial_state,
    project,
    train,
)
from protocol.errors import GraphRefused, Interrupted
from tests.support.devices.round_factory import same_bits
from tests.support.graphs.step_graphs import MOMENTUM, data, opened, round_tensors

State = dict[str, NDArray[Any]]
STEP = opened("step")
DATA = TrainingSet(*data(23))
FEATURE, LABELS = DATA.feature, DATA.labels


def begin(**replaced: Tensors) -> State:
    given = {"kept": {}, "tensors": round_tensors(), **replaced}
    return initial_state(opened("init"), DATA, **given)


def copied(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint as it is when it was written to the disk and read again."""
    state = {name: array.copy() for name, array in checkpoint.state.items()}
    return Checkpoint(state, checkpoint.steps, checkpoint.loss_sum)


class Recorder:
    """Records a training's checkpoints and progress, and stops it before the step of a number."""

    def __init__(self, *, stop_before: int | None = None) -> None:
        self.checkpoints: list[Checkpoint] = []
        self.progress: list[tuple[int, int]] = []
        self._asked = 0
        self._stop_before = stop_before

    def hooks(self, *, ticks: Sequence[float] = (), checkpoint_s: float = 1e9) -> TrainingHooks:
        """Return hooks that record; the clock shows `ticks` one after the other, then 0."""
        times = iter(ticks)
        return TrainingHooks(
            on_checkpoint=lambda checkpoint: self.checkpoints.append(copied(checkpoint)),
            should_stop=self._should_stop,
            on_progress=lambda done, total: self.progress.append((done, total)),
            checkpoint_s=checkpoint_s,
            clock=lambda: next(times, 0.0),
        )

    def _should_stop(self) -> bool:
        self._asked += 1
        return self._stop_before is not None and self._asked > self._stop_before


def run(
    start: Checkpoint,
    *,
    schedule: Schedule,
    hooks: TrainingHooks | None = None,
    step: Graph = STEP,
    tensors: Tensors | None = None,
    data: TrainingSet = DATA,
) -> Trained:
    return train(
        step,
        start,
        data,
        tensors=round_tensors() if tensors is None else tensors,
        schedule=schedule,
        hooks=hooks or Recorder().hooks(),
    )


def by_hand(state: State, schedule: Schedule) -> tuple[State, float]:
    """The same training in numpy's float64, and the loss of the last epoch."""
    weight, velocity = state["weight"].astype(float), state["velocity"].astype(float)
    targets, loss_sum = round_tensors()["targets"].astype(float), 0.0
    for epoch in range(schedule.epochs):
        order, loss_sum = np.random.default_rng([*schedule.seed, epoch]).permutation(len(FEATURE)), 0.0
        for start in range(0, len(order), schedule.batch_size):
            rows = order[start : start + schedule.batch_size]
            centered = FEATURE[rows] - state["mean"]
            error = centered @ weight - targets[LABELS[rows]]
            loss_sum += (error**2).mean() * len(rows)
            velocity = MOMENTUM * velocity + centered.T @ error / error.size
            weight = weight - 0.1 * velocity
    return {"weight": weight, "velocity": velocity}, loss_sum / len(FEATURE)


@pytest.mark.parametrize("batch_size", [1, 5, 23, 100])
def test_training_equals_the_same_steps_in_numpy(batch_size: int) -> None:
    """State and loss: shuffled, the last small batch included."""
    schedule = Schedule(epochs=3, batch_size=batch_size, seed=(7, 1))
    state, recorder = begin(), Recorder()
    trained = run(Checkpoint(state), schedule=schedule, hooks=recorder.hooks())
    expected, loss = by_hand(state, schedule)
    for name, array in expected.items():
        np.testing.assert_allclose(trained.state[name], array, rtol=1e-4, atol=1e-6)
    assert trained.loss == pytest.approx(loss, rel=1e-5)
    steps = 3 * -(-len(FEATURE) // batch_size)
    assert trained.state["steps"] == steps
    assert recorder.progress == [(done + 1, steps) for done in range(steps)]
    assert trained.state["mean"] is state["mean"]


@given(st.lists(st.integers(0, 11), max_size=4).map(sorted), st.integers(1, 25))
def test_interruptions_change_no_bit(stops: list[int], batch_size: int) -> None:
    schedule = Schedule(epochs=3, batch_size=batch_size, seed=(1, 2, 3))
    whole = run(Checkpoint(begin()), schedule=schedule)
    at = Checkpoint(begin())
    for stop in stops:
        recorder = Recorder(stop_before=stop - at.steps)
        try:
            run(at, schedule=schedule, hooks=recorder.hooks())
        except Interrupted:
            (at,) = recorder.checkpoints
            assert at.steps == stop
    resumed = run(at, schedule=schedule)
    assert same_bits(resumed.state, whole.state)
    assert resumed.loss == whole.loss


def test_nonfinite_loss_ends_the_training() -> None:
    """The error has the number of steps, and no checkpoint is stored."""
    recorder = Recorder()
    with (
        pytest.raises(Diverged, match=r"the loss is (inf|nan) after \d+ steps of 300"),
        np.errstate(all="ignore"),
    ):
        run(
            Checkpoint(begin()),
            schedule=Schedule(epochs=50, batch_size=4, seed=()),
            tensors=round_tensors(rate=1e4),
            hooks=recorder.hooks(),
        )
    assert recorder.checkpoints == []


@pytest.mark.parametrize("stop_before", [None, 1])
def test_nonfinite_state_is_neither_returned_nor_stored(stop_before: int | None) -> None:
    """The last step's loss is that of the state before it."""
    recorder = Recorder(stop_before=stop_before)
    with pytest.raises(Diverged, match="weight"):
        run(
            Checkpoint(begin()),
            schedule=Schedule(epochs=1 if stop_before is None else 2, batch_size=23, seed=()),
            tensors=round_tensors(rate=np.inf),
            hooks=recorder.hooks(),
        )
    assert recorder.checkpoints == []


TRANSPOSED = """step (float[n, 4] feature, float[4, 2] weight) => (float loss, float[r, c] next_weight)
    { loss = ReduceMean<keepdims = 0>(feature) next_weight = Transpose(weight) }"""


def test_unsuitable_tensors_are_refused_by_name() -> None:
    """Kept tensors of another shape or not finite, round tensors that are missing or unsuitable."""
    schedule = Schedule(epochs=1, batch_size=4, seed=())
    for kept, reason in (
        (np.zeros(5, np.float32), r"'mean' must be float32 \(4\), and is float32 \(5\)"),
        (np.full(4, np.nan, np.float32), "not finite: mean"),
    ):
        with pytest.raises(GraphRefused, match=reason):
            begin(kept={"mean": kept})
    with pytest.raises(GraphRefused, match="asks for targets, rate"):
        run(Checkpoint(begin()), schedule=schedule, tensors={})
    for gone, reason in (
        ("mean", "asks for mean"),
        ("steps", "changes steps; the state has weight, velocity, mean"),
    ):
        with pytest.raises(GraphRefused, match=reason):
            run(Checkpoint({n: a for n, a in begin().items() if n != gone}), schedule=schedule)
    with pytest.raises(GraphRefused, match=r"'labels' must be int64 \(22\), and is int64 \(23\)"):
        run(Checkpoint(begin()), schedule=schedule, data=TrainingSet(FEATURE[1:], LABELS))
    with pytest.raises(GraphRefused, match=r"'feature' must be float32 \(any, 4\)"):
        run(Checkpoint(begin()), schedule=schedule, data=TrainingSet(FEATURE[:, 1:], LABELS))
    with pytest.raises(GraphRefused, match="the step graph fails"):
        run(Checkpoint(begin()), schedule=schedule, step=opened("step", body=TRANSPOSED))


@pytest.mark.parametrize("images", [0, 1, 23, 700])
def test_projections_equal_the_graphs_for_any_number_of_images(images: int) -> None:
    feature, _ = data(images)
    state = begin()
    projection = project(opened("project"), feature, state=state, tensors={})
    np.testing.assert_allclose(projection, (feature - state["mean"]) @ state["weight"], rtol=1e-4, atol=1e-5)
    assert projection.shape == (images, 2)
    assert projection.dtype == np.float32


def test_invalid_projection_is_refused() -> None:
    """NaN, and another size than in the metadata."""
    state = begin()
    with pytest.raises(Diverged):
        project(opened("project"), np.full((2, 4), np.nan, np.float32), state=state, tensors={})
    with pytest.raises(
        GraphRefused, match=r"'projection' must be float32 \(23, 3\), and is float32 \(23, 2\)"
    ):
        project(opened("project", projection_size=3), FEATURE, state=state, tensors={})
