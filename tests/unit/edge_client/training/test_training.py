"""A device's part in a round: correct steps of a step graph, and the same bits after any interruption."""

import copy
import io
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_client.graphs.onnx_model import Tensors
from edge_client.graphs.program_graph import Graph
from edge_client.kinds.prepared_submission import PreparedSubmission, encode_submission
from edge_client.training.local_round import (
    LocalModel,
    RoundResult,
    pack,
    pack_checkpoint,
    train_round,
    unpack,
    unpack_checkpoint,
)
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
from protocol.errors import GraphRefused, StateError
from protocol.storage.blobstore import BlobStore
from protocol.wire.arrays import to_array
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import Receipt, RoundManifest, TaskManifest
from tests.support.devices.job_threads import EndedError
from tests.support.devices.round_factory import (
    TASK,
    make_task,
    open_round,
    same_bits,
    tensors_blob,
    watching,
)
from tests.support.graphs.step_graphs import MOMENTUM, data, opened, round_tensors

State = dict[str, NDArray[Any]]
STEP = opened("step")
DATA = TrainingSet(*data(23))
FEATURE, LABELS = DATA.feature, DATA.labels


def begin(**replaced: Tensors) -> State:
    given = {"kept": {}, "tensors": round_tensors(), **replaced}
    return initial_state(opened("init"), DATA, **given)


class Recorder:
    """Records a training's progress, and ends it with a checkpoint before the step of a number."""

    def __init__(self, *, stop_before: int | None = None) -> None:
        self.checkpoints: list[Checkpoint] = []
        self.progress: list[tuple[int, int]] = []
        self._stop_before = stop_before

    def hooks(self) -> TrainingHooks:
        return TrainingHooks(
            on_checkpoint=self._on_checkpoint,
            on_progress=lambda done, total: self.progress.append((done, total)),
            checkpoint_s=1e9 if self._stop_before is None else 0.0,
            clock=lambda: 0.0,
        )

    def _on_checkpoint(self, checkpoint: Checkpoint) -> None:
        if len(self.progress) == self._stop_before:
            self.checkpoints.append(copy.deepcopy(checkpoint))
            raise EndedError


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
        except EndedError:
            (at,) = recorder.checkpoints
            assert at.steps == stop
    resumed = run(at, schedule=schedule)
    assert same_bits(resumed.state, whole.state)
    assert resumed.loss == whole.loss


@pytest.mark.parametrize(
    ("rate", "epochs", "batch_size", "stop_before", "reason"),
    [
        (1e4, 50, 4, None, r"the loss is (inf|nan) after \d+ steps of 300"),
        (np.inf, 1, 23, None, "weight"),  # the last step's loss is that of the state before it
        (np.inf, 2, 23, 1, "weight"),
    ],
)
def test_nonfinite_loss_or_state_is_neither_returned_nor_stored(
    rate: float, epochs: int, batch_size: int, stop_before: int | None, reason: str
) -> None:
    recorder = Recorder(stop_before=stop_before)
    schedule = Schedule(epochs=epochs, batch_size=batch_size, seed=())
    tensors, hooks = round_tensors(rate=rate), recorder.hooks()
    with pytest.raises(Diverged, match=reason), np.errstate(all="ignore"):
        run(Checkpoint(begin()), schedule=schedule, tensors=tensors, hooks=hooks)
    assert recorder.checkpoints == []


