"""Worker: builds with unusable images and classes, and jobs that are outdated or interrupted."""

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from edge_client.cli import cli
from edge_client.data.decoding import decoded, pixel_digest
from edge_client.data.extraction import extract
from edge_client.storage.feature_cache import FeatureCache
from edge_client.storage.stored_values import Heads, LeftOut, SubmissionReport
from edge_client.submission import head_evaluation, head_installer, image_features
from protocol.errors import UnreadableImage
from protocol.wire.messages import Evaluation, HeadManifest
from tests.support.devices.device_bench import BROADCAST_S, CONSTANT, HeadBench, RoundsBench
from tests.support.devices.device_factory import image_file, make_manifest, noise, tiny, write_images
from tests.support.graphs.backbones import tiny_backbone

RETRIED_S = 3600.0
"""Seconds after which every build that failed was repeated."""


def test_unknown_folders_do_not_stop_uploads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are logged once, stored for `status`, and noticed while the device runs."""
    bench = HeadBench(tmp_path)
    before = bench.submission()
    image_file(tmp_path / "data" / os.fsdecode(b"w\xe4sps") / "1.png")
    (tmp_path / "data/zzz").mkdir()
    image_file(tmp_path / "data/@eaDir/1.png")
    for number in range(2):
        (tmp_path / f"data/cat/holiday{number}.mp4").touch()
        bench.scan()
    assert bench.submission() == before
    assert caplog.text.count("suffix .mp4") == 1
    assert caplog.text.count("no class of the task, images left out") == 1
    assert bench.store.get(LeftOut) == LeftOut(
        (r"'w\udce4sps'", "'zzz'"), {"suffix .mp4": 2, "folder @eaDir of the system": 1}
    )
    assert bench.start().submission() == before


def test_an_image_that_is_missing_for_one_scan_is_not_deleted(bench: HeadBench, tmp_path: Path) -> None:
    """Under differential privacy, its disappearance and its return would be charged. A new image counts at once."""
    image = next((tmp_path / "data/cat").iterdir())

    def images() -> int:
        bench.scan()
        return bench.store.get(SubmissionReport).classes[0].images

    for _ in range(2):
        hidden = image.rename(tmp_path / "hidden")
        assert images() == 20
        hidden.rename(image)
        assert images() == 20
    image.unlink()
    assert [images() for _ in range(3)] == [20, 19, 19]
    image_file(image)
    assert images() == 20


def test_scans_one_right_after_the_other_are_one_scan(bench: HeadBench, tmp_path: Path) -> None:
    """They waited for another job, and a program replaces a file meanwhile."""
    image = next((tmp_path / "data/cat").iterdir())
    image.unlink()
    bench.scan().scan_again().scan_again()
    assert bench.store.get(SubmissionReport).classes[0].images == 20
    bench.scan()
    assert bench.store.get(SubmissionReport).classes[0].images == 19


def test_images_that_cannot_be_read_for_a_moment_are_released_as_before(
    bench: HeadBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task with another backbone comes while a disk fails: the build is repeated, and status says what is missing."""
    before = bench.store.get(SubmissionReport).classes
    groups = bench.store.image_groups.read().number_of
    cats = sorted((tmp_path / "data/cat").iterdir())
    released = {}
    for path in cats:
        with decoded(path) as image:
            if (digest := pixel_digest(image)) in groups:
                released[groups[digest]] = path
    assert len(released) == 2, "one image of each prototype"
    failing = set(released.values())

    def decode_or_fail(path: Path) -> AbstractContextManager[Image.Image]:
        if path in failing:
            raise UnreadableImage(f"{path}: Input/output error") from OSError(errno.EIO, "Input/output error")
        return decoded(path)

    monkeypatch.setattr("edge_client.data.extraction.decoded", decode_or_fail)
    bench.follow(make_manifest(backbones=(bench.offer(tiny_backbone(seed=5), "other"),)))
    assert [entry.counts for entry in bench.store.get(SubmissionReport).classes] == [(), (5, 5)]
    status = CliRunner().invoke(cli, ["status", "--state", str(bench.state)]).output
    assert "cat: 18 images, 10 held out, 0 prototypes; 8 waiting for 2 missing\n" in status
    failing.clear()
    bench.wait(RETRIED_S)
    assert bench.store.get(SubmissionReport).classes == before


def test_an_unusable_image_outside_utf8_is_reported(tmp_path: Path) -> None:
    """The name of a folder or file may be any bytes; in reports they are escaped."""
    folder = tmp_path / "data/cat" / os.fsdecode(b"\xff")
    folder.mkdir(parents=True)
    (folder / "broken.png").write_text("broken")
    ((path, _),) = HeadBench(tmp_path).store.get(SubmissionReport).unusable
    assert path.endswith(r"data/cat/\udcff/broken.png")


