"""A running aggregator: announcements, accepted and refused messages, blobs, and rounds."""

import contextlib
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.tensors import unpack_tensors
from aggregator.http.commands import run_command
from aggregator.server.device_reports import bounded_info
from aggregator.storage.open_store import open_store
from protocol.errors import StateError
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.arrays import to_tensor
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import (
    BlobRequest,
    Frame,
    HeadManifest,
    Presence,
    Receipt,
    Submission,
    TaskManifest,
)
from protocol.wire.topics import fleet_topic
from tests.support.fleets.aggregator_process import (
    FLEET,
    IN_ROUNDS,
    MAX_BYTES,
    PATIENT,
    Device,
    aggregator,
    key_of,
    running_fleet,
    signed,
    spoil,
    write_task,
)
from tests.support.fleets.fleet import wait_until
from tests.support.messages.manifests import signed_manifest
from tests.support.messages.submissions import MANIFEST, device_info, evaluation, round_submission, submission
from tests.support.network.sessions import other_client


def test_unknown_retained_manifests_are_cleared(broker: BrokerAddress, tmp_path: Path) -> None:
    """Another aggregator's head and round on the broker do not reach devices that connect later."""
    topics = {fleet_topic(FLEET, "head"), fleet_topic(FLEET, "round")}

    def are_cleared() -> bool:
        with Device(broker, "late") as late:
            late.aggregator_is("online")
            late.task()
            return not topics & late.topics()

    with Device(broker, "early") as early:
        for topic in topics:
            early.say(topic, b"of another aggregator", retain=True)
        with aggregator(write_task(tmp_path), broker):
            for topic in topics:
                early.wait_cleared(topic)
            # amqtt clears it after it has sent that on.
            wait_until("cleared manifests", are_cleared, diagnostics=str)


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
            for payload in (b"\x01", b"\xff" * 99)
        ),
        ("state", spoil(Presence(state="online", epoch=1), epoch=-1), "malformed"),
        ("state", spoil(Presence(state="online", epoch=1), v=9), "version"),
        ("info", b"\x01" * 200_000, "malformed"),
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
    """Each reason is counted, and logged once, and no probe is; a valid submission is accepted afterwards."""
    task_file = write_task(tmp_path, PATIENT + "\nmax_submission_mb = 0.1")
    with aggregator(task_file, address, "--embedded-broker") as daemon, Device(address, "mallory") as device:
        task = digest_of(device.task())
        hostile = _hostile(task)
        expected = Counter(reason for _, _, reason in hostile * 2)
        for channel in ("state", "info", "up/0", "get"):  # of `edge-client doctor`
            device.say(f"pf/1/{FLEET}/d/mallory/{channel}", bytes(60_000))
        for channel, payload, _ in hostile * 2:
            device.say(f"pf/1/{FLEET}/d/mallory/{channel}", payload)
        daemon.until(lambda summary: sum(_refused(summary, "mallory").values()) >= len(hostile) * 2)
        assert _refused(daemon.status(), "mallory") == expected
        for reason in expected:
            assert daemon.log().count(f"message refused device=mallory reason={reason} ") == 1
        assert "Traceback" not in daemon.log()
        assert device.upload(submission(task=task)).status == "received"


def test_overwritten_fleet_topic_is_restored(amqtt_broker: BrokerAddress, tmp_path: Path) -> None:
    """Without an access list: devices that connect later find the aggregator's task and presence, and it is counted.

    Most tools clear a retained topic at QoS 0.
    """
    task, state = fleet_topic(FLEET, "task"), fleet_topic(FLEET, "state")
    forged = signed_manifest(b"x", key=key_of("a"), fleet=FLEET, channel="task", release=2**62)
    with (
        aggregator(write_task(tmp_path, PATIENT), amqtt_broker) as daemon,
        Device(amqtt_broker, "a") as a,
        other_client(amqtt_broker) as publish,
    ):
        a.task()
        a.aggregator_is("online")
        genuine = {topic: a.received(topic)[-1].payload for topic in (task, state)}
        for topic, written, qos in (
            *((task, written, qos) for written in (forged, b"") for qos in (0, 1)),
            *((state, written, qos) for written in (b"junk", b"") for qos in (0, 1)),
        ):
            publish(topic, written, qos=qos, retain=True)
            a.until(topic, written)
            a.until(topic, genuine[topic])
        daemon.until(lambda summary: _refused(summary, "?") == {"signature": 2, "malformed": 2})
        with Device(amqtt_broker, "b") as late:
            late.until(task, genuine[task])
            late.until(state, genuine[state])


