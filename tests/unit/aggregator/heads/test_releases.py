"""Heads in the fleet, with the aggregator as a process: canaries, decisions, orders, restarts, and what is told."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from aggregator.config.task_file import load_task
from aggregator.heads.operator_commands import submit_command
from aggregator.heads.releases import Releases
from aggregator.messaging.manifest_signer import ManifestSigner, identity_of
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.tasks.task import prepare_task
from protocol.errors import ConfigError, StateError
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.canary_rank import canary_rank
from protocol.wire.codec import digest_of, encode, to_tensor, to_unsigned
from protocol.wire.messages import DeviceInfo, Evaluation, HeadManifest, Presence, Submission
from protocol.wire.signing import open_manifest
from protocol.wire.topics import device_topic, fleet_topic
from tests.support.aggregator_process import FLEET, Daemon, Device, aggregator, write_task
from tests.support.brokers import amqtt
from tests.support.submissions import SERVED, evaluation

CANARY = (
    "quorum = 1\ndeadline_s = 1000\n[training]\nepochs = 1\n[rollout]\ncanary_fraction = 0.5\nmargin = 0.05"
)
DEVICES = ("a", "b")
FIRST, SECOND = sorted(DEVICES, key=lambda device: canary_rank(device, 2))
"""Of two devices, the one that tries head 2 first."""


@pytest.fixture
def alone(address: BrokerAddress) -> Iterator[BrokerAddress]:
    """One kind of broker: what is tested does not depend on it."""
    with amqtt(address):
        yield address


def _submission(task: bytes, *, sequence: int = 1) -> Submission:
    labels = np.repeat([0, 1, 2], 5)
    values = np.random.default_rng(sequence).normal(size=(15, 16)) * 0.1 + np.eye(16)[labels] * 3
    return Submission(
        task=task, sequence=sequence, prototypes=to_tensor(values.astype(np.float16)),
        labels=to_unsigned(labels), counts=to_unsigned(np.full(15, 5)), images=75,
    )  # fmt: skip


def _says(task: bytes, version: int, right: int, *, before: int | None, problem: str = "") -> Evaluation:
    """Of ten images."""
    return Evaluation(
        task=task, head_version=version, correct=(right, 0, 0), incorrect=(0 if problem else 10 - right, 0, 0),
        previous_correct=() if before is None else (before, 0, 0), problem=problem,
    )  # fmt: skip


def _online(device: Device, *, head: int = 0) -> None:
    """Say that it is there, and which head it uses."""
    topic = device_topic(FLEET, device.name, "state")
    device.say(topic, encode(Presence(state="online", epoch=1)), retain=True)
    info = DeviceInfo(
        epoch=1, software="", runtime="", backbones=(), images={}, unusable_images=0, head_version=head
    )
    device.say(device_topic(FLEET, device.name, "info"), encode(info), retain=True)


def _manifest(device: Device, *, after: HeadManifest | None = None) -> HeadManifest:
    """The next manifest, or the next one that says something else."""
    topic = fleet_topic(FLEET, "head")
    return device.wait(topic, HeadManifest, when=lambda manifest: manifest != after)


def _two_heads(first: Device, second: Device, daemon: Daemon) -> tuple[bytes, HeadManifest]:
    """A fleet of two that uses head 1, and whose first device is to try head 2."""
    first.aggregator_is("online")
    task = digest_of(first.task())
    for device in (first, second):
        _online(device)
    daemon.until(lambda summary: [row["state"] for row in summary["devices"]] == ["online", "online"])
    first.upload(_submission(task))
    one = _manifest(first)
    assert (one.current.version, one.candidate, one.canary_rank_limit) == (1, None, 0)
    for device in (first, second):
        device.upload(evaluation(task=task))
    first.upload(_submission(task, sequence=2))
    two = first.wait(
        fleet_topic(FLEET, "head"), HeadManifest, when=lambda manifest: manifest.canary_rank_limit > 0
    )
    assert two != one
    return task, two


def _command(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aggregator.cli", *arguments, "--state", str(daemon.state)],
        capture_output=True,
        text=True,
        check=False,
    )


def _head_file(daemon: Daemon) -> str:
    return digest_of((daemon.state / "head.onnx").read_bytes()).hex()


def _sha256(summary: dict[str, Any], version: int) -> str:
    return str(next(head["sha256"] for head in summary["heads"] if head["version"] == version))


def test_worse_head_is_rejected(alone: BrokerAddress, tmp_path: Path) -> None:
    """Only the canary is offered it; log and status have the accuracies; a restart does not offer it again."""
    task_file = write_task(tmp_path, CANARY)
    with Device(alone, FIRST) as first, Device(alone, SECOND) as second:
        with aggregator(task_file, alone) as daemon:
            task, trial = _two_heads(first, second, daemon)
            assert trial.candidate is not None
            assert (trial.current.version, trial.candidate.version) == (1, 2)
            assert canary_rank(FIRST, 2) < trial.canary_rank_limit <= canary_rank(SECOND, 2)
            assert first.fetch(trial.candidate.head)
            summary = daemon.status()
            assert summary["rollout"]["candidate"]["awaited"] == [FIRST]
            assert _head_file(daemon) == _sha256(summary, 1)
            first.upload(_says(task, 2, 7, before=8))
            back = _manifest(first, after=trial)
            assert (back.current.version, back.candidate) == (1, None)
            why = "accuracy 70.0% (7/10) on 1 canary, 80.0% (8/10) with the previous head"
            assert f'head rejected version=2 current=1 reason="{why}"' in daemon.log()
            heads = daemon.status()["heads"]
            assert [(head["state"], head["reason"]) for head in heads] == [("current", ""), ("rejected", why)]
            daemon.stop()
        with aggregator(task_file, alone) as daemon, Device(alone, "late") as late:
            late.aggregator_is("online")
            assert _manifest(late) == back
            assert _head_file(daemon) == _sha256(daemon.status(), 1)


def test_good_head_is_activated_after_a_restart(alone: BrokerAddress, tmp_path: Path) -> None:
    """The trial continues; then the files are the new head's."""
    task_file = write_task(tmp_path, CANARY)
    with Device(alone, FIRST) as first, Device(alone, SECOND) as second:
        with aggregator(task_file, alone) as daemon:
            task, trial = _two_heads(first, second, daemon)
            daemon.process.kill()
            daemon.process.wait()
        with aggregator(task_file, alone) as daemon:
            first.aggregator_is("online")
            with Device(alone, "late") as late:
                assert _manifest(late) == trial
            second.upload(_says(task, 2, 0, before=None, problem="it is no canary"))
            first.upload(_says(task, 2, 8, before=8))
            after = second.wait(
                fleet_topic(FLEET, "head"), HeadManifest, when=lambda manifest: manifest.current.version == 2
            )
            assert after.candidate is None
            summary = daemon.until(lambda summary: summary["rollout"]["current"] == 2)
            assert _head_file(daemon) == _sha256(summary, 2)
            assert (daemon.state / "model.onnx").is_file()


