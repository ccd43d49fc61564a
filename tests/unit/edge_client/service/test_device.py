"""Device: what it stores and deletes, and with what it waits or ends."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_client.agent import downloads, events
from edge_client.agent.state import Mode
from edge_client.cli.status import device_status
from edge_client.service.device import MAX_TICK_S, Device
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import (
    CurrentTask,
    Heads,
    InstalledHead,
    StoredLocalModel,
    TaskProblem,
)
from edge_client.submission.prepared_submission import PreparedSubmission
from edge_client.training.local_round import initial_model, pack
from protocol.errors import BackboneMismatch, ConfigError, ThreadFailed
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Received
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef, Frame, HeadManifest, HeadRef, RoundManifest
from protocol.wire.topics import fleet_topic
from protocol.wire.transfer import frames_of
from tests.support.devices.device_factory import info_of, make_manifest, make_settings
from tests.support.devices.round_factory import BACKBONE, TASK, make_task, open_round, stored
from tests.support.graphs.step_graphs import file
from tests.support.messages.manifests import signed_manifest
from tests.support.simulation.fleet import reference
from tests.unit.edge_client.service.devices import capture, make_device, signed_round


def test_unused_blobs_are_deleted_once_a_head_is_in_use(tmp_path: Path, store: DeviceState) -> None:
    """The blobs of the task and of the head remain."""
    device = make_device(tmp_path, store)
    old, head = map(store.blobs.put, (b"old", b"head"))
    store.set(Heads(InstalledHead(head=head, version=1, backbones=(), classes=())))
    stored = device._agent._downloads.delete_unused(device._agent.state)
    assert old not in store.blobs
    assert {head, digest_of(file("step"))} <= stored


@pytest.mark.parametrize("max_epsilon", [None, 1.0])
def test_a_blob_that_arrives_damaged_is_reported(
    tmp_path: Path, store: DeviceState, max_epsilon: float | None
) -> None:
    """Other frames than the aggregator's: status and info name the blob and the broker, until the true ones arrive."""
    device, data = Device(make_settings(tmp_path, max_epsilon=max_epsilon), store), b"backbone"
    device._handle(Connected(None))
    device._take(events.TaskSeen(TASK, make_manifest(backbones=(reference(data, "the backbone"),))))
    for sent in (b"attacker", b"attacker", b"attacker", data):
        (frame,) = frames_of(sent, digest=digest_of(data))
        problem = device_status(store)["problem"]
        assert info_of(device).problem == problem
        assert ("the backbone arrives damaged" in problem and "the broker" in problem) == (sent == data)
        state, _ = downloads.request_due(device._agent.state, time.monotonic() + 10)
        device._agent.state = state
        device._handle(frame)
        device._handle(device._inbox.get(timeout=1))
    assert device_status(store)["problem"] == info_of(device).problem == ""


def test_tasks_that_never_get_a_head_do_not_fill_the_disk(tmp_path: Path, store: DeviceState) -> None:
    """The blobs of a task that is replaced are deleted, except for those that the next one needs."""
    device = make_device(tmp_path, store)
    shared, only_old = (stored(store.blobs, data, "backbone") for data in (b"shared", b"old"))
    for name, blobs in (("first", (shared, only_old)), ("second", (shared,))):
        manifest = make_manifest(algorithm=name, backbones=blobs)
        device._take(events.TaskSeen(store.blobs.put(encode(manifest)), manifest))
    assert (
        device._agent.state.stored
        == set(store.blobs.digests())
        == {shared.digest, digest_of(encode(manifest))}
    )


def test_rounds_and_heads_that_are_replaced_do_not_fill_the_disk(tmp_path: Path, store: DeviceState) -> None:
    """No head is ever in use, and each is replaced before it has arrived: what the newest round needs remains."""
    device = make_device(tmp_path, store)
    blobs = store.blobs
    task = events.TaskSeen(blobs.put(b"the task"), make_task(blobs))
    blobs.path(BACKBONE).write_bytes(b"backbone")
    device._take(task)
    needed = set(blobs.digests())
    device._handle(Connected(None))
    for number in range(3):
        data, head = b"tensors %d" % number, reference(b"head %d" % number, "head")
        opened = RoundManifest(
            task=task.digest, number=number, rounds=9, epochs=1, tensors=reference(data, "tensors")
        )
        device._handle(signed_round(encode(opened), release=1 + number))
        for frame in frames_of(data, digest=opened.tensors.digest):
            device._handle(frame)
        device._handle(device._inbox.get(timeout=1))
        announced = HeadRef(version=1 + number, head=head, devices=1, prototypes=1)
        device._take(HeadManifest(task=task.digest, current=announced))
        device._handle(Frame(v=1, digest=head.digest, size_bytes=head.size_bytes, offset=0, data=b"h"))
        assert set(blobs.digests()) == needed | {opened.tensors.digest, digest_of(encode(opened))}
        assert [file.name for file in (blobs.folder / "partial").iterdir()] == [head.digest.hex()]


