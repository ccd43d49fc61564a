"""Heads of a fleet after restarts, commands of other processes, and with damaged files."""

import queue
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from aggregator.commands.operator_commands import forget, make_current
from aggregator.config.task_file import load_task
from aggregator.coordination.round_state import Entry
from aggregator.heads import rollout
from aggregator.heads.rollout import Rollout
from aggregator.heads.schedule import Schedule
from aggregator.job_processes import JobProgress
from aggregator.server.aggregator import Aggregator
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks.retention import KEPT_S, delete_unneeded_blobs
from aggregator.tasks.task_preparation import prepare_task
from aggregator.training.jobs import folder_name
from protocol.mqtt.tls import BrokerAddress
from protocol.wire.codec import digest_of
from tests.support.fleets.aggregator_process import write_task
from tests.support.messages.heads import add_head, plan_head
from tests.support.messages.jobs import NoJobs
from tests.unit.aggregator.heads import test_calibration
from tests.unit.aggregator.heads.test_calibration import DEVICES, TASK, _all


@pytest.fixture
def world(store: Store, monkeypatch: pytest.MonkeyPatch) -> test_calibration.World:
    monkeypatch.setattr(rollout, "POLL_S", 0.0)
    return test_calibration.World(store)


def _lose(store: Store, digest: bytes) -> None:
    store.blobs.path(digest).write_bytes(b"damaged")
    store._members = {}  # as in a program that was started since


@pytest.mark.parametrize("failures", [0, 1])
def test_lost_list_of_a_plan_does_not_end_the_program_again_and_again(
    world: test_calibration.World, failures: int
) -> None:
    """The plan is made again of what counts."""
    members = {device: digest_of(f"{device} 1".encode()) for device in DEVICES}
    plan = plan_head(world.store, 2, task=TASK, members=members, failures=failures)
    _lose(world.store, plan.members)
    for _ in range(2):
        world.restart()
        world.tick()


def test_lost_list_of_the_newest_head_does_not_end_the_program(world: test_calibration.World) -> None:
    """It is not calibrated."""
    world.evaluate(_all())
    head = world.store.heads.newest(TASK)
    assert head is not None
    _lose(world.store, head.members)
    world.restart()
    world.tick()


def test_submissions_of_the_last_round_are_not_lost(prepared: Path, tmp_path: Path) -> None:
    """Retention deletes them once all rounds are over: no device is asked for them again."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    store = open_store(tmp_path / "state")
    task = prepare_task(*load_task(tmp_path / "task.toml"), store=store)
    for device in "ab":
        digest = store.blobs.put(device.encode())
        entry = Entry(1, digest, 0.0, 2)
        store.submissions.put(task.digest, SubmissionRecord(device, entry, 1, 1, 1, {0: 1}))
    add_head(store, 3, task=task.digest, tensors=task.first_tensors)
    training = Schedule(task, store, NoJobs())
    training.tick()
    delete_unneeded_blobs(task, store)
    restarted = Schedule(task, store, NoJobs())
    assert store.submissions.lost(task.digest) == []
    assert restarted.lost.requests() == []


def test_plan_of_a_deleted_task_keeps_no_submissions(world: test_calibration.World) -> None:
    """Its submissions are deleted for good 30 days after another task has replaced it."""
    store, earlier = world.store, bytes(32)
    digest = store.blobs.put(b"private")
    store.submissions.put(earlier, SubmissionRecord("z", Entry(1, digest, 0.0), 1, 1, 1, {0: 1}))
    plan_head(store, 1, task=earlier, members={"z": digest}, failures=1)
    delete_unneeded_blobs(world.task, store)
    assert digest in store.blobs
    world.clock.elapsed_s += KEPT_S + 1.0
    delete_unneeded_blobs(world.task, store)
    assert store.submissions.of_device("z") == []
    assert digest not in store.blobs
    assert store.heads.planned(earlier) is None


def test_training_folder_that_was_deleted_in_part_does_not_end_the_program(tmp_path: Path) -> None:
    """A start deletes the folder of the training before, and may be killed meanwhile."""
    store = open_store(tmp_path / "state")
    task = prepare_task(*load_task(write_task(tmp_path)), store=store)
    digest = store.blobs.put(b"head 1")
    add_head(store, 1, task=task.digest, digest=digest, size_bytes=6, file=digest)
    (folder := store.folder / "training" / folder_name(task.digest.hex(), 1, 1)).mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"model")
    Rollout(task, store)


def test_head_that_was_made_before_forget_does_not_become_current_after_it(
    world: test_calibration.World,
) -> None:
    """The program was killed between the head and the rollout."""
    made = {"digest": world.store.blobs.put(b"2"), "size_bytes": 1, "metrics": {}}
    members = {device: digest_of(f"{device} 1".encode()) for device in DEVICES}
    add_head(world.store, 2, task=TASK, members=members, is_used=False, **made)
    forget(world.store, "a")
    releases = Rollout(world.task, world.store)
    releases.tick()
    assert releases.state.current == 1


def test_progress_that_cannot_be_read_does_not_end_the_program(world: test_calibration.World) -> None:
    """A library may print anything, also an object in JSON."""
    world.upload("a")
    assert world.training.plan is not None
    world.training.store_progress(JobProgress(Path(), {"epoch": 1.5, "loss": "low"}))
    world.tick()


def test_start_on_a_full_disk_deletes_what_nothing_needs(world: test_calibration.World) -> None:
    """Replaced submissions, which a running program deletes once a minute, fill the disk."""
    store = world.store
    unneeded = store.blobs.put(b"a submission that was replaced")

    def disk(_: object) -> SimpleNamespace:
        return SimpleNamespace(total=10**9, free=10**3 if unneeded in store.blobs else 10**9)

    with patch.object(shutil, "disk_usage", disk):
        Aggregator(
            world.task, store, broker=BrokerAddress("127.0.0.1", 1), events=queue.SimpleQueue(), jobs=NoJobs()
        )
    assert unneeded not in store.blobs


def test_head_in_use_is_made_again_without_a_forgotten_device_although_it_is_not_the_newest(
    world: test_calibration.World,
) -> None:
    """An operator has rolled back from a head without the device, which was revoked before."""
    store = world.store
    members = {device: digest_of(f"{device} 1".encode()) for device in DEVICES[1:]}
    made = {"digest": store.blobs.put(b"2"), "size_bytes": 1, "metrics": {}}
    add_head(store, 2, task=TASK, members=members, is_used=False, **made)
    world.releases.tick(at_once=True)
    make_current(store, "rollback", 1)
    world.tick()
    assert (world.releases.state.current, world.jobs) == (1, [])
    said = forget(store, "a")
    for _ in range(3):
        world.tick()
    assert world.jobs, said