def test_head_that_a_canary_cannot_use_is_rejected(alone: BrokerAddress, tmp_path: Path) -> None:
    """Log and status have the device's problem."""
    task_file = write_task(tmp_path, CANARY)
    with (
        Device(alone, FIRST) as first,
        Device(alone, SECOND) as second,
        aggregator(task_file, alone) as daemon,
    ):
        task, trial = _two_heads(first, second, daemon)
        first.upload(_says(task, 2, 0, before=None, problem="the head gives NaN"))
        assert _manifest(first, after=trial).candidate is None
        assert f'head not used device={FIRST} head=2 reason="the head gives NaN' in daemon.log()
        assert daemon.status()["heads"][1]["reason"] == f"{FIRST} cannot use it: the head gives NaN"


def test_commands_are_carried_out_while_running(alone: BrokerAddress, tmp_path: Path) -> None:
    """Promote and rollback change the current head and its files; a refused command prints one line."""
    task_file = write_task(tmp_path, CANARY)
    with (
        Device(alone, FIRST) as first,
        Device(alone, SECOND) as second,
        aggregator(task_file, alone) as daemon,
    ):
        _, trial = _two_heads(first, second, daemon)
        done = _command(daemon, "promote")
        assert (done.stdout, done.returncode) == ("head 2 is current\n", 0)
        second_manifest = second.wait(
            fleet_topic(FLEET, "head"), HeadManifest, when=lambda manifest: manifest.current.version == 2
        )
        assert second_manifest != trial
        (daemon.state / "training" / "head-2" / "model.onnx").unlink()
        model = (daemon.state / "model.onnx").read_bytes()
        done = _command(daemon, "rollback")
        assert (done.stdout, done.returncode) == ("head 1 is current\n", 0)
        back = _manifest(second, after=second_manifest)
        assert (back.current, back.candidate) == (trial.current, None)
        summary = daemon.status()
        assert _head_file(daemon) == _sha256(summary, 1)
        assert summary["heads"][1]["reason"] == "rolled back to head 1"
        for arguments, words in (
            (("rollback", "1"), "head 1 is current already"),
            (("rollback", "7"), "there is no head 7; there are 1, 2"),
            (("rollback",), "no other head was current before"),
            (("promote",), "no candidate to promote"),
        ):
            done = _command(daemon, *arguments)
            assert done.returncode == 1
            assert words in done.stderr
            assert "Traceback" not in done.stderr
        assert _command(daemon, "rollback", "2").stdout == "head 2 is current\n"
        assert (daemon.state / "model.onnx").read_bytes() == model


