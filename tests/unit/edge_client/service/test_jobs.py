"""Jobs: builds with unusable images and classes, jobs that are outdated or cancelled, and their processes."""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from PIL import Image

from edge_client.cli import cli
from edge_client.core.state import Kind
from edge_client.heads import head_evaluation, head_installer
from edge_client.images.decoding import decoded, pixel_digest
from edge_client.images.extraction import extract
from edge_client.job import program
from edge_client.job.program import Service, _Program
from edge_client.kinds import builder, image_features
from edge_client.kinds.prepared_submission import encode_submission
from edge_client.service.job_processes import IDLE_S
from edge_client.service.publisher import Publisher
from edge_client.store.feature_cache import FeatureCache
from edge_client.store.job_folder import Built, Changes, Result, Run
from edge_client.store.job_state import JobState
from edge_client.store.stored_values import Heads, LeftOut, SubmissionReport
from protocol import children
from protocol.errors import ProtofleetError, RuntimeMissing, StateError, ThreadFailed, UnreadableImage
from protocol.wire.codec import encode
from protocol.wire.messages import Evaluation, HeadManifest
from protocol.wire.transfer import frames_of
from tests.support.devices.device_bench import BROADCAST_S, CONSTANT, DeviceBench, HeadBench, RoundsBench
from tests.support.devices.device_factory import image_file, make_manifest, noise, write_images
from tests.support.devices.job_threads import EndedError, JobThread, die
from tests.support.devices.worker_benches import PUBLIC_MAP, private_task
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

    monkeypatch.setattr("edge_client.images.extraction.decoded", decode_or_fail)
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


def test_a_data_folder_outside_utf8_that_cannot_be_read_is_named(bench: HeadBench, tmp_path: Path) -> None:
    """The list of images has the reason, which is text."""
    data = tmp_path / os.fsdecode(b"\xff")
    data.write_text("no list")
    with pytest.raises(ProtofleetError, match=r"\\udcff must start with the header"):
        bench.start(data=data).connect().follow(make_manifest(seed=3))


