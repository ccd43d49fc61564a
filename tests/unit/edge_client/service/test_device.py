"""Device: what it stores, deletes and reports, and with what it waits or ends."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_client.agent.state import Mode, State
from edge_client.service.blob_downloads import BlobDownloads
from edge_client.service.device import MAX_TICK_S, Device
from edge_client.storage.device_state import DeviceState
from edge_client.storage.feature_cache import FeatureCache
from edge_client.storage.stored_values import (
    BuildProblem,
    CurrentTask,
    HeadProblem,
    Problems,
    StoredLocalModel,
    SubmissionReport,
)
from edge_client.submission.image_features import Workspace
from edge_client.submission.prepared_submission import PreparedSubmission
from edge_client.submission.round_submission import RoundTraining
from edge_client.training.local_round import initial_model, pack
from protocol.errors import BackboneMismatch, ConfigError
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef, HeadManifest, HeadRef
from protocol.wire.topics import fleet_topic
from tests.support.devices.device_bench import DeviceBench, HeadBench, RoundsBench
from tests.support.devices.device_factory import image_file, make_manifest, make_settings
from tests.support.devices.round_factory import TASK, make_task, open_round
from tests.support.simulation.fleet import reference


@pytest.mark.parametrize("max_epsilon", [None, 1.0])
def test_a_blob_that_arrives_damaged_is_reported(tmp_path: Path, max_epsilon: float | None) -> None:
    """Other frames than the aggregator's: status and info name the blob and the broker, until the true ones arrive."""
    bench, data = DeviceBench(tmp_path, max_epsilon=max_epsilon), b"backbone"
    bench.start().connect().announce(make_manifest(backbones=(reference(data, "the backbone"),)))
    for sent in (b"attacker", b"attacker", b"attacker", data):
        problem = bench.status["problem"]
        assert bench.info.problem == problem
        assert ("the backbone arrives damaged" in problem and "the broker" in problem) == (sent == data)
        bench.wait(10).broadcast(sent, digest=digest_of(data))
    assert "damaged" not in bench.status["problem"]
    assert digest_of(data) in bench.store.blobs


def test_tasks_that_never_get_a_head_do_not_fill_the_disk(tmp_path: Path) -> None:
    """The blobs of a task that is replaced are deleted, except for those that the next one needs."""
    bench = DeviceBench(tmp_path).start().connect()
    shared, only_old = (bench.offer(data) for data in (b"shared", b"old"))
    for name, blobs in (("first", (shared, only_old)), ("second", (shared,))):
        manifest = make_manifest(algorithm=name, backbones=blobs)
        bench.announce(manifest)
        assert all(blob.digest in bench.store.blobs for blob in blobs)
    assert set(bench.store.blobs.digests()) == {shared.digest, digest_of(encode(manifest))}


def test_rounds_and_heads_that_are_replaced_do_not_fill_the_disk(rounds: RoundsBench) -> None:
    """No head is ever in use, and each is replaced before it has arrived: what the newest round needs remains."""
    needed = set(rounds.store.blobs.digests())
    for number in range(3):
        opened, head = rounds.open(number, rate=number), b"head %d" % number
        rounds.begin(opened)
        announced = HeadRef(version=1 + number, head=reference(head, "head"), devices=1, prototypes=1)
        rounds.announce(HeadManifest(task=rounds.task, current=announced))
        rounds.broadcast(head, ranges=((0, 1),))
        assert set(rounds.store.blobs.digests()) == needed | {
            opened.tensors.digest,
            digest_of(encode(opened)),
        }
        partial = (rounds.store.blobs.folder / "partial").iterdir()
        assert [file.name for file in partial] == [digest_of(head).hex()]


def test_a_local_model_is_not_deleted_while_it_is_stored(tmp_path: Path, store: DeviceState) -> None:
    """The worker stores round after round while the agent's thread deletes unused blobs."""
    manifest, opened = make_task(store.blobs), open_round(store.blobs)
    training = RoundTraining(Workspace(make_settings(tmp_path), store, FeatureCache(tmp_path / "features")))
    state = State(mode=Mode.SERVICE, task=TASK, manifest=manifest, round=opened)
    model = initial_model(manifest, opened.tensors, data=None, blobs=store.blobs)
    fields: dict[str, Any] = dict.fromkeys(["prototypes", "labels", "counts"])
    prepared = PreparedSubmission(**fields, classes=(), unusable=(), local_model=model)
    done = threading.Event()

    def delete() -> None:
        while not done.is_set():
            BlobDownloads(store).delete_unused(state)

    deleting = threading.Thread(target=delete)
    deleting.start()
    try:
        for number in range(40):
            model.state["steps"][...] = number
            training.store(TASK, opened, prepared, b"%d" % number)
            assert store.blobs.read(store.get(StoredLocalModel).digest) == pack(model)
    finally:
        done.set()
        deleting.join()


