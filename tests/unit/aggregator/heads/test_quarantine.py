"""Devices that are quarantined, released or forgotten, heads that learned from them, and heads per hour."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from aggregator.commands.operator_commands import forget, make_current, release
from aggregator.config.limits import Limits
from aggregator.config.task_file import load_task
from aggregator.coordination.round_state import DeviceDecisions, Entry, Settings
from aggregator.heads import rollout
from aggregator.heads.head_rate import limited_until_s
from aggregator.heads.next_head import folder_of, update_quarantine
from aggregator.heads.rollout import Rollout
from aggregator.heads.schedule import Schedule
from aggregator.intake.validation import Prototypes
from aggregator.storage.heads import HeadRecord
from aggregator.storage.open_store import open_store
from aggregator.storage.quarantine import REVOKED
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from aggregator.sums.stored_lists import PendingList, SumLists, put_sums, sums_of
from aggregator.tasks.retention import delete_unneeded_blobs
from aggregator.tasks.task_preparation import Task, prepare_task
from aggregator.training.jobs import HeadJob, Result
from aggregator.training.trainer import Finished
from protocol.errors import ConfigError, StateError
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.arrays import to_unsigned
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef, Submission
from protocol.wire.quantization import prototype_fields
from tests.support.fleets.aggregator_process import Device, aggregator, run_aggregator, write_task
from tests.support.graphs.backbones import without_metadata
from tests.support.messages.heads import add_head, plan_head
from tests.support.messages.jobs import NoJobs
from tests.support.messages.prototype_sets import fleet, flipped, honest
from tests.support.messages.submissions import MANIFEST, SERVED, TASK, device_info, evaluation
from tests.support.messages.tasks import served_task
from tests.support.network.brokers import free_address
from tests.support.simulation.clocks import FakeClock
from tests.support.simulation.submissions import accept


@pytest.fixture
def store(store: Store) -> Store:
    store.facts.put(SERVED)
    return store


def _keep(store: Store, version: int, *, quarantined: dict[str, str], warning: str = "") -> None:
    digests = {device: device.encode().hex() for device in quarantined}
    head = HeadRecord(task=TASK, version=version, trained_s=float(version), quarantined=digests)
    update_quarantine(store, head, "abc", Result(metrics={}, quarantined=quarantined, warning=warning))


def test_every_training_updates_the_quarantine(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Devices that are no longer outliers leave it; each change is logged once."""
    caplog.set_level(logging.INFO)
    _keep(store, 1, quarantined={"a": "far off", "b": "far off"})
    assert [device for device in "abc" if f"device={device} reason=" in caplog.text] == ["a", "b"]
    caplog.clear()
    _keep(store, 2, quarantined={"a": "farther off"})
    assert "device quarantined" not in caplog.text
    assert "device no longer quarantined device=b" in caplog.text
    assert {device: (one.reason, one.since_s) for device, one in store.quarantine.all(TASK).items()} == {
        "a": ("farther off", 1.0)
    }
    _keep(store, 3, quarantined={}, warning="all of them are far off")
    assert store.quarantine.all(TASK) == {}
    assert "all of them are far off" in caplog.text


def test_release_outlives_trainings(store: Store) -> None:
    """Trainings that started before it do not quarantine the device again."""
    _keep(store, 1, quarantined={"a": "far off"})
    assert release(store, "a") == "released a: the next head after the start of the aggregator includes it"
    assert release(store, "a") == "a is already released"
    _keep(store, 2, quarantined={"a": "far off"})
    _keep(store, 3, quarantined={})
    assert store.decisions(TASK) == DeviceDecisions(released=frozenset("a"))


def test_revoked_device_stays_quarantined(store: Store) -> None:
    """No training releases it; only a new enrollment does."""
    store.quarantine.add(TASK, "a", reason=REVOKED, now_s=1.0)
    _keep(store, 1, quarantined={})
    _keep(store, 2, quarantined={"a": "far off"})
    assert store.decisions(TASK) == DeviceDecisions(quarantined=frozenset("a"))
    with pytest.raises(ConfigError, match="a is revoked: enroll it again"):
        release(store, "a")


