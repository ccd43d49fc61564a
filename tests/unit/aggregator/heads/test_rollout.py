"""Heads in the fleet: their files, decisions about them, commands and restarts."""

import dataclasses
import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from aggregator.commands.operator_commands import make_current
from aggregator.config.limits import Limits
from aggregator.config.task_file import load_task
from aggregator.coordination.rollout_state import Settings, State
from aggregator.heads import current_files, rollout
from aggregator.heads.rollout import Rollout
from aggregator.status import model
from aggregator.status.collect import collect_status
from aggregator.storage.blobs import FolderBlobs
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.tasks.task_preparation import Task, prepare_task
from protocol.errors import ConfigError, StateError
from protocol.wire.codec import digest_of
from protocol.wire.messages import Evaluation, HeadRef
from tests.support.fleets.aggregator_process import write_task
from tests.support.messages.heads import add_head, initial_state
from tests.support.messages.submissions import SERVED
from tests.support.simulation.releases import write_files


def _evaluation(task: bytes, correct: int, *, previous: int | None = None, problem: str = "") -> Evaluation:
    return Evaluation(
        task=task,
        head_version=2,
        correct=(correct, 0, 0),
        incorrect=(0 if problem else 10 - correct, 0, 0),
        previous_correct=() if previous is None else (previous, 0, 0),
        problem=problem,
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "state")


