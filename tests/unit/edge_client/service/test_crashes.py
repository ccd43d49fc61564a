"""Tasks and heads that end the device program, and files that its disk has changed."""

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from edge_client.agent import events
from edge_client.agent.state import head_key
from edge_client.inference import open_installed
from edge_client.service.device import Device
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import CurrentTask, HeadProblem, Heads, LeftOut, SubmissionReport
from edge_client.storage.trials import MAX_ENDS, task_key
from edge_client.submission import builder, head_installer, image_features
from edge_client.training import local_round
from protocol.errors import StateError
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import encode
from protocol.wire.messages import HeadManifest, Receipt
from tests.support.devices.device_factory import (
    TINY,
    image_file,
    make_manifest,
    make_settings,
    noise,
    run_jobs,
)
from tests.support.devices.round_factory import look_at, open_round, take_images
from tests.support.devices.worker_benches import CONSTANT, HeadBench, RoundsBench
from tests.support.graphs.backbones import tiny_backbone


class EndedError(Exception):
    """Stands for the end of the program: nothing handles it."""


def die(*_: object, **__: object) -> Any:
    raise EndedError


def build(bench: HeadBench | RoundsBench, build: events.BuildSubmission) -> events.SubmissionBuilt:
    bench.worker.task = build.task
    bench.worker.round = None if build.round is None else build.round.number
    bench.emitted.clear()
    bench.worker._build(build)
    (built,) = bench.emitted
    assert isinstance(built, events.SubmissionBuilt)
    return built


@pytest.mark.parametrize("when", ["open_backbone", "extract"])
def test_a_backbone_that_ends_the_program_is_not_run_at_the_fourth_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The device reports it, waits for the broker at its start, and follows another task or a dry run."""
    bench = HeadBench(tmp_path)
    deadly = replace_seed(bench, seed=1)
    monkeypatch.setattr(image_features, when, die)
    for _ in range(MAX_ENDS):
        bench.start()
        if when == "extract":  # a part of the task that works
            bench.install(bench.head(1, CONSTANT["cat"]))
        with pytest.raises(EndedError):
            build(bench, deadly)
    bench.start()
    built = build(bench, deadly)
    assert built.item is None
    assert built.may_pass
    assert built.reason.startswith("the program ended 3 times while it ran the task's graphs")
    assert "--dry-run" in built.reason
    broker = BrokerAddress("localhost", 1883)
    bench.store.set(CurrentTask(deadly.task))
    device = Device(make_settings(tmp_path, broker=broker), bench.store)
    device._recall()
    assert device._agent.state.task is None
    monkeypatch.undo()
    assert build(bench, replace_seed(bench, seed=2)).item is not None
    assert build(bench, deadly).item is None
    bench.worker._workspace.dry_run = True
    bench.worker._workspace._backbones = {}
    assert build(bench, deadly).item is not None
    assert bench.store.trials.ends(task_key(deadly.manifest)) == 0
    device._recall()
    assert device._agent.state.task == deadly.task


def test_a_task_that_ends_the_program_as_its_submission_is_stored_is_not_run_at_the_fourth_start(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task decides what is stored as well: whatever ends the program before it is on disk counts."""
    deadly = replace_seed(bench, seed=1)
    monkeypatch.setattr(builder, "encode_submission", die)
    for _ in range(MAX_ENDS):
        with pytest.raises(EndedError):
            build(bench, deadly)
    assert build(bench, deadly).reason.startswith("the program ended 3 times")


def replace_seed(bench: HeadBench, *, seed: int) -> events.BuildSubmission:
    manifest = make_manifest(seed=seed)
    return events.BuildSubmission(bench.store.blobs.put(encode(manifest)), manifest)


