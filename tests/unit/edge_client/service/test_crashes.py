"""Tasks, heads and images that end jobs, and files that the device's disk has changed."""

import contextlib
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from edge_client.core.state import Mode, head_key
from edge_client.heads import head_installer
from edge_client.heads.head import open_installed
from edge_client.images import extraction
from edge_client.job import program
from edge_client.job.program import Service
from edge_client.kinds import builder, image_features
from edge_client.service import device
from edge_client.service.notices import HeadInstalled, ProblemReported
from edge_client.store.culprits import MAX_DEATHS, task_key
from edge_client.store.device_state import DeviceState
from edge_client.store.job_folder import Doing, FromJob, Line, Ready
from edge_client.store.stored_values import Heads, LeftOut, SubmissionReport
from edge_client.training import local_round
from protocol.errors import StateError
from protocol.models.preprocessing import Preprocessing, preprocess
from protocol.storage.blobstore import BlobStore
from protocol.wire.codec import decode, encode
from protocol.wire.messages import HeadManifest, Receipt, Submission
from tests.support.devices.device_bench import CONSTANT, HeadBench, RoundsBench
from tests.support.devices.device_factory import (
    TINY,
    image_file,
    make_manifest,
    noise,
    payload_of,
    write_images,
)
from tests.support.devices.job_threads import JobThread, die
from tests.support.graphs.backbones import tiny_backbone


def deaths(bench: HeadBench, digest: bytes) -> int:
    return bench.store.culprits.deaths().get(digest.hex(), 0)


@pytest.mark.parametrize(
    ("module", "when"),
    [(image_features, "open_backbone"), (image_features, "extract"), (builder, "encode_submission")],
    ids=["open_backbone", "extract", "encode_submission"],
)
def test_a_task_that_ends_three_jobs_is_not_run_a_fourth_time(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: object, when: str
) -> None:  # fmt: skip
    """The device reports it, waits for the broker at its start, and follows another task or a dry run.

    A task decides what is stored as well: whatever ends the job before it is on disk counts.
    """
    deadly = make_manifest(backbones=(bench.offer(tiny_backbone(seed=1)),), seed=1)
    with monkeypatch.context() as patched:
        patched.setattr(module, when, die)
        bench.follow(deadly)
        assert caplog.text.count("job ended: it was killed") == MAX_DEATHS
        bench.start()
        assert "the stored task ended 3 jobs: waiting for the broker" in caplog.text
        bench.connect().follow(deadly)
        problem = bench.status["problem"]
        assert problem.startswith("3 jobs ended while running the task's graphs")
        assert "edge-client dry-run" in problem
        assert bench.submission() is None
    bench.follow(make_manifest(seed=2))
    assert bench.submission() is not None
    bench.follow(deadly)
    assert bench.status["problem"] == problem
    bench.start(mode=Mode.DRY_RUN).connect().announce(deadly)
    assert len(bench.shown) == 1
    assert deaths(bench, task_key(deadly)) == 0
    bench.start(mode=Mode.SERVICE)
    assert bench.submission() is not None


