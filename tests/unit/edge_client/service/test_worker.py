"""Worker: builds with unusable images and classes, and jobs that are outdated or interrupted."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from PIL import Image

from edge_client.agent import events
from edge_client.cli import cli
from edge_client.data.images import decoded
from edge_client.runtime import watchdog
from edge_client.runtime.backbone import Backbone
from edge_client.service.device import Device
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import Heads, LeftOut, SubmissionReport
from edge_client.submission.image_features import FoundImages
from protocol.errors import UnreadableImage
from protocol.wire.codec import encode
from tests.support.devices.device_factory import (
    image_file,
    make_manifest,
    make_settings,
    noise,
    run_jobs,
    tiny,
    write_images,
)
from tests.support.devices.round_factory import TASK as ROUNDS_TASK
from tests.support.devices.round_factory import look_at, open_round, stored, take_images
from tests.support.devices.worker_benches import CONSTANT, HeadBench, RoundsBench
from tests.support.graphs.backbones import tiny_backbone


def test_unknown_folders_do_not_stop_uploads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are logged once, stored for `status`, and noticed while the device runs; `strict` refuses them."""
    bench = HeadBench(tmp_path)
    image_file(tmp_path / "data" / os.fsdecode(b"w\xe4sps") / "1.png")
    (tmp_path / "data/@eaDir").mkdir()
    (tmp_path / "data/cat/holiday.mp4").touch()
    for _ in range(2):
        bench.worker.check_images()
        run_jobs(bench.worker)
    assert bench.emitted == []
    assert caplog.text.count("no class of the task, images left out") == 1
    assert bench.store.get(LeftOut) == LeftOut(("'@eaDir'", r"'w\udce4sps'"), {"suffix .mp4": 1})
    restarted = HeadBench(tmp_path)
    assert restarted.store.outbox.newest_submission() is not None
    strict = HeadBench(tmp_path, strict=True)
    strict.worker._build(events.BuildSubmission(strict.task, strict.manifest))
    (built,) = strict.emitted
    assert isinstance(built, events.SubmissionBuilt)
    assert (built.item, built.may_pass) == (None, False)
    assert built.reason.endswith("omit --strict to leave their images out")


def test_an_image_that_is_missing_for_one_scan_is_not_deleted(tmp_path: Path) -> None:
    """Under differential privacy, its disappearance and its return would be charged. A new image counts at once."""
    bench = HeadBench(tmp_path)
    image = next((tmp_path / "data/cat").iterdir())

    def check() -> int:
        bench.worker.check_images()
        run_jobs(bench.worker)
        return bench.emitted.count(events.ImagesChanged())

    for _ in range(2):
        hidden = image.rename(tmp_path / "hidden")
        assert check() == 0
        hidden.rename(image)
        assert check() == 0
    image.unlink()
    assert [check() for _ in range(3)] == [0, 1, 1]
    image_file(image)
    assert check() == 2


