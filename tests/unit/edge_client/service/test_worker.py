"""Heads on a device that works: compared with the one before, refused with a report, gone back to."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from edge_client.agent import events
from edge_client.agent.state import head_key
from edge_client.runtime.backbone import Backbone
from edge_client.service.device import Device
from edge_client.service.worker import Crashed, Worker
from edge_client.storage.device_state import DeviceState
from edge_client.storage.facts import Heads, StoredLocalModel
from edge_client.training.local_round import initial_model, pack
from protocol.wire.codec import decode, encode
from protocol.wire.messages import BlobRef, Evaluation, HeadManifest, HeadRef, TaskManifest
from tests.support.device_factory import CLASSES, linear_head, tiny, write_images
from tests.support.graphs import tiny_backbone
from tests.support.round_factory import TASK as ROUNDS_TASK
from tests.support.round_factory import make_task, open_round
from tests.unit.edge_client.service.test_device import make_settings

ALWAYS = {
    name: np.where(np.arange(2) == label, 1.0, 0.0) * np.ones((16, 1)) for label, name in enumerate(CLASSES)
}
"""Heads that say the same of every image whose features add up to more than nothing."""


class Bench:
    """A worker of a device with images, one piece of work at a time.

    Args:
        folder: of everything.
    """

    def __init__(self, folder: Path) -> None:
        self.kept = DeviceState(folder / "state")
        self.backbone = tiny(folder)
        write_images(folder / "data", count=20)
        blob = self.put(tiny_backbone(), "tiny")
        self.manifest = TaskManifest(
            fleet="f", algorithm="fedtc", classes=CLASSES, backbones=(blob,), alpha=1.0, batch_size=5,
            min_images=2, seed=0,
        )  # fmt: skip
        self.task = self.kept.blobs.put(encode(self.manifest))
        self.said: list[events.Event | Crashed] = []
        settings = make_settings(folder)
        settings = replace(settings, local=replace(settings.local, holdout=0.5))
        self.worker = Worker(settings, self.kept, emit=self.said.append, show=None)
        self.worker.focus = self.task
        self.worker._build(events.BuildSubmission(self.task, self.manifest))
        self.said.clear()

    def put(self, data: bytes, name: str) -> BlobRef:
        """Have a blob."""
        return BlobRef(digest=self.kept.blobs.put(data), size_bytes=len(data), name=name)

    def head(self, version: int, file: bytes) -> HeadRef:
        """A head as the manifest names it."""
        return HeadRef(version=version, head=self.put(file, "head.onnx"), devices=1, prototypes=1)

    def install(self, head: HeadRef) -> tuple[events.HeadInstalled, Evaluation]:
        """Have a head taken into use; the outcome and what is reported."""
        self.worker.install(events.InstallHead(self.task, self.manifest, head))
        return self.outcome()

    def outcome(self) -> tuple[events.HeadInstalled, Evaluation]:
        """Of the work that waits."""
        job = self.worker._jobs.get()
        assert job is not None
        job()
        installed = self.said.pop()
        assert isinstance(installed, events.HeadInstalled)
        report = installed.report
        (payload,) = self.kept.outbox.read(report.digest, ((0, report.size_bytes),)) or (b"",)
        return installed, decode(payload, Evaluation, max_bytes=len(payload))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """One for each test."""
    return Bench(tmp_path)


def _head(backbones: Sequence[Backbone], name: str, sign: NDArray[np.float64] | float = 1.0) -> bytes:
    return linear_head(backbones, (ALWAYS[name] * sign).astype(np.float32))


def test_a_head_is_compared_with_the_one_before(bench: Bench) -> None:
    """On the same images, class for class; the first one with none, and one that is there already with the same."""
    first = bench.head(1, _head([bench.backbone], "cat"))
    second = bench.head(2, _head([bench.backbone], "cat", -1.0))
    installed, one = bench.install(first)
    assert (installed.head, installed.reason, one.previous_correct) == (head_key(first), "", ())
    assert sum(one.correct) + sum(one.incorrect) > 0
    for _ in range(2):
        _, two = bench.install(second)
        assert two.previous_correct == one.correct
        assert [r + w for r, w in zip(two.correct, two.incorrect, strict=True)] == [
            r + w for r, w in zip(one.correct, one.incorrect, strict=True)
        ]
    assert two.correct != one.correct
    _, back = bench.install(first)
    assert (back.correct, back.previous_correct) == (one.correct, two.correct)


def test_a_head_of_another_task_is_no_comparison(bench: Bench) -> None:
    """Its classes may mean something else."""
    bench.install(bench.head(1, _head([bench.backbone], "cat")))
    bench.task = bench.worker.focus = b"u" * 32
    _, evaluation = bench.install(bench.head(1, _head([bench.backbone], "dog")))
    assert evaluation.previous_correct == ()


def test_a_head_before_that_is_damaged_is_no_hindrance(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The new one is taken into use without a comparison."""
    first = bench.head(1, _head([bench.backbone], "cat"))
    bench.install(first)
    bench.kept.blobs.path(first.head.digest).write_bytes(b"damaged")
    installed, evaluation = bench.install(bench.head(2, _head([bench.backbone], "dog")))
    assert (installed.reason, evaluation.previous_correct) == ("", ())
    assert "no comparison with the head before" in caplog.text