@pytest.mark.parametrize("error", [TypeError, MemoryError])
def test_an_error_that_nobody_expects_ends_the_job_and_counts(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """The output of a graph may show a defect of the program; the service must not end at each of its starts."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(builder, "encode_submission", fail)
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    bench.follow(make_manifest(seed=1))
    assert bench.status["problem"].startswith("3 jobs ended while running the task's graphs")


def test_a_job_that_ends_before_it_runs_anything_ends_the_program(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No task and no head is to blame; a service manager starts the program again, later each time."""
    monkeypatch.setattr(program, "build_submission", die)
    with pytest.raises(StateError, match="the process of a job ended"):
        bench.follow(make_manifest(seed=1))
    assert bench.store.culprits.deaths() == {}


def test_a_part_of_a_task_that_works_does_not_end_the_row(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backbones can be opened, and run for a head: the task's images still end the job."""
    deadly = make_manifest(seed=1)
    monkeypatch.setattr(image_features, "extract", die)
    bench.follow(deadly)
    head = HeadManifest(task=bench.task, current=bench.head(1, CONSTANT["cat"]))
    bench.start().connect().announce(deadly).announce(head)
    assert bench.status["problem"].startswith("3 jobs ended while running the task's graphs")


def test_a_step_graph_that_ends_three_jobs_is_not_run_a_fourth_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted as for backbones, also in the next round."""
    write_images(tmp_path / "data", count=8)
    rounds = RoundsBench(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(local_round, "train_round", die)
        rounds.begin(rounds.open())
    rounds.begin(rounds.open(1))
    assert rounds.status["problem"].startswith("3 jobs ended")
    rounds.start().connect().follow(rounds.manifest).begin(rounds.open(2))
    assert rounds.status["problem"].startswith("3 jobs ended")


@pytest.mark.parametrize("when", ["open_installed", "balanced"])
def test_a_head_that_ends_three_jobs_is_refused(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """For good; the previous head stays in use all the time, and another head is installed afterwards."""
    bench.install(bench.head(1, CONSTANT["cat"]))
    before, deadly = bench.store.get(Heads), bench.head(2, CONSTANT["cat"], b"deadly")
    if when == "balanced":
        deadly = bench.head(2, CONSTANT["dog"])
    with monkeypatch.context() as patched:
        patched.setattr(head_installer, when, die)
        for _ in range(2):
            installed = bench.install(deadly)
            assert bench.store.get(Heads) == before
            assert installed.evaluation.problem == "3 jobs ended while running the head"
            assert installed.reason.endswith(
                f"the previous head stays in use: {installed.evaluation.problem}"
            )
            bench.start().connect()
    assert not bench.install(bench.head(3, CONSTANT["dog"] * 2)).reason


def test_a_head_that_ends_the_job_in_the_comparison_does_not_block_its_successor(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After one end there is no comparison; a rollback is a successor too."""
    first, bad, third = (
        bench.head(version, CONSTANT[name] * version)
        for version, name in ((1, "cat"), (2, "dog"), (3, "cat"))
    )
    bench.install(first)
    bench.install(bad)
    whole = open_installed

    def open_or_die(blobs: Any, installed: Any, backbones: Any) -> Any:
        return die() if installed.version == 2 else whole(blobs, installed, backbones)

    for successor in (third, first):
        with monkeypatch.context() as patched:
            patched.setattr(head_installer, "open_installed", open_or_die)
            installed = bench.install(successor)
        assert (installed.reason, installed.evaluation.previous_correct) == ("", ())
        assert sum(installed.evaluation.correct) > 0
        assert caplog.text.count("no comparison with the previous head") == 1
        caplog.clear()
        bench.install(bad)


def test_a_head_that_fails_in_predict_gives_way_to_the_previous_one(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the service runs: it notices, and reports the head as bad when the fleet offers it again."""
    heads = [bench.head(version, CONSTANT[name]) for version, name in ((1, "cat"), (2, "dog"))]
    for head in heads:
        bench.install(head)
    other = DeviceState(bench.state, read_only=True)
    in_use = other.heads_in_use().installed
    assert in_use is not None
    for _ in range(MAX_DEATHS):
        bench.scan()
        assert bench.info.head_version == 2
        with pytest.raises(RuntimeError), other.head_trials.count(in_use.key):
            raise RuntimeError
    noticed: list[object] = []
    monkeypatch.setattr(device, "notify", noticed.append)
    bench.scan()
    assert noticed[:1] == [ProblemReported(kind="head", text="head 2 failed 3 times in use")]
    assert [each.version for each in noticed if isinstance(each, HeadInstalled)] == [1]
    back = bench.store.get(Heads).installed
    assert back is not None
    assert (back.version, bench.info.head_version) == (1, 1)
    installed = bench.install(heads[1])
    assert installed.evaluation.problem.startswith("3 jobs ended")
    assert bench.store.get(Heads).installed == back


Damage = Callable[[bytes], bytes]
DAMAGES: dict[str, Damage] = {
    "a flipped byte": lambda data: data[:400] + bytes([data[400] ^ 1]) + data[401:],
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("what", ["backbone", "head", "deleted backbone"])
def test_a_damaged_file_is_downloaded_again_and_is_no_vote(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch, what: str, damage: str
) -> None:
    """The job is repeated once the file is there; a file that is damaged again and again ends the program."""
    head = bench.head(1, CONSTANT["cat"])
    digest = head.head.digest if what == "head" else TINY.digest
    finish, downloads = BlobStore.finish, []

    def damaged(number: int) -> None:
        path = bench.store.blobs.path(digest)
        if what == "deleted backbone":
            path.unlink()
        else:
            path.write_bytes(DAMAGES[damage](path.read_bytes()))
        downloads.append(number)

    def finish_and_damage(store: BlobStore, finished: bytes) -> None:
        finish(store, finished)
        if finished == digest and len(downloads) < limit:
            damaged(len(downloads))

    def start_damaged() -> None:
        bench.stop()
        if what != "head":
            damaged(0)
        bench.start().connect()

    limit = 2
    monkeypatch.setattr(BlobStore, "finish", finish_and_damage)
    start_damaged()
    installed = bench.install(head)
    assert (installed.reason, len(downloads)) == ("", limit)
    assert not installed.evaluation.problem
    other, downloads, limit = bench.head(2, CONSTANT["dog"]), [], 9
    digest = other.head.digest if what == "head" else digest

    def start_and_install() -> None:
        start_damaged()
        bench.install(other)

    with pytest.raises(StateError):
        start_and_install()


def test_a_submission_that_is_damaged_in_a_running_outbox_is_built_again(bench: HeadBench) -> None:
    """The aggregator refuses other bytes than their digest is of, which sending them again does not correct."""
    damaged = bench.submission()
    with sqlite3.connect(bench.state / "device.sqlite") as other:
        other.execute("UPDATE payloads SET bytes = zeroblob(length(bytes))")
    assert damaged is not None
    refused = Receipt(digest=damaged.digest, status="refused", reason="digest")
    bench.receive(bench.topic("ack"), encode(refused))
    built = bench.submission()
    assert built is not None
    assert bench.store.outbox.payload(built) is not None
    assert bench.store.outbox.items() == (built,)


def test_an_evaluation_that_is_damaged_in_a_running_outbox_is_made_again(bench: HeadBench) -> None:
    submission, head = bench.submission(), bench.head(1, CONSTANT["cat"])
    assert submission is not None
    bench.receive(bench.topic("ack"), encode(Receipt(digest=submission.digest, status="received")))
    whole = bench.install(head).evaluation
    (damaged,) = (item for item in bench.store.outbox.items() if item.kind == "evaluation")
    with sqlite3.connect(bench.state / "device.sqlite") as other:
        other.execute("UPDATE payloads SET bytes = zeroblob(length(bytes))")
    refused = Receipt(digest=damaged.digest, status="refused", reason="digest")
    bench.receive(bench.topic("ack"), encode(refused))
    assert bench.install(head).evaluation == whole


def test_a_blob_that_disappears_is_downloaded_again(bench: HeadBench) -> None:
    """`edge-client predict` deletes a damaged one."""
    bench.store.blobs.path(TINY.digest).unlink()
    before = len(bench.requests)
    bench.scan()
    assert {each.digest for each in bench.requests[before:]} == {TINY.digest}
    assert TINY.digest in bench.store.blobs


def test_a_device_that_cannot_run_the_task_has_no_vote(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is not in use, and the device uploads no report on it."""
    head = bench.head(1, CONSTANT["cat"])
    monkeypatch.setattr(image_features, "open_backbone", die)
    bench.start().connect().follow(bench.manifest)
    for _ in range(2):
        installed = bench.install(head)
        assert installed.report is None
        assert "while running the task's graphs" in installed.reason
        bench.start().connect().follow(bench.manifest)
    assert deaths(bench, task_key(bench.manifest, purpose="install")) == MAX_DEATHS
    assert deaths(bench, head_key(head)) == 0


def test_an_image_that_ends_the_job_is_left_out_and_not_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The third job names it and uploads the others; it is tried again with more memory, or when its file changes."""
    deadly, whole = image_file(tmp_path / "data/cat/deadly.png", noise(33, 33)), preprocess

    def preprocess_or_die(image: Image.Image, spec: Preprocessing) -> Any:
        return die() if image.size == (33, 33) else whole(image, spec)

    def ends() -> int:
        count = caplog.text.count("job ended: it was killed")
        caplog.clear()
        return count

    monkeypatch.setattr(extraction, "preprocess", preprocess_or_die)
    monkeypatch.setattr(extraction, "limit_bytes", lambda: 10**9)
    bench = HeadBench(tmp_path, batch_size=4)
    assert re.search(r'job=build decoding="cat/\S+, cat/\S+, cat/\S+ or \d more"', caplog.text)
    assert ends() == 2
    ((path, reason),) = bench.store.get(LeftOut).unusable
    assert (path, "a job ended when it decoded this image" in reason) == (str(deadly), True)
    assert bench.store.get(SubmissionReport).unusable == ((path, reason),)
    assert sum(entry.images for entry in bench.store.get(SubmissionReport).classes) == 40
    assert deaths(bench, task_key(make_manifest())) == 0
    bench.start()
    assert ends() == 0
    monkeypatch.setattr(extraction, "limit_bytes", lambda: 2 * 10**9)
    bench.start()
    assert ends() == 2
    image_file(deadly, noise(34, 34))
    bench.start()
    assert ends() == 0
    assert bench.store.get(LeftOut).unusable == ()


def test_a_job_that_is_killed_at_any_message_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it said before: the submission and the head's evaluation are those of a device without a death."""
    send, left = Service.send, [0]

    def send_or_die(service: Service, message: FromJob) -> None:
        if not isinstance(message, (Ready, Line, Doing)):
            left[0] -= 1
            if not left[0]:
                die()
        send(service, message)

    monkeypatch.setattr(Service, "send", send_or_die)

    def live(dies_at: int) -> tuple[Any, ...]:
        shutil.copytree(tmp_path / "before", folder := tmp_path / str(dies_at))  # with the secret
        bench = HeadBench(folder)
        head = bench.head(1, CONSTANT["cat"])
        left[0] = dies_at
        for follow in (lambda: bench.follow(make_manifest(seed=1)), lambda: bench.install(head)):
            with contextlib.suppress(StateError):  # nothing was named: the service ends, and is started again
                follow()
                continue
            bench.start().connect()
            follow()
        (evaluation,) = (item for item in bench.store.outbox.items() if item.kind == "evaluation")
        submission = bench.submission()
        assert submission is not None
        message = decode(payload_of(bench.store, submission), Submission, max_bytes=10**6)
        assert list((bench.state / "jobs").iterdir()) == []
        assert bench.store.culprits.deaths() == {}
        bench.stop()
        return (
            evaluation.digest,
            msgspec.structs.replace(message, sequence=0),
            bench.store.get(SubmissionReport),
        )

    HeadBench(tmp_path / "before").stop()
    JobThread.wait_for_killed()
    whole = live(0)
    messages = -left[0]
    assert messages >= 8, "what a build and an installation name, and their ends"
    for dies_at in range(1, messages + 1):
        assert live(dies_at) == whole
