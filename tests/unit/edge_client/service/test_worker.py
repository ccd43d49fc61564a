"""Worker: which jobs are dropped, and how heads are installed, compared, refused and kept."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_client.agent import events
from edge_client.agent.state import head_key
from edge_client.inference import Head
from edge_client.runtime.backbone import Backbone
from edge_client.service.device import Device
from edge_client.service.worker import Worker
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import (
    Heads,
    HeadTrial,
    InstalledHead,
    LeftOut,
    StoredLocalModel,
    SubmissionReport,
)
from edge_client.submission import head_installer
from edge_client.submission.image_features import FoundImages
from edge_client.training.local_round import initial_model, pack
from protocol.errors import GraphRefused, StateError
from protocol.wire.codec import decode, encode
from protocol.wire.messages import BlobRef, Evaluation, HeadManifest, HeadRef
from tests.support.device_factory import (
    CLASSES,
    TINY,
    image_file,
    linear_head,
    make_manifest,
    make_settings,
    payload_of,
    run_jobs,
    tiny,
    write_images,
)
from tests.support.graphs import tiny_backbone
from tests.support.round_factory import TASK as ROUNDS_TASK
from tests.support.round_factory import look_at, make_task, open_round, stored, take_images

CONSTANT = {
    name: np.where(np.arange(2) == label, 1.0, 0.0) * np.ones((16, 1)) for label, name in enumerate(CLASSES)
}
"""Weights of heads that predict one class for every image whose features have a positive sum."""


class Bench:
    """A worker of a device with images, whose jobs run on the caller's thread."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.store = DeviceState(folder / "state")
        self.store.blobs.put(tiny_backbone())
        self.backbone = tiny(folder)
        write_images(folder / "data", count=20)
        self.manifest = make_manifest()
        self.task = self.store.blobs.put(encode(self.manifest))
        self.emitted: list[events.Event | BaseException] = []
        self.worker = Worker(
            make_settings(folder, holdout=0.5, **settings), self.store, emit=self.emitted.append, show=None
        )
        self.worker.task = self.task
        self.worker._build(events.BuildSubmission(self.task, self.manifest))
        self.emitted.clear()

    def head(self, version: int, weights: NDArray[np.float64], file: bytes | None = None) -> HeadRef:
        """Return a reference to a linear head, or to a file."""
        data = linear_head([self.backbone], weights.astype(np.float32)) if file is None else file
        return HeadRef(
            version=version, head=stored(self.store.blobs, data, "head.onnx"), devices=1, prototypes=1
        )

    def install(self, head: HeadRef, problem: str = "") -> tuple[events.HeadInstalled, Evaluation]:
        """Install a head; returns the result and the evaluation in the outbox."""
        self.worker.install(events.InstallHead(self.task, self.manifest, head, problem=problem))
        return self.result()

    def result(self) -> tuple[events.HeadInstalled, Evaluation]:
        """Run the next job; returns its result and the evaluation in the outbox."""
        run_jobs(self.worker, 1)
        installed = self.emitted.pop()
        assert isinstance(installed, events.HeadInstalled)
        payload = payload_of(self.store, installed.report)
        return installed, decode(payload, Evaluation, max_bytes=len(payload))

    def device(self, folder: Path) -> Device:
        """Return a device program on the same state, with the task."""
        device = Device(make_settings(folder), self.store)
        device._step(events.TaskSeen(self.task, self.manifest))
        device._state = replace(device._state, building=True)
        return device


class RoundsBench:
    """A worker on a task with rounds."""

    def __init__(self, folder: Path) -> None:
        self.store = DeviceState(folder / "state")
        self.manifest = make_task(self.store.blobs)
        self.emitted: list[events.Event | BaseException] = []
        self.worker = Worker(make_settings(folder), self.store, emit=self.emitted.append, show=None)
        self.worker.task = ROUNDS_TASK

    def tensors(self, rate: float) -> BlobRef:
        return open_round(self.store.blobs, tensors={"rate": np.array(rate, np.float32)}).tensors

    def install(self, version: int, tensors: BlobRef) -> None:
        """Queue the installation of a head that is bound to a round's tensors."""
        assert self.manifest.program is not None
        file = self.manifest.program.head
        head = HeadRef(version=version, head=file, devices=1, prototypes=1, tensors=tensors)
        self.worker.install(events.InstallHead(ROUNDS_TASK, self.manifest, head))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def rounds(tmp_path: Path) -> RoundsBench:
    return RoundsBench(tmp_path)