def _bad_heads(backbone: Backbone) -> dict[str, bytes]:
    nan_far_out = np.zeros((16, 2), dtype=np.float32)
    nan_far_out[:, 0] = 3e38
    return {
        "expected an ONNX file": b"junk",
        "add up": linear_head([backbone], np.full((16, 2), np.nan, dtype=np.float32)),
        "classes": linear_head([backbone], np.zeros((16, 2), np.float32), classes=("cat", "cow")),
        "one probability per class": linear_head([backbone], np.zeros((16, 3), np.float32)),
        "cannot load": _unloadable(linear_head([backbone], np.zeros((16, 2), np.float32))),
    }


def _unloadable(file: bytes) -> bytes:
    """A well-formed file that ONNX Runtime makes no session of."""
    assert file.count(b"MatMul") == 1
    return file.replace(b"MatMul", b"MatMad")


def test_a_bad_head_is_refused_and_reported_and_the_old_one_stays(bench: Bench) -> None:
    """Whatever is wrong with it: the report names it with no image counted, and the head in use is as it was."""
    bench.install(bench.head(1, _head([bench.backbone], "cat")))
    before = bench.kept.get(Heads).installed
    for version, (words, file) in enumerate(_bad_heads(bench.backbone).items(), start=2):
        head = bench.head(version, file)
        installed, evaluation = bench.install(head)
        assert installed.head == head_key(head)
        assert f"head {version} refused, the old one stays" in installed.reason
        assert (evaluation.head_version, evaluation.correct, evaluation.incorrect) == (
            version,
            (0, 0),
            (0, 0),
        )
        assert words in evaluation.problem
        assert evaluation.problem in installed.reason
        assert bench.kept.get(Heads).installed == before


def test_a_head_that_fails_on_the_devices_own_images_is_refused(bench: Bench) -> None:
    """It gives probabilities for what it is tried out on, and NaN for what the device sees."""
    far = np.zeros((16, 2), dtype=np.float32)
    installed, _ = bench.install(bench.head(1, linear_head([bench.backbone], far)))
    assert not installed.reason
    cache = bench.worker._cache
    huge = np.full((1, 16), 3e38, dtype=np.float32)
    far[:, 0], far[:, 1] = 9, -9
    cache.chunks = lambda *_: [huge]  # type: ignore[method-assign, assignment]
    installed, evaluation = bench.install(bench.head(2, linear_head([bench.backbone], far)))
    assert "NaN or infinity for held-out images" in evaluation.problem
    assert "head 2 refused" in installed.reason


def test_what_cannot_be_fetched_is_reported(bench: Bench) -> None:
    """A head that the device has no whole file of."""
    head = HeadRef(version=4, head=BlobRef(digest=bytes(32), size_bytes=1, name="h"), devices=1, prototypes=1)
    bench.worker.refuse(events.RefuseHead(bench.task, bench.manifest, head, "it arrived damaged"))
    installed, evaluation = bench.outcome()
    assert installed.reason == "head 4 refused, the old one stays: it arrived damaged"
    assert (evaluation.head_version, evaluation.problem) == (4, "it arrived damaged")


def test_the_head_before_stays_on_the_disk(bench: Bench, tmp_path: Path) -> None:
    """So that a device that is told to go back needs no network; one that is older goes."""
    heads = [bench.head(version, _head([bench.backbone], "cat", float(version))) for version in (1, 2, 3)]
    for head in heads:
        bench.install(head)
    device = Device(make_settings(tmp_path), bench.kept)
    device._step(events.TaskSeen(bench.task, bench.manifest))
    device._state = replace(device._state, installed=head_key(heads[2]))
    device._tidy()
    assert [head.head.digest in bench.kept.blobs for head in heads] == [False, True, True]
    assert device._info().head_version == 3


