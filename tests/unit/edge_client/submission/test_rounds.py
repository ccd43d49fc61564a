"""Rounds on the device's disk: each of them taken part in once, whatever interrupts it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from edge_client.agent.upload_item import UploadItem
from edge_client.config import LocalSettings
from edge_client.data.extraction import Interrupted
from edge_client.data.images import LabeledImage
from edge_client.storage.device_state import DeviceState
from edge_client.storage.facts import StoredLocalModel, SubmissionReport, SubmissionSequence
from edge_client.storage.feature_cache import FeatureCache
from edge_client.submission.builder import FoundImages, PreparedSubmission, submission_of
from edge_client.submission.rounds import RoundWork
from edge_client.training.local_round import LocalModel, pack, unpack
from edge_client.training.trainer import Diverged
from protocol.errors import GraphRefused, ProtofleetError, StateError
from protocol.wire.codec import decode
from protocol.wire.messages import RoundManifest, Submission, TaskManifest
from tests.support.machine import full_disk
from tests.support.round_factory import (
    COUNTS,
    TASK,
    look_at,
    make_task,
    open_round,
    same_bits,
    take_images,
)
from tests.support.step_graphs import PROJECTION

STEPS_AN_EPOCH = 5
"""Of 18 images, 4 at a time."""


@dataclass
class Device:
    """A device program, started on a folder; the same folder again is a restart."""

    folder: Path
    dry: bool = False
    holdout: float = 0.0

    def __post_init__(self) -> None:
        """Start."""
        self.kept = DeviceState(self.folder)
        self.cache = FeatureCache(self.folder / "features.sqlite")
        local = LocalSettings(
            device_id="device", data=Path("data"), holdout=self.holdout, batch_size=4, workers=1
        )
        self.work = RoundWork(local, self.kept, self.cache, dry=self.dry)
        self.steps: list[int] = []

    def take_part(
        self,
        manifest: TaskManifest,
        opened: RoundManifest,
        *,
        images: Sequence[LabeledImage] | None = None,
        stop_before: int | None = None,
        task: bytes = TASK,
    ) -> tuple[PreparedSubmission, LocalModel]:
        """Take part in a round; `steps` has those that were done."""
        self.steps = []
        found = take_images() if images is None else images
        look_at(self.cache, found)
        return self.work.take_part(
            task,
            manifest,
            opened,
            found=FoundImages(tuple(found), ()),
            on_progress=lambda done, _total: self.steps.append(done),
            should_stop=lambda: stop_before is not None and len(self.steps) >= stop_before,
        )

    def upload(self, manifest: TaskManifest, opened: RoundManifest, *, sequence: int = 7) -> UploadItem:
        """Take part in a round and keep it."""
        prepared, local_model = self.take_part(manifest, opened)
        payload = submission_of(
            prepared, task=TASK, manifest=manifest, sequence=sequence, number=opened.number
        )
        return self.work.keep(
            TASK, opened, payload=payload, local_model=local_model, report=SubmissionReport()
        )

    def on_disk(self) -> dict[str, bytes]:
        """Every file but the cache of features, and every fact."""
        files = [path for path in self.folder.rglob("*") if path.is_file() and "sqlite" not in path.name]
        kinds = (StoredLocalModel, SubmissionSequence, SubmissionReport)
        facts = {kind.__name__: repr(self.kept.get(kind)).encode() for kind in kinds}
        facts["outbox"] = repr(self.kept.outbox.items()).encode()
        return {**{str(path.relative_to(self.folder)): path.read_bytes() for path in files}, **facts}

    def payload(self, item: UploadItem) -> bytes:
        """The bytes of something in the outbox."""
        (payload,) = self.kept.outbox.read(item.digest, ((0, item.size_bytes),)) or (b"",)
        return payload


@pytest.fixture
def device(tmp_path: Path) -> Device:
    """A device."""
    return Device(tmp_path)


def test_a_restart_uploads_what_was_made(tmp_path: Path, device: Device) -> None:
    """After a restart the round's submission is there, and none for another round or another task."""
    opened = open_round(device.kept.blobs)
    item = device.upload(make_task(device.kept.blobs), opened)
    again = Device(tmp_path)
    assert again.work.uploaded(TASK, opened, above=0) == item
    assert again.work.uploaded(TASK, open_round(device.kept.blobs, number=1), above=0) is None
    assert again.work.uploaded(b"u" * 32, opened, above=0) is None
    again.kept.outbox.receive(item.digest)
    assert again.work.uploaded(TASK, opened, above=0) == replace(item, received=True)