def test_reported_info_is_reduced_to_what_is_known() -> None:
    """The task's classes and backbones, reasons of the protocol, each a bounded number of times, and bounded drift."""
    known = MANIFEST.backbones[0].digest
    info = device_info(
        images={"cat": 3, "made up": 9},
        refused_messages={"signature": 2, "shape": 2**63 - 1, "made up": 9},
        backbones=(bytes([1]) * 32, known),
        drift=9e29,
    )
    bounded = bounded_info(info, MANIFEST)
    assert bounded.backbones == (known,)
    assert bounded.images == {"cat": 3}
    assert bounded.refused_messages == {"signature": 2, "shape": 1_000_000}
    assert bounded.drift == 1000.0


SHAPES = {
    "adapter_weight": (4, 16),
    "adapter_bias": (4,),
    "classifier_weight": (3, 4),
    "classifier_bias": (3,),
}


@pytest.fixture
def task_file(prepared: Path, tmp_path: Path) -> Path:
    """A copy of the prepared task file and state directory."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    return tmp_path / "task.toml"


def _made(device: Device, number: int, *, sequence: int = 1) -> Submission:
    """Return a device's submission for a round, unlike that of other devices."""
    return round_submission(
        task=digest_of(device.task()),
        number=number,
        sequence=sequence,
        shapes=SHAPES,
        seed=sum(device.name.encode()) + 1000 * number,
    )


def _upload(device: Device, number: int, *, sequence: int = 1) -> Receipt:
    return device.upload(_made(device, number, sequence=sequence))


def test_three_rounds(broker: BrokerAddress, task_file: Path) -> None:
    """Each round is announced, its tensors are broadcast, its quorum closes it, and a head is trained.

    A device that has seen another round makes the open one be published again.
    """
    with running_fleet(task_file, broker, "a", "b") as (daemon, [a, b]):
        task = decode(a.task(), TaskManifest, max_bytes=MAX_BYTES)
        assert task.program is not None
        assert task.program.uploaded == tuple(SHAPES)
        for graph in (task.program.init, task.program.step, task.program.project, task.program.head):
            assert digest_of(a.fetch(graph)) == graph.digest
        opened = a.round()
        assert (opened.task, opened.rounds, opened.epochs) == (digest_of(a.task()), 3, FPL().epochs)
        before = unpack_tensors(a.fetch(opened.tensors))
        assert _upload(a, 2).reason == "unknown_round"
        assert a.round().number == 0
        for number in range(3):
            submissions = {device.name: _made(device, number) for device in (a, b)}
            for device in (a, b):
                assert device.upload(submissions[device.name]).status == "received"
            opened = a.round(number + 1)
            after = unpack_tensors(a.catch(opened.tensors))
            changes = [
                np.frombuffer(each.tensors["adapter_bias"].data, "<f2") for each in submissions.values()
            ]
            expected = before["adapter_bias"] + np.mean(changes, axis=0, dtype=np.float32)
            np.testing.assert_allclose(after["adapter_bias"], expected, atol=1e-6)
            head = a.head(number + 1)
            assert (head.version, head.round, head.devices, head.prototypes) == (number + 1, number, 2, 4)
            assert (head.head, head.tensors) == (task.program.head, opened.tensors)
            before = after
        assert (opened.number, opened.rounds, opened.epochs) == (3, 3, 0)
        assert "round closed round=2 rounds=3 devices=2" in daemon.log()
        assert "last round closed rounds=3 head=3" in daemon.log()
        late = _upload(a, 2, sequence=2)
        assert (late.status, late.reason) == ("refused", "late")
        assert late.detail == "the submission is for round 2, but all 3 rounds are over"


