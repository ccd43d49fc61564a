"""A running aggregator on real brokers: announcements, accepted and refused messages, blobs."""

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aggregator.server.device_messages import bounded_info
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import decode, digest_of, encode, to_tensor
from protocol.wire.messages import BlobRequest, Frame, Presence, TaskManifest
from protocol.wire.topics import fleet_topic
from tests.support.fleets.aggregator_process import (
    FLEET,
    MAX_BYTES,
    PATIENT,
    Device,
    aggregator,
    key_of,
    signed,
    spoil,
    write_task,
)
from tests.support.messages.manifests import signed_manifest
from tests.support.messages.submissions import MANIFEST, device_info, evaluation, submission


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

    def frame(payload: bytes) -> bytes:
        whole = Frame(v=1, digest=digest_of(payload), size_bytes=len(payload), offset=0, data=payload)
        return signed(whole, "mallory")

    def piece(*, size_bytes: int, v: int = 1) -> bytes:
        return signed(Frame(v=v, digest=unseen, size_bytes=size_bytes, offset=0, data=b"x"), "mallory")

    def spoilt(**fields: object) -> bytes:
        return frame(encode(msgspec.structs.replace(good, **fields)))

    return [
        *(
            (channel, payload, "malformed")
            for channel in ("info", "get", "up/0")
            for payload in (b"\x00", b"\xff" * 99)
        ),
        ("state", spoil(Presence(state="online", epoch=1), epoch=-1), "malformed"),
        ("state", spoil(Presence(state="online", epoch=1), v=9), "version"),
        ("info", b"\x00" * 200_000, "malformed"),
        ("get", spoil(BlobRequest(digest=unseen, offset=0, length=1), length=2**40), "malformed"),
        ("get", encode(BlobRequest(digest=unseen, offset=0, length=1)), "unknown_blob"),
        ("up/0", piece(size_bytes=2**31), "oversized"),
        ("up/0", piece(size_bytes=1, v=2), "version"),
        ("up/0", piece(size_bytes=1), "digest"),
        ("up/0", encode(Frame(v=1, digest=unseen, size_bytes=1, offset=0, data=b"x")), "signature"),
        ("up/0", frame(b"noise"), "malformed"),
        ("up/0", spoilt(v=2), "version"),
        ("up/0", spoilt(task=bytes(32)), "unknown_task"),
        ("up/0", spoilt(tensors=nan), "not_finite"),
        ("up/0", spoilt(prototypes=to_tensor(np.zeros((4, 17), np.uint8))), "shape"),
        ("up/0", frame(encode(evaluation(task=task))), "unknown_head"),
    ]


def _refused(summary: dict[str, Any], device: str) -> dict[str, int]:
    return {row["reason"]: row["count"] for row in summary["refusals"] if row["device"] == device}


def test_hostile_messages_are_refused_and_counted(address: BrokerAddress, tmp_path: Path) -> None:
    """Each reason is counted, and logged once; a valid submission is accepted afterwards."""
    task_file = write_task(tmp_path, PATIENT + "\nmax_submission_mb = 0.1")
    with aggregator(task_file, address, "--embedded-broker") as daemon, Device(address, "mallory") as device:
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


def test_overwritten_fleet_topic_is_restored(amqtt_broker: BrokerAddress, tmp_path: Path) -> None:
    """Without an access list: devices that connect later find the aggregator's task, and it is counted."""
    forged = signed_manifest(b"x", key=key_of("a"), fleet=FLEET, channel="task", release=2**62)
    with aggregator(write_task(tmp_path, PATIENT), amqtt_broker) as daemon, Device(amqtt_broker, "a") as a:
        genuine = a.signed("task")
        for written in (forged, b""):
            a.say(fleet_topic(FLEET, "task"), written, retain=True)
            while a.signed("task") != genuine:
                pass  # the overwriting message arrives first
        daemon.until(lambda summary: _refused(summary, "?") == {"signature": 1})
        with Device(amqtt_broker, "b") as late:
            assert late.signed("task") == genuine


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