def test_initial_state_takes_kept_tensors_and_then_those_of_the_round() -> None:
    """Dtypes are those of `init`."""
    velocity, steps = np.full((4, 2), 2, np.float16), np.array(9, np.uint32)
    kept: State = {"velocity": velocity, "steps": steps, "more": np.zeros(3)}
    mine, theirs = np.ones((4, 2), np.float32), np.full((4, 2), 3, np.float16)
    state = begin(kept={**kept, "weight": mine}, tensors={**round_tensors(), "weight": theirs})
    assert all(array.flags.owndata for array in state.values()), "a view would keep a session's memory"
    assert list(state) == ["weight", "velocity", "mean", "steps"]
    np.testing.assert_array_equal(state["weight"], np.full((4, 2), 3, np.float32))
    np.testing.assert_array_equal(state["velocity"], np.full((4, 2), 2, np.float32))
    np.testing.assert_allclose(state["mean"], FEATURE.mean(axis=0), rtol=1e-5, atol=1e-6)
    assert [state[name].dtype for name in state] == [np.float32] * 3 + [np.int64]
    assert state["steps"] == 9
    run(Checkpoint(state), schedule=Schedule(epochs=1, batch_size=4, seed=()))


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
    without_mean, without_steps = begin(), begin()
    del without_mean["mean"], without_steps["steps"]
    refused: list[tuple[State, dict[str, Any], str]] = [
        (begin(), {"tensors": {}}, "asks for targets, rate"),
        (without_mean, {}, "asks for mean"),
        (without_steps, {}, "changes steps; the state has weight, velocity, mean"),
        (
            begin(),
            {"data": TrainingSet(FEATURE[1:], LABELS)},
            r"'labels' must be int64 \(22\), and is int64 \(23\)",
        ),
        (begin(), {"data": TrainingSet(FEATURE[:, 1:], LABELS)}, r"'feature' must be float32 \(any, 4\)"),
        (begin(), {"step": opened("step", body=TRANSPOSED)}, "the step graph fails"),
    ]
    for state, changes, reason in refused:
        with pytest.raises(GraphRefused, match=reason):
            run(Checkpoint(state), schedule=schedule, **changes)


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
    reason = r"'projection' must be float32 \(23, 3\), and is float32 \(23, 2\)"
    with pytest.raises(GraphRefused, match=reason):
        project(opened("project", projection_size=3), FEATURE, state=state, tensors={})


ABOUT = ("task", 3, "tensors", "images")


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def take_part(
    blobs: BlobStore,
    manifest: TaskManifest,
    opened: RoundManifest,
    *,
    last: LocalModel | None = None,
    resumed: Checkpoint | None = None,
    hooks: TrainingHooks | None = None,
) -> RoundResult:
    return train_round(
        manifest, opened, data=DATA, last=last, resumed=resumed, blobs=blobs, device_id="device",
        hooks=hooks or watching(),
    )  # fmt: skip


def sent(made: RoundResult, manifest: TaskManifest) -> bytes:
    prepared = PreparedSubmission(made.prototypes, made.labels, made.counts, (), (), made.changes, made.loss)
    return encode_submission(prepared, task=TASK, manifest=manifest, sequence=1, round_number=3)


@settings(max_examples=25, deadline=None)
@given(stops=st.lists(st.integers(0, 11), max_size=3))
def test_interrupted_training_uploads_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, stops: list[int]
) -> None:
    blobs = BlobStore(tmp_path_factory.mktemp("blobs"))
    manifest = make_task(blobs, uploaded=("weight",))
    opened = open_round(blobs, number=3, tensors={"weight": np.full((4, 2), 0.3, np.float16)})
    whole = take_part(blobs, manifest, opened)
    written: list[bytes] = []
    for stop in stops:
        resumed = unpack_checkpoint(written[-1], ABOUT) if written else None
        hooks = watching(
            stop_before=stop, on_checkpoint=lambda at: written.append(pack_checkpoint(at, ABOUT))
        )
        try:
            take_part(blobs, manifest, opened, resumed=resumed, hooks=hooks)
        except EndedError:
            continue
    resumed = unpack_checkpoint(written[-1], ABOUT) if written else None
    made = take_part(blobs, manifest, opened, resumed=resumed)
    assert sent(made, manifest) == sent(whole, manifest)
    assert pack(made.local_model) == pack(whole.local_model)


