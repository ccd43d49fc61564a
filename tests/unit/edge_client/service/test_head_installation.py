"""Heads on a device: installed, compared with the previous one, refused, and kept on disk."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner
from PIL import Image

from edge_client.cli import cli
from edge_client.graphs.backbone import open_backbone
from edge_client.heads import classifier, head_evaluation, head_installer
from edge_client.store.device_state import DeviceState
from edge_client.store.feature_cache import FeatureCache
from edge_client.store.head_trials import MAX_FAILURES
from edge_client.store.stored_values import Heads, InstalledHead, StoredLocalModel
from edge_client.training.local_round import initial_model, pack
from protocol.errors import BackboneMismatch
from protocol.wire.codec import digest_of
from protocol.wire.messages import Evaluation, HeadManifest, HeadRef
from tests.support.devices.device_bench import CONSTANT, HeadBench, RoundsBench
from tests.support.devices.device_factory import linear_head, make_manifest
from tests.support.graphs.hostile_graphs import always_fails, fails_on_white
from tests.support.machine_faults import full_disk
from tests.support.simulation.fleet import reference


def _totals(evaluation: Evaluation) -> list[int]:
    return [r + w for r, w in zip(evaluation.correct, evaluation.incorrect, strict=True)]


def test_a_head_is_compared_with_the_previous_one(bench: HeadBench) -> None:
    """On the same images, per class, also when the device goes back."""
    first, second = bench.head(1, CONSTANT["cat"]), bench.head(2, -CONSTANT["cat"])
    assert bench.install(first).reason == ""
    one = bench.install(first).evaluation
    assert one.previous_correct == ()
    assert sum(_totals(one)) > 0
    two = bench.install(second).evaluation
    assert two.previous_correct == one.correct
    assert _totals(two) == _totals(one)
    assert two.correct != one.correct
    back = bench.install(first).evaluation
    assert (back.correct, back.previous_correct) == (one.correct, two.correct)


@pytest.mark.parametrize("kept", [("weight",), ()])
def test_the_accuracy_of_a_personal_model_is_over_all_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: tuple[str, ...]
) -> None:
    """Of one class the device has held-out images; without local state the model is the fleet's."""
    rounds = RoundsBench(tmp_path, kept=kept)
    evaluation = Evaluation(task=rounds.task, head_version=1, correct=(7, 0, 0), incorrect=(1, 0, 0))
    monkeypatch.setattr(head_installer, "evaluate_head", lambda *_, **__: evaluation)
    rounds.install(rounds.head(1, rounds.open().tensors))
    installed = rounds.store.get(Heads).installed
    assert installed is not None
    assert (installed.correct, installed.total, installed.known) == (7, 8, 3)
    assert installed.balanced == (pytest.approx(7 / 8 / 3) if kept else None)


