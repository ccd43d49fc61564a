"""From submissions to heads without a network: failures, restarts during an aggregation, and a full disk."""

import contextlib
import logging
import queue
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from msgspec import structs

from aggregator.commands.operator_commands import forget
from aggregator.config.task_file import load_task
from aggregator.config.training_packages import INSTALL
from aggregator.coordination import round_state
from aggregator.heads import schedule
from aggregator.heads.next_head import folder_of, store_head
from aggregator.heads.schedule import Schedule
from aggregator.intake.accepted_submissions import AcceptedSubmissions
from aggregator.job_processes import STOPPED_FILE, JobEnded, JobEvent, JobProgress, JobRunner
from aggregator.storage.heads import TrainingProgress
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import LostFiles
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks import restoration
from aggregator.tasks.restoration import heal
from aggregator.tasks.retention import RETENTION_S
from aggregator.tasks.task_preparation import Task, prepare_task
from aggregator.training.jobs import JOB_FILE, Result, RoundJob
from aggregator.training.trainer import KILLED, Finished
from protocol.errors import StateError
from protocol.wire.codec import digest_of
from protocol.wire.messages import Receipt
from tests.support.messages.jobs import NoJobs
from tests.support.simulation.submissions import retry, submit

Events = queue.SimpleQueue[JobEvent]


@pytest.fixture
def store(prepared: Path, tmp_path: Path) -> Store:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    return open_store(tmp_path / "state")


@pytest.fixture
def task(store: Store) -> Task:
    return prepare_task(*load_task(store.folder.parent / "task.toml"), store=store)


@pytest.fixture
def events() -> Events:
    return queue.SimpleQueue()


@pytest.fixture
def training(task: Task, store: Store, events: Events) -> Schedule:
    return Schedule(task, store, JobRunner(events.put))


def _take(training: Schedule, devices: str, *, number: int = 0) -> list[str]:
    """Let each device submit, make it durable, and start what is due; return the verdicts."""
    verdicts = list[str]()
    for device in devices:
        verdicts.append(submit(training, device, number=number).verdict)
        training.tick()
    return verdicts


def planned(training: Schedule) -> set[str]:
    """Return the devices that the next head is planned of."""
    return set() if training.plan is None else set(training._store.members(training.plan))


def progress(training: Schedule) -> TrainingProgress | None:
    return None if training.plan is None else training.plan.progress


def _kill(training: Schedule) -> None:
    """Kill the job that runs, as the system does where memory runs out."""
    runner = training._trainer._jobs
    assert isinstance(runner, JobRunner)
    assert runner._child is not None
    runner._child.kill()


def _end(events: Events) -> JobEnded:
    event = events.get(timeout=300.0)
    assert isinstance(event, JobEnded)
    return event


