"""Rounds of a running aggregator: announcements, verdicts, restarts, graphs, and receivers."""

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import pytest

from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.tensors import unpack_tensors
from aggregator.heads.operator_commands import submit_command
from aggregator.storage.open_store import open_store
from protocol.errors import StateError
from protocol.models.onnx_metadata import HeadMetadata, read_metadata
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import HeadManifest, Receipt, Submission, TaskManifest
from protocol.wire.topics import SHARDS, fleet_topic
from tests.support.fleets.aggregator_process import (
    FLEET,
    IN_ROUNDS,
    MAX_BYTES,
    Cluster,
    Daemon,
    Device,
    aggregator,
    running_fleet,
    write_task,
)
from tests.support.messages.submissions import round_submission
from tests.support.network.brokers import mosquitto, needs_mosquitto

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
    """Each round is announced, its tensors are broadcast, its quorum closes it, and a head is trained."""
    with running_fleet(task_file, broker, "a", "b") as (daemon, [a, b]):
        task = decode(a.task(), TaskManifest, max_bytes=MAX_BYTES)
        assert task.program is not None
        assert task.program.uploaded == tuple(SHAPES)
        for graph in (task.program.init, task.program.step, task.program.project, task.program.head):
            assert digest_of(a.fetch(graph)) == graph.digest
        opened = a.round()
        assert (opened.task, opened.rounds, opened.epochs) == (digest_of(a.task()), 3, FPL().epochs)
        before = unpack_tensors(a.fetch(opened.tensors))
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
        _the_head_works_by_itself(daemon)


def _the_head_works_by_itself(daemon: Daemon) -> None:
    for name, example in (
        ("head.onnx", {"feature": np.ones((2, 16), np.float32)}),
        ("model.onnx", {"image": np.ones((2, 8, 8, 3), np.uint8)}),
    ):
        session = onnxruntime.InferenceSession(daemon.state / name, providers=["CPUExecutionProvider"])
        (probabilities,) = session.run(["probabilities"], example)
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    session = onnxruntime.InferenceSession(daemon.state / "head.onnx")
    metadata = read_metadata(session.get_modelmeta().custom_metadata_map, HeadMetadata)
    assert (metadata.version, metadata.classes) == (3, ("cat", "dog", "fox"))


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


def test_round_survives_a_restart(amqtt_broker: BrokerAddress, task_file: Path) -> None:
    """Submissions count, the round has the same tensors, and no graph is compiled again."""
    with Device(amqtt_broker, "a") as a, Device(amqtt_broker, "b") as b:
        with aggregator(task_file, amqtt_broker) as daemon:
            a.aggregator_is("online")
            for device in (a, b):
                assert _upload(device, 0).status == "received"
            opened = a.round(1)
            task = a.task()
            a.head()
            assert _upload(a, 1).status == "received"
            daemon.stop(signal.SIGKILL)
        with aggregator(task_file, amqtt_broker) as daemon:
            with Device(amqtt_broker, "new") as new:
                new.aggregator_is("online")
                assert (new.round(), new.task()) == (opened, task)
            assert daemon.status()["round"]["devices"] == ["a"]
            assert a.receipt(a.send_payload(encode(_made(a, 1)))).status == "received"
            assert _upload(b, 1).status == "received"
            head = b.head(2)
            assert (head.devices, head.metrics["carried"]) == (2, 0.0)
            assert "exporting graphs" not in daemon.log()


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
    assert last.endswith(f"see {tmp_path / 'state' / 'graphs'}")
    assert "Traceback" not in done.stderr


def test_compilation_can_be_interrupted(tmp_path: Path) -> None:
    task = write_task(tmp_path, IN_ROUNDS)
    with aggregator(task, BrokerAddress("127.0.0.1", 1)) as daemon:
        job = tmp_path / "state" / "graphs" / "job.json"
        while not job.exists():
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
        assert str(job) not in running


def test_rollback_of_a_round_head(amqtt_broker: BrokerAddress, task_file: Path) -> None:
    """Devices get its tensors, the files are its own, and training continues with the newest round."""
    with running_fleet(task_file, amqtt_broker, "a", "b") as (daemon, [a, b]):
        first, second = (_head_of(number, a, b) for number in range(2))
        assert submit_command(open_store(daemon.state), "rollback") == "head 1 is current"
        back = a.wait(fleet_topic(FLEET, "head"), HeadManifest, when=lambda head: head != second)
        assert (back.current, back.candidate) == (first.current, None)
        assert back.current.tensors is not None
        assert digest_of(a.fetch(back.current.tensors)) == back.current.tensors.digest
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


@needs_mosquitto
def test_two_receivers_of_the_same_shards(task_file: Path, tmp_path: Path, address: BrokerAddress) -> None:
    """Each submission is stored and counts once, also on SQLite; rounds close, and an open one is published again."""
    with (
        mosquitto(address, tmp_path),
        Cluster(tmp_path, address) as cluster,
        contextlib.ExitStack() as running,
    ):
        cluster.aggregator_state = tmp_path / "state"
        cluster.start_coordinator(task_file)
        for name in ("one", "two"):
            cluster.start_receiver(name, "--shards", f"0-{SHARDS - 1}")
            cluster.wait_for_log(name, f"shards={SHARDS}")
        a, b = (running.enter_context(Device(address, name)) for name in "ab")
        task = digest_of(a.task())
        made = {device: _made(device, 0) for device in (a, b)}
        refused = a.upload(msgspec.structs.replace(made[a], round=2))
        assert (refused.status, refused.reason) == ("refused", "unknown_round")
        assert a.round().number == b.round().number == 0
        assert a.round().number == 0  # published again
        for device in (a, b):
            assert device.upload(made[device]).status == "received"
        opened = a.round(1)
        assert digest_of(a.fetch(opened.tensors)) == opened.tensors.digest
        assert cluster.stored(task) == {device.name: digest_of(encode(made[device])) for device in (a, b)}
        assert a.head().devices == 2
        assert _upload(b, 1).status == "received"