def test_a_step_graph_that_ends_the_program_is_not_run_at_the_fourth_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted as for backbones, also in the next round."""
    rounds = RoundsBench(tmp_path)
    workspace, opened = rounds.worker._workspace, open_round(rounds.store.blobs)
    look_at(workspace.cache, take_images())
    monkeypatch.setattr(workspace, "extract", lambda *_: image_features.FoundImages(tuple(take_images()), ()))
    monkeypatch.setattr(local_round, "train_round", die)
    task = rounds.worker.task or b""
    for _ in range(MAX_ENDS):
        with pytest.raises(EndedError):
            build(rounds, events.BuildSubmission(task, rounds.manifest, opened))
    monkeypatch.undo()
    monkeypatch.setattr(workspace, "extract", lambda *_: image_features.FoundImages(tuple(take_images()), ()))
    later = open_round(rounds.store.blobs, number=1)
    built = build(rounds, events.BuildSubmission(task, rounds.manifest, later))
    assert built.reason.startswith("the program ended 3 times")


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
    for _ in range(MAX_ENDS):
        with pytest.raises(EndedError):
            bench.install(deadly)
    for _ in range(2):
        installed, evaluation = bench.install(deadly)
        assert bench.store.get(Heads) == before
        assert evaluation.problem == "the program ended 3 times while it ran the head"
        assert installed.reason.endswith(f"the previous head stays in use: {evaluation.problem}")
        assert bench.store.get(HeadProblem).text == installed.reason
    monkeypatch.undo()
    assert not bench.install(bench.head(3, CONSTANT["dog"] * 2))[0].reason
    assert bench.store.get(HeadProblem).text == ""


def test_a_head_that_ends_the_program_in_the_comparison_does_not_block_its_successor(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After one end there is no comparison; a rollback is a successor too."""
    first, bad = bench.head(1, CONSTANT["cat"]), bench.head(2, CONSTANT["dog"])
    bench.install(first)
    bench.install(bad)
    whole = open_installed

    def open_or_die(blobs: Any, installed: Any, backbones: Any) -> Any:
        return die() if installed.version == 2 else whole(blobs, installed, backbones)

    monkeypatch.setattr(head_installer, "open_installed", open_or_die)
    for successor in (bench.head(3, CONSTANT["cat"] * 3), first):
        bench.store.trials._write(head_key(bad), 0)
        with pytest.raises(EndedError):
            bench.install(successor)
        installed, evaluation = bench.install(successor)
        assert (installed.reason, evaluation.previous_correct) == ("", ())
        assert sum(evaluation.correct) > 0
        heads = bench.store.get(Heads)
        bench.store.set(Heads(heads.previous, heads.installed))
    assert "no comparison with the previous head" in caplog.text


def test_a_head_that_fails_in_predict_gives_way_to_the_previous_one(bench: HeadBench, tmp_path: Path) -> None:
    """While the service runs: it notices, and reports the head as bad when the fleet offers it again."""
    heads = [bench.head(version, CONSTANT[name]) for version, name in ((1, "cat"), (2, "dog"))]
    for head in heads:
        bench.install(head)
    device = bench.device(tmp_path)
    device._agent.state = replace(device._agent.state, installed=head_key(heads[1]), building=True)
    device._agent.step(HeadManifest(task=bench.task, current=heads[1]))
    other = DeviceState(tmp_path / "state")
    in_use = other.heads_in_use().installed
    assert in_use is not None
    for _ in range(MAX_ENDS):
        device._check_stored()
        assert device._agent.state.installed == head_key(heads[1])
        with pytest.raises(EndedError), other.run_head(in_use):
            raise EndedError
    device._check_stored()
    back = bench.store.get(Heads).installed
    assert back is not None
    assert (back.version, device._agent.state.installed) == (1, head_key(heads[0]))
    assert device._agent.state.installing == head_key(heads[1])
    installed, evaluation = bench.install(heads[1])
    assert evaluation.problem.startswith("the program ended 3 times")
    device._handle(installed)
    assert head_key(heads[1]) != device._agent.state.installing
    assert bench.store.get(Heads).installed == back