def test_commands_wait_for_the_next_start(alone: BrokerAddress, tmp_path: Path) -> None:
    """Commands to a stopped aggregator are checked as if the earlier ones were carried out."""
    task_file = write_task(tmp_path, "quorum = 1\n[training]\nepochs = 1")
    with Device(alone) as device:
        with aggregator(task_file, alone) as daemon:
            device.aggregator_is("online")
            task = digest_of(device.task())
            for version in (1, 2, 3):
                device.upload(_submission(task, sequence=version))
                device.head(version)
            daemon.stop()
            assert (
                _command(daemon, "rollback").stdout
                == "head 2 will be current when the aggregator is started\n"
            )
            assert (
                _command(daemon, "rollback").stdout
                == "head 1 will be current when the aggregator is started\n"
            )
            assert daemon.status()["rollout"]["requested"] == 1
        with aggregator(task_file, alone) as daemon:
            summary = daemon.until(
                lambda summary: (
                    _head_file(daemon) == _sha256(summary, 1) and summary["rollout"]["requested"] is None
                )
            )
            assert summary["rollout"]["current"] == 1
            device.aggregator_is("online")
            device.upload(_submission(task, sequence=4))
            assert device.head(4).version == 4


def test_release_number_grows_after_a_lost_state(alone: BrokerAddress, tmp_path: Path) -> None:
    """A manifest signed after the loss has a greater release number."""
    task_file = write_task(tmp_path, "quorum = 1\n[training]\nepochs = 1")
    with Device(alone) as device:
        released: list[int] = []
        for _ in range(2):
            with aggregator(task_file, alone) as daemon:
                device.aggregator_is("online")
                task = digest_of(device.task())
                device.upload(_submission(task))
                released.append(device.signed("head").release)
                daemon.stop()
            daemon.state.rename(tmp_path / f"lost-{len(released)}")
        assert released[0] < released[1]


def _made(store: Store, task: bytes, version: int) -> HeadRecord:
    """A head that a training has made, without a file to show to people."""
    head = store.blobs.put(b"head %d" % version)
    row = HeadRecord(version, task, head, 6, 0.0, 1, {"a": "00" * 32}, {})
    store.heads.add(row)
    return row


def test_release_number_grows_after_a_restored_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest of the backup's head has a greater release number than any before."""
    state, backup = tmp_path / "state", tmp_path / "backup"

    def told(version: int, *, at_s: int) -> tuple[int, HeadManifest]:
        """What a start of the aggregator tells the fleet; at that time, and with a new head of that version."""
        monkeypatch.setattr(time, "time", lambda: float(at_s))
        store = Store(state)
        task = prepare_task(*load_task(write_task(tmp_path)), store=store)
        if version:
            _made(store, task.digest, version)
        releases = Releases(task, store)
        releases.tick(version)
        assert releases.manifest is not None
        signer = ManifestSigner(store, key=identity_of(state), fleet=FLEET)
        payload = signer.sign("head", encode(releases.manifest))
        signer.keep()
        store.close()
        return open_manifest(payload, fleet=FLEET, channel="head").release, releases.manifest

    told(1, at_s=1000)
    shutil.copytree(state, backup)
    release, later = told(2, at_s=2000)
    shutil.rmtree(state)
    backup.rename(state)
    greater, restored = told(0, at_s=3000)
    assert (later.current.version, restored.current.version) == (2, 1)
    assert greater > release