def test_what_is_being_taken_into_use_stays_on_the_disk(bench: Bench, tmp_path: Path) -> None:
    """The outcome of an older head comes while one is tried, and a newer one is announced: both still work."""
    heads = [bench.head(version, _head([bench.backbone], "cat", float(version))) for version in (1, 2)]
    device = Device(make_settings(tmp_path), bench.kept)
    device._step(events.TaskSeen(bench.task, bench.manifest))
    device._state = replace(device._state, working=True)
    for number, head in enumerate(heads, start=1):
        device._step(events.HeadSeen(HeadManifest(task=bench.task, current=head)))
        bench.worker.install(events.InstallHead(bench.task, bench.manifest, head))
        if number == 1:
            outcome, _ = bench.outcome()
    assert device._state.installing == head_key(heads[1])
    device._state = replace(device._state, installed=head_key(heads[0]))
    blob = BlobRef(digest=bytes(32), size_bytes=9, name="to be fetched")
    newer = HeadRef(version=3, head=blob, devices=1, prototypes=1)
    device._step(events.HeadSeen(HeadManifest(task=bench.task, current=newer)))
    device._handle(outcome)
    assert heads[1].head.digest in bench.kept.blobs
    installed, _ = bench.outcome()
    device._handle(installed)
    assert heads[1].head.digest in bench.kept.blobs


def test_the_backbone_of_the_head_in_use_stays_on_the_disk(bench: Bench, tmp_path: Path) -> None:
    """Another task has another one, and its first head is refused: the old head works as before."""
    old = bench.head(1, _head([bench.backbone], "cat"))
    bench.install(old)
    device = Device(make_settings(tmp_path), bench.kept)
    other = bench.put(tiny_backbone(feature_size=8), "other")
    manifest = msgspec.structs.replace(bench.manifest, backbones=(other,))
    device._state = replace(
        device._state, installed=head_key(old), stored=frozenset(bench.kept.blobs.digests())
    )
    device._step(events.TaskSeen(b"u" * 32, manifest))
    device._state = replace(device._state, working=True)
    device._tidy()
    kept = bench.kept.get(Heads).installed
    assert kept is not None
    assert all(digest in bench.kept.blobs for digest in (kept.head, *kept.backbones))


def test_a_rounds_head_is_gone_back_to_as_it_was(tmp_path: Path) -> None:
    """Bound to what the device had learned when it was in use; a head of which that is gone, to what it knows now."""
    kept = DeviceState(tmp_path / "state")
    manifest = make_task(kept.blobs)
    assert manifest.program is not None
    said: list[events.Event | Crashed] = []
    worker = Worker(make_settings(tmp_path), kept, emit=said.append, show=None)
    worker.focus = ROUNDS_TASK
    heads = [
        HeadRef(
            version=number + 1, head=manifest.program.head, devices=1, prototypes=1,
            tensors=open_round(kept.blobs, tensors={"rate": np.array(number, np.float32)}).tensors,
        )
        for number in range(2)
    ]  # fmt: skip
    local_model = []
    for number in range(2):
        assert heads[0].tensors is not None
        taught = initial_model(manifest, heads[0].tensors, data=None, blobs=kept.blobs)
        taught.state["steps"][...] = number
        local_model.append(kept.blobs.put(pack(taught)))
    played = ((0, 0, None), (1, 1, None), (0, 0, None), (1, 1, None), (0, 1, 0))
    for step, (number, bound, gone) in enumerate(played):
        kept.set(StoredLocalModel(ROUNDS_TASK, local_model[min(step, 1)]))
        if gone is not None:
            kept.blobs.path(local_model[gone]).unlink()
        worker._newest = head_key(heads[number])
        worker._install(events.InstallHead(ROUNDS_TASK, manifest, heads[number]))
        installed = kept.get(Heads).installed
        assert installed is not None
        assert (installed.version, installed.local_model) == (number + 1, local_model[bound])


DEADLY = """
import os, signal, sys
from pathlib import Path
from edge_client.service import worker
from tests.unit.edge_client.service.test_worker import Bench

bench = Bench(Path(sys.argv[1]))
worker.open_installed = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
installed, evaluation = bench.install(bench.head(2, b"deadly"))
print(installed.reason, evaluation.problem, sep="\\n")
"""
"""A device whose libraries do not survive a head."""


def test_a_head_that_ends_the_program_is_refused_in_the_end(tmp_path: Path) -> None:
    """Three starts die of it; the next one refuses and reports it, and the old one is in use all the time."""
    bench = Bench(tmp_path)
    bench.install(bench.head(1, _head([bench.backbone], "cat")))
    before = bench.kept.get(Heads).installed
    for code in (-signal.SIGKILL, -signal.SIGKILL, -signal.SIGKILL, 0):
        done = subprocess.run(
            [sys.executable, "-c", DEADLY, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        assert bench.kept.get(Heads).installed == before
    assert done.stdout.splitlines() == [
        "head 2 refused, the old one stays: the program has ended 3 times while it tried it out",
        "the program has ended 3 times while it tried it out",
    ]
    installed, _ = bench.install(bench.head(2, _head([bench.backbone], "dog")))
    assert not installed.reason
