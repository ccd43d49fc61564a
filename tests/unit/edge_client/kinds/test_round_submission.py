"""Rounds: each is trained once across restarts, and stored as a whole."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from edge_client.core.events import BuildSubmission
from edge_client.core.state import UploadItem
from edge_client.images.images import LabeledImage
from edge_client.kinds import round_submission
from edge_client.kinds.image_features import FoundImages
from edge_client.kinds.prepared_submission import PreparedSubmission, encode_submission
from edge_client.prototypes.holdout import held_out
from edge_client.store.device_state import DeviceState
from edge_client.store.feature_cache import FeatureCache
from edge_client.store.job_folder import CHECKPOINTS
from edge_client.store.stored_values import StoredLocalModel, SubmissionReport, SubmissionSequence
from edge_client.training.local_round import LocalModel, pack, unpack
from edge_client.training.trainer import Diverged, TrainingHooks
from protocol.errors import GraphRefused, StateError
from protocol.wire.codec import decode
from protocol.wire.messages import RoundManifest, Submission, TaskManifest
from tests.support.devices.device_factory import (
    make_manifest,
    make_settings,
    make_submission,
    open_workspace,
    payload_of,
)
from tests.support.devices.job_states import commit, job_state
from tests.support.devices.job_threads import EndedError
from tests.support.devices.round_factory import (
    COUNTS,
    TASK,
    look_at,
    make_task,
    open_round,
    same_bits,
    take_images,
)
from tests.support.graphs.step_graphs import PROJECTION
from tests.support.machine_faults import full_disk

STEPS_PER_EPOCH = 5
"""18 images in batches of 4."""

GROUP = 5
"""Images in a group, as `make_task` sets it."""


class Device:
    """A device program on a folder; another one on the same folder is a restart."""

    def __init__(self, folder: Path, *, dry_run: bool = False, holdout: float = 0.0) -> None:
        self.folder = folder
        self.store = DeviceState(folder)
        self.cache = FeatureCache(folder / "features.sqlite")
        self.holdout = holdout
        settings = make_settings(folder)
        self.workspace = open_workspace(settings, self.store, self.cache, dry_run=dry_run)
        self.steps: list[int] = []

    def train(
        self,
        manifest: TaskManifest,
        opened: RoundManifest,
        *,
        images: Sequence[LabeledImage] | None = None,
        stop_after: int | None = None,
        task: bytes = TASK,
    ) -> PreparedSubmission:
        """Train a round; `steps` has the steps that were taken."""
        self.steps = []

        def on_progress(done: int, _total: int) -> None:
            self.steps.append(done)
            if done == stop_after:
                raise EndedError

        def hooks(**given: Any) -> TrainingHooks:
            """Return hooks of a training in which each step begins with a checkpoint, if the job is killed."""
            checkpoint_s = 1e9 if stop_after is None else 0.0
            return TrainingHooks(**{**given, "on_progress": on_progress, "checkpoint_s": checkpoint_s})

        found = take_images() if images is None else images
        look_at(self.cache, found)
        usable = FoundImages(tuple(found), (), held_out(found, self.holdout))
        self.workspace.store = job_state(self.store)
        with patch.object(round_submission, "TrainingHooks", hooks):
            return make_submission(self.workspace, manifest, usable, opened, digest=task)

    def interrupt(self, manifest: TaskManifest, opened: RoundManifest, *, stop_after: int = 7) -> None:
        """Kill the job after a step."""
        with pytest.raises(EndedError):
            self.train(manifest, opened, stop_after=stop_after)

    def complete(self, manifest: TaskManifest, opened: RoundManifest) -> UploadItem:
        """Train and store a round."""
        prepared = self.train(manifest, opened)
        return self.end_job(opened, prepared, encoded(prepared, manifest, opened))

    def end_job(self, opened: RoundManifest, prepared: PreparedSubmission, payload: bytes) -> UploadItem:
        """Leave a trained round in a job's folder, as `build_submission` does, and commit it."""
        job = job_state(self.store)
        job.partition = self.workspace.store.partition
        model = round_submission.put_model(job, TASK, prepared.local_model)
        item = job.leave("submission", payload, task=TASK, about=str(opened.number))
        commit(self.store, job, model)
        return item

    def found(self, opened: RoundManifest, *, task: bytes = TASK, above: int = 0) -> UploadItem | None:
        """Return the round's submission if it was built before."""
        build = BuildSubmission(task, make_manifest(), opened, above)
        job = job_state(self.store, above=above)
        item = round_submission.existing_submission(replace(self.workspace, store=job), build)
        commit(self.store, job)
        return item

    def local_model(self) -> LocalModel | None:
        """Return the task's stored local model."""
        digest = round_submission.local_model_digest(job_state(self.store), TASK)
        return unpack(self.store.blobs.read(digest)) if digest else None

    def on_disk(self) -> dict[str, bytes]:
        """Return every file except the feature cache and those of jobs, and every fact."""
        files = [
            path
            for path in self.folder.rglob("*")
            if path.is_file() and "sqlite" not in path.name and "jobs" not in path.parts
        ]
        kinds = (StoredLocalModel, SubmissionSequence, SubmissionReport)
        facts = {kind.__name__: repr(self.store.get(kind)).encode() for kind in kinds}
        facts["outbox"] = repr(self.store.outbox.items()).encode()
        return {**{str(path.relative_to(self.folder)): path.read_bytes() for path in files}, **facts}