def _totals(evaluation: Evaluation) -> list[int]:
    return [r + w for r, w in zip(evaluation.correct, evaluation.incorrect, strict=True)]


def test_unknown_folders_do_not_stop_uploads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are logged once, stored for `status`, and noticed while the device runs; `strict` refuses them."""
    bench = Bench(tmp_path)
    image_file(tmp_path / "data" / os.fsdecode(b"w\xe4sps") / "1.png")
    (tmp_path / "data/@eaDir").mkdir()
    (tmp_path / "data/cat/holiday.mp4").touch()
    for _ in range(2):
        bench.worker.check_images()
        run_jobs(bench.worker)
    assert bench.emitted == []
    assert caplog.text.count("no class of the task, images left out") == 1
    assert bench.store.get(LeftOut) == LeftOut(("'@eaDir'", r"'w\udce4sps'"), {"suffix .mp4": 1})
    restarted = Bench(tmp_path)
    assert restarted.store.outbox.newest_submission() is not None
    strict = Bench(tmp_path, strict=True)
    strict.worker._build(events.BuildSubmission(strict.task, strict.manifest))
    (built,) = strict.emitted
    assert isinstance(built, events.SubmissionBuilt)
    assert (built.item, built.may_pass) == (None, False)
    assert built.reason.endswith("omit --strict to leave their images out")


@pytest.mark.parametrize("classes", [("cat",), ("cat", "cow"), ("cow", "cat", "dog"), ("cow",)])
def test_a_change_of_the_tasks_classes_ends_no_device(tmp_path: Path, classes: tuple[str, ...]) -> None:
    """A device uploads the classes that are left; without any it receives heads."""
    bench = Bench(tmp_path)
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
    ((path, _),) = Bench(tmp_path).store.get(SubmissionReport).unusable
    assert path.endswith(r"data/cat/\udcff/broken.png")


def test_an_outdated_build_may_miss_its_blobs(rounds: RoundsBench) -> None:
    """The tensors of a closed round are deleted: its build ends silently, a current one raises."""
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
    with pytest.raises(StateError):
        build(0)


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
    worker, trials = rounds.worker, []

    def stop_and_load(_: object) -> Backbone:
        trials.append(rounds.store.get(HeadTrial))
        worker.task = None
        return tiny(tmp_path)

    worker._workspace._open = stop_and_load  # type: ignore[method-assign, assignment]
    rounds.install(1, rounds.tensors(0.1))
    run_jobs(worker)
    assert rounds.store.outbox.items() == ()
    assert rounds.emitted == []
    assert trials == [HeadTrial()]


def test_an_interrupted_evaluation_has_no_result(bench: Bench) -> None:
    """The device stops in the evaluation: the trial does not count, and the next start installs the head."""
    head, cache, task = bench.head(1, CONSTANT["cat"]), bench.worker._workspace.cache, bench.task
    chunks = cache.chunks

    def stop_and_read(identities: Sequence[str], *backbones: str) -> Iterator[NDArray[np.float32]]:
        bench.worker.task = None
        return chunks(identities, *backbones)

    cache.chunks = stop_and_read  # type: ignore[method-assign]
    bench.worker.install(events.InstallHead(task, bench.manifest, head))
    run_jobs(bench.worker)
    assert (bench.emitted, bench.store.get(Heads), bench.store.get(HeadTrial)) == ([], Heads(), HeadTrial())
    assert all(item.kind == "submission" for item in bench.store.outbox.items())
    cache.chunks, bench.worker.task = chunks, task  # type: ignore[method-assign]
    assert bench.install(head)[0].reason == ""


def test_a_head_is_compared_with_the_previous_one(bench: Bench) -> None:
    """On the same images, per class, also when it is installed again or the device goes back."""
    first, second = bench.head(1, CONSTANT["cat"]), bench.head(2, -CONSTANT["cat"])
    installed, one = bench.install(first)
    assert (installed.head, installed.reason, one.previous_correct) == (head_key(first), "", ())
    assert sum(_totals(one)) > 0
    for _ in range(2):
        _, two = bench.install(second)
        assert two.previous_correct == one.correct
        assert _totals(two) == _totals(one)
    assert two.correct != one.correct
    _, back = bench.install(first)
    assert (back.correct, back.previous_correct) == (one.correct, two.correct)


@pytest.mark.parametrize("why", ["another task", "damaged"])
def test_a_previous_head_that_cannot_be_compared_is_no_obstacle(
    bench: Bench, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    """A head of another task has other classes; a damaged one does not open."""
    first = bench.head(1, CONSTANT["cat"])
    bench.install(first)
    if why == "damaged":
        bench.store.blobs.path(first.head.digest).write_bytes(b"damaged")
    else:
        bench.task = bench.worker.task = b"u" * 32
    installed, evaluation = bench.install(bench.head(2, CONSTANT["dog"]))
    assert (installed.reason, evaluation.previous_correct) == ("", ())
    assert ("no comparison with the previous head" in caplog.text) == (why == "damaged")


def _bad_heads(backbone: Backbone) -> dict[str, bytes]:
    zeros = np.zeros((16, 2), np.float32)
    unloadable = linear_head([backbone], zeros)
    assert unloadable.count(b"MatMul") == 1
    return {
        "expected an ONNX file": b"junk",
        "add up": linear_head([backbone], np.full((16, 2), np.nan, dtype=np.float32)),
        "classes": linear_head([backbone], zeros, classes=("cat", "cow")),
        "one probability per class": linear_head([backbone], np.zeros((16, 3), np.float32)),
        "cannot load": unloadable.replace(b"MatMul", b"MatMad"),
    }


def test_a_bad_head_is_refused_with_a_report(bench: Bench) -> None:
    """The report names the problem and counts no image, and the previous head stays in use."""
    bench.install(bench.head(1, CONSTANT["cat"]))
    before = bench.store.get(Heads)
    for version, (words, file) in enumerate(_bad_heads(bench.backbone).items(), start=2):
        head = bench.head(version, CONSTANT["cat"], file)
        installed, evaluation = bench.install(head)
        assert installed.head == head_key(head)
        assert f"head {version} refused, the previous head stays in use" in installed.reason
        assert (evaluation.head_version, _totals(evaluation)) == (version, [0, 0])
        assert words in evaluation.problem
        assert evaluation.problem in installed.reason
        assert bench.store.get(Heads) == before


def test_a_head_that_fails_on_the_devices_images_is_refused(bench: Bench) -> None:
    """It passes the trial run, and gives NaN for the held-out images."""
    huge, weights = np.full((1, 16), 3e38, dtype=np.float32), np.zeros((16, 2))
    weights[:, 0], weights[:, 1] = 9, -9
    bench.worker._installer._workspace.cache.chunks = lambda *_: [huge]  # type: ignore[method-assign, assignment]
    installed, evaluation = bench.install(bench.head(2, weights))
    assert "NaN or infinity for held-out images" in evaluation.problem
    assert "head 2 refused" in installed.reason


def test_a_head_that_cannot_be_downloaded_is_reported(bench: Bench) -> None:
    """The agent's reason is in the report."""
    head = HeadRef(version=4, head=TINY, devices=1, prototypes=1)
    installed, evaluation = bench.install(head, problem="it arrived damaged")
    assert installed.reason == "head 4 refused, the previous head stays in use: it arrived damaged"
    assert (evaluation.head_version, evaluation.problem) == (4, "it arrived damaged")


