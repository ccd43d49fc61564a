"""Submissions of one device: no prototype, and no combination of submissions, has fewer than `min_images` images."""

import hmac
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from aggregator.intake.validation import Expectation, check_submission, read_message
from edge_client.images.images import LabeledImage
from edge_client.kinds import image_features
from edge_client.kinds.image_features import FoundImages, Workspace, training_feature_keys
from edge_client.kinds.image_grouping import group_images
from edge_client.kinds.prepared_submission import (
    PreparedSubmission,
    encode_submission,
)
from edge_client.prototypes.holdout import held_out, held_out_count
from edge_client.prototypes.prototype_averaging import class_means
from edge_client.store.device_state import DeviceState
from edge_client.training import local_round
from edge_client.training.local_round import LocalModel, RoundResult
from edge_client.training.trainer import TrainingSet
from protocol.errors import ProtofleetError
from protocol.wire.arrays import to_array
from protocol.wire.messages import BlobRef, Program, RoundManifest, Submission, TaskManifest
from protofleet.prototypes import average_class
from tests.support.devices.device_factory import (
    CLASSES,
    PROGRAM,
    TINY,
    make_manifest,
    make_submission,
    make_workspace,
    open_workspace,
    write_images,
)
from tests.support.devices.job_states import commit, job_state
from tests.support.devices.job_threads import EndedError
from tests.support.devices.linear_attacker import fewest_images
from tests.support.devices.round_factory import put_contents, take_images
from tests.support.messages.submissions import values_of
from tests.support.simulation.clocks import FakeClock

TASK = b"t" * 32
FOUR_CLASSES = ("ant", "bee", "cat", "dog")
OTHER_BACKBONE = BlobRef(digest=b"o" * 32, size_bytes=1, name="other")
SIZE = 1 << 6
"""Length of a feature: one value per image of a class, so that a prototype shows which images are in it."""


def _class_means_of_features(
    manifest: TaskManifest, _: object, *, data: TrainingSet, **__: object
) -> RoundResult:
    """Stand in for a training whose projection is the feature itself."""
    values, labels, counts = class_means(
        data.feature, data.labels, num_classes=len(FOUR_CLASSES), min_images=manifest.min_images
    )
    model = LocalModel({}, values, counts.astype(np.float32))
    return RoundResult(model, values.astype(np.float16), labels, counts, {}, None)


def _prepare(workspace: Workspace, manifest: TaskManifest, found: FoundImages) -> PreparedSubmission:
    opened = RoundManifest(task=TASK, number=0, rounds=1, epochs=1, tensors=TINY)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local_round, "train_round", _class_means_of_features)
        patched.setattr(local_round, "feature_size", lambda *_: SIZE)
        return make_submission(workspace, manifest, found, opened)


def _sent(
    counts: Sequence[int], manifest: TaskManifest, holdout: float, folder: Path
) -> list[tuple[int, int, int]]:
    """Return class, declared and actual number of images of each prototype that leaves a device.

    Nothing leaves it if it has too few images; `counts` are its images of each class.
    """
    images = take_images(counts)
    workspace = make_workspace(folder)
    (key,) = training_feature_keys(manifest)
    directions = np.eye(SIZE, dtype=np.float32)
    features = [(image.identity, directions[int(Path(image.relative).stem)]) for image in images]
    workspace.cache.put(key, features, [])
    put_contents(workspace.cache, images)
    try:
        found = FoundImages(tuple(images), (), held_out(images, holdout))
        prepared = _prepare(workspace, manifest, found)
    except ProtofleetError:
        return []
    finally:
        workspace.cache.close()
    message = read_message(encode_submission(prepared, task=TASK, manifest=manifest, sequence=1))
    assert isinstance(message, Submission)
    arrays = (to_array(message.labels), to_array(message.counts), values_of(message))
    return [
        (int(label), int(count), int((prototype != 0).sum()))
        for label, count, prototype in zip(*arrays, strict=True)
    ]