def test_submission_is_logged_as_accepted_once_it_is_durable(
    store: Store, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose write failed is accepted, and logged, when the device has sent it to the next program."""
    accepted = AcceptedSubmissions(task.digest, task.file.settings, store)
    record = SubmissionRecord("a", round_state.Entry(1, digest_of(b"payload"), 0.0), 7, 10, 2, {0: 1, 2: 1})
    caplog.set_level(logging.INFO)
    with contextlib.suppress(StateError), store.transaction():
        accepted.add(record, b"payload")
        raise StateError("the disk is full")
    assert "submission accepted" not in caplog.text
    accepted = AcceptedSubmissions(task.digest, task.file.settings, store)
    with store.transaction():
        accepted.add(record, b"payload")
        accepted.flush()
    assert "submission accepted" not in caplog.text
    accepted.log()
    assert caplog.text.count("submission accepted") == 1
    assert store.blobs.read(digest_of(b"payload")) == b"payload"


def test_images_in_blocks_are_not_logged_as_prototypes(
    store: Store, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    """Where devices may upload blocks, the number of a submission is that of images."""
    accepted = AcceptedSubmissions(task.digest, task.file.settings, store, counts_images=True)
    record = SubmissionRecord(
        "a", round_state.Entry(1, digest_of(b"payload"), 0.0), 31096, 130, 104, {0: 104}
    )
    caplog.set_level(logging.INFO)
    with store.transaction():
        accepted.add(record, b"payload")
        accepted.flush()
    accepted.log()
    assert " images_in_prototypes=104 images=130 " in caplog.text
    assert " prototypes=" not in caplog.text


def test_stored_submissions_close_a_round(
    training: Schedule, events: Events, task: Task, store: Store
) -> None:
    """The table tells which are new; one that was deleted again does not count."""
    for device in "ab":
        submit(training, device)
        with store.transaction():
            store.submissions.delete("a", task.digest)
        training.tick()
        assert training._collection.count == (device == "b")
    assert training.plan is None
    submit(training, "c")
    training.tick()
    assert planned(training) == {"b", "c"}
    assert training.finish(_end(events))


def test_damaged_file_ends_the_program_once(
    training: Schedule, events: Events, task: Task, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The start writes it again, and trains at once; of one that is lost, the training fails until it is there."""
    assert task.first_tensors is not None
    blob = store.blobs.path(digest := task.first_tensors.digest)
    whole = blob.read_bytes()
    blob.write_bytes(b"damaged")
    _take(training, "ab")
    with pytest.raises(
        StateError, match=r"was damaged on disk and has been moved to .*: the next start writes it"
    ):
        training.finish(_end(events))
    assert 'closing a round failed round=0 failures=1 reason="' in caplog.text
    assert store.facts.get(LostFiles) == LostFiles((digest.hex(),))
    with patch.object(restoration, "prepare_task"):
        heal(task, store, [])
    restarted = Schedule(task, store, JobRunner(events.put))
    restarted.tick()
    assert not restarted.finish(_end(events))
    assert store.facts.get(LostFiles) == LostFiles((digest.hex(),))
    heal(task, store, [])
    assert blob.read_bytes() == whole
    assert store.facts.get(LostFiles) == LostFiles(())
    restarted = Schedule(task, store, JobRunner(events.put))
    restarted.tick()
    assert restarted.finish(_end(events))
    assert [head.devices for head in store.heads.all()] == [2]


def test_damaged_files_are_restored(training: Schedule, events: Events, task: Task, store: Store) -> None:
    """From a copy, or as the start writes them; what is in neither is lost."""
    _take(training, "ab")
    assert training.finish(_end(events))
    tensors = store.heads.all()[0].tensors
    assert tensors is not None
    digests = [task.digest, task.manifest.backbones[0].digest, tensors.digest]
    for digest in digests:
        store.blobs.path(digest).write_bytes(b"damaged")
    heal(task, store, digests)
    assert all(store.blobs.is_whole(digest) for digest in digests)
    assert len(list((store.folder / "damaged").iterdir())) == 3
    assert store.facts.get(LostFiles) is None
    store.blobs.path(tensors.digest).unlink()
    shutil.rmtree(store.folder / "training")
    heal(task, store, digests)
    assert store.facts.get(LostFiles) == LostFiles((tensors.digest.hex(),))


def test_killed_training_is_repeated(training: Schedule, events: Events, task: Task, store: Store) -> None:
    """After its delay, and by a restarted aggregator, which knows of the failures until there is a head."""
    _take(training, "ab")
    for failures in (1, 2):
        _kill(training)
        assert not training.finish(_end(events))
        failed = training.plan
        assert failed is not None
        assert (failed.failures, failed.problem) == (failures, KILLED)
        retry(training)
        training.tick()
    training.stop()
    restarted = Schedule(task, store, JobRunner((after := queue.SimpleQueue[JobEvent]()).put))
    restarted.tick()
    assert restarted.plan is not None
    assert restarted.plan.failures == 2
    assert restarted.finish(_end(after))
    assert store.heads.planned(task.digest) is None
    assert [head.devices for head in store.heads.all()] == [2]


def test_training_on_a_forgotten_device_is_stopped(
    training: Schedule, events: Events, task: Task, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Its end changes nothing, even if it has made a head; the round closes without the device."""
    caplog.set_level(logging.INFO)
    _take(training, "ab")
    job = training._trainer.job
    assert job is not None
    forget(store, "a")
    folder = folder_of(store, job)
    for name in ("head.onnx", "tensors.bin"):
        (folder / name).write_bytes(b"made of a and b")
    training.tick()
    assert not training._finish(job, Finished(Result(metrics={"seconds": 1.0})))
    assert not training.finish(_end(events))  # of the stopped process
    assert (store.heads.all(), training.plan) == ([], None)
    assert "failed" not in caplog.text
    training.tick()
    assert "training ended: an operator's command has changed what it is made of" in caplog.text
    assert training.plan is None  # the quorum is two
    _take(training, "c")
    assert planned(training) == {"b", "c"}
    training.stop()


def test_training_in_place_of_a_stopped_one_waits_for_its_end(
    training: Schedule, events: Events, task: Task, store: Store
) -> None:
    """Their folders have the same name: the end of the first is not that of the second."""
    _take(training, "abc")
    forget(store, "a")
    training.tick()
    assert training._trainer.job is None
    assert not training.finish(_end(events))
    training.tick()
    assert planned(training) == {"b", "c"}
    assert training.finish(_end(events))
    (head,) = store.heads.all(task.digest)
    assert set(store.members(head)) == {"b", "c"}


def test_adapter_that_needs_pytorch_is_logged(
    training: Schedule, task: Task, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    _take(training, "ab")
    job, plan = training._trainer.job, training.plan
    assert isinstance(job, RoundJob)
    assert plan is not None
    training.stop()
    for name in ("head.onnx", "tensors.bin"):
        (folder_of(store, job) / name).write_bytes(b"made of a and b")
    figures = {"adapter_missing": 1.0}
    store_head(task, store, plan, job, Result(metrics=figures))
    expected = f'the adapter was not tried head=1 reason="PyTorch is not installed: {INSTALL}"'
    assert expected in caplog.text


def test_damaged_submission_is_moved_apart_and_requested(events: Events, task: Task, store: Store) -> None:
    """The head is made of the others, if they are enough; the device's upload is accepted again, and counts."""
    alone = structs.replace(task.file, rounds=structs.replace(task.file.rounds, min_devices=1))
    task = replace(task, file=alone)
    training = Schedule(task, store, JobRunner(events.put))
    _take(training, "a")
    blob = store.blobs.path(store.submissions.all(task.digest)["a"].entry.digest)
    blob.write_bytes(bytes([blob.read_bytes()[0] ^ 1]) + blob.read_bytes()[1:])
    _take(training, "b")
    assert not training.finish(_end(events))
    assert [path.name for path in (store.folder / "damaged").iterdir()] == [blob.name]
    assert training.plan is not None
    assert training.plan.failures == 0
    (lost,) = store.submissions.lost(task.digest)
    assert (lost.device, lost.sha256) == ("a", blob.name)
    assert training.lost.requests() == [("a", Receipt(digest=bytes.fromhex(blob.name), status="missing"))]
    assert training.lost.requests() == []
    assert not store.holds("a", bytes.fromhex(blob.name))
    training.tick()
    assert training.finish(_end(events))
    assert [list(store.members(head)) for head in store.heads.all()] == [["b"]]
    assert _take(training, "a") == ["new"]
    assert store.submissions.lost(task.digest) == []


def test_missing_submission_is_requested_at_the_start(training: Schedule, task: Task, store: Store) -> None:
    _take(training, "a")
    store.blobs.path(store.submissions.all(task.digest)["a"].entry.digest).unlink()
    again = Schedule(task, store, NoJobs())
    assert store.submissions.all(task.digest) == {}
    assert [device for device, _ in again.lost.requests()] == ["a"]


def test_aggregator_killed_during_a_training_counts_as_a_failure(task: Task, store: Store) -> None:
    """Where memory runs out, the aggregator may be killed with its training."""
    _take(Schedule(task, store, NoJobs()), "ab")
    for failures in (1, 2):
        assert _restarted(task, store) == failures


def test_training_that_was_stopped_or_has_other_settings_has_not_failed(task: Task, store: Store) -> None:
    _take(Schedule(task, store, NoJobs()), "ab")
    for name in (STOPPED_FILE, JOB_FILE):
        _job_file(store).with_name(name).write_text("by the supervisor; before a device was released")
        assert _restarted(task, store) == 0


def _job_file(store: Store) -> Path:
    (file,) = (store.folder / "training").glob(f"*/{JOB_FILE}")
    return file


def _restarted(task: Task, store: Store) -> int:
    """Start the aggregator and its training again; return how often that has failed."""
    after = Schedule(task, store, NoJobs())
    after.tick()
    assert after.plan is not None
    assert after.plan.state == "training"
    return after.plan.failures


def test_failure_that_cannot_be_stored_is_one_of_the_next_start(
    training: Schedule, events: Events, task: Task, store: Store
) -> None:
    """The program ends, as on a full disk; the next one trains again."""
    _take(training, "ab")
    _kill(training)
    failure = _end(events)
    store.database.write("PRAGMA query_only = 1")
    with pytest.raises(StateError):
        training.finish(failure)
    store.database.write("PRAGMA query_only = 0")
    again = Schedule(task, store, JobRunner(events.put))
    again.tick()
    assert again.plan is not None
    assert again.plan.failures == 1
    assert again.finish(_end(events))
    assert [head.devices for head in store.heads.all()] == [2]


def test_head_whose_commit_was_not_reported_is_adopted(
    training: Schedule, events: Events, task: Task, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts once."""
    _take(training, "ab")
    finished = _end(events)

    def store_and_fail(*arguments: object) -> None:
        store_head(*arguments)  # type: ignore[arg-type]
        raise StateError("the connection was lost")

    monkeypatch.setattr(schedule, "store_head", store_and_fail)
    assert not training.finish(finished)
    training.tick()
    assert [head.version for head in store.heads.all(task.digest)] == [1]
    assert training.plan is None
    assert training.round is not None
    assert training.round.number == 1
    training.stop()


def test_interrupted_round_is_closed_again(
    task: Task, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The same submissions are used; later ones belong to the next round."""
    caplog.set_level(logging.INFO)
    before = Schedule(task, store, NoJobs())
    _take(before, "abc")
    _job_file(store).with_name(STOPPED_FILE).touch()
    events: Events = queue.SimpleQueue()
    after = Schedule(task, store, JobRunner(events.put))
    after.tick()
    assert "interrupted training resumed version=1" in caplog.text
    job = after._trainer.job
    assert isinstance(job, RoundJob)
    assert sorted(job.members) == ["a", "b"]
    assert after.finish(_end(events))
    (head,) = store.heads.all()
    assert sorted(store.members(head)) == ["a", "b"]
    assert sorted(store.submissions.all(task.digest)) == ["a", "b", "c"]


def test_progress_of_a_training_is_stored(training: Schedule) -> None:
    _take(training, "ab")
    training.store_progress(JobProgress(Path(), {"device": "cpu", "prototypes": 7}))
    assert progress(training) == TrainingProgress(1)
    training.store_progress(JobProgress(Path(), {"epoch": 4, "epochs": 15, "loss": 0.5}))
    assert progress(training) == TrainingProgress(1, epoch=4, epochs=15, loss=0.5)


def test_refused_submission_is_not_stored(training: Schedule, task: Task, store: Store) -> None:
    before = set(store.blobs.digests())
    assert _take(training, "a", number=1) == ["unknown_round"]
    assert set(store.blobs.digests()) == before
    assert store.submissions.all(task.digest) == {}


def test_batch_that_cannot_be_stored_is_undone(
    training: Schedule, events: Events, task: Task, store: Store
) -> None:
    """It closes no round, leaves neither blob nor row, and can be submitted again."""
    with pytest.raises(StateError), store.transaction():
        _take_both(training)
    training.tick()
    assert (training.plan, store.submissions.all(task.digest)) == (None, {})
    assert events.empty()
    assert _take(training, "ab") == ["new", "new"]
    assert training.finish(_end(events))


def _take_both(training: Schedule) -> None:
    for device in "ab":
        submit(training, device)
    raise StateError("the disk is full")


def test_replaced_submissions_are_deleted(
    training: Schedule, task: Task, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a minute, as what a device uploads all day would fill the disk; the newest one stays."""
    before = set(store.blobs.digests())
    started_s = store.clock.now_s()
    for number in range(1, 30):
        monkeypatch.setattr(store.clock, "now_s", lambda number=number: started_s + number * RETENTION_S / 3)
        verdict = submit(training, "a", sequence=number)
        training.tick()
        left = set(store.blobs.digests())
        assert verdict.counted_entry is not None
        assert before | {verdict.counted_entry.digest} <= left
        assert len(left - before) <= 3


def test_earlier_tasks_expire_although_no_head_is_made(
    training: Schedule, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet may keep one head for months, without a restart of the aggregator."""
    earlier, blob = digest_of(b"earlier"), store.blobs.put(b"submission")
    store.submissions.put(
        earlier, SubmissionRecord("a", round_state.Entry(1, blob, 0.0), 10, 10, 2, {0: 1, 2: 1})
    )
    started_s = store.clock.now_s()
    for days in (1, 2, 30):
        monkeypatch.setattr(store.clock, "now_s", lambda days=days: started_s + days * 24 * 3600)
        training.tick()
        assert blob in store.blobs
    monkeypatch.setattr(store.clock, "now_s", lambda: started_s + 31 * 24 * 3600)
    training.tick()
    assert store.tasks() == set()
    assert blob not in store.blobs