@pytest.fixture
def task(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    """A task in the store, whose commands and evaluations are read at each tick."""
    monkeypatch.setattr(rollout, "POLL_S", 0.0)
    return prepare_task(*load_task(write_task(tmp_path)), store=store)


def _current(releases: Rollout) -> HeadRef:
    assert releases.manifest is not None
    return releases.manifest.current


def _add_head(store: Store, task: bytes, *versions: int, file: bytes = b"") -> bytes:
    """Store heads, with a file that needs only features if it is given; return the digest of the last one."""
    for version in versions:
        digest = store.blobs.put(file or b"head %d" % version)
        written = digest if file else b""
        fields = {"digest": digest, "size_bytes": 6, "file": written}
        add_head(store, version, task=task, members={"a": bytes(32)}, is_used=False, **fields)
    return digest


def _rolled_out(store: Store, task: Task, count: int) -> Rollout:
    """Let the fleet use heads one after the other."""
    releases = Rollout(task, store)
    for version in range(1, count + 1):
        _add_head(store, task.digest, version, file=b"head %d" % version)
        releases.tick()
    return releases


def test_head_is_served_although_its_file_could_not_be_written(store: Store, task: Task) -> None:
    """A disk that is full for a moment has no lasting effect."""
    releases = Rollout(task, store)
    digest = _add_head(store, task.digest, 1)
    releases.tick()
    (store.folder / "head.onnx").mkdir()
    with pytest.raises(StateError):
        write_files(releases)
    assert _current(releases).head.digest == digest
    assert digest in releases.served


def test_files_of_a_head_are_written_after_a_failure_of_the_object_store(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The head is published meanwhile, and the older files are kept."""
    monkeypatch.setattr(current_files, "RETRY_S", 0.0)
    head = store.folder / "head.onnx"
    head.write_bytes(b"of an earlier head")
    releases = Rollout(task, store)
    _add_head(store, task.digest, 1, file=b"new")
    with monkeypatch.context() as failure:
        failure.setattr(store.blobs, "read", _fail)
        releases.tick()
        write_files(releases)
        assert _current(releases).version == 1
        assert head.read_bytes() == b"of an earlier head"
        assert "cannot read a head's file: retrying head=1" in caplog.text
    write_files(releases)
    assert head.read_bytes() == b"new"


def _fail(digest: bytes) -> bytes:
    raise StateError("cannot use the object store")


def test_head_that_cannot_be_fused_is_published(
    store: Store, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a model.onnx, which would otherwise be an earlier head's; the log has the reason."""
    (store.folder / "model.onnx").write_bytes(b"of an earlier head")
    digest = _add_head(store, task.digest, 1, file=b"broken")
    releases = Rollout(task, store)
    releases.tick()
    assert _current(releases).head.digest == digest
    write_files(releases)
    assert (store.folder / "head.onnx").read_bytes() == b"broken"
    assert not (store.folder / "model.onnx").exists()
    assert 'cannot write model.onnx head=1 reason="onnx cannot merge' in caplog.text


def test_oldest_heads_are_deleted(store: Store, task: Task) -> None:
    """With what was stored of them; the newest `kept_heads`, and those that a rollback can return to, stay."""
    task = dataclasses.replace(task, file=replace(task.file, limits=Limits(kept_heads=10)))
    _add_head(store, task.digest, *range(1, 40))
    rejected = dict.fromkeys(range(2, 40), "worse")
    store.heads.put_rollout(task.digest, State(newest=39, current=1, rejected=rejected))
    Rollout(task, store)
    assert [head.version for head in store.heads.all(task.digest)] == [1, *range(30, 40)]
    assert store.heads.rollout(task.digest).rejected.keys() == set(range(30, 40))
    newest = store.heads.newest(task.digest)
    assert newest is not None
    assert newest.version == 39


def test_command_is_carried_out_once(store: Store, task: Task) -> None:
    """If a head's row cannot be stored, none is changed; otherwise a rollback would happen twice."""
    store.facts.put(replace(SERVED, digest=task.digest))
    releases = _rolled_out(store, task, 3)
    before = store.heads.all(task.digest)
    store.database.write(
        "CREATE TEMP TRIGGER full BEFORE UPDATE ON heads WHEN new.version = 3 BEGIN SELECT RAISE(ABORT, 'full'); END"
    )
    with pytest.raises(StateError, match="full"):
        make_current(store, "rollback")
    assert store.heads.all(task.digest) == before
    store.database.write("DROP TRIGGER full")
    assert make_current(store, "rollback") == "head 2 will be current when the aggregator is started"
    releases.tick()
    assert _current(releases).version == store.heads.rollout(task.digest).current == 2


def test_command_logs_and_counts_a_head_that_was_made_just_before(
    store: Store, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    """The rollback overrides it: the next start does not give it to devices."""
    caplog.set_level(logging.INFO)
    store.facts.put(replace(SERVED, digest=task.digest))
    _rolled_out(store, task, 1)
    _add_head(store, task.digest, 2)
    make_current(store, "rollback", 1)
    assert 'head activated version=1 reason="rolled back by an operator"' in caplog.text
    releases = Rollout(task, store)
    releases.tick()
    assert _current(releases).version == 1
    assert store.heads.rollout(task.digest).rejected == {2: "rolled back to head 1"}


def test_promotion_without_a_candidate_is_refused(store: Store, task: Task) -> None:
    store.facts.put(replace(SERVED, digest=task.digest))
    _rolled_out(store, task, 1)
    with pytest.raises(ConfigError, match="there is no candidate to promote"):
        make_current(store, "promote")


def _report(releases: Rollout, store: Store, device: str, problem: str, *, head: int = 2) -> None:
    """Let a device report on head 2, and time pass."""
    report = replace(_evaluation(releases.manifest.task, 10, problem=problem), head_version=head)  # type: ignore[union-attr]
    store.evaluations.put(device, report, digest=device.encode(), now_s=0.0)
    releases.tick()


def test_current_head_that_fails_on_devices_is_rejected(
    store: Store, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    """Each device counts once, by its last report; also those from before a restart, and not revoked ones."""
    _add_head(store, task.digest, 1, 2)
    releases = Rollout(task, store)
    releases.tick()
    store.devices.put_presence("silent", "online", now_s=0.0)
    for device in ("a", "a", "b", "c", "d", "e", "f"):
        _report(releases, store, device, "")
    for device, problem in (("b", "it gives NaN"), ("b", ""), ("a", "it gives NaN")):
        _report(releases, store, device, problem)
        _report(releases, store, device, problem, head=1)
    store.keys.enroll("c", bytes(32), serial="", now_s=0.0)
    store.keys.revoke("c", now_s=0.0)
    _report(releases, store, "c", "it gives NaN")
    assert _current(releases).version == 2
    releases = Rollout(task, store)
    _report(releases, store, "d", "it gives NaN")
    assert _current(releases).version == store.heads.rollout(task.digest).current == 1
    reason = "2 of 6 devices cannot use it, such as a: it gives NaN"
    assert f'head rejected version=2 current=1 reason="{reason}"' in caplog.text


def test_evaluations_of_canaries_decide(store: Store, task: Task) -> None:
    """Also if this program has ended since they were stored."""
    task = dataclasses.replace(
        task, file=replace(task.file, rollout=Settings(canary_fraction=1.0, min_canaries=1))
    )
    _add_head(store, task.digest, 1)
    Rollout(task, store).tick()
    _add_head(store, task.digest, 2, 3)
    for device in "ab":
        store.devices.put_presence(device, "online", now_s=0.0)

    def _stored(device: str, head: int) -> None:
        report = replace(_evaluation(task.digest, 10, previous=10), head_version=head)
        store.evaluations.put(device, report, digest=device.encode(), now_s=0.0)

    releases = Rollout(task, store)
    releases.tick()
    _stored("a", 3)
    releases.tick()
    assert store.heads.rollout(task.digest).current == 1
    _stored("b", 3)
    Rollout(task, store).tick()
    assert store.heads.rollout(task.digest).current == 3


def test_commands_apply_at_the_next_start(store: Store, task: Task) -> None:
    """Commands to a stopped aggregator change its rows at once, one after the other."""
    store.facts.put(replace(SERVED, digest=task.digest))
    _rolled_out(store, task, 3)
    for version in (2, 1):
        outcome = make_current(store, "rollback")
        assert outcome == f"head {version} will be current when the aggregator is started"
    assert collect_status(store).rollout == model.Rollout(newest=3, current=1, candidate=None)
    releases = Rollout(task, store)
    releases.tick()
    assert _current(releases).version == 1
    write_files(releases)
    assert (store.folder / "head.onnx").read_bytes() == b"head 1"
    _add_head(store, task.digest, 4)
    releases.tick()
    assert _current(releases).version == 4


def test_rollback_to_a_head_without_blobs_is_refused(store: Store) -> None:
    store.facts.put(replace(SERVED, digest=bytes(32)))
    _add_head(store, bytes(32), 1, 2)
    store.heads.put_rollout(bytes(32), initial_state([1, 2]))
    store.blobs.path(digest_of(b"head 1")).unlink()
    with pytest.raises(ConfigError, match=r"head 1 cannot be used any more: its files were deleted"):
        make_current(store, "rollback")


def test_command_asks_for_the_blobs_of_its_head_only(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question is a request to an object store, and the aggregator takes no uploads meanwhile."""
    releases = _rolled_out(store, task, 5)
    store.facts.put(replace(SERVED, digest=task.digest))
    asked = list[bytes]()
    contains = FolderBlobs.__contains__

    def counted(blobs: FolderBlobs, digest: bytes) -> bool:
        asked.append(digest)
        return contains(blobs, digest)

    monkeypatch.setattr(FolderBlobs, "__contains__", counted)
    commands: tuple[tuple[int | None, int], ...] = ((None, 4), (3, 3))
    for named, head in commands:
        make_current(store, "rollback", named)
        releases.tick()
        assert store.heads.rollout(task.digest).current == head
    assert asked == [digest_of(b"head 4"), digest_of(b"head 3")]