@pytest.mark.parametrize("program", [None, PROGRAM], ids=["fedtc", "rounds"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(0, 40), min_size=4, max_size=4).filter(any),
    alpha=st.floats(0.01, 1.0),
    batch_size=st.integers(1, 12),
    holdout=st.floats(0.0, 0.9),
    data=st.data(),
)
def test_every_prototype_averages_at_least_min_images(
    tmp_path_factory: pytest.TempPathFactory, program: Program | None, counts: list[int], alpha: float,
    batch_size: int, holdout: float, data: st.DataObject,
) -> None:  # fmt: skip
    """For any images and any task, each prototype's count is correct and large enough."""
    min_images = data.draw(st.integers(1, batch_size))
    manifest = make_manifest(
        classes=FOUR_CLASSES, alpha=alpha, batch_size=batch_size, min_images=min_images, program=program
    )
    sent = _sent(counts, manifest, holdout, tmp_path_factory.mktemp("device"))
    for label, said, images in sent:
        assert said == images >= min_images, FOUR_CLASSES[label]
    training = [count - held_out_count(count, holdout) for count in counts]
    enough = {label for label in range(4) if training[label] >= min_images}
    assert {label for label, _, _ in sent} <= enough, "a class with fewer gives none"
    if program is not None or alpha == 1.0:
        assert {label for label, _, _ in sent} == enough


class Victim:
    """A device whose features show which images are in a prototype: one value per image, in each backbone."""

    def __init__(self, folder: Path) -> None:
        self.workspace, self.state = make_workspace(folder), DeviceState(folder / "state")
        self.state.clock = self.clock = FakeClock()
        self.sums: list[Any] = []

    def upload(self, numbers: Iterable[int], **task: Any) -> None:
        """Release images of one class, a day later, if the task can be uploaded to."""
        self.clock.elapsed_s += 25 * 3600
        manifest = make_manifest(**task)
        images = [LabeledImage(Path(), f"cat/{number:02}", 0, size_bytes=1, mtime_ns=1) for number in numbers]
        (key,) = training_feature_keys(manifest)
        # A few images are far from the others, and an outlier filter leaves them out first.
        features = np.eye(SIZE, dtype=np.float32) + np.float32(0.01)
        features[::7] *= -1
        made = [(image.identity, features[int(image.relative[-2:])]) for image in images]
        self.workspace.cache.put(key, made, [])
        put_contents(self.workspace.cache, images)
        found = FoundImages(tuple(images), ())
        self.workspace.store = job_state(self.state)
        try:
            prepared = _prepare(self.workspace, manifest, found)
        except ProtofleetError:
            return
        finally:
            commit(self.state, self.workspace.store)
        sums = prepared.prototypes.astype(np.float64) * prepared.counts[:, None]
        self.sums += list(abs(sums) > 0.5)


