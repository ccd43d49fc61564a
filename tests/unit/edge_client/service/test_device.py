"""The device program between its two threads: what the one deletes is nothing that the other still needs."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_client.agent import events
from edge_client.agent.state import Mode
from edge_client.config import LocalSettings, Settings
from edge_client.service.device import Device
from edge_client.service.worker import Crashed, Worker
from edge_client.storage.device_state import DeviceState
from edge_client.storage.facts import CurrentTask, Heads, InstalledHead, StoredLocalModel, SubmissionReport
from edge_client.submission.builder import FoundImages
from edge_client.training.local_round import initial_model, pack
from protocol.errors import ConfigError, ProtofleetError, StateError
from protocol.mqtt.session import Outgoing, Received
from protocol.wire.codec import decode, encode
from protocol.wire.messages import DeviceInfo, HeadRef, Presence, PresenceState, Receipt
from protocol.wire.signing import public_key, sign_manifest
from protocol.wire.topics import device_topic, fleet_topic
from tests.support.round_factory import TASK, look_at, make_task, open_round, take_images


def make_settings(folder: Path) -> Settings:
    """A service without a broker."""
    local = LocalSettings(device_id="device", data=folder / "data", holdout=0.0, batch_size=4, workers=1)
    return Settings(
        broker=None, fleet="f", local=local, mode=Mode.SERVICE, provider="cpu", threads=1, backbones=(),
        rescan_s=30.0,
    )  # fmt: skip


@pytest.fixture
def kept(tmp_path: Path) -> DeviceState:
    """A device's state directory."""
    return DeviceState(tmp_path / "state")


def make_device(folder: Path, kept: DeviceState) -> Device:
    """A device that has a head in use."""
    device = Device(make_settings(folder), kept)
    manifest = make_task(kept.blobs)
    device._state = replace(device._state, task=TASK, manifest=manifest, installed=b"h" * 32)
    return device


def test_the_blobs_of_the_past_are_deleted(tmp_path: Path, kept: DeviceState) -> None:
    """Once a head is in use: what the task is worked with stays, and what the head needs."""
    device = make_device(tmp_path, kept)
    old, head = map(kept.blobs.put, (b"old", b"head"))
    kept.set(Heads(InstalledHead(head=head, version=1, backbones=(), classes=())))
    manifest = device._state.manifest
    device._tidy()
    assert old not in kept.blobs
    assert head in kept.blobs
    assert manifest is not None
    assert manifest.program is not None
    assert manifest.program.step.digest in kept.blobs


def test_what_is_being_kept_is_not_tidied_away(tmp_path: Path, kept: DeviceState) -> None:
    """While blobs of the past are deleted, the work's thread keeps a round: what it has taught is there afterwards."""
    device = make_device(tmp_path, kept)
    manifest, opened = make_task(kept.blobs), open_round(kept.blobs)
    local_model = initial_model(manifest, opened.tensors, data=None, blobs=kept.blobs)
    done = threading.Event()

    def tidy() -> None:
        while not done.is_set():
            device._tidy()

    tidying = threading.Thread(target=tidy)
    tidying.start()
    try:
        for number in range(40):
            local_model.state["steps"][...] = number
            device._worker._rounds.keep(
                TASK, opened, payload=b"%d" % number, local_model=local_model, report=SubmissionReport()
            )
            stored = kept.get(StoredLocalModel).digest
            assert kept.blobs.read(stored) == pack(local_model)
    finally:
        done.set()
        tidying.join()


class _Overtaken(Worker):
    """A worker to whom another round may come while it looks for images."""

    comes: int

    def _find(self, *_: object) -> FoundImages:
        look_at(self._cache, take_images())
        self.round = self.comes
        return FoundImages(tuple(take_images()), ())


def test_work_that_is_overtaken_may_find_its_blobs_gone(tmp_path: Path, kept: DeviceState) -> None:
    """A round that closes takes its tensors with it: work for it ends without a word, and the program goes on."""
    said: list[events.Event | Crashed] = []
    manifest, opened = make_task(kept.blobs), open_round(kept.blobs)
    kept.blobs.path(opened.tensors.digest).unlink()
    worker = _Overtaken(make_settings(tmp_path), kept, emit=said.append, show=None)
    worker.focus, worker.round, worker.comes = TASK, 0, 1
    worker._build(events.BuildSubmission(TASK, manifest, opened))
    assert said == []
    worker.round = worker.comes = 0
    with pytest.raises(StateError):
        worker._build(events.BuildSubmission(TASK, manifest, opened))


def test_of_several_heads_the_newest_is_taken(tmp_path: Path, kept: DeviceState) -> None:
    """An older one that still waits is passed over: what it binds may be gone."""
    said: list[events.Event | Crashed] = []
    manifest = make_task(kept.blobs)
    assert manifest.program is not None
    worker = Worker(make_settings(tmp_path), kept, emit=said.append, show=None)
    worker.focus = TASK
    gone, here = (
        open_round(kept.blobs, tensors={"rate": np.array(rate, np.float32)}).tensors for rate in (0.1, 0.2)
    )
    kept.blobs.path(gone.digest).unlink()
    for version, tensors in enumerate((gone, here), start=1):
        head = HeadRef(version=version, head=manifest.program.head, devices=1, prototypes=1, tensors=tensors)
        worker.install(events.InstallHead(TASK, manifest, head))
    while not worker._jobs.empty():
        job = worker._jobs.get()
        assert job is not None
        job()
    (installed,) = said
    assert isinstance(installed, events.HeadInstalled)
    assert (installed.head, installed.reason) == (here.digest, "")
    assert installed.report is not None
    assert installed.report in kept.outbox.items()