def test_tensors_are_broadcast_once(broker: BrokerAddress, task_file: Path) -> None:
    """However many devices there are; a device that has missed them requests them."""
    with (
        Device(broker, "a") as a,
        Device(broker, "b") as b,
        Device(broker, "c") as c,
        aggregator(task_file, broker),
    ):
        for device in (a, b, c):
            device.aggregator_is("online")
        first = a.round().tensors
        for device in (a, b):
            assert _upload(device, 0).status == "received"
        second = c.round(1).tensors
        c.head()
        assert [frame.digest for frame in c.casts()] == [first.digest, second.digest]
        with Device(broker, "late") as late:
            assert late.round(1).tensors == second
            assert digest_of(late.fetch(second)) == second.digest
            assert late.casts() == []
        assert digest_of(c.fetch(first)) == first.digest


def test_failed_compilation_ends_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = write_task(tmp_path, IN_ROUNDS)
    broken = tmp_path / "torch.py"
    broken.write_text("raise MemoryError('no room')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "aggregator.cli", "run", "--task", task, "--state", tmp_path / "state"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith("error: cannot export the graphs of fpl: exit status 1: ")
    assert last.endswith(f"see {tmp_path / 'state' / 'graphs' / 'export'}")
    assert "Traceback" not in done.stderr


def test_compilation_can_be_interrupted(tmp_path: Path) -> None:
    task = write_task(tmp_path, IN_ROUNDS)
    with aggregator(task, BrokerAddress("127.0.0.1", 1)) as daemon:
        folder = tmp_path / "state" / "graphs" / "export"
        while not (folder / "job.json").exists():
            assert daemon.process.poll() is None
        with (
            contextlib.closing(open_store(daemon.state, read_only=True)) as store,
            pytest.raises(StateError, match="its graphs are being exported"),
        ):
            store.served_task()
        assert daemon.stop(signal.SIGINT) == 130
        assert "exporting graphs, once for this task algorithm=fpl features=16 classes=3" in daemon.log()
        assert "Traceback" not in daemon.log()
        running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert str(folder) not in running


def test_rollback_of_a_round_head(amqtt_broker: BrokerAddress, task_file: Path) -> None:
    """Devices get its tensors, the files are its own, and training continues with the newest round."""
    with running_fleet(task_file, amqtt_broker, "a", "b") as (daemon, [a, b]):
        first, second = (_head_of(number, a, b) for number in range(2))
        assert run_command(daemon.state, "rollback", b"").message == "head 1 is current"
        back = a.wait(fleet_topic(FLEET, "head"), HeadManifest, when=lambda head: head != second)
        assert (back.current, back.candidate) == (first.current, None)
        assert back.current.tensors is not None
        assert digest_of(a.fetch(back.current.tensors)) == back.current.tensors.digest
        daemon.until(lambda status: status["head_path"] is not None and status["rollout"]["current"] == 1)
        row = open_store(daemon.state, read_only=True).heads.all()[0]
        assert digest_of((daemon.state / "head.onnx").read_bytes()) == row.file
        assert second.current.tensors is not None
        assert a.round(2).tensors == second.current.tensors
        assert _head_of(2, a, b).current.version == 3


def _head_of(number: int, *devices: Device) -> HeadManifest:
    for device in devices:
        assert _upload(device, number).status == "received"
    topic = fleet_topic(FLEET, "head")
    return devices[0].wait(topic, HeadManifest, when=lambda head: head.current.version == number + 1)