ALL = range(40)
Uploads = Sequence[tuple[Iterable[int], dict[str, Any]]]
ATTACKS: dict[str, Uploads] = {
    "another alpha": [(ALL, {"alpha": alpha}) for alpha in (1.0, 0.975, 0.95, 0.9)],
    "a deleted image and another seed": [(ALL, {}), (set(ALL) - {7}, {"seed": 1})],
    "a deleted image in a task with rounds": [(ALL, {}), (set(ALL) - {7}, {"program": PROGRAM})],
    "rounds while images come": [(range(count), {"program": PROGRAM}) for count in range(20, 40)],
    "another image each day": [(range(count), {"seed": count}) for count in range(10, 40)],
    "another batch size": [(ALL, {"batch_size": size}) for size in (20, 5, 7, 12)],
    "another backbone and a deleted image": [
        (ALL, {"backbones": (OTHER_BACKBONE,)}),
        (set(ALL) - {3}, {}),
        (set(ALL) - {4}, {"backbones": (OTHER_BACKBONE,), "seed": 2}),
    ],
    "images that go and return": [
        (set(range(20)) - {day % 20, (3 * day) % 20} | set(range(20, 20 + day)), {"alpha": 1 - day / 99})
        for day in range(20)
    ],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_combination_of_submissions_has_fewer_images_than_a_prototype(tmp_path: Path, attack: str) -> None:
    """Whatever the task changes and whichever images come and go: differences are of at least five images."""
    victim = Victim(tmp_path)
    for numbers, task in ATTACKS[attack]:
        victim.upload(numbers, **{"batch_size": 5, "min_images": 5, **task})
    assert len(victim.sums) > 5 or "rounds" in attack
    assert fewest_images(np.array(victim.sums, float), below=5) == 5


def test_attacks_would_be_found(tmp_path: Path) -> None:
    """If a device that has lost its record averages again, the difference is one image."""
    victim = Victim(tmp_path / "before")
    victim.upload(ALL, program=PROGRAM)
    again = Victim(tmp_path / "after")
    again.upload(set(ALL) - {7}, program=PROGRAM)
    assert fewest_images(np.array([*victim.sums, *again.sums], float), below=5) == 1


class Folder:
    """A device with a folder of real files."""

    def __init__(self, folder: Path, *, images: int = 12, holdout: float = 0.0) -> None:
        self.data = write_images(folder / "data", count=images)
        self.workspace, self.state = make_workspace(folder, holdout=holdout), DeviceState(folder / "state")
        self.state.clock = self.clock = FakeClock()

    def upload(self, **task: Any) -> PreparedSubmission:
        manifest = make_manifest(**task)
        self.workspace.store = job_state(self.state)
        found = self.workspace.extract(manifest)
        prepared = make_submission(self.workspace, manifest, found)
        commit(self.state, self.workspace.store)
        payload = encode_submission(prepared, task=TASK, manifest=manifest, sequence=1)
        message = read_message(payload)
        assert isinstance(message, Submission)
        check_submission(message, Expectation(TASK, manifest, prepared.prototypes.shape[1]))
        return prepared

    def add(self, count: int, *, start: int = 100) -> None:
        for number in range(start, start + count):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(self.data / CLASSES[0] / f"{number}.png")


def test_first_submission_is_fedtcs(tmp_path: Path) -> None:
    """The groups of a device that has uploaded nothing are batches without outliers, bit by bit."""
    device = Folder(tmp_path, images=23)
    prepared = device.upload(alpha=0.9)
    found = device.workspace.extract(make_manifest())
    features = device.workspace.features(found.of_class(1), training_feature_keys(make_manifest()), 16)
    key = hmac.digest(device.workspace.store.secret, b"0/device/1", "sha256")
    values, counts = average_class(features, batch=5, alpha=0.9, rng=np.random.default_rng(list(key)))
    assert prepared.classes[1].counts == tuple(counts)
    np.testing.assert_array_equal(prepared.prototypes[prepared.labels == 1], values.astype(np.float16))


def test_few_new_images_wait_and_enough_count(tmp_path: Path) -> None:
    """The prototypes that were uploaded stay as they were, also under another seed."""
    device = Folder(tmp_path)
    first = device.upload()
    device.add(4)
    waiting = device.upload(seed=1)
    assert waiting.fingerprint == first.fingerprint
    shown = waiting.classes[0]
    assert (shown.images, shown.waiting, shown.more_needed) == (16, 4, 1)
    device.add(1, start=200)
    second = device.upload()
    assert second.classes[0].counts == (*first.classes[0].counts, 5)
    assert second.classes[0].waiting == 0
    mine = second.labels == 0
    np.testing.assert_array_equal(second.prototypes[mine][:-1], first.prototypes[first.labels == 0])


def test_a_removed_image_takes_its_prototype_with_it(tmp_path: Path) -> None:
    """The others stay as they were; its other images wait for it, and after a day for new ones."""
    device = Folder(tmp_path)
    first = device.upload()
    (device.data / CLASSES[0] / "0003.png").unlink()
    second = device.upload()
    rows = {tuple(row) for row in first.prototypes[first.labels == 0]}
    left = {tuple(row) for row in second.prototypes[second.labels == 0]}
    assert left < rows
    assert len(rows - left) == 1
    assert second.classes[0].waiting == 11 - sum(second.classes[0].counts)
    assert (second.classes[0].more_needed, second.classes[0].missing) == (0, 1)
    device.clock.elapsed_s += 25 * 3600
    third = device.upload().classes[0]
    assert third.counts == second.classes[0].counts
    assert (third.waiting, third.more_needed, third.missing) == (second.classes[0].waiting, 4, 0)
    device.add(4)
    assert sum(device.upload().classes[0].counts) == 15


def test_an_image_in_whose_file_another_one_is_now_is_not_awaited(tmp_path: Path) -> None:
    """A half-copied image was uploaded, and nobody can restore it: the others form new prototypes at once.

    Also if the job that finds the other image is killed.
    """
    device = Folder(tmp_path, images=13)
    half = [device.data / CLASSES[0] / f"{number:04}.png" for number in (0, 5, 9)]
    for path in half:
        path.rename(path.with_suffix(".whole"))
        Image.new("RGB", (12, 10), (int(path.stem), 0, 0)).save(path)
    assert sum(device.upload().classes[0].counts) == 13
    for path in half:
        path.with_suffix(".whole").replace(path)
    with patch.object(image_features, "extract", side_effect=EndedError), pytest.raises(EndedError):
        device.workspace.extract(make_manifest())
    complete = device.upload().classes[0]
    assert (complete.images, sum(complete.counts), complete.missing) == (13, 13, 0)


def test_an_image_in_whose_file_there_is_none_is_awaited(tmp_path: Path) -> None:
    """Programs that keep files in a cloud leave empty ones in their places."""
    device = Folder(tmp_path)
    first, path = device.upload(), device.data / CLASSES[0] / "0003.png"
    data = path.read_bytes()
    path.write_bytes(b"")
    assert device.upload().classes[0].missing == 1
    path.write_bytes(data)
    assert device.upload().fingerprint == first.fingerprint


def test_images_of_a_class_that_is_split_are_shown_as_waiting(tmp_path: Path) -> None:
    """One image of each prototype moves to the other class: nothing of either is left, and both say how many wait."""
    device = Folder(tmp_path, images=4)
    device.upload(batch_size=4, min_images=4)
    for name in CLASSES:
        (device.data / name / "0000.png").rename(device.data / name / "moved.png")
    cat, dog = (device.data / name / "moved.png" for name in CLASSES)
    cat.rename(dog.with_name("other.png"))
    dog.rename(cat)
    device.add(1)
    with pytest.raises(ProtofleetError, match="add 1 image to use them again"):
        device.upload(batch_size=4, min_images=4)
    manifest = make_manifest(batch_size=4, min_images=4)
    found = device.workspace.extract(manifest)
    released = group_images(device.workspace, manifest, found).classes
    assert [(each.waiting, each.more_needed) for each in released] == [(5, 1), (4, 2)]


def test_a_file_in_two_classes_counts_in_the_first_one(tmp_path: Path) -> None:
    """It does not break the first class's prototype at each submission."""
    device = Folder(tmp_path)
    file = device.data / CLASSES[0] / "0003.png"
    (device.data / CLASSES[1] / file.name).write_bytes(file.read_bytes())
    first, second = device.upload(), device.upload()
    assert [sum(each.counts) for each in first.classes[:2]] == [12, 11]
    assert second.fingerprint == first.fingerprint


def _rename(path: Path) -> None:
    path.rename(path.with_name("renamed.png"))


def _touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def _copy(path: Path) -> None:
    path.with_name("copy.png").write_bytes(path.read_bytes())


@pytest.mark.parametrize("change", [_rename, _touch, _copy])
def test_an_image_is_its_files_content(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """Renamed, copied again or twice there, it stays in its group, and counts once."""
    device = Folder(tmp_path)
    first = device.upload()
    change(device.data / CLASSES[0] / "0003.png")
    device.workspace.cache.close()
    device.workspace = make_workspace(tmp_path)
    second = device.upload()
    assert second.counts.tolist() == first.counts.tolist()
    np.testing.assert_allclose(second.prototypes, first.prototypes, rtol=2e-3)


def test_images_of_prototypes_are_not_held_out_later(tmp_path: Path) -> None:
    """New images make the share larger; the ones held out for it are new."""
    device = Folder(tmp_path, images=20, holdout=0.2)
    first = device.upload()
    device.add(10)
    second = device.upload()
    assert [report.held_out for report in second.classes] == [6, 4]
    rows = second.prototypes[second.labels == 0][: len(first.classes[0].counts)]
    np.testing.assert_array_equal(rows, first.prototypes[first.labels == 0])


def test_a_dry_run_records_no_group(tmp_path: Path) -> None:
    device = Folder(tmp_path)
    before = device.workspace
    shown = open_workspace(before.settings, device.state, before.cache, dry_run=True)
    found = shown.extract(make_manifest())
    prepared = make_submission(shown, make_manifest(), found)
    assert shown.store.changes.partition is None
    assert device.upload().counts.tolist() == prepared.counts.tolist()
    assert len(device.state.image_groups.read().groups) == len(prepared.counts)