def test_the_previous_head_stays_on_disk(bench: Bench, tmp_path: Path) -> None:
    """Going back to it needs no network; an older one is deleted."""
    heads = [bench.head(version, CONSTANT["cat"] * version) for version in (1, 2, 3)]
    for head in heads:
        bench.install(head)
    device = bench.device(tmp_path)
    device._state = replace(device._state, installed=head_key(heads[2]))
    device._downloads.delete_unused(device._state)
    assert [head.head.digest in bench.store.blobs for head in heads] == [False, True, True]
    assert device._info().head_version == 3


def test_a_head_being_installed_stays_on_disk(bench: Bench, tmp_path: Path) -> None:
    """Also if an older head's result arrives meanwhile and a newer head is announced."""
    heads = [bench.head(version, CONSTANT["cat"] * version) for version in (1, 2)]
    device = bench.device(tmp_path)
    for number, head in enumerate(heads, start=1):
        device._step(HeadManifest(task=bench.task, current=head))
        bench.worker.install(events.InstallHead(bench.task, bench.manifest, head))
        if number == 1:
            result, _ = bench.result()
    assert device._state.installing == head_key(heads[1])
    device._state = replace(device._state, installed=head_key(heads[0]))
    blob = BlobRef(digest=bytes(32), size_bytes=9, name="to be downloaded")
    newer = HeadRef(version=3, head=blob, devices=1, prototypes=1)
    device._step(HeadManifest(task=bench.task, current=newer))
    device._handle(result)
    assert heads[1].head.digest in bench.store.blobs
    installed, _ = bench.result()
    device._handle(installed)
    assert heads[1].head.digest in bench.store.blobs


