"""Tasks and heads that end the device program, and files that its disk has changed."""

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from edge_client.agent.state import Mode, head_key
from edge_client.predict.head import open_installed
from edge_client.storage.crash_counter import MAX_CRASHES, task_key
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import Heads, LeftOut, SubmissionReport
from edge_client.submission import builder, head_installer, image_features
from edge_client.training import local_round
from protocol.errors import StateError
from protocol.storage.blobstore import BlobStore
from protocol.wire.codec import encode
from protocol.wire.messages import HeadManifest, Receipt, TaskManifest
from tests.support.devices.device_bench import CONSTANT, HeadBench, RoundsBench
from tests.support.devices.device_factory import (
    TINY,
    image_file,
    make_manifest,
    noise,
    write_images,
)
from tests.support.graphs.backbones import tiny_backbone


class EndedError(Exception):
    """Stands for the end of the program: nothing handles it."""


def die(*_: object, **__: object) -> Any:
    raise EndedError


def follow_until_it_dies(bench: HeadBench, manifest: TaskManifest) -> None:
    """Follow a task that ends the program at each of `MAX_CRASHES` starts."""
    with pytest.raises(EndedError):
        bench.follow(manifest)
    for _ in range(MAX_CRASHES - 1):
        with pytest.raises(EndedError):
            bench.start()


@pytest.mark.parametrize(
    ("module", "when"),
    [(image_features, "open_backbone"), (image_features, "extract"), (builder, "encode_submission")],
    ids=["open_backbone", "extract", "encode_submission"],
)
def test_a_task_that_ends_the_program_is_not_run_at_the_fourth_start(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: object, when: str
) -> None:  # fmt: skip
    """The device reports it, waits for the broker at its start, and follows another task or a dry run.

    A task decides what is stored as well: whatever ends the program before it is on disk counts.
    """
    deadly = make_manifest(backbones=(bench.offer(tiny_backbone(seed=1)),), seed=1)
    monkeypatch.setattr(module, when, die)
    follow_until_it_dies(bench, deadly)
    bench.start()
    assert "the stored task ended the program 3 times: waiting for the broker" in caplog.text
    bench.connect().follow(deadly)
    problem = bench.status["problem"]
    assert problem.startswith("the program ended 3 times while it ran the task's graphs")
    assert "edge-client dry-run" in problem
    assert bench.submission() is None
    monkeypatch.undo()
    bench.follow(make_manifest(seed=2))
    assert bench.submission() is not None
    bench.follow(deadly)
    assert bench.status["problem"] == problem
    bench.start(mode=Mode.DRY_RUN).connect().announce(deadly)
    assert len(bench.shown) == 1
    assert bench.store.crash_counter.crashes(task_key(deadly)) == 0
    bench.start(mode=Mode.SERVICE)
    assert bench.submission() is not None


