"""A device's part in a round, with a least squares program in ONNX Runtime."""

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

from edge_client.submission.prepared_submission import PreparedSubmission, encode_submission
from edge_client.training.local_round import (
    LocalModel,
    RoundResult,
    pack,
    pack_checkpoint,
    train_round,
    unpack,
    unpack_checkpoint,
)
from edge_client.training.trainer import Checkpoint, TrainingHooks, TrainingSet
from protocol.errors import GraphRefused, Interrupted, StateError
from protocol.storage.blobstore import BlobStore
from protocol.wire.codec import digest_of, encode, to_array
from protocol.wire.messages import Receipt, RoundManifest, TaskManifest
from tests.support.devices.round_factory import (
    TASK,
    make_task,
    open_round,
    same_bits,
    tensors_blob,
    watching,
)
from tests.support.graphs.step_graphs import data, round_tensors

DATA = TrainingSet(*data(23))
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
        except Interrupted:
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