def test_the_backbone_of_the_head_in_use_stays_on_disk(bench: Bench, tmp_path: Path) -> None:
    """Also in a new task with another backbone, whose first head is refused."""
    old = bench.head(1, CONSTANT["cat"])
    bench.install(old)
    device = Device(make_settings(tmp_path), bench.store)
    other = stored(bench.store.blobs, tiny_backbone(feature_size=8), "other")
    device._state = replace(device._state, installed=head_key(old))
    device._step(events.TaskSeen(b"u" * 32, make_manifest(backbones=(other,))))
    device._downloads.delete_unused(device._state)
    in_use = bench.store.get(Heads).installed
    assert in_use is not None
    assert all(digest in bench.store.blobs for digest in (in_use.head, *in_use.backbones))


def test_going_back_to_a_rounds_head_restores_its_local_model(rounds: RoundsBench) -> None:
    """If that model is lost, the head is bound to the current one."""
    store, tensors, models = rounds.store, [rounds.tensors(0), rounds.tensors(1)], []
    for number in range(2):
        model = initial_model(rounds.manifest, tensors[0], data=None, blobs=store.blobs)
        model.state["steps"][...] = number
        models.append(store.blobs.put(pack(model)))
    for step, (number, bound) in enumerate(((0, 0), (1, 1), (0, 0), (1, 1), (0, 1))):
        store.set(StoredLocalModel(ROUNDS_TASK, models[min(step, 1)]))
        if (number, bound) == (0, 1):
            store.blobs.path(models[0]).unlink()
        rounds.install(number + 1, tensors[number])
        run_jobs(rounds.worker)
        installed = store.get(Heads).installed
        assert isinstance(installed, InstalledHead)
        assert (installed.version, installed.local_model) == (number + 1, models[bound])


def test_a_head_that_ends_the_program_is_refused_at_the_fourth_start(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous head stays in use all the time, and another head is installed afterwards."""
    bench.install(bench.head(1, CONSTANT["cat"]))
    before, deadly = bench.store.get(Heads), bench.head(2, CONSTANT["cat"], b"deadly")
    trials: list[HeadTrial] = []

    def end(*_: object) -> Head:
        trials.append(bench.store.get(HeadTrial))
        raise GraphRefused("the process is killed here")

    monkeypatch.setattr(head_installer, "open_installed", end)
    for _ in range(4):
        installed, evaluation = bench.install(deadly)
        assert bench.store.get(Heads) == before
        # A killed process leaves the record of its trial.
        bench.store.set(trials[-1])
    assert [trial.attempts for trial in trials] == [1, 2, 3]
    assert evaluation.problem == "the program ended 3 times while testing it"
    assert installed.reason.endswith(f"the previous head stays in use: {evaluation.problem}")
    monkeypatch.undo()
    assert not bench.install(bench.head(2, CONSTANT["dog"]))[0].reason
