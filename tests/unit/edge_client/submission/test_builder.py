"""Prototypes of a device, their encoding, and evaluations."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from aggregator.intake.validation import Expectation, check_submission, read_message
from edge_client.cli import cli
from edge_client.data.holdout import held_out
from edge_client.data.images import NoImages, find_images
from edge_client.predict.head import open_head
from edge_client.runtime.backbone import Backbone
from edge_client.storage.stored_values import BuildProblem, CurrentTask, DeviceName, Secret
from edge_client.submission.builder import LOST_IMAGES
from edge_client.submission.head_evaluation import evaluate_head, held_out_images
from edge_client.submission.prepared_submission import (
    PreparedSubmission,
    encode_submission,
    prepare_prototypes,
)
from protocol.errors import BackboneMismatch, ConfigError, ProtofleetError
from protocol.wire.messages import Evaluation, Submission
from tests.support.devices.device_bench import HeadBench
from tests.support.devices.device_factory import (
    CLASSES,
    linear_head,
    make_manifest,
    make_workspace,
    tiny,
    write_images,
)
from tests.support.devices.worker_benches import WANTED, PrivateBench

TASK = b"t" * 32


def _prepare(
    folder: Path, *, secret: bytes = b"s" * 32, manifest: dict[str, Any] | None = None, **local: Any
) -> PreparedSubmission:
    """Prepare a submission of the images in the data folder."""
    workspace, task = make_workspace(folder, **{"holdout": 0.2, **local}), make_manifest(**(manifest or {}))
    workspace.store.set(Secret(secret))
    return prepare_prototypes(workspace, task, workspace.extract(task, should_stop=lambda: False))


def test_held_out_images_are_in_no_prototype(tmp_path: Path) -> None:
    """Every other image is in exactly one, and the report has the counts."""
    data = write_images(tmp_path / "data", count=30)
    prepared = _prepare(tmp_path)
    images = find_images(data, CLASSES)
    assert len(held_out(images, 0.2)) == 12
    assert prepared.counts.sum() == len(images) - 12
    assert [report.images for report in prepared.classes] == [30, 30]
    assert [report.held_out for report in prepared.classes] == [6, 6]
    assert prepared.prototypes.dtype == np.float16


def test_a_class_with_a_name_that_no_folder_can_have(tmp_path: Path) -> None:
    """It must not end the program, which would end again at each start with the stored task."""
    bench = PrivateBench(tmp_path, differential_privacy=None, classes=(*CLASSES, "\U0001f600" * 128))
    assert bench.upload().images == 80


def test_the_same_images_give_the_same_submission(tmp_path: Path) -> None:
    """Another device shuffles differently."""
    data = write_images(tmp_path / "data", count=12)
    first = _prepare(tmp_path)
    assert _prepare(tmp_path).fingerprint == first.fingerprint
    other = _prepare(tmp_path / "other", device_id="other", data=data)
    assert other.fingerprint != first.fingerprint


def test_the_shuffle_depends_on_the_devices_secret(tmp_path: Path) -> None:
    """Task, device and class, which the aggregator knows, do not determine it."""
    data = write_images(tmp_path / "data", count=12)
    first, other = (_prepare(tmp_path / str(i), secret=bytes([i] * 32), data=data) for i in range(2))
    assert first.counts.tolist() == other.counts.tolist()
    assert first.fingerprint != other.fingerprint


def test_the_aggregator_accepts_a_submission(tmp_path: Path) -> None:
    """It holds the device's prototypes."""
    write_images(tmp_path / "data", count=12)
    prepared = _prepare(tmp_path)
    payload = encode_submission(prepared, task=TASK, manifest=make_manifest(), sequence=7)
    message = read_message(payload)
    assert isinstance(message, Submission)
    assert message.sequence == 7
    taken = check_submission(message, Expectation(TASK, make_manifest(), 16))
    half_step = np.ptp(prepared.prototypes.astype(np.float32), axis=0) / 510
    assert (np.abs(taken.values - prepared.prototypes) <= 1.001 * half_step).all()
    assert len(payload) < prepared.prototypes.size + 4 * prepared.prototypes.shape[1] + 300
    np.testing.assert_array_equal(taken.counts, prepared.counts)