def test_an_aggregator_that_connects_again_is_noticed(tmp_path: Path, kept: DeviceState) -> None:
    """What the broker has kept of it says nothing new; what it says at this moment does."""
    device = make_device(tmp_path, kept)

    def heard(state: PresenceState, epoch: int, *, retained: bool) -> list[events.Event]:
        payload = encode(Presence(state=state, epoch=epoch))
        return list(device._translate(fleet_topic("f", "state"), payload, retained=retained))

    assert heard("online", 7, retained=True) == [events.OutboxSeen(()), events.AggregatorStarted()]
    assert heard("online", 7, retained=True) == []
    assert heard("offline", 7, retained=False) == []
    assert heard("online", 7, retained=False) == [events.AggregatorBack()]
    assert heard("online", 8, retained=False) == [events.OutboxSeen(()), events.AggregatorStarted()]


def test_what_was_refused_is_uploaded_again_after_the_next_start(tmp_path: Path, kept: DeviceState) -> None:
    """Of the aggregator: it may take larger submissions by now."""
    device = make_device(tmp_path, kept)
    device._state = replace(device._state, working=True)
    item = kept.outbox.keep("submission", b"large", task=TASK, about="x")
    device._step(events.OutboxSeen(kept.outbox.items()))
    device._step(events.ReceiptSeen(Receipt(digest=item.digest, status="refused", reason="oversized")))
    assert not device._state.uploads
    payload = encode(Presence(state="online", epoch=7))
    device._handle(Received(fleet_topic("f", "state"), payload))
    assert [upload.item for upload in device._state.uploads] == [item]


def _said(body: bytes, *, key: bytes = b"k" * 32, release: int = 1) -> Received:
    """What an aggregator has said of a round."""
    payload = sign_manifest(body, key=key, fleet="f", channel="round", release=release)
    return Received(fleet_topic("f", "round"), payload)


@pytest.mark.parametrize("mode", [Mode.SERVICE, Mode.DRY_RUN])
def test_what_is_believed_is_kept_before_it_is_acted_upon(
    tmp_path: Path, kept: DeviceState, caplog: pytest.LogCaptureFixture, *, mode: Mode
) -> None:
    """And is not forgotten at the next start; a dry run keeps nothing, and makes no key."""
    opened = encode(open_round(kept.blobs))
    device = Device(replace(make_settings(tmp_path), mode=mode), kept)
    device._handle(_said(opened, release=5))
    assert device._state.round is not None
    assert caplog.text.count("taking the first aggregator that was heard") == 1
    assert (kept.folder / "signing.key").exists() == (mode is Mode.SERVICE)
    again = Device(make_settings(tmp_path), kept)
    again._handle(_said(opened, release=4))
    assert (again._state.round is None) == (mode is Mode.SERVICE)
    assert again._info().refused_messages == ({"replayed": 1} if mode is Mode.SERVICE else {})


def test_a_device_that_is_given_another_key_believes_that_one(tmp_path: Path, kept: DeviceState) -> None:
    """From the next start on, whatever was heard before; also a device that is not given it again."""
    opened = encode(open_round(kept.blobs))
    Device(make_settings(tmp_path), kept)._handle(_said(opened, release=5))
    given = replace(make_settings(tmp_path), aggregator_key=public_key(b"n" * 32))
    for settings in (given, make_settings(tmp_path)):
        device, believed = Device(settings, kept), []
        for key, release in ((b"k", 6), (b"n", 1)):
            device._handle(_said(opened, key=key * 32, release=release))
            believed.append(device._state.round is not None)
        assert believed == [False, True]
        assert device._info().refused_messages == {"signature": 1}


def test_a_kind_of_what_is_not_believed_is_told_once(
    tmp_path: Path, kept: DeviceState, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it comes, it is counted, and one line is logged; the operator hears of it ever more rarely."""
    device = make_device(tmp_path, kept)
    device._handle(_said(encode(open_round(kept.blobs)), release=9))
    sent: list[int] = []
    device._send_outgoing = lambda outgoing: sent.append(  # type: ignore[method-assign]
        decode(outgoing.payload, DeviceInfo, max_bytes=10**6).refused_messages["signature"]
    )
    for number in range(20):
        device._handle(_said(b"anything", key=b"m" * 32, release=10 + number))
    assert device._info().refused_messages == {"signature": 20}
    assert caplog.text.count("is signed by another aggregator") == 1
    assert sent == [1, 2, 4, 8, 16]


def test_a_dry_run_without_a_broker_needs_all_of_a_task(tmp_path: Path, kept: DeviceState) -> None:
    """A task with rounds that was never seen with its round is one line, and no waiting for ever."""
    manifest = make_task(kept.blobs)
    kept.set(CurrentTask(kept.blobs.put(encode(manifest))))
    device = Device(replace(make_settings(tmp_path), mode=Mode.DRY_RUN), kept)
    with pytest.raises(ConfigError, match="say where the broker is with --broker"):
        device.run()


def test_a_presence_that_nobody_can_have_left_ends_nothing(tmp_path: Path, kept: DeviceState) -> None:
    """A broker keeps what was said: a device that gave way to it would never start again."""
    device = make_device(tmp_path, kept)
    device._state = replace(device._state, connected=True)
    topic = device_topic("f", device._id, "state")
    sent: list[Outgoing] = []
    with pytest.MonkeyPatch.context() as heard:
        heard.setattr(device, "_send_outgoing", sent.append)
        device._handle(Received(topic, encode(Presence(state="online", epoch=2**63 - 1)), retained=True))
    assert [decode(said.payload, Presence, max_bytes=1024).epoch for said in sent] == [device._epoch]
    with pytest.raises(ProtofleetError, match="another edge-client has come online"):
        device._handle(Received(topic, encode(Presence(state="online", epoch=device._epoch + 1))))