Damage = Callable[[bytes], bytes]
DAMAGES: dict[str, Damage] = {
    "a flipped byte": lambda data: data[:400] + bytes([data[400] ^ 1]) + data[401:],
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("what", ["backbone", "head", "deleted backbone"])
def test_a_damaged_file_is_downloaded_again_and_is_no_vote(bench: HeadBench, what: str, damage: str) -> None:
    """The job is repeated once the file is there; a file that is damaged again and again ends the program."""
    head = bench.head(1, CONSTANT["cat"])
    digest = head.head.digest if what == "head" else TINY.digest
    path, whole = bench.store.blobs.path(digest), bench.store.blobs.read(digest)
    for number in range(4):
        bench.worker._workspace._backbones = {}
        path.unlink(missing_ok=True)
        if "deleted" not in what:
            path.write_bytes(DAMAGES[damage](whole))
        bench.worker.install(events.InstallHead(bench.task, bench.manifest, head))
        if number == 3:
            with pytest.raises(StateError):
                run_jobs(bench.worker)
            continue
        run_jobs(bench.worker)
        assert bench.emitted.pop() == events.BlobsMissing(frozenset({digest}), "install")
        assert not path.exists()
        assert all(item.kind == "submission" for item in bench.store.outbox.items())
    path.write_bytes(whole)
    assert bench.install(head)[0].reason == ""


def test_a_build_without_its_backbone_is_repeated(bench: HeadBench) -> None:
    path = bench.store.blobs.path(TINY.digest)
    path.write_bytes(b"damaged")
    bench.worker._workspace._backbones = {}
    bench.emitted.clear()
    bench.worker._build(events.BuildSubmission(bench.task, bench.manifest))
    assert bench.emitted == [events.BlobsMissing(frozenset({TINY.digest}), "build")]
    path.write_bytes(tiny_backbone())
    assert build(bench, events.BuildSubmission(bench.task, bench.manifest)).item is not None


def test_a_submission_that_is_damaged_in_a_running_outbox_is_built_again(
    bench: HeadBench, tmp_path: Path
) -> None:
    """The aggregator refuses other bytes than their digest is of, which sending them again does not correct."""
    settings = make_settings(tmp_path, holdout=0.5, broker=BrokerAddress("localhost", 1883))
    device, damaged = Device(settings, bench.store), bench.store.outbox.newest_submission()
    device._publisher.send = lambda _: None  # type: ignore[method-assign, assignment]
    device._worker.follow(bench.task)
    device._agent.step(events.TaskSeen(bench.task, bench.manifest))
    device._agent.step(events.OutboxSeen(bench.store.outbox.items()))
    device._agent.step(events.Connected(65_536))  # a receipt for what was not sent is ignored
    with sqlite3.connect(bench.store.folder / "device.sqlite") as other:
        other.execute("UPDATE payloads SET bytes = zeroblob(length(bytes))")
    assert damaged is not None
    device._agent.step(Receipt(digest=damaged.digest, status="refused", reason="digest"))
    while not device._inbox.empty():
        device._handle(device._inbox.get())
    run_jobs(device._worker)
    built = device._inbox.get(timeout=1)
    assert isinstance(built, events.SubmissionBuilt)
    assert built.item is not None
    assert bench.store.outbox.payload(built.item) is not None
    assert bench.store.outbox.items() == (built.item,)


def test_a_blob_that_disappears_is_downloaded_again(bench: HeadBench, tmp_path: Path) -> None:
    """`edge-client predict` deletes a damaged one; without a broker there is nothing to download it from."""
    device = bench.device(tmp_path)
    device._agent.state = replace(device._agent.state, stored=frozenset(bench.store.blobs.digests()))
    bench.store.blobs.path(TINY.digest).unlink()
    device._check_stored()
    assert TINY.digest not in device._agent.state.stored
    assert device._agent.state.download is not None
    assert device._agent.state.download.blob == TINY
    with pytest.raises(StateError, match="pass --broker"):
        device._handle(events.BlobsMissing(frozenset({TINY.digest}), "build"))


def test_a_device_that_cannot_run_the_task_has_no_vote(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is not in use, and the device uploads no report on it."""
    head = bench.head(1, CONSTANT["cat"])
    bench.worker._workspace._backbones = {}
    monkeypatch.setattr(image_features, "open_backbone", die)
    for _ in range(MAX_ENDS):
        bench.worker.install(events.InstallHead(bench.task, bench.manifest, head))
        with pytest.raises(EndedError):
            run_jobs(bench.worker)
    bench.worker.install(events.InstallHead(bench.task, bench.manifest, head))
    run_jobs(bench.worker)
    installed = bench.emitted.pop()
    assert isinstance(installed, events.HeadInstalled)
    assert installed.report is None
    assert "while it ran the task's graphs" in installed.reason
    assert bench.store.trials.ends(head_key(head)) == 0


def test_a_damaged_stored_task_comes_from_the_broker_again(bench: HeadBench, tmp_path: Path) -> None:
    """The start does not fail."""
    bench.store.set(CurrentTask(bench.task))
    device = Device(make_settings(tmp_path, broker=BrokerAddress("localhost", 1883)), bench.store)
    bench.store.blobs.path(bench.task).write_bytes(b"damaged")
    device._recall()
    assert device._agent.state.task is None


_BUILD = """
import os, signal, sys
from pathlib import Path
from edge_client.data import decoding_memory, extraction
from protocol.models.preprocessing import preprocess
from tests.support.devices.worker_benches import HeadBench

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
    assert store.trials.ends(task_key(make_manifest())) == 0
    assert [start(2 * 10**9) for _ in range(3)] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    image_file(deadly, noise(34, 34))
    assert start(2 * 10**9) == 0
    assert store.get(LeftOut).unusable == ()


_BUILD_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from tests.support.devices.worker_benches import HeadBench

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