def test_only_quarantined_devices_can_be_released(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a is not quarantined: `aggregator status` lists"):
        release(store, "a")
    with pytest.raises(StateError, match="start `aggregator run`"):
        release(open_store(tmp_path / "new"), "a")


def _upload(broker: BrokerAddress, name: str, part: Prototypes) -> None:
    with Device(broker, name) as device:
        device.aggregator_is("online")
        message = Submission(
            task=digest_of(device.task()),
            sequence=1,
            **prototype_fields(part.values.astype(np.float16)),
            labels=to_unsigned(part.labels),
            counts=to_unsigned(part.counts),
            images=int(part.counts.sum()),
        )
        assert device.upload(message).status == "received"


def _has_files_of(version: int) -> Callable[[dict[str, Any]], bool]:
    """Return a condition of a status: this head is current, and its file is written."""
    return lambda summary: summary["rollout"]["current"] == version and summary["head_path"] is not None


def test_device_with_flipped_labels_is_quarantined_released_and_forgotten(tmp_path: Path) -> None:
    """One of six; status shows it, and the running aggregator applies the commands.

    The head after `aggregator forget` is, byte for byte, that of a fleet that never had the device.
    """
    task = write_task(tmp_path, "quorum = 6\ndeadline_s = 1000\n[training]\nepochs = 1")
    broker = free_address()
    with aggregator(task, broker, "--embedded-broker") as daemon:
        for device, part in {**fleet(5), "malicious": flipped(honest(9))}.items():
            _upload(broker, device, part)
        summary = daemon.until(_has_files_of(1))
        assert (summary["heads"][0]["devices"], summary["waiting"]) == (5, 0)
        assert [one["device"] for one in summary["quarantine"]] == ["malicious"]
        assert "device=malicious reason=\"class '" in daemon.log()
        without = without_metadata((daemon.state / "head.onnx").read_bytes())
        done = run_aggregator("release", "malicious", "--state", str(daemon.state))
        assert (done.returncode, done.stdout) == (0, "released malicious: the next head includes it\n")
        summary = daemon.until(_has_files_of(2))
        assert summary["heads"][1]["devices"] == 6
        assert summary["quarantine"][0]["released_s"] is not None
        assert without_metadata((daemon.state / "head.onnx").read_bytes()) != without
        done = run_aggregator("forget", "malicious", "--state", str(daemon.state))
        assert done.stdout.splitlines()[:2] == [
            "forgot malicious: its submissions are deleted",
            "head 2 is made again without it now; until then it stays in use",
        ]
        summary = daemon.until(_has_files_of(3))
        assert (summary["submissions"], summary["heads"][2]["devices"], summary["quarantine"]) == (5, 5, [])
        assert without_metadata((daemon.state / "head.onnx").read_bytes()) == without
        done = run_aggregator("rollback", "2", "--state", str(daemon.state))
        assert "head 2 cannot be used any more: it learned from a device that was forgotten" in done.stderr


OTHER, OPEN = b"o" * 32, b"p" * 32


def _submitted(store: Store, device: str, payload: bytes, *, task: bytes = TASK) -> bytes:
    digest = store.blobs.put(payload)
    store.submissions.put(task, SubmissionRecord(device, Entry(1, digest, 0.0), len(payload), 5, 1, {0: 1}))
    return digest


def _add_head(store: Store, version: int, *, task: bytes = TASK, **members: bytes) -> bytes:
    digest = store.blobs.put(b"head %d" % version)
    add_head(store, version, task=task, members=members, digest=digest, is_used=False)
    return digest


def test_everything_that_a_device_has_submitted_is_deleted(store: Store) -> None:
    """To every task, also what a head or a training is made of; nothing of other devices, and no budget."""
    first, second = _submitted(store, "a", b"one"), _submitted(store, "a", b"two", task=OTHER)
    replaced = store.blobs.put(b"replaced, but part of the head")
    training = store.blobs.put(b"replaced, but trained on")
    shared = _submitted(store, "a", b"shared", task=bytes(32))
    _submitted(store, "b", b"shared")
    _add_head(store, 1, a=replaced, b=shared)
    plan_head(store, 2, members={"a": training, "b": shared})
    (store.folder / "damaged").mkdir()
    (store.folder / "damaged" / first.hex()).write_bytes(b"damaged")
    for device in "ab":
        store.evaluations.put(device, evaluation(), digest=device.encode(), now_s=0.0)
        store.devices.put_info(device, device_info(images={"cat": 5}), now_s=0.0)
        store.devices.raise_epsilon(device, 2.0)
        store.quarantine.add(TASK, device, reason="far off", now_s=0.0)
    forget(store, "a")
    assert store.submissions.of_device("a") == []
    assert list(store.submissions.all(TASK)) == ["b"]
    assert {first, second, replaced, training}.isdisjoint(store.blobs.digests())
    assert shared in store.blobs
    assert list((store.folder / "damaged").iterdir()) == []
    assert store.heads.planned(TASK) is None
    assert list(store.evaluations.of_head(TASK, 1)) == ["b"]
    assert {each.device: each.info is None for each in store.devices.all()} == {"a": True, "b": False}
    assert list(store.quarantine.all(TASK)) == ["b"]
    assert store.devices.epsilons() == {"a": 2.0, "b": 2.0}
    assert [(each.device, each.head) for each in store.forgotten.all(TASK)] == [("a", 1)]
    assert [(each.device, each.head) for each in store.forgotten.all(OTHER)] == [("a", 0)]


def test_forgetting_is_repeated_until_no_head_has_the_device(store: Store) -> None:
    """As after a kill before the files were deleted; then nothing is stored, and that is an error."""
    digest = _submitted(store, "a", b"one")
    _submitted(store, "b", b"two")
    _add_head(store, 1, a=digest)
    forget(store, "a")
    store.blobs.put(b"one")
    forget(store, "a")
    assert digest not in store.blobs
    _add_head(store, 2, b=bytes(32))
    with pytest.raises(ConfigError, match="no submission of 'a' is stored: `aggregator status` lists"):
        forget(store, "a")


def test_outcome_says_what_remains(store: Store) -> None:
    """The head that is in use until another is made, rounds that have closed, and that it may upload again."""
    again = "it may upload again: to prevent that, run `aggregator revoke {0}`"
    for device in "abc":
        _submitted(store, device, device.encode())
    assert forget(store, "a") == ["forgot a: its submissions are deleted", again.format("a")]
    _add_head(store, 1, b=b"b", c=b"c")
    store.keys.enroll("b", bytes(32), now_s=0.0)
    store.keys.revoke("b", now_s=0.0)
    stays = "head 1 is made again without it {}; until then it stays in use"
    assert forget(store, "b")[1:] == [stays.format("when the aggregator is started")]
    assert forget(store, "c")[1:] == [stays.format("once another device submits"), again.format("c")]


def test_closed_rounds_cannot_be_undone(store: Store) -> None:
    """Their heads stay usable: later rounds learned from them anyway."""
    store.facts.put(replace(SERVED, settings=Settings(quorum=1, deadline_s=1.0, rounds=3)))
    digest = _submitted(store, "a", b"one")
    tensors = BlobRef(digest=digest, size_bytes=1, name="tensors")
    add_head(store, 1, members={"a": digest}, digest=digest, tensors=tensors)
    assert "closed rounds have learned from it" in forget(store, "a")[1]
    assert store.heads.rollout(TASK).forgotten == 0


@pytest.fixture
def task(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setattr(rollout, "POLL_S", 0.0)
    return prepare_task(*load_task(write_task(tmp_path)), store=store)


def test_no_rollback_to_heads_with_a_forgotten_device(store: Store, task: Task) -> None:
    """Their files are deleted once a newer one is current; a candidate is rejected at once, and a restart knows it."""
    store.facts.put(replace(SERVED, digest=task.digest))
    digest = _submitted(store, "a", b"one", task=task.digest)
    releases = Rollout(task, store)
    files = {}
    for version in (1, 2):
        files[version] = _add_head(store, version, task=task.digest, a=digest)
        releases.tick()
    forget(store, "a")
    for each in (releases, Rollout(task, store)):
        each.tick()
        assert each.manifest is not None
        assert each.manifest.current.version == 2
        assert each.retained == {2}
        delete_unneeded_blobs(task, store)
        assert [head.digest in store.blobs for head in store.heads.all(task.digest)] == [False, True]
    _add_head(store, 3, task=task.digest, b=bytes(32))
    releases.tick()
    releases.tick()
    assert store.heads.rollout(task.digest).current == 3
    delete_unneeded_blobs(task, store)
    assert not {*files.values()} & {*store.blobs.digests()}
    with pytest.raises(ConfigError, match="no other head was current before"):
        make_current(store, "rollback")
    with pytest.raises(ConfigError, match="it learned from a device that was forgotten"):
        make_current(store, "rollback", 2)


def test_sums_of_earlier_tasks_do_not_prevent_forgetting(store: Store) -> None:
    """A sum that was opened stays, and so does its head; a list that was not is made again without the device.

    Only of the task that is served, a device in a sum cannot be forgotten.
    """
    listed = PendingList(members={"a": "00", "b": "01"}, request="02", requested_s=0.0, masked="03")
    for task, device in ((OTHER, "a"), (OPEN, "a"), (TASK, "a"), (TASK, "b")):
        _submitted(store, device, task + device.encode(), task=task)
    head = _add_head(store, 1, task=OTHER, a=digest_of(OTHER + b"a"))
    put_sums(store.facts, SumLists(OTHER, count=1, devices=("a", "c"), summed=2))
    put_sums(store.facts, SumLists(OPEN, pending=listed))
    done = forget(store, "a")
    assert done[0].endswith("except from sums of earlier tasks that a second operator has opened")
    assert store.submissions.of_device("a") == []
    assert head in store.blobs
    assert [[each.device for each in store.forgotten.all(task)] for task in (OTHER, OPEN, TASK)] == [
        [],
        ["a"],
        ["a"],
    ]
    assert sums_of(store.facts, OTHER).devices == ("a", "c")
    assert sums_of(store.facts, OPEN).pending is None
    for lists in (SumLists(TASK, devices=("b",)), SumLists(TASK, pending=listed)):
        put_sums(store.facts, lists)
        with pytest.raises(ConfigError, match="the submission of b is in a sum"):
            forget(store, "b")


def test_revoked_device_stays_revoked(store: Store) -> None:
    _submitted(store, "a", b"one")
    store.quarantine.add(TASK, "a", reason=REVOKED, now_s=0.0)
    forget(store, "a")
    assert [each.reason for each in store.quarantine.all(TASK).values()] == [REVOKED]


HOURLY = 6
TRAINING_S = 10.0
LIMITED_TASK = served_task(limits=Limits(heads_per_hour=HOURLY))


@dataclass
class World:
    """A head training whose job takes `TRAINING_S` seconds, and its clock."""

    store: Store
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """The devices that each training excludes, with reasons."""
    now_s: float = 1000.0
    jobs: list[HeadJob] = field(default_factory=list)
    ends_s: float = math.inf
    """When the running job ends."""
    job: HeadJob | None = None
    is_stopping: bool = False

    def __post_init__(self) -> None:
        self.clock = self.store.clock = FakeClock(self.now_s)
        self.store.blobs.put(encode(MANIFEST))
        self.restart()

    def restart(self) -> None:
        self.job = None
        self.training = Schedule(LIMITED_TASK, self.store, NoJobs())
        self.training._trainer = self  # type: ignore[assignment]  # no process

    def limited_until_s(self) -> float | None:
        return limited_until_s(self.store, LIMITED_TASK.digest, LIMITED_TASK.file.limits)

    def start(self, job: HeadJob) -> None:
        self.job = job
        self.jobs.append(job)
        self.ends_s = self.now_s + TRAINING_S
        folder = folder_of(self.store, job)
        folder.mkdir(parents=True)
        (folder / "head.onnx").write_bytes(b"%d" % job.version)

    def submit(self, device: str, sequence: int) -> None:
        data = b"%s %d" % (device.encode(), sequence)
        entry = Entry(sequence, digest_of(data), self.now_s)
        accept(self.training, SubmissionRecord(device, entry, len(data), 10, 2, {0: 2}), data)

    def run(self, seconds: int, upload: Callable[[int], None] = lambda _: None, *, every_s: int = 1) -> None:
        """Let time pass, with an upload now and then."""
        for number in range(seconds // every_s):
            self.now_s += every_s
            self.clock.elapsed_s = self.now_s
            upload(number)
            if self.now_s >= self.ends_s:
                self.ends_s = math.inf
                metrics = {"seconds": 1.0, "onnx_max_difference": 0.0}
                quarantined = dict(self.quarantined)
                self.job = None
                result = Result(metrics=metrics, prototypes=2, quarantined=quarantined)
                self.training._finish(self.jobs[-1], Finished(result))
            self.training.tick()


@pytest.fixture
def world(store: Store) -> World:
    made = World(store)
    for device in ("honest", "mallory"):
        made.submit(device, 1)
    made.run(60, every_s=10)
    return made


def test_quarantined_device_makes_no_heads(world: World) -> None:
    """60 uploads in two minutes make none; the next head of another device judges the last upload."""
    world.quarantined = {"mallory": "far off"}
    world.submit("mallory", 2)
    world.run(60, every_s=10)
    before = len(world.jobs)
    world.run(120, lambda number: world.submit("mallory", 3 + number), every_s=2)
    assert len(world.jobs) == before
    world.submit("honest", 2)
    world.run(60, every_s=10)
    assert len(world.jobs) == before + 1
    assert world.jobs[-1].members["mallory"] == digest_of(b"mallory 62").hex()


def test_heads_of_an_hour_are_bounded(world: World) -> None:
    """A burst and then one from time to time, each of all submissions; `status` has the time of the next."""
    before = len(world.jobs)
    world.run(2 * 3600, lambda number: world.submit("mallory", 2 + number), every_s=90)
    assert 2 * HOURLY <= len(world.jobs) - before <= 3 * HOURLY
    limit_s = world.limited_until_s()
    assert limit_s is not None
    assert 0 < limit_s - world.now_s <= 3600 / HOURLY
    world.submit("honest", 2)
    world.run(3600 // HOURLY + 60, every_s=10)
    assert world.jobs[-1].members["honest"] == digest_of(b"honest 2").hex()
    world.run(3600, every_s=60)
    assert world.limited_until_s() is None


def test_restarts_do_not_fill_the_bucket(world: World) -> None:
    """An aggregator that is started again every ten minutes makes no more heads than one that runs on."""
    before = len(world.jobs)
    for sequence in range(2, 722, 60):

        def upload(number: int, first: int = sequence) -> None:
            world.submit("mallory", first + number)

        world.run(600, upload, every_s=10)
        world.restart()
        limit_s = world.limited_until_s()
        assert limit_s is None or limit_s > world.now_s
    assert 2 * HOURLY <= len(world.jobs) - before <= 3 * HOURLY