def test_a_device_looks_at_its_images_while_messages_arrive_all_the_time(
    bench: HeadBench, tmp_path: Path
) -> None:
    """Also if each of them is refused: a client that sends some a second does not stop it."""
    image_file(tmp_path / "data/cat/new.png")
    bench.receive(fleet_topic("f", "cast"), b"junk")
    assert bench.store.get(SubmissionReport).classes[0].images == 20
    bench.clock.advance(bench.settings.rescan_s + MAX_TICK_S)
    for _ in range(2):
        bench.receive(fleet_topic("f", "cast"), b"junk")
    assert bench.store.get(SubmissionReport).classes[0].images == 21


def test_a_task_that_another_version_has_stored_comes_from_the_broker(
    tmp_path: Path, store: DeviceState, caplog: pytest.LogCaptureFixture
) -> None:
    """After an upgrade the device starts, and waits for it."""
    caplog.set_level("INFO")
    fields = msgspec.msgpack.decode(encode(make_task(store.blobs)))
    store.set(CurrentTask(store.blobs.put(msgspec.msgpack.encode({**fields, "v": 0}))))
    DeviceBench(tmp_path).start().connect()
    assert "waiting for the fleet's task" in caplog.text


def test_a_wrong_backbone_file_ends_a_single_run_at_every_start(tmp_path: Path) -> None:
    """The task is not stored before the file was checked, so that a corrected option is used."""
    (tmp_path / "wrong.onnx").write_bytes(b"wrong")
    bench = DeviceBench(tmp_path, mode=Mode.ONCE, backbones=(tmp_path / "wrong.onnx",))
    for _ in range(2):
        bench.start()
        with pytest.raises(BackboneMismatch, match="not the task's backbone"):
            bench.announce(make_manifest())
        assert bench.store.get(CurrentTask) == CurrentTask()


def test_a_service_with_another_tasks_backbone_file_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps its task, reports the problem, logs it once, and follows the task once the file is replaced."""
    file = tmp_path / "backbone.onnx"
    file.write_bytes(b"old")
    bench = DeviceBench(tmp_path, backbones=(file,)).start().connect()
    digests = []
    for data in (b"old", b"new"):
        manifest = make_manifest(backbones=(BlobRef(digest=digest_of(data), size_bytes=3, name="tiny"),))
        digests.append(digest_of(encode(manifest)))
        signed = bench.signed(manifest)
        for _ in range(2):
            bench.receive(*signed)
        assert bench.store.get(CurrentTask).digest == digests[0]
    problem = bench.store.get(Problems).texts["task"]
    assert problem.endswith("omit --backbone to download it; waiting for another task")
    assert bench.info.problem == problem[:256]
    assert caplog.text.count("waiting for another task") == 1
    file.write_bytes(b"new")
    bench.receive(*signed)
    assert bench.store.get(CurrentTask).digest == digests[1]
    assert "task" not in bench.store.get(Problems).texts
    assert "waiting for another task" not in bench.info.problem


def test_a_dry_run_without_a_broker_needs_every_blob(tmp_path: Path, store: DeviceState) -> None:
    """A task with rounds whose round is not stored ends in an error, not in endless waiting."""
    store.set(CurrentTask(store.blobs.put(encode(make_task(store.blobs)))))
    with pytest.raises(ConfigError, match="pass --broker"):
        Device(make_settings(tmp_path, mode=Mode.DRY_RUN), store).run()


def test_a_start_ends_all_problems_but_the_last_builds_and_the_last_heads(tmp_path: Path) -> None:
    """Those two are not published: the task that the device will follow may be private."""
    bench = DeviceBench(tmp_path).start()
    old = "of an earlier start"
    bench.store.set(Problems({"upload": old, "task": old}), BuildProblem(old), HeadProblem(old))
    bench.start().connect()
    assert (bench.status["problem"], bench.info.problem) == (old, "")
    assert bench.store.get(Problems).texts == {}
    assert (bench.store.get(BuildProblem).text, bench.store.get(HeadProblem).text) == (old, old)