def encoded(prepared: PreparedSubmission, manifest: TaskManifest, opened: RoundManifest) -> bytes:
    number = opened.number
    return encode_submission(prepared, task=TASK, manifest=manifest, sequence=7 + number, round_number=number)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


@pytest.fixture
def manifest(device: Device) -> TaskManifest:
    return make_task(device.store.blobs)


@pytest.fixture
def opened(device: Device) -> RoundManifest:
    return open_round(device.store.blobs)


def model_of(prepared: PreparedSubmission) -> LocalModel:
    assert prepared.local_model is not None
    return prepared.local_model


def test_a_renumbered_submission_differs_in_its_sequence_only(
    device: Device, manifest: TaskManifest, opened: RoundManifest
) -> None:
    """It replaces the one in the outbox."""
    first = payload_of(device.store, device.complete(manifest, opened))
    second = device.found(opened, above=10**12)
    assert second is not None
    old, new = (
        decode(payload, Submission, max_bytes=10**6) for payload in (first, payload_of(device.store, second))
    )
    assert new.sequence > 10**12
    assert msgspec.structs.replace(new, sequence=old.sequence) == old
    assert Device(device.folder).found(opened) == second


def test_an_interrupted_training_resumes(
    tmp_path: Path, device: Device, manifest: TaskManifest, opened: RoundManifest, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """From its last checkpoint, and the result equals that of an uninterrupted training."""
    caplog.set_level(logging.INFO)
    other = Device(tmp_path / "other")
    whole = model_of(other.train(make_task(other.store.blobs), open_round(other.store.blobs)))
    device.interrupt(manifest, opened)
    again = Device(tmp_path)
    model = model_of(again.train(manifest, opened))
    assert again.steps == [7, 8, 9, 10]
    assert "training resumed step=6" in caplog.text
    assert pack(model) == pack(whole)


CHANGES: dict[str, Callable[[list[LabeledImage]], list[LabeledImage]]] = {
    "added": lambda images: [
        *images,
        *(LabeledImage(Path("data"), f"2/new-{n}.png", 2, 100, 1_000) for n in range(GROUP)),
    ],
    "modified": lambda images: [replace(images[0], mtime_ns=2_000), *images[1:]],
    "relabeled": lambda images: [replace(images[0], label=1), *images[1:]],
    "removed": lambda images: images[:-1],
}


@pytest.mark.parametrize("change", CHANGES)
def test_training_restarts_after_an_image_changed(
    device: Device, manifest: TaskManifest, opened: RoundManifest, change: str
) -> None:
    """The checkpoint is of other images."""
    device.interrupt(manifest, opened)
    again = Device(device.folder)
    again.train(manifest, opened, images=CHANGES[change](take_images()))
    assert again.steps[0] == 1


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: data[:-1] + b"!", lambda _: b""])
def test_training_restarts_after_a_damaged_checkpoint(
    device: Device, manifest: TaskManifest, opened: RoundManifest, damage: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It is logged, and costs only the steps."""
    device.interrupt(manifest, opened)
    (file,) = (device.folder / CHECKPOINTS).iterdir()
    file.write_bytes(damage(file.read_bytes()))
    device.train(manifest, opened)
    assert len(device.steps) == 2 * STEPS_PER_EPOCH
    assert "checkpoint lost, training restarts" in caplog.text


def test_a_dry_run_writes_nothing(device: Device, manifest: TaskManifest, opened: RoundManifest) -> None:
    """Complete or killed; it also trains a round that was uploaded."""
    device.complete(manifest, opened)
    dry = Device(device.folder, dry_run=True)
    before = dry.on_disk()
    assert dry.found(opened) is None
    assert len(dry.train(manifest, opened).counts) == 3
    dry.interrupt(manifest, opened, stop_after=3)
    assert dry.on_disk() == before


@pytest.mark.parametrize("tensors", [{"rate": np.array(1e20, np.float32)}, {"rate": np.zeros(2, np.float32)}])
def test_a_failed_round_changes_nothing(device: Device, tensors: dict[str, NDArray[np.float32]]) -> None:
    """After divergence or a refused graph, the local model and the submission are the same, bit for bit."""
    manifest = make_task(device.store.blobs, kept=("weight",))
    device.complete(manifest, open_round(device.store.blobs))
    refused = open_round(device.store.blobs, number=1, tensors=tensors, epochs=20)
    before = device.on_disk()
    with pytest.raises((Diverged, GraphRefused)), np.errstate(all="ignore"):
        device.train(manifest, refused)
    assert device.on_disk() == before
    prepared = device.train(manifest, open_round(device.store.blobs, number=2, epochs=0))
    stored = device.local_model()
    assert stored is not None
    np.testing.assert_array_equal(model_of(prepared).state["weight"], stored.state["weight"])


def test_the_local_model_continues_in_the_next_round_of_its_task(device: Device) -> None:
    """Another task starts with a new one."""
    manifest = make_task(device.store.blobs, kept=("steps",))
    device.complete(manifest, open_round(device.store.blobs))
    opened = open_round(device.store.blobs, number=1)
    assert model_of(device.train(manifest, opened)).state["steps"] == 4 * STEPS_PER_EPOCH
    assert round_submission.local_model_digest(job_state(device.store), b"u" * 32) == b""
    other = device.train(manifest, opened, task=b"u" * 32)
    assert model_of(other).state["steps"] == 2 * STEPS_PER_EPOCH


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_lost_local_model_is_logged_and_replaced(
    device: Device, manifest: TaskManifest, opened: RoundManifest, damage: str, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """The next round starts from the initial model."""
    device.complete(manifest, opened)
    file = device.store.blobs.path(round_submission.local_model_digest(job_state(device.store), TASK))
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    assert device.local_model() is None
    assert "local model lost" in caplog.text
    device.train(manifest, open_round(device.store.blobs, number=1))


def test_submission_and_local_model_are_stored_together(device: Device, manifest: TaskManifest) -> None:
    """On a disk that fills up at any moment, both are stored or neither, and then storing succeeds later."""
    outcomes = set()
    for number, room in enumerate([*range(0, 3_000, 150), 10**8]):
        opened = open_round(device.store.blobs, number=number)
        device.interrupt(manifest, opened, stop_after=5)
        prepared = device.train(manifest, opened)
        payload = encoded(prepared, manifest, opened)
        before = (device.store.get(StoredLocalModel), device.store.outbox.items())
        try:
            with full_disk(after_bytes=room):
                device.end_job(opened, prepared, payload)
        except StateError:
            assert (device.store.get(StoredLocalModel), device.store.outbox.items()) == before
            assert (device.folder / CHECKPOINTS).exists()
            assert Device(device.folder).found(opened) is None
            outcomes.add("neither")
            device.end_job(opened, prepared, payload)
        else:
            outcomes.add("both")
        again = Device(device.folder)
        item, model = again.found(opened), again.local_model()
        assert item is not None
        assert payload_of(again.store, item) == payload
        assert model is not None
        assert same_bits(model.state, model_of(prepared).state)
        assert not (device.folder / CHECKPOINTS).exists()
    assert outcomes == {"both", "neither"}


@pytest.mark.parametrize("counts", [COUNTS, ()])
def test_an_initial_model_fits_the_devices_images(
    device: Device, manifest: TaskManifest, opened: RoundManifest, counts: tuple[int, ...]
) -> None:
    """A device that trained in no round has no prototypes, and maybe no images."""
    images = take_images(counts)
    look_at(device.cache, images)
    digest = round_submission.store_initial_model(
        device.workspace, manifest, opened.tensors, FoundImages(tuple(images), ())
    )
    model = unpack(device.workspace.store.blobs.read(digest))
    assert model.prototypes.shape == (3, PROJECTION)
    assert not model.counts.any()
    assert model.state["mean"].any() == bool(counts)