def test_a_job_logs_names_outside_utf8(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever logs them: a message that cannot be sent would end the job."""

    def log_and_build(*arguments: Any) -> Result:
        forwarder = program._Forwarder(program_service[0])  # noqa: SLF001 - on a thread, it is not the root logger's
        name = os.fsdecode(b"\xff")
        forwarder.emit(
            logging.makeLogRecord({"msg": f"text {name}", "name": "job", "levelno": logging.ERROR})
        )
        return build(*arguments)

    program_service: list[Service] = []
    build, run = builder.build_submission, _Program.run

    def note_service(each: _Program, message: Run) -> None:
        program_service.append(each._service)  # noqa: SLF001
        run(each, message)

    monkeypatch.setattr(_Program, "run", note_service)
    monkeypatch.setattr(program, "build_submission", log_and_build)
    bench.follow(make_manifest(seed=3))
    assert r"text \udcff" in caplog.text
    assert bench.submission() is not None


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

    def open_the_next() -> None:
        rounds.deliver(*rounds.signed(following))
        assert JobThread.newest.killed.wait(60)

    lost = _lose(rounds, monkeypatch, then=open_the_next)
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


def test_a_head_that_ends_its_job_is_not_tried_again_before_a_newer_one(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing that comes of it is of use."""
    deadly, newer = bench.head(1, CONSTANT["cat"]), bench.head(2, CONSTANT["dog"])
    evaluate = head_evaluation.evaluate_head

    def announce_and_die(*_: object, **__: object) -> Any:
        monkeypatch.setattr(head_installer, "evaluate_head", evaluate)
        bench.deliver(*bench.signed(HeadManifest(task=bench.task, current=newer)))
        for frame in frames_of(data, digest=newer.head.digest):
            bench.deliver(bench.topic("blk"), encode(frame))
        while not bench._device._jobs._wanted:  # noqa: SLF001 - the newer head waits
            time.sleep(0.01)
        die()

    data = bench.withdraw(newer.head)
    monkeypatch.setattr(head_installer, "evaluate_head", announce_and_die)
    bench.install(deadly)
    heads = bench.store.get(Heads)
    assert heads.installed is not None
    assert (heads.installed.version, heads.previous) == (2, None)
    assert caplog.text.count("job ended") == 1


def test_a_cancelled_job_has_no_result(bench: HeadBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a task that is replaced: its end is no death of the head, which is installed when the task returns."""
    head, chunks = bench.head(1, CONSTANT["cat"]), FeatureCache.chunks
    follower = make_manifest(seed=7)

    def replace_task_and_read(cache: FeatureCache, identities: Sequence[str], *backbones: str) -> Any:
        monkeypatch.setattr(FeatureCache, "chunks", chunks)
        bench.deliver(*bench.signed(follower))
        assert JobThread.newest.killed.wait(60)
        return chunks(cache, identities, *backbones)

    first = bench.manifest
    monkeypatch.setattr(FeatureCache, "chunks", replace_task_and_read)
    installed = bench.install(head)
    assert (installed.report, installed.reason, bench.store.get(Heads)) == (None, "", Heads())
    assert bench.store.culprits.deaths() == {}
    assert all(item.kind == "submission" for item in bench.store.outbox.items())
    bench.follow(first)
    assert bench.install(head).reason == ""
    assert bench.store.get(Heads).installed is not None


def test_a_head_that_waits_for_a_build_is_installed_when_the_rounds_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build of the last round is cancelled then, and no other one follows that would begin the installation."""
    write_images(tmp_path / "data", count=8)
    rounds = RoundsBench(tmp_path)
    last = rounds.open()
    over = msgspec.structs.replace(last, number=last.rounds)
    head = HeadManifest(task=rounds.task, current=rounds.head(1, last.tensors))

    def end_rounds(*_: object, **__: object) -> None:
        rounds.deliver(*rounds.signed(head))
        rounds.deliver(*rounds.signed(over))
        assert JobThread.newest.killed.wait(60)
        raise EndedError

    monkeypatch.setattr(builder, "encode_submission", end_rounds)
    rounds.begin(last)
    installed = rounds.store.get(Heads).installed
    assert installed is not None
    assert installed.version == 1


def test_a_process_runs_one_job_after_the_other_and_ends_after_a_minute(bench: HeadBench) -> None:
    """So rounds do not pay for a start."""
    first = JobThread.newest
    bench.follow(make_manifest(seed=1)).install(bench.head(1, CONSTANT["cat"]))
    assert JobThread.newest is first
    bench.wait(IDLE_S)
    assert first.killed.is_set()
    bench.follow(make_manifest(seed=2))
    assert JobThread.newest is not first
    assert bench.submission() is not None


def test_under_differential_privacy_no_process_runs_two_jobs(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has read an image makes no clean template. That of an earlier task ends before, with its lock."""
    started: list[JobThread] = []

    def launch(*arguments: Any) -> JobThread:
        started.append(JobThread(*arguments))
        return started[-1]

    monkeypatch.setattr(children, "launch", launch)
    monkeypatch.setattr(JobThread, "isolate", nullcontext)
    bench.offer(PUBLIC_MAP)
    bench.follow(make_manifest(**private_task()))
    assert bench.submission() is not None
    bench.install(bench.head(1, CONSTANT["cat"]))
    image_file(bench.settings.data / "cat/new.png")
    bench.scan()
    assert len(started) == 3
    assert all(each.killed.is_set() for each in started)


def test_a_head_is_evaluated_beside_a_build_under_differential_privacy(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the head's report does not show how long a build takes."""
    whole, head, reported = encode_submission, bench.head(1, CONSTANT["cat"]), threading.Event()
    data = bench.withdraw(head.head)

    def encode_slowly(*arguments: Any, **options: Any) -> Any:
        bench.deliver(*bench.signed(HeadManifest(task=bench.task, current=head)))
        for frame in frames_of(data, digest=head.head.digest):
            bench.deliver(bench.topic("blk"), encode(frame))
        assert reported.wait(60)
        return whole(*arguments, **options)

    def leave(state: JobState, kind: Kind, *arguments: Any, **options: Any) -> Any:
        if kind == "evaluation":
            reported.set()
        return left(state, kind, *arguments, **options)

    left = JobState.leave
    monkeypatch.setattr(JobState, "leave", leave)
    monkeypatch.setattr(builder, "encode_submission", encode_slowly)
    monkeypatch.setattr(JobThread, "isolate", nullcontext)
    bench.offer(PUBLIC_MAP)
    bench.follow(make_manifest(**private_task()))
    assert {item.kind for item in bench.store.outbox.items()} == {"submission", "evaluation"}


def test_missing_libraries_end_the_program_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise RuntimeMissing("no ONNX Runtime")

    monkeypatch.setattr(program, "require_runtime", missing)
    with pytest.raises(RuntimeMissing, match="no ONNX Runtime"):
        DeviceBench(tmp_path).start()


def test_a_program_that_cannot_start_its_session_leaves_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program that it is embedded in may continue for long."""

    def fail(_: object) -> None:
        raise ThreadFailed("no thread")

    monkeypatch.setattr(Publisher, "start", fail)
    with pytest.raises(ThreadFailed):
        DeviceBench(tmp_path).start()
    assert JobThread.newest.killed.is_set()


def test_folders_of_jobs_are_never_adopted(bench: HeadBench) -> None:
    """One that was not committed may hold a release."""
    before = bench.submission()
    bench.stop()
    left = bench.state / "jobs/7"
    left.mkdir()
    (left / "result.json").write_text("{}")
    bench.start()
    assert not left.exists()
    assert bench.submission() == before


def _leave_a_secret(*_: object) -> Result:
    changes = Changes(facts={"Secret": msgspec.Raw(b'{"key":""}')})
    return Result(outcome=Built(item=None), changes=changes)


def _send_junk(program: _Program, *_: object) -> dict[str, int]:
    program._service._pipe.send_bytes(b"junk")  # noqa: SLF001 - of a hostile job
    return {}


@pytest.mark.parametrize(
    ("leave", "problem"),
    [
        (_leave_a_secret, "unexpected facts in the result of a job"),
        (lambda *_: {"outcome": 1}, "malformed result of a job"),
        (_send_junk, "malformed message of a job"),
    ],
    ids=["a fact", "a result", "a message"],
)
def test_what_a_job_may_not_leave_ends_the_program(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch, leave: Callable[..., Any], problem: str
) -> None:
    """The state stays as it is: a job has run foreign code."""
    secret, items = bench.store.secret(), bench.store.outbox.items()
    monkeypatch.setattr(_Program, "_result", leave)
    with pytest.raises(StateError, match=problem):
        bench.follow(make_manifest(seed=1))
    assert (bench.store.secret(), bench.store.outbox.items()) == (secret, items)