def test_persistent_tensors_stay_unless_the_round_replaces_them(blobs: BlobStore) -> None:
    ones = {"weight": np.ones((4, 2), np.float32), "velocity": np.ones((4, 2), np.float32)}
    last = LocalModel({**ones, "steps": np.array(7)}, np.zeros((3, 2), np.float32), np.zeros(3, np.float32))
    manifest = make_task(blobs, kept=("weight", "steps", "never_made"))
    begun = take_part(blobs, manifest, open_round(blobs, epochs=0))
    made = take_part(blobs, manifest, open_round(blobs, epochs=0), last=last)
    state = made.local_model.state
    np.testing.assert_array_equal(state["weight"], ones["weight"])
    np.testing.assert_array_equal(state["velocity"], begun.local_model.state["velocity"])
    assert state["steps"] == 7
    assert made.loss is None
    brought = {"weight": np.full((4, 2), 0.25, np.float16)}
    made = take_part(blobs, manifest, open_round(blobs, epochs=0, tensors=brought), last=last)
    np.testing.assert_array_equal(made.local_model.state["weight"], np.full((4, 2), 0.25, np.float32))
    assert made.local_model.state["weight"].dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_changes_are_the_state_minus_the_tensors_of_the_round(
    blobs: BlobStore, dtype: type[np.floating[Any]]
) -> None:
    brought = {"weight": np.linspace(-1, 1, 8).reshape(4, 2).astype(dtype)}
    made = take_part(blobs, make_task(blobs, uploaded=("weight",)), open_round(blobs, tensors=brought))
    assert list(made.changes) == ["weight"]
    expected = made.local_model.state["weight"].astype(float) - brought["weight"].astype(float)
    found = to_array(made.changes["weight"])
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
    assert np.abs(expected).max() > 1e-2


def test_prototypes_are_class_means_of_projections(blobs: BlobStore) -> None:
    """The device keeps them in float32, with zeros for a class without prototype."""
    manifest = make_task(blobs, min_images=8)
    made = take_part(blobs, manifest, open_round(blobs))
    counts = np.bincount(DATA.labels, minlength=3)
    assert 0 < (counts >= 8).sum() < 3
    state = made.local_model.state
    projection = (DATA.feature - state["mean"]) @ state["weight"]
    for label in range(3):
        if counts[label] < 8:
            assert not made.local_model.prototypes[label].any()
            assert made.local_model.counts[label] == 0
            assert label not in made.labels
            continue
        (row,) = np.flatnonzero(made.labels == label)
        mean = projection[DATA.labels == label].mean(axis=0)
        np.testing.assert_allclose(made.local_model.prototypes[label], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(made.prototypes[row], mean, rtol=2e-3, atol=1e-3)
        assert made.counts[row] == made.local_model.counts[label] == counts[label]


@pytest.mark.parametrize(("rate", "epochs"), [(1e4, 30), (3e38, 1), (3e6, 1)])
def test_diverged_training_is_refused(blobs: BlobStore, rate: float, epochs: int) -> None:
    """NaN, infinity, and values outside the range of float16."""
    tensors = {"rate": np.array(rate, np.float32), "weight": np.zeros((4, 2), np.float32)}
    opened = open_round(blobs, tensors=tensors, epochs=epochs)
    with pytest.raises(Diverged):
        take_part(blobs, make_task(blobs, uploaded=("weight",), batch_size=23), opened)


@pytest.mark.parametrize("name", ["targets", "weight"])
def test_uploads_that_are_not_in_the_state_and_the_round_are_refused(blobs: BlobStore, name: str) -> None:
    with pytest.raises(GraphRefused, match=f"program uploads {name}"):
        take_part(blobs, make_task(blobs, uploaded=(name,)), open_round(blobs))


def _replaced(**tensors: NDArray[Any]) -> bytes:
    return tensors_blob({**round_tensors(), **tensors})


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "tensors-0 cannot be used"),
        (b"\xc1" * 40, "tensors-0 cannot be used"),
        (encode(Receipt(digest=TASK, status="received")), "tensors-0 cannot be used"),
        (_replaced(rate=np.array(0.1, np.float32)).replace(b"\xa2f2", b"\xa2f4"), "expected 24 bytes"),
        (_replaced(targets=np.full((3, 2), np.nan, np.float16)), "targets holds NaN or infinity"),
        (_replaced(unused=np.array([np.inf], np.float32)), "unused holds NaN or infinity"),
        (tensors_blob({"rate": np.array(0.1, np.float32)}), "asks for targets"),
        (_replaced(targets=np.zeros((2, 2), np.float32)), "'targets' must be float32"),
        (_replaced(rate=np.zeros(1, np.float32)), "'rate' must be float32"),
        (_replaced(weight=np.zeros((2, 4), np.float32)), "'weight' must be float32"),
        (_replaced(steps=np.array(1.5, np.float32)), "'steps' must be int64"),
    ],
)  # fmt: skip
def test_unusable_round_tensors_are_refused_by_name(blobs: BlobStore, payload: bytes, reason: str) -> None:
    with pytest.raises(GraphRefused, match=reason):
        take_part(blobs, make_task(blobs), open_round(blobs, payload=payload))