def test_a_part_of_a_task_that_works_does_not_end_the_row(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backbones can be opened, and run for a head: the task's images still end the program."""
    deadly = make_manifest(seed=1)
    bench.manifest = deadly
    head = HeadManifest(task=bench.task, current=bench.head(1, CONSTANT["cat"]))
    monkeypatch.setattr(image_features, "extract", die)
    follow_until_it_dies(bench, deadly)
    bench.start().connect().announce(deadly).announce(head)
    assert bench.status["problem"].startswith("the program ended 3 times while it ran the task's graphs")


def test_a_step_graph_that_ends_the_program_is_not_run_at_the_fourth_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted as for backbones, also in the next round."""
    write_images(tmp_path / "data", count=8)
    rounds = RoundsBench(tmp_path)
    monkeypatch.setattr(local_round, "train_round", die)
    with pytest.raises(EndedError):
        rounds.begin(rounds.open())
    for _ in range(MAX_CRASHES - 1):
        with pytest.raises(EndedError):
            rounds.start()
    monkeypatch.undo()
    rounds.start().connect().follow(rounds.manifest).begin(rounds.open(1))
    assert rounds.status["problem"].startswith("the program ended 3 times")


@pytest.mark.parametrize("when", ["open_installed", "balanced"])
def test_a_head_that_ends_the_program_is_refused_at_the_fourth_start(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """For good; the previous head stays in use all the time, and another head is installed afterwards."""
    bench.install(bench.head(1, CONSTANT["cat"]))
    before, deadly = bench.store.get(Heads), bench.head(2, CONSTANT["cat"], b"deadly")
    if when == "balanced":
        deadly = bench.head(2, CONSTANT["dog"])
    monkeypatch.setattr(head_installer, when, die)
    for _ in range(MAX_CRASHES):
        with pytest.raises(EndedError):
            bench.install(deadly)
        bench.start().connect()
    for _ in range(2):
        installed = bench.install(deadly)
        assert bench.store.get(Heads) == before
        assert installed.evaluation.problem == "the program ended 3 times while it ran the head"
        assert installed.reason.endswith(f"the previous head stays in use: {installed.evaluation.problem}")
        bench.start().connect()
    monkeypatch.undo()
    assert not bench.install(bench.head(3, CONSTANT["dog"] * 2)).reason


def test_a_head_that_ends_the_program_in_the_comparison_does_not_block_its_successor(
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
            with pytest.raises(EndedError):
                bench.install(successor)
            bench.start().connect()
            installed = bench.install(successor)
        assert (installed.reason, installed.evaluation.previous_correct) == ("", ())
        assert sum(installed.evaluation.correct) > 0
        assert caplog.text.count("no comparison with the previous head") > 0
        caplog.clear()
        bench.install(bad)


def test_a_head_that_fails_in_predict_gives_way_to_the_previous_one(bench: HeadBench) -> None:
    """While the service runs: it notices, and reports the head as bad when the fleet offers it again."""
    heads = [bench.head(version, CONSTANT[name]) for version, name in ((1, "cat"), (2, "dog"))]
    for head in heads:
        bench.install(head)
    other = DeviceState(bench.state)
    in_use = other.heads_in_use().installed
    assert in_use is not None
    for _ in range(MAX_CRASHES):
        bench.scan()
        assert bench.info.head_version == 2
        with pytest.raises(EndedError), other.run_head(in_use):
            raise EndedError
    bench.scan()
    back = bench.store.get(Heads).installed
    assert back is not None
    assert (back.version, bench.info.head_version) == (1, 1)
    installed = bench.install(heads[1])
    assert installed.evaluation.problem.startswith("the program ended 3 times")
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
    for _ in range(MAX_CRASHES):
        with pytest.raises(EndedError):
            bench.start()
    for _ in range(MAX_CRASHES):
        bench.start().connect().follow(bench.manifest)
        with pytest.raises(EndedError):
            bench.install(head)
    installed = bench.start().connect().follow(bench.manifest).install(head)
    assert installed.report is None
    assert "while it ran the task's graphs" in installed.reason
    assert bench.store.crash_counter.crashes(head_key(head)) == 0


_BUILD = """
import os, signal, sys
from pathlib import Path
from edge_client.data import decoding_memory, extraction
from protocol.models.preprocessing import preprocess
from tests.support.devices.device_bench import HeadBench

def preprocess_or_die(image, spec):
    if image.size == (33, 33):
        os.kill(os.getpid(), signal.SIGKILL)
    return preprocess(image, spec)

extraction.preprocess = preprocess_or_die
extraction.limit_bytes = lambda: int(sys.argv[2])
HeadBench(Path(sys.argv[1]), batch_size=4)
"""


def test_an_image_that_crashes_the_program_is_left_out_and_not_the_task(tmp_path: Path) -> None:
    """The third start names it and uploads the others; it is tried again with more memory, or when its file changes."""
    deadly = image_file(tmp_path / "data/cat/deadly.png", noise(33, 33))

    def start(memory_bytes: int) -> int:
        return subprocess.run(
            [sys.executable, "-c", _BUILD, tmp_path, str(memory_bytes)], check=False, timeout=120
        ).returncode

    assert [start(10**9) for _ in range(4)] == [-signal.SIGKILL, -signal.SIGKILL, 0, 0]
    store = DeviceState(tmp_path / "state")
    ((path, reason),) = store.get(LeftOut).unusable
    assert (path, "the program crashed when it decoded this image" in reason) == (str(deadly), True)
    assert store.get(SubmissionReport).unusable == ((path, reason),)
    assert sum(entry.images for entry in store.get(SubmissionReport).classes) == 40
    assert store.crash_counter.crashes(task_key(make_manifest())) == 0
    assert [start(2 * 10**9) for _ in range(3)] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    image_file(deadly, noise(34, 34))
    assert start(2 * 10**9) == 0
    assert store.get(LeftOut).unusable == ()


_BUILD_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from tests.support.devices.device_bench import HeadBench

pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 400 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
HeadBench(Path(sys.argv[1]))
"""


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="the size of the process is read from /proc"
)
def test_an_image_that_needs_more_memory_than_there_is_is_left_out(tmp_path: Path) -> None:
    """A CMYK JPEG of 81 megapixels, in a process that may take 400 MiB; the other images are uploaded."""
    (tmp_path / "data/cat").mkdir(parents=True)
    large = tmp_path / "data/cat/large.jpg"
    Image.new("CMYK", (9000, 9000)).save(large)
    subprocess.run([sys.executable, "-c", _BUILD_IN_LITTLE_MEMORY, tmp_path], check=True, timeout=120)
    store = DeviceState(tmp_path / "state")
    ((path, reason),) = store.get(LeftOut).unusable
    assert path == str(large)
    assert reason.startswith("not enough memory to decode it: it needs 619 MiB beside what is in use")
    assert store.outbox.newest_submission() is not None
