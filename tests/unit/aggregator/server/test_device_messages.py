"""A running aggregator on real brokers: announcements, accepted and refused messages, blobs."""

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from aggregator.server.device_messages import bounded_info
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire import topics
from protocol.wire.codec import decode, digest_of, encode, to_tensor, to_unsigned
from protocol.wire.messages import BlobRequest, Frame, Presence, TaskManifest
from protocol.wire.topics import device_topic, fleet_topic
from tests.support.fleets.aggregator_process import (
    FLEET,
    MAX_BYTES,
    PATIENT,
    Daemon,
    Device,
    aggregator,
    presence_of,
    signed,
    spoil,
    write_task,
)
from tests.support.messages.submissions import MANIFEST, device_info, evaluation, submission
from tests.support.network.brokers import free_address, mosquitto, needs_mosquitto


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerAddress, Daemon]]:
    """An aggregator with its embedded broker, shared by tests that each are another device."""
    address = free_address()
    task = write_task(tmp_path_factory.mktemp("embedded"), PATIENT + "\nmax_submission_mb = 0.1")
    with aggregator(task, address, "--embedded-broker") as daemon:
        yield address, daemon


def test_task_is_announced(broker: BrokerAddress, tmp_path: Path) -> None:
    with aggregator(write_task(tmp_path, "[client]\nalpha = 0.5"), broker), Device(broker) as device:
        assert device.aggregator_is("online").epoch > 0
        manifest = decode(device.task(), TaskManifest, max_bytes=MAX_BYTES)
        assert (manifest.fleet, manifest.classes, manifest.alpha) == (FLEET, ("cat", "dog", "fox"), 0.5)
        (backbone,) = manifest.backbones
        assert backbone.name == "tiny.onnx"
        assert device.fetch(backbone) == (tmp_path / "tiny.onnx").read_bytes()


def test_unknown_retained_manifests_are_cleared(broker: BrokerAddress, tmp_path: Path) -> None:
    """Another aggregator's head and round on the broker do not reach devices that connect later."""
    topics = {fleet_topic(FLEET, "head"), fleet_topic(FLEET, "round")}
    with Device(broker, "early") as early:
        for topic in topics:
            early.say(topic, b"of another aggregator", retain=True)
        with aggregator(write_task(tmp_path), broker):
            early.aggregator_is("online")
            with Device(broker, "late") as late:
                late.aggregator_is("online")
                late.task()
                assert not topics & late.topics()


def test_retained_presence_of_an_impossible_epoch_is_replaced(broker: BrokerAddress, tmp_path: Path) -> None:
    """The aggregator starts all the same, counts it as refused, and publishes its own in its place."""
    with Device(broker, "early") as early:
        left = encode(Presence(state="online", epoch=2**63 - 1))
        early.say(fleet_topic(FLEET, "state"), left, retain=True)
        with aggregator(write_task(tmp_path), broker) as daemon:
            daemon.until(lambda summary: any(row["reason"] == "implausible" for row in summary["refusals"]))
            early.wait(fleet_topic(FLEET, "state"), Presence, when=lambda own: own.epoch < 2**63 - 1)
            with Device(broker, "late") as late:
                assert late.aggregator_is("online").epoch < 2**63 - 1


def test_presence_follows_the_process(broker: BrokerAddress, tmp_path: Path) -> None:
    """Online, stopped after SIGTERM, offline after it was killed; a new start has a greater epoch."""
    task = write_task(tmp_path)
    with Device(broker) as device:
        with aggregator(task, broker) as daemon:
            first = device.aggregator_is("online")
            assert daemon.stop() == 0
            assert device.aggregator_is("stopped").epoch == first.epoch
        with aggregator(task, broker) as daemon:
            second = device.aggregator_is("online")
            assert second.epoch > first.epoch
            daemon.stop(signal.SIGKILL)
            assert device.aggregator_is("offline").epoch == second.epoch