def test_a_submission_is_renumbered_and_nothing_else(tmp_path: Path, device: Device) -> None:
    """One that has to go above a sequence says the same under a greater one, and is what stands from then on."""
    opened = open_round(device.kept.blobs)
    first = device.payload(device.upload(make_task(device.kept.blobs), opened))
    far = 10**12
    second = device.work.uploaded(TASK, opened, above=far)
    assert second is not None
    was, now = (decode(payload, Submission, max_bytes=10**6) for payload in (first, device.payload(second)))
    assert now.sequence > far
    assert msgspec.structs.replace(now, sequence=was.sequence) == was
    assert Device(tmp_path).work.uploaded(TASK, opened, above=0) == second


def test_an_interrupted_training_goes_on(
    tmp_path: Path, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """No step is taken twice, it is said where it goes on, and the outcome is that of one that ran through."""
    caplog.set_level(logging.INFO)
    manifest, opened = make_task(device.kept.blobs), open_round(device.kept.blobs)
    _, whole = Device(tmp_path / "other").take_part(
        make_task(DeviceState(tmp_path / "other").blobs), open_round(DeviceState(tmp_path / "other").blobs)
    )
    with pytest.raises(Interrupted):
        device.take_part(manifest, opened, stop_before=7)
    again = Device(tmp_path)
    _, local_model = again.take_part(manifest, opened)
    assert again.steps == [8, 9, 10]
    assert "going on with the training from step 7" in caplog.text
    assert pack(local_model) == pack(whole)


def _longer(images: list[LabeledImage]) -> list[LabeledImage]:
    return [*images, LabeledImage(Path("data"), "2/new.png", 2, 100, 1_000)]


def _touched(images: list[LabeledImage]) -> list[LabeledImage]:
    return [replace(images[0], mtime_ns=2_000), *images[1:]]


def _relabeled(images: list[LabeledImage]) -> list[LabeledImage]:
    return [replace(images[0], label=1), *images[1:]]


@pytest.mark.parametrize("change", [_longer, _touched, _relabeled, lambda images: images[:-1]])
def test_other_images_begin_the_round_anew(
    tmp_path: Path, device: Device, change: Callable[[list[LabeledImage]], list[LabeledImage]]
) -> None:
    """An image more, one less, one that was changed or is of another class now: nothing of before goes on."""
    manifest, opened = make_task(device.kept.blobs), open_round(device.kept.blobs)
    with pytest.raises(Interrupted):
        device.take_part(manifest, opened, stop_before=7)
    again = Device(tmp_path)
    again.take_part(manifest, opened, images=change(take_images()))
    assert again.steps == list(range(1, 2 * STEPS_AN_EPOCH + 1))


def test_another_round_begins_anew(device: Device) -> None:
    """So does the same round with other tensors, and that of another task."""
    blobs = device.kept.blobs
    manifest, opened = make_task(blobs), open_round(blobs)
    for other, task in (
        (open_round(blobs, number=1), TASK),
        (open_round(blobs, tensors={"rate": np.array(0.2, np.float32)}), TASK),
        (opened, b"u" * 32),
    ):
        with pytest.raises(Interrupted):
            device.take_part(manifest, opened, stop_before=7)
        device.take_part(manifest, other, task=task)
        assert device.steps[0] == 1
        (device.folder / "training.checkpoint").unlink()


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: data[:-1] + b"!", lambda _: b""])
def test_a_damaged_checkpoint_begins_the_round_anew(
    device: Device, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that lost a part of it costs the steps, and is told; the round is taken part in."""
    manifest, opened = make_task(device.kept.blobs), open_round(device.kept.blobs)
    with pytest.raises(Interrupted):
        device.take_part(manifest, opened, stop_before=7)
    file = device.folder / "training.checkpoint"
    file.write_bytes(damage(file.read_bytes()))
    device.take_part(manifest, opened)
    assert len(device.steps) == 2 * STEPS_AN_EPOCH
    assert "begins anew" in caplog.text


def test_few_images_of_a_class_send_nothing(device: Device) -> None:
    """A class with fewer than `min_images` has no prototype, and the report says so; it is trained on all the same."""
    manifest = make_task(device.kept.blobs, min_images=6)
    prepared, local_model = device.take_part(manifest, open_round(device.kept.blobs))
    assert prepared.labels.tolist() == [0, 1]
    assert prepared.counts.tolist() == [7, 6]
    assert [(entry.counts, entry.left_out) for entry in prepared.classes] == [
        ((7,), False),
        ((6,), False),
        ((), True),
    ]
    assert local_model.counts.tolist() == [7, 6, 0]
    assert len(device.steps) == 2 * STEPS_AN_EPOCH


def test_held_out_images_are_not_learned_from(tmp_path: Path) -> None:
    """Counts are those of the images that remain, and a class that is held out as a whole sends nothing."""
    device = Device(tmp_path, holdout=0.5)
    prepared, local_model = device.take_part(make_task(device.kept.blobs), open_round(device.kept.blobs))
    reports = {entry.name: entry for entry in prepared.classes}
    remain = [entry.images - entry.held_out for entry in reports.values()]
    assert 0 < sum(remain) < sum(COUNTS)
    assert local_model.counts.tolist() == remain


def test_too_few_images_of_everything_are_one_line(device: Device) -> None:
    """Nothing is trained on that could not be uploaded."""
    with pytest.raises(ProtofleetError, match="no class has enough images"):
        device.take_part(make_task(device.kept.blobs, min_images=8), open_round(device.kept.blobs))
    assert device.steps == []


def test_a_dry_run_leaves_nothing(tmp_path: Path, device: Device) -> None:
    """Neither when it ends nor when it is interrupted; and it shows what a round would be, also one uploaded."""
    manifest, opened = make_task(device.kept.blobs), open_round(device.kept.blobs)
    device.upload(manifest, opened)
    dry = Device(tmp_path, dry=True)
    before = dry.on_disk()
    assert dry.work.uploaded(TASK, opened, above=0) is None
    prepared, _ = dry.take_part(manifest, opened)
    assert len(prepared.counts) == 3
    with pytest.raises(Interrupted):
        dry.take_part(manifest, opened, stop_before=3)
    assert dry.on_disk() == before


@pytest.mark.parametrize("tensors", [{"rate": np.array(1e20, np.float32)}, {"rate": np.zeros(2, np.float32)}])
def test_a_round_that_fails_changes_nothing(device: Device, tensors: dict[str, NDArray[np.float32]]) -> None:
    """What was learned and uploaded before stands, bit for bit, after a training that diverged or was refused."""
    manifest = make_task(device.kept.blobs, kept=("weight",))
    device.upload(manifest, open_round(device.kept.blobs))
    wrong = open_round(device.kept.blobs, number=1, tensors=tensors, epochs=20)
    before = device.on_disk()
    with pytest.raises((Diverged, GraphRefused)), np.errstate(all="ignore"):
        device.take_part(manifest, wrong)
    assert device.on_disk() == before
    _, local_model = device.take_part(manifest, open_round(device.kept.blobs, number=2, epochs=0))
    standing = unpack(device.kept.blobs.read(device.work.local_model_digest(TASK)))
    np.testing.assert_array_equal(local_model.state["weight"], standing.state["weight"])


def test_what_was_learned_goes_into_the_next_round_of_its_task_alone(device: Device) -> None:
    """Another task knows nothing of it."""
    manifest = make_task(device.kept.blobs, kept=("steps",))
    device.upload(manifest, open_round(device.kept.blobs))
    _, local_model = device.take_part(manifest, open_round(device.kept.blobs, number=1))
    assert local_model.state["steps"] == 4 * STEPS_AN_EPOCH
    assert device.work.local_model_digest(b"u" * 32) == b""
    _, local_model = device.take_part(manifest, open_round(device.kept.blobs, number=1), task=b"u" * 32)
    assert local_model.state["steps"] == 2 * STEPS_AN_EPOCH


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_what_was_learned_may_get_lost(device: Device, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """A device whose disk has lost it says so and begins anew, at this round and at every start after it."""
    manifest, opened = make_task(device.kept.blobs), open_round(device.kept.blobs)
    _, local_model = device.take_part(manifest, opened)
    device.work.keep(TASK, opened, payload=b"payload", local_model=local_model, report=SubmissionReport())
    file = device.kept.blobs.path(device.work.local_model_digest(TASK))
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    assert device.work.local_model_digest(TASK) == b""
    assert "local model is lost" in caplog.text
    device.take_part(manifest, open_round(device.kept.blobs, number=1))


def test_submission_and_what_was_learned_are_kept_together(tmp_path: Path, device: Device) -> None:
    """On a disk that is full at any moment either both are there afterwards or neither, and then it can be made up."""
    manifest = make_task(device.kept.blobs)
    outcomes = set()
    for number, room in enumerate([*range(0, 3_000, 150), 10**8]):
        opened = open_round(device.kept.blobs, number=number)
        with pytest.raises(Interrupted):
            device.take_part(manifest, opened, stop_before=5)
        prepared, local_model = device.take_part(manifest, opened)
        payload = submission_of(prepared, task=TASK, manifest=manifest, sequence=number, number=number)
        before = (device.kept.get(StoredLocalModel), device.kept.outbox.items())
        try:
            with full_disk(after_bytes=room):
                device.work.keep(
                    TASK, opened, payload=payload, local_model=local_model, report=SubmissionReport()
                )
        except StateError:
            assert (device.kept.get(StoredLocalModel), device.kept.outbox.items()) == before
            assert (device.folder / "training.checkpoint").exists()
            assert Device(tmp_path).work.uploaded(TASK, opened, above=0) is None
            outcomes.add("neither")
            device.work.keep(
                TASK, opened, payload=payload, local_model=local_model, report=SubmissionReport()
            )
        else:
            outcomes.add("both")
        again = Device(tmp_path)
        item = again.work.uploaded(TASK, opened, above=0)
        assert item is not None
        assert again.payload(item) == payload
        taught = unpack(again.kept.blobs.read(again.work.local_model_digest(TASK)))
        assert same_bits(taught.state, local_model.state)
        assert not (device.folder / "training.checkpoint").exists()
    assert outcomes == {"both", "neither"}


@pytest.mark.parametrize("counts", [COUNTS, ()])
def test_a_device_that_came_too_late_fits_the_head_to_its_images(
    device: Device, counts: tuple[int, ...]
) -> None:
    """It has no prototypes of its own; its state is made of the images that it has, if there are any."""
    manifest, opened = make_task(device.kept.blobs), open_round(device.kept.blobs)
    images = take_images(counts)
    look_at(device.cache, images)
    digest = device.work.keep_initial_model(manifest, opened.tensors, FoundImages(tuple(images), ()))
    local_model = unpack(device.kept.blobs.read(digest))
    assert local_model.prototypes.shape == (3, PROJECTION)
    assert not local_model.counts.any()
    assert local_model.state["mean"].any() == bool(counts)