@pytest.mark.parametrize("why", ["another task", "damaged"])
def test_a_previous_head_that_cannot_be_compared_is_no_obstacle(
    bench: HeadBench, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    """A head of another task has other classes; a damaged one does not open."""
    first = bench.head(1, CONSTANT["cat"])
    bench.install(first)
    if why == "damaged":
        bench.store.blobs.path(first.head.digest).write_bytes(b"damaged")
    else:
        bench.follow(make_manifest(seed=1))
    installed = bench.install(bench.head(2, CONSTANT["dog"]))
    assert (installed.reason, installed.evaluation.previous_correct) == ("", ())
    assert ("no comparison with the previous head" in caplog.text) == (why == "damaged")


def test_a_bad_head_is_refused_with_a_report(bench: HeadBench) -> None:
    """The report names the problem and counts no image, and the previous head stays in use."""
    bench.install(bench.head(1, CONSTANT["cat"]))
    before, backbones = bench.store.get(Heads), [bench.backbone]
    unloadable = linear_head(backbones, np.zeros((16, 2), np.float32))
    assert unloadable.count(b"MatMul") == 1
    bad_heads = {
        "classes": linear_head(backbones, np.zeros((16, 2), np.float32), classes=("cat", "cow")),
        "one probability per class": linear_head(backbones, np.zeros((16, 3), np.float32)),
        "cannot load": unloadable.replace(b"MatMul", b"MatMad"),
    }
    for version, (words, file) in enumerate(bad_heads.items(), start=2):
        head = bench.head(version, CONSTANT["cat"], file)
        installed = bench.install(head)
        evaluation = installed.evaluation
        assert f"head {version} refused, the previous head stays in use" in installed.reason
        assert (evaluation.head_version, _totals(evaluation)) == (version, [0, 0])
        assert words in evaluation.problem
        assert evaluation.problem in installed.reason
        assert bench.store.get(Heads) == before


def test_a_head_that_fails_on_the_devices_images_is_refused(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes the trial run, and gives NaN for the held-out images."""
    huge, weights = np.full((1, 16), 3e38, dtype=np.float32), np.zeros((16, 2))
    weights[:, 0], weights[:, 1] = 9, -9
    monkeypatch.setattr(FeatureCache, "chunks", lambda *_: [huge])
    installed = bench.install(bench.head(2, weights))
    assert "NaN or infinity" in installed.evaluation.problem
    assert "head 2 refused" in installed.reason


def _follow(bench: HeadBench, backbone: bytes) -> None:
    """Give the device another task with a backbone."""
    blob = bench.offer(backbone, "other")
    bench.follow(make_manifest(backbones=(blob,), seed=1))
    bench.backbone = open_backbone(bench.store.blobs.path(blob.digest), provider="cpu", threads=1)


def test_a_head_whose_backbone_does_not_run_is_not_used(bench: HeadBench, tmp_path: Path) -> None:
    """Of a new task, whose features a device without images never computes: `predict` works with the head before."""
    bench.install(bench.head(1, CONSTANT["cat"]))
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "data").mkdir()
    before = bench.store.get(Heads)
    _follow(bench, always_fails())
    installed = bench.install(bench.head(2, CONSTANT["dog"]))
    assert "head 2 refused, the previous head stays in use: the backbone fails" in installed.reason
    assert installed.report is None, "it is no fault of the head"
    assert bench.store.get(Heads) == before


@pytest.mark.parametrize("fails", ["runs", "opening"])
def test_a_backbone_that_fails_in_predict_gives_way_to_the_head_before(
    bench: HeadBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """It has worked on zeros. An image that cannot be decoded neither counts nor ends the row of failures."""
    images = {name: tmp_path / f"{name}.png" for name in ("white", "broken")}
    Image.new("RGB", (8, 8), "white").save(images["white"])
    images["broken"].write_bytes(b"no image")

    def predict(name: str) -> str:
        arguments = ["predict", str(images[name]), "--state", str(bench.store.folder), "--provider", "cpu"]
        result = CliRunner().invoke(cli, arguments)
        return f"{result.output}{result.exception or ''}"

    bench.install(bench.head(1, CONSTANT["cat"]))
    _follow(bench, fails_on_white())
    bench.install(bench.head(2, CONSTANT["dog"]))
    with monkeypatch.context() as patched:
        if fails == "opening":
            error = BackboneMismatch("the backbone fails")
            patched.setattr(classifier, "open_backbone", Mock(side_effect=error))
        for _ in range(MAX_FAILURES):
            assert "the backbone fails" in predict("white")
            if fails == "runs":
                assert "1 of 1 images could not be read" in predict("broken")
    assert "%" in predict("white")
    old = bench.store.heads_in_use().installed
    assert old is not None
    assert old.version == 1
    # A second head of the new task, whose previous one has the same backbone: going back would not help.
    for version in (3, 4):
        bench.install(bench.head(version, CONSTANT["dog"] * version))
    for _ in range(MAX_FAILURES + 1):
        assert "the backbone fails" in predict("white")
    in_use = bench.store.heads_in_use().installed
    assert in_use is not None
    assert in_use.version == 4


@pytest.mark.parametrize("was_killed", [False, True])
def test_predict_and_status_work_on_a_full_disk(
    bench: HeadBench, tmp_path: Path, *, was_killed: bool
) -> None:
    """After a kill the database's log is not empty. The runs do not count."""
    bench.install(bench.head(1, CONSTANT["cat"]))
    image, state = tmp_path / "white.png", ["--state", str(bench.store.folder)]
    Image.new("RGB", (8, 8), "white").save(image)
    if not was_killed:
        bench.stop()
        bench.store.close()
    with full_disk(after_bytes=0):
        for command in (["predict", str(image), "--provider", "cpu"], ["status"]):
            result = CliRunner().invoke(cli, [*command, *state])
            assert (result.exit_code, "%" in result.output) == (0, True), result.output
    installed = DeviceState(bench.store.folder).get(Heads).installed
    assert installed is not None
    assert bench.store.head_trials.failures(installed.key) == 0


@pytest.mark.parametrize("max_epsilon", [None, 1.0])
def test_no_graph_of_a_head_runs_beside_images_that_must_not_be_revealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_epsilon: float | None
) -> None:
    """It could read them in memory, and reveal them by being refused: it runs in another process."""
    bench = HeadBench(tmp_path, max_epsilon=max_epsilon)
    head = bench.head(1, CONSTANT["cat"])
    monkeypatch.setattr(onnxruntime.InferenceSession, "run", Mock(side_effect=MemoryError))
    bench.install(head)
    assert (bench.store.get(Heads).installed is None) == (max_epsilon is None)


def test_a_head_being_installed_stays_on_disk(bench: HeadBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds if an older head's result arrives and a newer head is announced."""
    heads = [bench.head(version, CONSTANT["cat"] * version) for version in (1, 2)]
    later = HeadRef(version=3, head=reference(b"to be downloaded", "head"), devices=1, prototypes=1)
    evaluate = head_evaluation.evaluate_head

    def announce_and_evaluate(*arguments: Any, **options: Any) -> Evaluation:
        """Announce the next head while one is tried."""
        monkeypatch.setattr(head_installer, "evaluate_head", evaluate)
        bench.deliver(*bench.signed(HeadManifest(task=bench.task, current=later)))
        return evaluate(*arguments, **options)

    bench.install(heads[0])
    monkeypatch.setattr(head_installer, "evaluate_head", announce_and_evaluate)
    bench.install(heads[1])
    assert all(head.head.digest in bench.store.blobs for head in heads)
    assert bench.requests[-1].digest == later.head.digest


def test_going_back_to_a_rounds_head_restores_its_local_model(rounds: RoundsBench) -> None:
    """If that model is lost, the head is bound to the current one."""
    store, opened, models = rounds.store, [rounds.open(number, rate=number) for number in range(2)], []
    rounds.begin(opened[0])
    for number in range(2):
        model = initial_model(rounds.manifest, opened[0].tensors, data=None, blobs=store.blobs)
        model.state["steps"][...] = number
        models.append(model)
    files = [pack(model) for model in models]
    digests = [digest_of(file) for file in files]
    for step, (number, bound) in enumerate(((0, 0), (1, 1), (0, 0), (1, 1), (0, 1))):
        for file in files[: 1 if (number, bound) == (0, 1) else 2]:
            store.blobs.put(file)
        store.set(StoredLocalModel(rounds.task, digests[min(step, 1)]))
        if (number, bound) == (0, 1):
            store.blobs.path(digests[0]).unlink()
        rounds.install(rounds.head(number + 1, opened[number].tensors))
        installed = store.get(Heads).installed
        assert isinstance(installed, InstalledHead)
        assert (installed.version, installed.local_model) == (number + 1, digests[bound])