def _hostile(task: bytes) -> list[tuple[str, bytes, str]]:
    good = submission(task=task)
    unseen = digest_of(b"unseen")
    nan = {"range": to_tensor(np.full((2, 16), np.nan, dtype=np.float16))}
    big = 200_000

    def frame(payload: bytes) -> bytes:
        whole = Frame(v=1, digest=digest_of(payload), size_bytes=len(payload), offset=0, data=payload)
        return signed(whole, "mallory")

    def piece(*, size_bytes: int, offset: int = 0, data: bytes = b"x", v: int = 1) -> bytes:
        return signed(Frame(v=v, digest=unseen, size_bytes=size_bytes, offset=offset, data=data), "mallory")

    def spoilt(**fields: object) -> bytes:
        return frame(encode(msgspec.structs.replace(good, **fields)))

    return [
        *(
            (channel, payload, "malformed")
            for channel in ("info", "get", "up/0")
            for payload in (b"\x00", b"\xff" * 99)
        ),
        ("state", b"\xc1", "malformed"),
        ("state", b"\x91" * 1000, "malformed"),
        ("state", spoil(Presence(state="online", epoch=1), epoch=-1), "malformed"),
        ("state", spoil(Presence(state="online", epoch=1), v=9), "version"),
        ("info", b"\x00" * 200_000, "malformed"),
        ("get", encode(Presence(state="online", epoch=1)), "malformed"),
        ("get", spoil(BlobRequest(digest=unseen, offset=0, length=1), length=2**40), "malformed"),
        ("get", encode(BlobRequest(digest=unseen, offset=0, length=1)), "unknown_blob"),
        ("up/0", piece(size_bytes=2**31), "oversized"),
        ("up/0", piece(size_bytes=big), "oversized"),
        ("up/0", piece(size_bytes=1, v=2), "version"),
        ("up/0", piece(size_bytes=1), "digest"),
        ("up/0", piece(size_bytes=2, offset=1, data=b"xy"), "digest"),
        ("up/0", piece(size_bytes=2, data=b""), "digest"),
        ("up/0", encode(Frame(v=1, digest=unseen, size_bytes=1, offset=0, data=b"x")), "signature"),
        ("up/0", frame(b"noise"), "malformed"),
        ("up/0", frame(encode(Presence(state="online", epoch=1))), "malformed"),
        ("up/0", frame(encode(good)[:-1]), "malformed"),
        ("up/0", spoilt(v=2), "version"),
        ("up/0", spoilt(task=bytes(32)), "unknown_task"),
        ("up/0", spoilt(tensors=nan), "not_finite"),
        ("up/0", spoilt(prototypes=to_tensor(np.zeros((4, 17), np.uint8))), "shape"),
        ("up/0", spoilt(labels=to_tensor(np.zeros(4, np.float16))), "dtype"),
        ("up/0", spoilt(labels=to_unsigned(np.array([0, 1, 2, 3]))), "unknown_class"),
        ("up/0", spoilt(counts=to_unsigned(np.array([5, 5, 5, 1]))), "malformed"),
        ("up/0", frame(encode(evaluation(task=task))), "unknown_head"),
        ("up/0", frame(encode(evaluation(task=bytes(32)))), "unknown_task"),
    ]


def _refused(summary: dict[str, Any], device: str) -> dict[str, int]:
    return {row["reason"]: row["count"] for row in summary["refusals"] if row["device"] == device}


def test_hostile_messages_are_refused_and_counted(embedded: tuple[BrokerAddress, Daemon]) -> None:
    """Each reason is counted, and logged once; a valid submission is accepted afterwards."""
    broker, daemon = embedded
    with Device(broker, "mallory") as device:
        task = digest_of(device.task())
        hostile = _hostile(task)
        expected = Counter(reason for _, _, reason in hostile * 2)
        for channel, payload, _ in hostile * 2:
            device.say(f"pf/1/{FLEET}/d/mallory/{channel}", payload)
        daemon.until(lambda summary: sum(_refused(summary, "mallory").values()) >= len(hostile) * 2)
        assert _refused(daemon.status(), "mallory") == expected
        for reason in expected:
            assert daemon.log().count(f"message refused device=mallory reason={reason} ") == 1
        assert "Traceback" not in daemon.log()
        assert device.upload(submission(task=task)).status == "received"


def test_a_query_for_a_refused_submission_causes_no_upload(embedded: tuple[BrokerAddress, Daemon]) -> None:
    """It is refused again for the same reason; another submission is accepted."""
    broker, _ = embedded
    with Device(broker, "wrong") as device:
        task, payload = digest_of(device.task()), b"no message" * 10
        answers = [
            device.receipt(device.send_payload(payload, ranges=ranges)) for ranges in (None, ((90, 100),))
        ]
        assert [(each.status, each.reason) for each in answers] == [("refused", "malformed")] * 2
        assert answers[0].detail == answers[1].detail
        assert device.upload(submission(task=task)).status == "received"


