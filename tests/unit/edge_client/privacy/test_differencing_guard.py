"""Added and removed images: no two submissions differ in fewer images than a prototype averages."""

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from aggregator.ingest.validation import Expectation, check_submission
from edge_client.privacy.differencing_guard import NO_SUBMISSION, LastSubmission, last_submission
from edge_client.storage.stored_values import UploadedImages
from edge_client.submission.prepared_submission import (
    PreparedSubmission,
    encode_submission,
    prepare_prototypes,
)
from tests.support.device_factory import CLASSES, make_manifest, make_workspace, write_images

TASK = b"t" * 32
B = 5
MANIFEST = make_manifest(batch_size=B)


class Life:
    """A device's folder of images over time, and what it uploads of it."""

    def __init__(self, folder: Path, *, images: int = 12) -> None:
        self.workspace = make_workspace(folder)
        self.data = write_images(folder / "data", count=images)
        self.first = CLASSES[0]
        self.last = NO_SUBMISSION

    def come(self, count: int, start: int = 100) -> None:
        for number in range(start, start + count):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(self.data / self.first / f"{number}.png")

    def go(self, count: int) -> None:
        for path in sorted((self.data / self.first).iterdir())[:count]:
            path.unlink()

    def upload(self, task: bytes = TASK) -> PreparedSubmission:
        """Make a submission, and remember it as the program does, in JSON and bytes."""
        found = self.workspace.extract(MANIFEST, should_stop=lambda: False)
        last = self.last if task == TASK else LastSubmission(self.last.images)
        prepared = prepare_prototypes(self.workspace, MANIFEST, found, last)
        payload = encode_submission(prepared, task=TASK, manifest=MANIFEST, sequence=int(time.time()))
        stored = msgspec.json.encode(UploadedImages(prepared.image_keys))
        self.last = last_submission(msgspec.json.decode(stored, type=UploadedImages), payload)
        return prepared


def test_few_new_images_wait_and_enough_count(tmp_path: Path) -> None:
    """The class without new images stays as it was."""
    life = Life(tmp_path)
    first = life.upload()
    life.come(B - 1)
    waiting = life.upload()
    assert waiting.fingerprint == first.fingerprint
    assert waiting.classes[0].waiting == B - 1
    assert waiting.classes[0].images == 12 + B - 1
    life.come(1, start=200)
    second = life.upload()
    assert second.classes[0].waiting == 0
    assert second.classes[0].counts != first.classes[0].counts
    assert second.counts[second.labels == 0].sum() == 12 + B
    others = [prepared.prototypes[prepared.labels == 1] for prepared in (first, second)]
    np.testing.assert_array_equal(*others)


@pytest.mark.parametrize(("come", "go"), [(0, 1), (0, B - 1), (2, 2), (1, B - 2)])
def test_few_removed_images_change_nothing(tmp_path: Path, come: int, go: int) -> None:
    """The uploaded prototypes stay, although some of their images are gone."""
    life = Life(tmp_path)
    first = life.upload()
    life.go(go)
    life.come(come)
    waiting = life.upload()
    assert waiting.fingerprint == first.fingerprint
    assert waiting.classes[0].waiting == come + go
    life.go(B)
    assert life.upload().fingerprint != first.fingerprint


def test_the_aggregator_accepts_prototypes_of_deleted_images(tmp_path: Path) -> None:
    """A class stays although its images are gone, while another one grows: the images read include the deleted ones."""
    life = Life(tmp_path)
    life.upload()
    life.go(B - 1)
    life.first = CLASSES[1]
    life.come(B)
    prepared = life.upload()
    assert [entry.images for entry in prepared.classes] == [12 - B + 1, 12 + B]
    submission = life.last.submission
    assert submission is not None
    assert submission.images == prepared.counts.sum() == 24 + B
    check_submission(submission, Expectation(TASK, MANIFEST, prepared.prototypes.shape[1]))


def test_changed_image_counts_as_removed_and_added(tmp_path: Path) -> None:
    life = Life(tmp_path)
    first = life.upload()
    path = min((life.data / life.first).iterdir())
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(path)
    waiting = life.upload()
    assert (waiting.fingerprint, waiting.classes[0].waiting) == (first.fingerprint, 2)


def test_whole_class_appears_and_disappears_at_once(tmp_path: Path) -> None:
    """Even with few images: the task's min_images allows it."""
    life = Life(tmp_path, images=3)
    life.upload()
    life.go(3)
    gone = life.upload()
    assert set(gone.labels.tolist()) == {1}
    life.come(3)
    assert set(life.upload().labels.tolist()) == {0, 1}


def test_new_images_wait_in_another_task_too(tmp_path: Path) -> None:
    """Two tasks of the same backbone are two submissions of the same images."""
    life = Life(tmp_path)
    first = life.upload()
    life.come(1)
    other = life.upload(task=b"u" * 32)
    assert other.fingerprint == first.fingerprint
    assert other.classes[0].waiting == 1


def test_damaged_last_submission_is_prepared_anew(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.upload()
    life.go(1)
    life.last = last_submission(UploadedImages(life.last.images), b"damaged")
    assert life.upload().counts.sum() == 12 + 11