MODEL = LocalModel(
    state={"weight": np.random.default_rng(0).normal(size=(4, 2)), "steps": np.array(3)},
    prototypes=np.ones((3, 2), np.float32),
    counts=np.arange(3, dtype=np.float32),
)
CHECKPOINT = Checkpoint(MODEL.state, steps=17, loss_sum=0.1 + 0.2)


def test_packed_models_and_checkpoints_are_read_back() -> None:
    """Bit for bit; a checkpoint only for what it belongs to."""
    local_model = unpack(pack(MODEL))
    found, expected = (
        {**model.state, "p": model.prototypes, "c": model.counts} for model in (local_model, MODEL)
    )
    assert same_bits(found, expected)
    written = pack_checkpoint(CHECKPOINT, ABOUT)
    checkpoint = unpack_checkpoint(written, ABOUT)
    assert checkpoint is not None
    assert same_bits(checkpoint.state, CHECKPOINT.state)
    assert (checkpoint.steps, checkpoint.loss_sum) == (17, 0.1 + 0.2)
    for other in (("other", *ABOUT[1:]), (*ABOUT[:3], "other"), ABOUT[:3]):
        assert unpack_checkpoint(written, other) is None


def _array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 10**4), byte=st.integers(1, 255))
def test_changed_byte_of_a_checkpoint_is_detected(at: int, byte: int) -> None:
    written = bytearray(pack_checkpoint(CHECKPOINT, ABOUT))
    written[at % len(written)] ^= byte
    with pytest.raises(StateError):
        unpack_checkpoint(bytes(written), ABOUT)


@pytest.mark.parametrize("other", [b"", bytes(100), b"PK\5\6" + bytes(18), _array(), _array()[:50]])
def test_other_files_are_refused(other: bytes) -> None:
    with pytest.raises(StateError):
        unpack(other)
    with pytest.raises(StateError):
        unpack_checkpoint(other, ABOUT)
    with pytest.raises(StateError):
        unpack(pack_checkpoint(CHECKPOINT, ABOUT))


def _file(**changed: object) -> bytes:
    """Return a checkpoint's file, without its digest."""
    about, fields = msgspec.msgpack.decode(pack_checkpoint(CHECKPOINT, ABOUT)[32:])
    return msgspec.msgpack.encode((changed.pop("about", about), {**fields, **changed}))


@pytest.mark.parametrize(
    "data",
    [
        pack(MODEL),
        msgspec.msgpack.encode(7),
        _file(about=7),
        _file(steps="7"),
        _file(steps=-1),
        b"\xa4\xed\xa0\x80\x00",
    ],
    ids=["no note", "a number", "about a number", "steps in words", "steps below zero", "half a character"],
)
def test_checkpoint_with_invalid_note_is_refused(data: bytes) -> None:
    """Although its digest is correct."""
    with pytest.raises(StateError, match="expected a checkpoint"):
        unpack_checkpoint(digest_of(data) + data, ABOUT)


@pytest.mark.parametrize(
    "prototypes", [["<f4", [2**28], bytes(12)], ["<f4", [2**31 - 1] * 9, b""], ["|O", [1], bytes(8)]]
)
def test_memory_of_a_file_is_bounded_by_its_size(prototypes: list[object]) -> None:
    """A shape that it claims is not allocated."""
    fields = msgspec.msgpack.decode(pack(MODEL))
    data = msgspec.msgpack.encode({**fields, "prototypes": prototypes})
    tracemalloc.start()
    try:
        with pytest.raises(StateError, match="expected a local model"):
            unpack(data)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(data) + 2**20
    finally:
        tracemalloc.stop()