def test_a_current_build_waits_for_its_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its round's tensors are lost while features are computed: they are requested, and it is built again."""
    write_images(tmp_path / "data", count=8)
    rounds = RoundsBench(tmp_path)
    opened, lost = rounds.open(), _lose(rounds, monkeypatch)
    lost.append(opened.tensors.digest)
    rounds.begin(opened)
    assert rounds.submission() is None
    rounds.wait(BROADCAST_S)
    assert rounds.submission() is not None
    assert opened.tensors.digest in {each.digest for each in rounds.requests}


def test_a_start_with_a_rounds_submission_finds_no_changed_image(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The build takes the submission from the outbox, without a look at the images."""
    write_images(tmp_path / "data", count=8)
    rounds = RoundsBench(tmp_path)
    rounds.begin(rounds.open())
    assert rounds.submission() is not None
    caplog.set_level("INFO")
    rounds.start().connect().scan()
    assert "images changed" not in caplog.text
    image_file(tmp_path / "data/cat/new.png", noise())
    rounds.scan()
    assert "images changed" in caplog.text


def test_an_outdated_build_may_miss_its_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of a closed round are deleted: its build ends silently."""
    write_images(tmp_path / "data", count=8)
    rounds = RoundsBench(tmp_path)
    opened, following = rounds.open(), rounds.open(1)
    lost = _lose(rounds, monkeypatch, then=lambda: rounds.deliver(*rounds.signed(following)))
    lost.append(opened.tensors.digest)
    rounds.begin(opened)
    assert rounds.status["problem"] == ""
    assert opened.tensors.digest not in {each.digest for each in rounds.requests}
    rounds.broadcast(rounds.withdraw(following.tensors))
    submission = rounds.submission()
    assert submission is not None
    assert submission.about == "1"


def _lose(
    rounds: RoundsBench, monkeypatch: pytest.MonkeyPatch, then: Callable[[], None] = lambda: None
) -> list[bytes]:
    """Return a list of blobs that disappear as soon as features are computed."""
    lost: list[bytes] = []

    def extract_and_lose(*arguments: Any, **options: Any) -> Any:
        if lost:
            rounds.store.blobs.path(lost.pop()).unlink()
            then()
            time.sleep(0.2)
        return extract(*arguments, **options)

    monkeypatch.setattr(image_features, "extract", extract_and_lose)
    return lost


def test_only_the_newest_pending_head_is_installed(
    rounds: RoundsBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors of an older one may be deleted."""
    opened = [rounds.open(number, rate=number) for number in range(3)]
    heads = [rounds.head(version, each.tensors) for version, each in enumerate(opened, start=1)]
    evaluate = head_evaluation.evaluate_head

    def announce_and_evaluate(*arguments: Any, **options: Any) -> Evaluation:
        """Announce the next heads while the first one is tried."""
        monkeypatch.setattr(head_installer, "evaluate_head", evaluate)
        for head in heads[1:]:
            rounds.deliver(*rounds.signed(HeadManifest(task=rounds.task, current=head)))
        return evaluate(*arguments, **options)

    monkeypatch.setattr(head_installer, "evaluate_head", announce_and_evaluate)
    rounds.install(heads[0])
    rounds.wait(BROADCAST_S)
    installed = rounds.store.get(Heads).installed
    assert installed is not None
    assert installed.version == 3


def test_an_interrupted_job_has_no_result(bench: HeadBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that stops in the evaluation: the trial does not count, and the next start installs the head."""
    head, chunks = bench.head(1, CONSTANT["cat"]), FeatureCache.chunks
    follower = make_manifest(seed=7)

    def replace_task_and_read(cache: FeatureCache, identities: Sequence[str], *backbones: str) -> Any:
        monkeypatch.setattr(FeatureCache, "chunks", chunks)
        bench.deliver(*bench.signed(follower))
        time.sleep(0.2)
        return chunks(cache, identities, *backbones)

    first = bench.manifest
    monkeypatch.setattr(FeatureCache, "chunks", replace_task_and_read)
    installed = bench.install(head)
    assert (installed.report, installed.reason, bench.store.get(Heads)) == (None, "", Heads())
    assert bench.store.crash_counter.crashes(head.head.digest) == 0
    assert all(item.kind == "submission" for item in bench.store.outbox.items())
    bench.follow(first)
    assert bench.install(head).reason == ""
    assert bench.store.get(Heads).installed is not None


def test_a_thread_that_the_worker_has_left_may_run_graphs(bench: HeadBench, tmp_path: Path) -> None:
    """A device that stops leaves nothing behind that ends the runs of the rest of the program."""
    bench.stop()
    backbone = tiny(tmp_path)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            backbone.features(np.zeros((1, 8, 8, 3), np.uint8))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