def test_head_is_served_although_its_file_could_not_be_written(tmp_path: Path) -> None:
    """A disk that is full for a moment has no lasting effect."""
    store = Store(tmp_path / "state")
    task = prepare_task(*load_task(write_task(tmp_path)), store=store)
    releases = Releases(task, store)
    row = _made(store, task.digest, 1)
    (store.folder / "head.onnx").mkdir()
    with pytest.raises(StateError):
        releases.tick(1)
    (store.folder / "head.onnx").rmdir()
    releases.tick(1)
    assert releases.manifest is not None
    assert releases.manifest.current.head.digest == row.digest
    assert row.digest in releases.served


def test_command_is_carried_out_once(tmp_path: Path) -> None:
    """If its outcome cannot be stored, it is undone; otherwise a rollback would happen twice."""
    store = Store(tmp_path / "state")
    task = prepare_task(*load_task(write_task(tmp_path)), store=store)
    releases = Releases(task, store)
    for version in (1, 2, 3):
        _made(store, task.digest, version)
        releases.tick(version)
    store.commands.add(task.digest, "rollback", None)
    store.database.write(
        "CREATE TEMP TRIGGER full BEFORE UPDATE ON operator_commands BEGIN SELECT RAISE(ABORT, 'full'); END"
    )
    with pytest.raises(StateError, match="full"):
        _look(releases)
    assert store.heads.rollout(task.digest).current == 3
    store.database.write("DROP TRIGGER full")
    _look(releases)
    assert releases.manifest is not None
    assert releases.manifest.current.version == store.heads.rollout(task.digest).current == 2


def _look(releases: Releases) -> None:
    """Let it look for orders now."""
    releases._poll_s = 0.0
    releases.tick(3)


def test_status_shows_the_head_of_a_device(alone: BrokerAddress, tmp_path: Path) -> None:
    """As the device reports it."""
    with aggregator(write_task(tmp_path), alone) as daemon, Device(alone) as device:
        device.aggregator_is("online")
        _online(device, head=7)
        summary = daemon.until(lambda summary: bool(summary["devices"]) and summary["devices"][0]["head"])
        assert summary["devices"][0]["head"] == 7


def test_rollback_to_a_head_without_blobs_is_refused(tmp_path: Path) -> None:
    """The error says so, and a folder without state stays unchanged."""
    store = Store(tmp_path)
    task = bytes(32)
    store.facts.put(replace(SERVED, digest=task))
    for version in (1, 2):
        digest = store.blobs.put(b"head %d" % version)
        store.heads.add(HeadRecord(version, task, digest, 6, 0.0, 1, {"a": ""}, {}, file=digest))
    store.blobs.path(digest_of(b"head 1")).unlink()
    with pytest.raises(ConfigError, match=r"head 1 cannot be used any more: its files were deleted"):
        submit_command(store, "rollback")
    empty = tmp_path / "empty"
    done = subprocess.run(
        [sys.executable, "-m", "aggregator.cli", "rollback", "--state", str(empty)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no aggregator state" in done.stderr
    assert not empty.exists()


def test_evaluation_with_impossible_counts_is_refused(alone: BrokerAddress, tmp_path: Path) -> None:
    """More previously correct than images, or another number of classes."""
    with (
        aggregator(write_task(tmp_path, "quorum = 1\n[training]\nepochs = 1"), alone),
        Device(alone) as device,
    ):
        device.aggregator_is("online")
        task = digest_of(device.task())
        device.upload(_submission(task))
        device.head()
        good = _says(task, 1, 5, before=5)
        for before, reason in (((11, 0, 0), "malformed"), ((1, 1), "shape")):
            receipt = device.upload(msgspec.structs.replace(good, previous_correct=before))
            assert (receipt.status, receipt.reason) == ("refused", reason)
        assert device.upload(good).status == "received"
