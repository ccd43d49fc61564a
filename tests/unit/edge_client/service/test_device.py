"""Device: what it stores, deletes, publishes and refuses."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_client.agent import events
from edge_client.agent.state import Mode
from edge_client.service.device import MAX_TICK_S, Device
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import (
    CurrentTask,
    Heads,
    InstalledHead,
    ManifestProblem,
    StoredLocalModel,
    TaskProblem,
)
from edge_client.submission.prepared_submission import PreparedSubmission
from edge_client.training.local_round import initial_model, pack
from protocol.errors import BackboneMismatch, ConfigError, ProtofleetError, ThreadFailed
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Outgoing, Received
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import BlobRef, DeviceInfo, Presence, PresenceState
from protocol.wire.presence import Duplicate
from protocol.wire.signing import public_key, sign_manifest
from protocol.wire.topics import DeviceChannel, device_topic, fleet_topic
from tests.support.device_factory import make_manifest, make_settings
from tests.support.graphs import tiny_backbone
from tests.support.round_factory import TASK, make_task, open_round, stored
from tests.support.step_graphs import file

OWN_STATE = device_topic("f", "device", "state")


@pytest.fixture
def store(tmp_path: Path) -> DeviceState:
    return DeviceState(tmp_path / "state")


def make_device(folder: Path, store: DeviceState) -> Device:
    device = Device(make_settings(folder), store)
    device._step(events.TaskSeen(TASK, make_task(store.blobs)))
    device._receiver._task = TASK
    device._state = replace(device._state, installed=b"h" * 32, building=True)
    return device


def capture(device: Device) -> list[Outgoing]:
    """Return the list to which everything is added that the device publishes."""
    sent: list[Outgoing] = []
    device._publisher.send = sent.append  # type: ignore[method-assign, assignment]
    return sent


def signed_round(body: bytes, *, key: bytes = b"k" * 32, release: int = 1) -> Received:
    payload = sign_manifest(body, key=key, fleet="f", channel="round", release=release)
    return Received(fleet_topic("f", "round"), payload)


def test_unused_blobs_are_deleted_once_a_head_is_in_use(tmp_path: Path, store: DeviceState) -> None:
    """The blobs of the task and of the head remain."""
    device = make_device(tmp_path, store)
    old, head = map(store.blobs.put, (b"old", b"head"))
    store.set(Heads(InstalledHead(head=head, version=1, backbones=(), classes=())))
    stored = device._downloads.delete_unused(device._state)
    assert old not in store.blobs
    assert {head, digest_of(file("step"))} <= stored


def test_tasks_that_never_get_a_head_do_not_fill_the_disk(tmp_path: Path, store: DeviceState) -> None:
    """The blobs of a task that is replaced are deleted, except for those that the next one needs."""
    device = make_device(tmp_path, store)
    shared, only_old = (stored(store.blobs, data, "backbone") for data in (b"shared", b"old"))
    for name, blobs in (("first", (shared, only_old)), ("second", (shared,))):
        manifest = make_manifest(algorithm=name, backbones=blobs)
        device._take(events.TaskSeen(store.blobs.put(encode(manifest)), manifest))
    assert device._state.stored == set(store.blobs.digests()) == {shared.digest, digest_of(encode(manifest))}


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
            device._downloads.delete_unused(device._state)

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


def test_a_reconnected_aggregator_is_noticed(tmp_path: Path, store: DeviceState) -> None:
    """A live presence counts, a retained one only with a new epoch."""
    device = make_device(tmp_path, store)

    def receive(state: PresenceState, epoch: int, *, retained: bool) -> list[object]:
        payload = encode(Presence(state=state, epoch=epoch))
        return list(device._receiver.receive(fleet_topic("f", "state"), payload, retained=retained))

    started = [events.OutboxSeen(()), events.AggregatorStarted()]
    assert receive("online", 7, retained=True) == started
    assert receive("online", 7, retained=True) == []
    assert receive("offline", 7, retained=False) == []
    assert receive("online", 7, retained=False) == [events.AggregatorReconnected()]
    assert receive("online", 8, retained=False) == started


@pytest.mark.parametrize(("mode", "channels"), [(Mode.SERVICE, ["state", "info"]), (Mode.DRY_RUN, [])])
def test_presence_and_info_are_published_at_every_connection(
    tmp_path: Path, store: DeviceState, mode: Mode, channels: list[DeviceChannel]
) -> None:
    """A dry run publishes neither."""
    device = Device(make_settings(tmp_path, mode=mode), store)
    sent = capture(device)
    for _ in range(2):
        device._handle(Connected(None))
    assert [each.topic for each in sent] == [device_topic("f", "device", name) for name in channels] * 2


@pytest.mark.parametrize("mode", [Mode.SERVICE, Mode.DRY_RUN])
def test_trust_is_stored_before_a_manifest_is_used(
    tmp_path: Path, store: DeviceState, caplog: pytest.LogCaptureFixture, *, mode: Mode
) -> None:
    """A restart refuses an older release; a dry run stores nothing and generates no key."""
    opened = encode(open_round(store.blobs))
    device = Device(replace(make_settings(tmp_path), mode=mode), store)
    device._handle(signed_round(opened, release=5))
    assert device._state.round is not None
    assert caplog.text.count("trusting the first aggregator key received") == 1
    assert (store.folder / "signing.key").exists() == (mode is Mode.SERVICE)
    again = Device(make_settings(tmp_path), store)
    again._handle(signed_round(opened, release=4))
    assert (again._state.round is None) == (mode is Mode.SERVICE)
    assert again._info().refused_messages == ({"replayed": 1} if mode is Mode.SERVICE else {})


def test_a_new_operator_key_replaces_the_stored_one(tmp_path: Path, store: DeviceState) -> None:
    """It is stored: the next start without the option trusts it as well."""
    opened = encode(open_round(store.blobs))
    Device(make_settings(tmp_path), store)._handle(signed_round(opened, release=5))
    with_key = replace(make_settings(tmp_path), aggregator_key=public_key(b"n" * 32))
    for settings in (with_key, make_settings(tmp_path)):
        device, accepted = Device(settings, store), []
        for key, release in ((b"k", 6), (b"n", 1)):
            device._handle(signed_round(opened, key=key * 32, release=release))
            accepted.append(device._state.round is not None)
        assert accepted == [False, True]
        assert device._info().refused_messages == {"signature": 1}


def test_refused_messages_are_logged_once_and_published_ever_more_rarely(
    tmp_path: Path, store: DeviceState, caplog: pytest.LogCaptureFixture
) -> None:
    """Every refused message is counted."""
    device = make_device(tmp_path, store)
    device._handle(signed_round(encode(open_round(store.blobs)), release=9))
    sent = capture(device)
    for number in range(20):
        device._handle(signed_round(b"anything", key=b"m" * 32, release=10 + number))
    infos = [decode(each.payload, DeviceInfo, max_bytes=10**6) for each in sent]
    assert [info.refused_messages["signature"] for info in infos] == [1, 2, 4, 8, 16]
    assert device._info().refused_messages == {"signature": 20}
    assert caplog.text.count("is signed by another aggregator") == 1


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
    """After an upgrade: the device starts, and waits."""
    fields = msgspec.msgpack.decode(encode(make_task(store.blobs)))
    store.set(CurrentTask(store.blobs.put(msgspec.msgpack.encode({**fields, "v": 0}))))
    device = Device(make_settings(tmp_path, broker=BrokerAddress("localhost", 1883)), store)
    device._recall()
    assert device._state.task is None


def test_a_wrong_backbone_file_ends_a_single_run_at_every_start(tmp_path: Path, store: DeviceState) -> None:
    """The task is not stored before the file was checked, so that a corrected option is used."""
    (tmp_path / "wrong.onnx").write_bytes(b"wrong")
    settings = make_settings(tmp_path, mode=Mode.ONCE, backbones=(tmp_path / "wrong.onnx",))
    body = encode(make_task(store.blobs))
    payload = sign_manifest(body, key=b"k" * 32, fleet="f", channel="task", release=1)
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
        payload = sign_manifest(body, key=b"k" * 32, fleet="f", channel="task", release=1 + len(digests))
        for _ in range(2):
            device._handle(Received(fleet_topic("f", "task"), payload))
        assert device._state.task == store.get(CurrentTask).digest == digests[0]
    problem = store.get(TaskProblem).text
    assert problem.endswith("omit --backbone to download it; waiting for another task")
    assert device._info().problem == problem[:256]
    assert caplog.text.count("waiting for another task") == 1
    file.write_bytes(b"new")
    device._handle(Received(fleet_topic("f", "task"), payload))
    assert device._state.task == digests[1]
    assert store.get(TaskProblem).text == device._info().problem == ""


def test_a_dry_run_without_a_broker_needs_every_blob(tmp_path: Path, store: DeviceState) -> None:
    """A task with rounds whose round is not stored ends in an error, not in endless waiting."""
    store.set(CurrentTask(store.blobs.put(encode(make_task(store.blobs)))))
    device = Device(replace(make_settings(tmp_path), mode=Mode.DRY_RUN), store)
    with pytest.raises(ConfigError, match="pass --broker"):
        device.run()


@pytest.mark.parametrize(
    ("presence", "is_another"),
    [
        (lambda _: Presence(state="online", epoch=2**63 - 1), False),
        (lambda own: Presence(state="offline", epoch=own - 1), False),
        (lambda own: Presence(state="online", epoch=own + 1), True),
    ],
    ids=["impossible epoch", "old will", "second program"],
)
def test_a_presence_on_the_own_topic_is_replaced_unless_it_is_newer(
    tmp_path: Path, store: DeviceState, presence: Callable[[int], Presence], *, is_another: bool
) -> None:
    """An impossible epoch, which a broker retains, must not keep the device from starting."""
    device = make_device(tmp_path, store)
    device._state = replace(device._state, connected=True)
    sent, own = capture(device), device._publisher.presence.epoch
    received = Received(device_topic("f", "device", "state"), encode(presence(own)), retained=True)
    if is_another:
        with pytest.raises(ProtofleetError, match="another edge-client is online"):
            device._handle(received)
        return
    device._handle(received)
    assert [decode(each.payload, Presence, max_bytes=1024).epoch for each in sent] == [own]


def test_a_forged_presence_does_not_stop_an_enrolled_device(tmp_path: Path, store: DeviceState) -> None:
    """Only the device's own key counts: the forged one is counted, and replaced."""
    device = Device(make_settings(tmp_path, signing_key=b"s" * 32), store)
    device._state = replace(device._state, connected=True)
    sent, own = capture(device), device._publisher.presence.epoch
    device._handle(Received(OWN_STATE, encode(Presence(state="online", epoch=own + 1))))
    assert [each.topic for each in sent] == [device_topic("f", "device", "info"), OWN_STATE]
    assert device._info().refused_messages == {"signature": 1}