def test_prototypes_have_the_columns_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same images are in the groups, and no feature is computed again."""
    write_images(tmp_path / "data", count=12)
    every = _prepare(tmp_path)
    monkeypatch.delattr(Backbone, "features")
    chosen = _prepare(tmp_path, manifest={"columns": ((1, 3), (15, 16))})
    np.testing.assert_array_equal(chosen.prototypes, every.prototypes[:, [1, 2, 15]])
    with pytest.raises(BackboneMismatch, match="expected ascending columns of 16 features"):
        _prepare(tmp_path, manifest={"columns": ((1, 3), (15, 17))})


def test_no_usable_image_is_an_error(tmp_path: Path) -> None:
    """The folder has only broken images, no image, or does not exist."""
    data = write_images(tmp_path / "data", count=2)
    for image in data.rglob("*.png"):
        image.write_text("broken")
    with pytest.raises(ProtofleetError, match="none of the 4 images can be used"):
        _prepare(tmp_path)
    (tmp_path / "empty/cat").mkdir(parents=True)
    with pytest.raises(NoImages, match=r"no image of the task's classes .*receives heads"):
        _prepare(tmp_path, data=tmp_path / "empty")
    with pytest.raises(ConfigError):
        _prepare(tmp_path, data=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("alpha", "min_images", "needed"), [(0.99, 2, 2), (1.0, 5, 5), (0.5, 2, 3), (0.5, 1, 1)]
)
def test_the_stated_number_of_images_is_sufficient(
    tmp_path: Path, alpha: float, min_images: int, needed: int
) -> None:
    """One image fewer is not sufficient."""
    manifest = {"alpha": alpha, "min_images": min_images}
    write_images(tmp_path / "enough" / "data", count=needed)
    assert len(_prepare(tmp_path / "enough", holdout=0.0, manifest=manifest).counts) == len(CLASSES)
    if needed > 1:
        write_images(tmp_path / "fewer" / "data", count=needed - 1)
        with pytest.raises(ProtofleetError, match=f" {needed} training images are needed: add images$"):
            _prepare(tmp_path / "fewer", holdout=0.0, manifest=manifest)


def _evaluate(folder: Path, **local: Any) -> Evaluation:
    """Evaluate a head that predicts the first class for every image."""
    backbone = tiny(folder)
    head = open_head(linear_head([backbone], np.zeros((16, 2), dtype=np.float32)), backbones=[backbone])
    workspace = make_workspace(folder, **local)
    manifest = make_manifest()
    members = held_out_images(workspace, manifest)
    return evaluate_head(workspace, head, task=TASK, manifest=manifest, version=1, members=members)


def test_an_evaluation_counts_held_out_images_only(tmp_path: Path) -> None:
    """Correct and incorrect add up to the readable held-out images."""
    data = write_images(tmp_path / "data", count=25)
    (data / "cat" / "broken.png").write_text("broken")
    prepared = _prepare(tmp_path, holdout=0.4)
    evaluation = _evaluate(tmp_path, holdout=0.4)
    totals = [
        correct + incorrect
        for correct, incorrect in zip(evaluation.correct, evaluation.incorrect, strict=True)
    ]
    assert totals == [report.held_out for report in prepared.classes]
    assert evaluation.correct == (totals[0], 0)


def test_a_head_is_evaluated_without_matching_images(tmp_path: Path) -> None:
    """An incorrect folder or a missing disk is no fault of the head."""
    for folder in (write_images(tmp_path / "data", count=2, classes=("cat", "zebra")), tmp_path / "away"):
        evaluation = _evaluate(tmp_path, data=folder)
        assert (evaluation.correct, evaluation.incorrect) == ((0, 0), (0, 0))


def test_classes_that_lose_their_images_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In log, status and info until they are restored; under differential privacy not in the info."""
    bench = PrivateBench(tmp_path, differential_privacy=None)
    bench.store.set(DeviceName("shed-1"))
    lost, away = bench.data / CLASSES[0], tmp_path / "away"

    def state() -> tuple[str, str, list[str]]:
        """Return the warning in info and status, and the new warnings in the log."""
        output = CliRunner().invoke(cli, ["status", "--json", "--state", str(tmp_path / "state")]).output
        logged = [text for text in caplog.messages if text.startswith(LOST_IMAGES)]
        caplog.clear()
        return bench.info().warning, json.loads(output)["warning"], logged

    bench.upload()
    assert state() == ("", "", [])
    lost.rename(away)
    bench.upload()
    warning = f"{LOST_IMAGES}: {lost.name} has 0 of 40 images"
    assert state() == (warning, warning, [f"{LOST_IMAGES} name={lost.name} images=0 before=40"])
    bench.add_images(seed=1)  # of each class: 3 of 40 are far fewer, too
    (bench.data / CLASSES[0]).mkdir(exist_ok=True)
    bench.upload()
    assert state() == (warning.replace("0 of", "3 of"), warning.replace("0 of", "3 of"), [])
    for file in away.iterdir():
        file.rename(lost / file.name)
    bench.upload()
    assert state() == ("", "", [])
    bench.manifest = make_manifest(batch_size=10, min_images=3, differential_privacy=WANTED)
    bench.upload()
    shutil.rmtree(lost)
    bench.restart()
    bench.upload()
    warning = f"{LOST_IMAGES}: {lost.name} has 0 of 43 images"
    assert state() == ("", warning, [f"{LOST_IMAGES} name={lost.name} images=0 before=43"])


