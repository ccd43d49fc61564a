"""Which manifests a device accepts: keys, release numbers and dates."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_client.agent import events
from edge_client.agent.state import Mode
from edge_client.service.device import Device
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import (
    CurrentTask,
    ManifestProblem,
)
from protocol.mqtt.reconnecting_session import Received
from protocol.wire.codec import decode, encode
from protocol.wire.messages import DeviceInfo, Receipt
from protocol.wire.signing import public_key
from protocol.wire.topics import device_topic, fleet_topic
from tests.support.devices.device_factory import info_of, make_manifest, make_settings
from tests.support.devices.round_factory import open_round
from tests.support.graphs.backbones import tiny_backbone
from tests.support.messages.manifests import signed_manifest
from tests.unit.edge_client.service.devices import capture, make_device, signed_round


@pytest.mark.parametrize("mode", [Mode.SERVICE, Mode.DRY_RUN])
def test_trust_is_stored_before_a_manifest_is_used(
    tmp_path: Path, store: DeviceState, caplog: pytest.LogCaptureFixture, *, mode: Mode
) -> None:
    """A restart refuses an older release; a dry run stores nothing and generates no key."""
    opened = encode(open_round(store.blobs))
    device = Device(replace(make_settings(tmp_path), mode=mode), store)
    device._handle(signed_round(opened, release=5))
    assert device._agent.state.round is not None
    assert caplog.text.count("trusting the first aggregator key received") == 1
    assert (store.folder / "signing.key").exists() == (mode is Mode.SERVICE)
    again = Device(make_settings(tmp_path), store)
    again._handle(signed_round(opened, release=4))
    assert (again._agent.state.round is None) == (mode is Mode.SERVICE)
    assert info_of(again).refused_messages == ({"replayed": 1} if mode is Mode.SERVICE else {})


def test_the_outbox_is_read_again_when_the_task_is_signed_again(tmp_path: Path, store: DeviceState) -> None:
    """Receipts are not signed: what a forged one prevents is uploaded then. The same message again changes nothing."""
    store.blobs.put(tiny_backbone())
    device, body = Device(make_settings(tmp_path), store), encode(make_manifest())
    payloads = [
        signed_manifest(body, key=b"k" * 32, fleet="f", channel="task", release=release)
        for release in (5, 5, 6)
    ]
    found = [device._receiver.receive(fleet_topic("f", "task"), each, retained=True) for each in payloads]
    assert [sum(isinstance(event, events.OutboxSeen) for event in each) for each in found] == [1, 0, 1]


def test_a_new_operator_key_replaces_the_stored_one(tmp_path: Path, store: DeviceState) -> None:
    """It is stored: the next start without the option trusts it as well."""
    opened = encode(open_round(store.blobs))
    Device(make_settings(tmp_path), store)._handle(signed_round(opened, release=5))
    with_key = replace(make_settings(tmp_path), aggregator_key=public_key(b"n" * 32))
    for settings in (with_key, make_settings(tmp_path)):
        device, accepted = Device(settings, store), []
        for key, release in ((b"k", 6), (b"n", 1)):
            device._handle(signed_round(opened, key=key * 32, release=release))
            accepted.append(device._agent.state.round is not None)
        assert accepted == [False, True]
        assert info_of(device).refused_messages == {"signature": 1}


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
    assert info_of(device).refused_messages == {"signature": 20}
    assert caplog.text.count("is signed by another aggregator") == 1


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
        payload = signed_manifest(body, key=b"k" * 32, fleet="f", channel="task", **signed)
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
    assert info_of(device).problem.startswith("expired: task; the broker withholds newer ones")
    assert store.get(ManifestProblem).text == info_of(device).problem
    device = start(100_000.0)
    device._handle(device._next_event())
    assert (len(jobs), info_of(device).problem[:13]) == (0, "expired: task")
    device._handle(task(issued_s=99_999))
    assert (len(jobs), info_of(device).problem) == (1, "")
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
    payload = signed_manifest(encode(make_manifest()), key=b"k" * 32, fleet="f", channel="task", **times)
    device._handle(Received(fleet_topic("f", "task"), payload))
    assert device._agent.state.stale_manifests == {"task"}


def test_a_retained_receipt_is_ignored(tmp_path: Path, store: DeviceState) -> None:
    """A client that has left could otherwise end the program at every start."""
    device = Device(make_settings(tmp_path), store)
    forged = Receipt(digest=b"d" * 32, status="refused", reason="revoked")
    for channel in ("ack", "blk"):
        device._handle(Received(device_topic("f", "device", channel), encode(forged), retained=True))
    assert device._receiver.receive(device_topic("f", "device", "ack"), encode(forged), retained=False) == (
        forged,
    )
    assert info_of(device).refused_messages == {"malformed": 2}