def test_images_that_cannot_be_read_for_a_moment_are_released_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task with another backbone comes while a disk fails: the build is repeated, and status says what is missing."""
    bench = HeadBench(tmp_path)
    before = bench.store.get(SubmissionReport).classes
    other = stored(bench.store.blobs, tiny_backbone(seed=5), "other")
    manifest = make_manifest(backbones=(other,))
    bench.worker.task = task = bench.store.blobs.put(encode(manifest))
    workspace = bench.worker._workspace
    cats = [image for image in workspace.find_images(manifest) if image.label == 0]
    keys, groups = workspace.content_keys(cats), bench.store.image_groups.read().number_of
    failing = {groups[key]: image.path for image in cats if (key := keys[image.identity]) in groups}
    assert len(failing) == 2, "one image of each prototype"

    def decode_or_fail(path: Path) -> AbstractContextManager[Image.Image]:
        if path in failing.values():
            raise UnreadableImage(f"{path}: Input/output error") from OSError(errno.EIO, "Input/output error")
        return decoded(path)

    def build() -> tuple[bool, SubmissionReport]:
        bench.worker._build(events.BuildSubmission(task, manifest))
        built = bench.emitted.pop()
        assert isinstance(built, events.SubmissionBuilt)
        return built.retries, bench.store.get(SubmissionReport)

    monkeypatch.setattr("edge_client.data.extraction.decoded", decode_or_fail)
    retries, report = build()
    assert (retries, [entry.counts for entry in report.classes]) == (True, [(), (5, 5)])
    status = CliRunner().invoke(cli, ["status", "--state", str(bench.store.folder)]).output
    assert "cat: 18 images, 10 held out, 0 prototypes; 8 waiting for 2 missing\n" in status
    failing.clear()
    retries, report = build()
    assert (retries, report.classes) == (False, before)


def test_the_report_is_renewed_if_the_submission_is_the_same(tmp_path: Path) -> None:
    """`edge-client status` shows how many new images wait, which an equal submission does not have."""
    bench = HeadBench(tmp_path)
    for number in range(3):
        image_file(tmp_path / "data/cat" / f"new-{number}.png", noise(seed=number))
    before = bench.store.outbox.newest_submission()
    bench.worker._build(events.BuildSubmission(bench.task, bench.manifest))
    assert bench.store.outbox.newest_submission() == before
    assert bench.store.get(SubmissionReport).classes[0].images == 23


@pytest.mark.parametrize("classes", [("cat",), ("cat", "cow"), ("cow", "cat", "dog"), ("cow",)])
def test_a_change_of_the_tasks_classes_ends_no_device(tmp_path: Path, classes: tuple[str, ...]) -> None:
    """A device uploads the classes that are left; without any it receives heads."""
    bench = HeadBench(tmp_path)
    manifest = make_manifest(classes=classes)
    bench.worker.task = bench.store.blobs.put(encode(manifest))
    bench.worker._build(events.BuildSubmission(bench.worker.task, manifest))
    (built,) = bench.emitted
    assert isinstance(built, events.SubmissionBuilt)
    left = len({"cat", "dog"} & set(classes))
    assert (built.no_images, built.may_pass) == (left == 0, left == 0)
    names = [entry.name for entry in bench.store.get(SubmissionReport).classes]
    assert names == (["cat", "dog"][:left] if left else ["cat", "dog"])


def test_an_unusable_image_outside_utf8_is_reported(tmp_path: Path) -> None:
    """The name of a folder or file may be any bytes; in reports they are escaped."""
    folder = tmp_path / "data/cat" / os.fsdecode(b"\xff")
    folder.mkdir(parents=True)
    (folder / "broken.png").write_text("broken")
    ((path, _),) = HeadBench(tmp_path).store.get(SubmissionReport).unusable
    assert path.endswith(r"data/cat/\udcff/broken.png")


def test_an_outdated_build_may_miss_its_blobs(rounds: RoundsBench) -> None:
    """The tensors of a closed round are deleted: its build ends silently, a current one waits for them."""
    opened, worker = open_round(rounds.store.blobs), rounds.worker
    rounds.store.blobs.path(opened.tensors.digest).unlink()
    workspace = worker._builder._workspace
    look_at(workspace.cache, take_images())

    def build(next_round: int) -> None:
        def extract_and_advance(*_: object) -> FoundImages:
            worker.round = next_round
            return FoundImages(tuple(take_images()), ())

        worker.round, workspace.extract = 0, extract_and_advance  # type: ignore[method-assign, assignment]
        worker._build(events.BuildSubmission(ROUNDS_TASK, rounds.manifest, opened))

    build(1)
    assert rounds.emitted == []
    build(0)
    assert rounds.emitted == [events.BlobsMissing(frozenset({opened.tensors.digest}), "build")]


def test_only_the_newest_pending_head_is_installed(rounds: RoundsBench) -> None:
    """The tensors of an older one may be deleted."""
    gone, here = rounds.tensors(0.1), rounds.tensors(0.2)
    rounds.store.blobs.path(gone.digest).unlink()
    rounds.install(1, gone)
    rounds.install(2, here)
    run_jobs(rounds.worker)
    (installed,) = rounds.emitted
    assert isinstance(installed, events.HeadInstalled)
    assert (installed.head, installed.reason) == (here.digest, "")
    assert installed.report in rounds.store.outbox.items()


def test_an_interrupted_installation_has_no_result(rounds: RoundsBench, tmp_path: Path) -> None:
    """A device that trained in no round computes features first: stopped there, it has not tried the head."""
    write_images(tmp_path / "data", count=9, classes=("cat",))
    worker, trials, tensors = rounds.worker, [], rounds.tensors(0.1)

    def stop_and_load(*_: object) -> Backbone:
        trials.append(rounds.store.trials.ends(tensors.digest))
        worker.task = None
        return tiny(tmp_path)

    worker._workspace._open = stop_and_load  # type: ignore[method-assign, assignment]
    rounds.install(1, tensors)
    run_jobs(worker)
    assert rounds.store.outbox.items() == ()
    assert rounds.emitted == []
    assert trials == [0]


def test_an_interrupted_evaluation_has_no_result(bench: HeadBench) -> None:
    """The device stops in the evaluation: the trial does not count, and the next start installs the head."""
    head, cache, task = bench.head(1, CONSTANT["cat"]), bench.worker._workspace.cache, bench.task
    chunks = cache.chunks

    def stop_and_read(identities: Sequence[str], *backbones: str) -> Iterator[NDArray[np.float32]]:
        bench.worker.task = None
        return chunks(identities, *backbones)

    cache.chunks = stop_and_read  # type: ignore[method-assign]
    bench.worker.install(events.InstallHead(task, bench.manifest, head))
    run_jobs(bench.worker)
    ends = bench.store.trials.ends(head.head.digest)
    assert (bench.emitted, bench.store.get(Heads), ends) == ([], Heads(), 0)
    assert all(item.kind == "submission" for item in bench.store.outbox.items())
    cache.chunks, bench.worker.task = chunks, task  # type: ignore[method-assign]
    assert bench.install(head)[0].reason == ""


def test_a_later_thread_with_the_workers_number_may_run_graphs(tmp_path: Path) -> None:
    """A device that stops leaves nothing behind that ends the runs of the rest of the program."""
    write_images(tmp_path / "data", count=1)
    device = Device(make_settings(tmp_path), DeviceState(tmp_path / "state"))
    device._worker.start()
    thread = device._worker._thread
    assert thread is not None
    device._worker.stop()
    assert thread.ident not in watchdog._WATCHDOG._interrupted
    device._worker.follow(None)
    assert thread.ident not in watchdog._WATCHDOG._interrupted