def test_two_keys_under_one_name_do_not_answer_each_other_forever(tmp_path: Path) -> None:
    """Such as an enrollment and its renewal, both running: at most one of them publishes again."""
    keys = (b"s" * 32, b"r" * 32)
    devices = [
        Device(make_settings(tmp_path, signing_key=key), DeviceState(tmp_path / key.decode()[:1]))
        for key in keys
    ]
    sent = [capture(device) for device in devices]
    for device in devices:
        device._handle(Connected(None))
    for _ in range(3):
        seen = [[each for each in some if each.topic == OWN_STATE] for some in sent]
        for device, some, others in zip(devices, sent, reversed(seen), strict=True):
            some.clear()
            for each in others:
                device._handle(Received(each.topic, each.payload))
    assert sum(len([each for each in some if each.topic == OWN_STATE]) for some in sent) == 0


def test_a_copied_device_stays_out_until_it_takes_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Equal clocks, equal epochs: the one that starts later continues, and both report the other."""
    settings = make_settings(tmp_path, signing_key=b"s" * 32)
    states = [DeviceState(tmp_path / name) for name in ("one", "two")]

    def connected(store: DeviceState) -> Device:
        device = Device(settings, store)
        capture(device)
        device._handle(Connected(None, "192.0.2.7"))
        return device

    def said(device: Device, state: PresenceState = "online") -> Received:
        return Received(OWN_STATE, device._publisher.presence.outgoing(state).payload)

    older, newer = (connected(store) for store in states)
    older._handle(said(older))
    newer._handle(said(older))
    newer._handle(said(newer))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"was started later, at .*192.0.2.7.*: this one stays out"):
            older._handle(said(newer))
        with pytest.raises(ConfigError, match="run `edge-client take-over`"):
            Device(settings, states[0])
        newer._handle(said(older, "replaced"))
        # It takes part: what it reports is no problem, and says what to do.
        assert newer._info().problem == ""
        assert "or enroll it under a name of its own; it ran at " in newer._info().warning
        assert caplog.text.count("a copy of this device was started earlier, and stays out") == 1
        assert all("192.0.2.7" in store.get(Duplicate).summary for store in states)
        assert "continues at the next start" in states[0].take_over()
        # The copy that was told continues; the other one stays out in its turn.
        caplog.clear()
        older, newer = newer, connected(states[0])
        newer._handle(said(newer))
        states.reverse()


def test_a_broker_that_withholds_is_noticed(
    tmp_path: Path, store: DeviceState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device builds nothing from an expired task, reports it after a restart too, and goes on with a newer one."""
    body = encode(make_manifest())
    store.blobs.put(tiny_backbone())
    jobs: list[object] = []
    releases = iter(range(1, 100))

    def task(*, issued_s: int) -> Received:
        signed: dict[str, Any] = {
            "issued_s": issued_s,
            "expires_s": issued_s + 1000,
            "release": next(releases),
        }
        payload = sign_manifest(body, key=b"k" * 32, fleet="f", channel="task", **signed)
        return Received(fleet_topic("f", "task"), payload)

    def start(at_s: float) -> Device:
        monkeypatch.setattr(time, "time", lambda: at_s)
        device = Device(make_settings(tmp_path, enrolled_s=500.0), store)
        capture(device)
        monkeypatch.setattr(device._worker, "build", jobs.append)
        if store.get(CurrentTask).digest:
            device._recall()
        return device

    device = start(100_000.0)
    device._handle(task(issued_s=98_000))
    assert device._info().problem.startswith("expired: task; the broker withholds newer ones")
    assert store.get(ManifestProblem).text == device._expiry_problem
    device = start(100_000.0)
    device._next_event()
    assert (len(jobs), device._info().problem[:13]) == (0, "expired: task")
    device._handle(task(issued_s=99_999))
    assert (len(jobs), device._info().problem) == (1, "")
    assert store.get(ManifestProblem).text == ""
    assert caplog.text.count("expired: task") == 2
    # Without a battery-backed clock, the time is at least the date of the last manifest.
    device = start(0.0)
    assert device._receiver.expired() == frozenset()
    later_s = time.monotonic() + 2000
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert device._receiver.expired() == {"task"}


def test_an_enrolled_device_without_a_clock_refuses_manifests_from_before_its_enrollment(
    tmp_path: Path, store: DeviceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that shows a new device an old task, which the aggregator signed."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    device = Device(make_settings(tmp_path, enrolled_s=9000.0), store)
    times: dict[str, Any] = {"release": 5000, "issued_s": 5000, "expires_s": 6000}
    payload = sign_manifest(encode(make_manifest()), key=b"k" * 32, fleet="f", channel="task", **times)
    device._handle(Received(fleet_topic("f", "task"), payload))
    assert device._state.stale_manifests == {"task"}


def test_end_of_a_thread_ends_the_program(tmp_path: Path, store: DeviceState) -> None:
    """With a message; the service manager starts the program again."""
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