def test_devices_with_different_numbers_of_shards(
    embedded: tuple[BrokerAddress, Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an older version, with 8, beside one with 64; after its upgrade its upload continues on its new shard."""
    broker, daemon = embedded
    with Device(broker, "older") as older, Device(broker, "newer") as newer:
        task = digest_of(older.task())
        first, second = encode(submission(task=task)), encode(submission(task=task, sequence=2))
        last = ((len(second) - 10, len(second)),)
        with monkeypatch.context() as version:
            version.setattr(topics, "SHARDS", 8)
            before = device_topic(FLEET, "older", "up")
            assert older.receipt(older.send_payload(first)).status == "received"
            answer = older.receipt(older.send_payload(second, ranges=last))
            assert answer.missing == ((0, len(second) - 10),)
        assert newer.upload(submission(task=task)).status == "received"
        assert device_topic(FLEET, "older", "up") != before
        assert older.receipt(older.send_payload(second, ranges=answer.missing + last)).status == "received"
        devices = {row["device"]: row for row in daemon.status()["devices"]}
        assert not _refused(daemon.status(), "older")
        assert devices.keys() >= {"older", "newer"}


def test_presence_and_info_are_in_the_status(embedded: tuple[BrokerAddress, Daemon]) -> None:
    """A cleared topic is no message; a problem is logged once and shown until it is solved."""
    broker, daemon = embedded
    with Device(broker, "shown") as device:
        info = device_info(epoch=7, runtime="ONNX Runtime", images={"cat": 3, "dog": 4}, head_version=7)
        for _ in range(2):
            said = {"problem": "no room for graphs", "warning": "a copy stays out"}
            device.send("info", encode(msgspec.structs.replace(info, **said)))
        daemon.until(
            lambda summary: any(row["problem"] == "no room for graphs" for row in summary["devices"])
        )
        assert daemon.log().count('device cannot take part device=shown reason="no room for graphs"') == 1
        assert daemon.log().count('device warns its operator device=shown warning="a copy stays out"') == 1
        device.send("info", encode(info))
        device.send("state", presence_of("shown"))
        device.send("state", b"")
        device.send("info", b"")
        device.upload(submission(task=bytes(32)))  # answered in order, so all before it was seen
        (row,) = [row for row in daemon.status()["devices"] if row["device"] == "shown"]
        assert (row["state"], row["images"], row["runtime"]) == ("online", 7, "ONNX Runtime")
        assert (row["problem"], row["warning"], row["head"]) == ("", "", 7)
        assert _refused(daemon.status(), "shown") == {"unknown_task": 1}


def test_only_the_device_changes_its_presence(embedded: tuple[BrokerAddress, Daemon]) -> None:
    """The last presence with its key counts, whatever its epoch; before its first upload, the last with any key."""
    broker, daemon = embedded

    def is_shown(state: str) -> None:
        daemon.until(
            lambda summary: ("victim", state) in {(row["device"], row["state"]) for row in summary["devices"]}
        )

    with Device(broker, "victim") as device:
        device.send("state", presence_of("victim", "offline", signer="mallory", epoch=2**63 - 1))
        is_shown("offline")
        device.send("state", presence_of("victim"))
        is_shown("online")
        device.upload(submission(task=bytes(32)))
        for forged in (
            encode(Presence(state="offline", epoch=2**63 - 1)),
            presence_of("victim", "offline", signer="mallory", epoch=2**63 - 1),
            presence_of("victim", "offline", epoch=2)[:-1] + b"\0",
        ):
            device.send("state", forged)
        daemon.until(lambda summary: _refused(summary, "victim").get("signature") == 3)
        is_shown("online")
        device.send("state", presence_of("victim", "stopped", epoch=0))
        is_shown("stopped")


@needs_mosquitto
def test_frames_fit_the_brokers_packet_size(address: BrokerAddress, tmp_path: Path) -> None:
    options = "allow_anonymous true\nmax_packet_size 1000"
    with (
        mosquitto(address, tmp_path, options=options),
        aggregator(write_task(tmp_path), address),
        Device(address) as device,
    ):
        (backbone,) = decode(device.task(), TaskManifest, max_bytes=MAX_BYTES).backbones
        assert backbone.size_bytes > 1000
        assert digest_of(device.fetch(backbone)) == backbone.digest


def test_reported_info_is_reduced_to_what_is_known() -> None:
    """The task's classes and backbones, and reasons of the protocol, each a bounded number of times."""
    known = MANIFEST.backbones[0].digest
    info = device_info(
        images={"cat": 3, "made up": 9},
        refused_messages={"signature": 2, "shape": 2**63 - 1, "made up": 9},
        backbones=(bytes([1]) * 32, known),
    )
    bounded = bounded_info(info, MANIFEST)
    assert bounded.backbones == (known,)
    assert bounded.images == {"cat": 3}
    assert bounded.refused_messages == {"signature": 2, "shape": 1_000_000}