def test_a_local_model_is_not_deleted_while_it_is_stored(tmp_path: Path, store: DeviceState) -> None:
    """The worker stores round after round while the agent's thread deletes unused blobs."""
    device = make_device(tmp_path, store)
    opened = open_round(store.blobs)
    model = initial_model(make_task(store.blobs), opened.tensors, data=None, blobs=store.blobs)
    fields: dict[str, Any] = dict.fromkeys(["prototypes", "labels", "counts"])
    prepared = PreparedSubmission(**fields, classes=(), unusable=(), local_model=model)
    done = threading.Event()

    def delete() -> None:
        while not done.is_set():
            device._agent._downloads.delete_unused(device._agent.state)

    deleting = threading.Thread(target=delete)
    deleting.start()
    try:
        for number in range(40):
            model.state["steps"][...] = number
            device._worker._builder._rounds.store(TASK, opened, prepared, b"%d" % number)
            assert store.blobs.read(store.get(StoredLocalModel).digest) == pack(model)
    finally:
        done.set()
        deleting.join()


def test_a_device_looks_at_its_images_while_messages_arrive_all_the_time(
    tmp_path: Path, store: DeviceState
) -> None:
    """Also if each of them is refused: a client that sends some a second does not stop it."""
    device = Device(make_settings(tmp_path), store)
    for _ in range(3):
        device._inbox.put(Received(fleet_topic("f", "cast"), b"junk"))
    assert isinstance(device._next_event(), Received)
    device._ticked_s = time.monotonic() - MAX_TICK_S
    assert device._next_event() == events.Ticked()
    assert isinstance(device._next_event(), Received)


def test_a_task_that_another_version_has_stored_comes_from_the_broker(
    tmp_path: Path, store: DeviceState
) -> None:
    """After an upgrade the device starts, and waits for it."""
    fields = msgspec.msgpack.decode(encode(make_task(store.blobs)))
    store.set(CurrentTask(store.blobs.put(msgspec.msgpack.encode({**fields, "v": 0}))))
    device = Device(make_settings(tmp_path, broker=BrokerAddress("localhost", 1883)), store)
    device._recall()
    assert device._agent.state.task is None


def test_a_wrong_backbone_file_ends_a_single_run_at_every_start(tmp_path: Path, store: DeviceState) -> None:
    """The task is not stored before the file was checked, so that a corrected option is used."""
    (tmp_path / "wrong.onnx").write_bytes(b"wrong")
    settings = make_settings(tmp_path, mode=Mode.ONCE, backbones=(tmp_path / "wrong.onnx",))
    body = encode(make_task(store.blobs))
    payload = signed_manifest(body, key=b"k" * 32, fleet="f", channel="task", release=1)
    for _ in range(2):
        device = Device(settings, store)
        assert device._receiver.recall() == ()
        with pytest.raises(BackboneMismatch, match="not the task's backbone"):
            device._handle(Received(fleet_topic("f", "task"), payload))
        assert store.get(CurrentTask) == CurrentTask()


def test_a_service_with_another_tasks_backbone_file_waits(
    tmp_path: Path, store: DeviceState, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps its task, reports the problem, logs it once, and follows the task once the file is replaced."""
    file = tmp_path / "backbone.onnx"
    file.write_bytes(b"old")
    device = Device(make_settings(tmp_path, backbones=(file,)), store)
    digests = []
    for data in (b"old", b"new"):
        reference = BlobRef(digest=digest_of(data), size_bytes=3, name="tiny")
        body = encode(make_manifest(backbones=(reference,)))
        digests.append(digest_of(body))
        payload = signed_manifest(body, key=b"k" * 32, fleet="f", channel="task", release=1 + len(digests))
        for _ in range(2):
            device._handle(Received(fleet_topic("f", "task"), payload))
        assert device._agent.state.task == store.get(CurrentTask).digest == digests[0]
    problem = store.get(TaskProblem).text
    assert problem.endswith("omit --backbone to download it; waiting for another task")
    assert info_of(device).problem == problem[:256]
    assert caplog.text.count("waiting for another task") == 1
    file.write_bytes(b"new")
    device._handle(Received(fleet_topic("f", "task"), payload))
    assert device._agent.state.task == digests[1]
    assert store.get(TaskProblem).text == info_of(device).problem == ""


def test_a_dry_run_without_a_broker_needs_every_blob(tmp_path: Path, store: DeviceState) -> None:
    """A task with rounds whose round is not stored ends in an error, not in endless waiting."""
    store.set(CurrentTask(store.blobs.put(encode(make_task(store.blobs)))))
    device = Device(replace(make_settings(tmp_path), mode=Mode.DRY_RUN), store)
    with pytest.raises(ConfigError, match="pass --broker"):
        device.run()


def test_end_of_a_thread_ends_the_program(tmp_path: Path, store: DeviceState) -> None:
    """It ends with a message, and the service manager starts it again."""
    device = Device(make_settings(tmp_path), store)
    with pytest.raises(ThreadFailed, match="mqtt-session"):
        device._handle(ThreadFailed("the thread mqtt-session has ended"))


def test_device_that_waits_names_its_fleet(
    tmp_path: Path, store: DeviceState, caplog: pytest.LogCaptureFixture
) -> None:
    """An incorrect --fleet would otherwise not be noticed."""
    caplog.set_level("INFO")
    device = Device(make_settings(tmp_path, fleet="orchrad"), store)
    capture(device)
    device._handle(Connected(None))
    assert "waiting for the fleet's task fleet=orchrad" in caplog.text