def test_same_submission_to_an_earlier_task_has_the_same_digest(tmp_path: Path) -> None:
    """The other task's submission may be received or not; a submission of other images has a greater number."""
    bench = PrivateBench(tmp_path, differential_privacy=None)
    first, other = bench.manifest, make_manifest(batch_size=10, min_images=3, seed=1)
    outbox, before = bench.store.outbox, bench.build().item
    assert before is not None
    outbox.receive(before.digest)
    for is_received in (True, False, True):
        bench.manifest = other
        elsewhere = bench.upload()
        if is_received:
            outbox.receive(outbox.items()[0].digest)
        bench.manifest = first
        assert bench.build().item == before
        assert outbox.items()[0] == before
        assert len({item.digest for item in outbox.items()}) == len(outbox.items())
        outbox.receive(before.digest)
    for seed in range(5):
        bench.add_images(seed=seed)
    newest = bench.upload()
    assert newest.sequence > elsewhere.sequence > bench.read(before).sequence
    shutil.rmtree(bench.data)
    write_images(bench.data, count=40)
    assert bench.upload().sequence > newest.sequence


def test_a_submission_of_images_that_are_gone_still_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without any image nothing is uploaded: status says so, and what removes the last submission."""
    bench = PrivateBench(tmp_path, differential_privacy=None)
    bench.store.set(DeviceName("shed-1"), CurrentTask(bench.task))
    bench.upload()

    def shown() -> str:
        return CliRunner().invoke(cli, ["status", "--state", str(tmp_path / "state")]).output

    advice = "it still counts: `aggregator revoke` and `aggregator forget` remove it"
    assert advice not in shown()
    (item,) = bench.store.outbox.items()
    bench.store.outbox.receive(item.digest)
    shutil.rmtree(bench.data)
    bench.data.mkdir()
    assert "no image of the task's classes" in bench.refused()
    bench.store.set(BuildProblem(bench.build().reason))
    assert advice in shown()
    assert [text for text in caplog.messages if text.startswith(LOST_IMAGES)] == [
        f"{LOST_IMAGES} name={name} images=0 before=40" for name in CLASSES
    ]


def test_task_that_adds_a_class_needs_no_upload_without_its_images(bench: HeadBench) -> None:
    """The submission to the earlier task is that of the new one; with images of the class, another one is built."""
    before, task = bench.submission(), bench.task
    assert before is not None
    added = msgspec.structs.replace(bench.manifest, classes=(*CLASSES, "bird"), continues=(task,))
    bench.follow(added)
    assert bench.submission() == replace(before, task=bench.task)
    write_images(bench.settings.data, count=8, seed=3, classes=("bird",))
    bench.scan()
    after = bench.submission()
    assert after is not None
    assert (after.task, after.digest == before.digest) == (bench.task, False)
    other = msgspec.structs.replace(bench.manifest, classes=("bird", *CLASSES), continues=msgspec.UNSET)
    bench.follow(other)
    assert bench.submission() not in (None, replace(after, task=bench.task))
