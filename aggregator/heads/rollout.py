"""Which head the fleet uses: stores what the rollout logic decides, and makes the fleet's head manifest."""

import logging
import time
from dataclasses import replace
from pathlib import Path

from aggregator.coordination import canary_rollout, rollout_state
from aggregator.coordination.canary_comparison import CanaryResult
from aggregator.coordination.rollout_state import retained_heads, without_forgotten
from aggregator.graphs.fused_model import fuse
from aggregator.heads.operator_commands import with_heads
from aggregator.notices import HeadActivated, HeadRejected
from aggregator.storage.heads import CALIBRATED_FROM, HeadRecord
from aggregator.storage.store import Store
from aggregator.tasks.manifests import head_ref
from aggregator.tasks.retention import served_blobs
from aggregator.tasks.task_preparation import Task
from protocol.errors import BackboneMismatch, BlobLost, StateError
from protocol.log import event, notify
from protocol.storage.blobstore import file_digest, state_errors, write_atomically
from protocol.wire.messages import Evaluation, HeadManifest

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between queries for commands and online devices."""

READ_S = 15.0
"""Seconds between attempts to read a head's files, while the object store or the disk fails."""


class Rollout:
    """Which head of a task the fleet uses."""

    def __init__(self, task: Task, store: Store) -> None:
        self._task = task
        self._store = store
        self._settings = task.file.rollout
        self._state = store.heads.rollout(task.digest)
        self._poll_s = 0.0
        self._written = 0
        self._write_s = 0.0
        self._has_changed = True
        self._has_unused = False
        self._problems: dict[str, str] | None = None
        self._change = store.newest_change()
        self.manifest: HeadManifest | None = None
        """The manifest to publish; None if there is no head."""
        self._heads = self._read_heads()
        self.served = self._served()
        """Digests of the blobs that devices may request."""
        store.heads.put_rollout(task.digest, self._state)
        self.delete_unused()
        self._publish()
        if (trial := self._state.trial) is not None:  # what was stored while this program did not run
            for device, each in store.evaluations.of_head(task.digest, trial.version).items():
                self._evaluate(device, each)

    def tick(self, newest: int) -> None:
        """Apply the passing of time; `newest` is the version of the newest head.

        Raises StateError if a change cannot be stored; the next call tries again.
        """
        if newest > self._state.newest:
            self._heads = self._read_heads()
            for version in sorted(self._heads):
                before = int(self._heads[version].metrics.get(CALIBRATED_FROM, 0))
                now_s = self._store.clock.now_s()
                self._step(rollout_state.HeadAdded(version, now_s, calibrates=before))
            self.delete_unused()
        if time.monotonic() < self._poll_s:
            return
        self._poll_s = time.monotonic() + POLL_S
        self._read_evaluations()
        self._leave_forgotten()
        self._carry_out_commands()
        self._check_failures()
        if (trial := self._state.trial) is not None:
            devices = self._heads[trial.version].devices
            self._step(rollout_state.Ticked(self._store.clock.now_s(), self._store.devices.online(), devices))
        self._publish()
        if self._has_unused:
            self.delete_unused()

    def _evaluate(self, device: str, evaluation: Evaluation) -> None:
        """Apply a device's evaluation of a head; raises StateError if a change cannot be stored."""
        correct = sum(evaluation.correct)
        result = CanaryResult(
            correct=correct,
            images=correct + sum(evaluation.incorrect),
            previous_correct=sum(evaluation.previous_correct) if evaluation.previous_correct else None,
            problem=evaluation.problem,
        )
        if self._problems is not None and evaluation.head_version == self._state.current:
            self._problems[device] = evaluation.problem
        self._step(rollout_state.Evaluated(device, evaluation.head_version, result))

    def reload(self) -> None:
        """Return to the stored state after a failed write; raises StateError if it cannot be read."""
        self._state = self._store.heads.rollout(self._task.digest)
        self._written, self._write_s, self._has_changed = 0, 0.0, True
        self._problems = None

    def _read_evaluations(self) -> None:
        evaluations, newest = self._store.evaluations.changes(self._task.digest, since=self._change)
        for device, evaluation in evaluations:
            self._evaluate(device, evaluation)
        self._change = newest

    def _leave_forgotten(self) -> None:
        """Keep heads that learned from a forgotten device from becoming current."""
        newest = self._store.forgotten.newest_head(self._task.digest)
        if newest > self._state.forgotten:
            self._problems = None  # its evaluations are deleted
            self._enter(without_forgotten(self._state, newest))

    def _check_failures(self) -> None:
        """Reject the current head if too many devices report that they cannot use it, also long after its start."""
        version = self._state.current
        if not self._state.is_watched:
            return
        if self._problems is None:
            evaluations = self._store.evaluations.of_head(self._task.digest, version)
            self._problems = {device: each.problem for device, each in evaluations.items()}
        if not any(self._problems.values()):
            return
        counts = self._store.decisions(self._task.digest).counts
        problems = {device: problem for device, problem in self._problems.items() if counts(device)}
        failed = {device: problem for device, problem in problems.items() if problem}
        devices = len(self._store.devices.online() | problems.keys())
        self._step(rollout_state.FailuresReported(version, failed, devices))

    def _carry_out_commands(self) -> None:
        for number, command in self._store.commands.pending(self._task.digest).items():
            received = with_heads(self._store, self._task.digest, self._state, command)
            try:
                with self._store.transaction():  # otherwise a kill in between would carry it out twice
                    actions = self._step(received)
                    refusals = [
                        each.reason for each in actions if isinstance(each, rollout_state.RefuseCommand)
                    ]
                    self._store.commands.finish(number, next(iter(refusals), ""))
            except StateError:
                self.reload()
                raise

    def _step(self, happened: rollout_state.Event) -> tuple[rollout_state.Action, ...]:
        state, actions = canary_rollout.step(self._state, happened, settings=self._settings)
        self._enter(without_forgotten(state, state.forgotten))
        for action in actions:
            self._log_action(action)
        return actions

    def _enter(self, state: rollout_state.State) -> None:
        if state == self._state:
            return
        self._store.heads.put_rollout(self._task.digest, state)
        if state.current != self._state.current:
            self._problems = None
        self._has_unused |= bool(state.forgotten)
        self._state, self._has_changed = state, True
        # Before anything else can fail: what the manifest will name must be served.
        self.served = self._served()
        self._publish()

    def _publish(self) -> None:
        """Write the current head's files and make the manifest, if they have changed."""
        state, heads = self._state, self._heads
        if state.current and state.current != self._written and time.monotonic() >= self._write_s:
            self._write(heads[state.current])
        if not state.current or not self._has_changed:
            return
        trial = state.trial
        self.manifest = HeadManifest(
            task=self._task.digest,
            current=head_ref(heads[state.current]),
            candidate=head_ref(heads[trial.version]) if trial else None,
            canary_rank_limit=trial.rank_limit if trial else 0,
        )
        self._has_changed = False

    def _write(self, head: HeadRecord) -> None:
        try:
            write_current_files(self._task, self._store, head)
            self._written = head.version
        except CannotRead as error:
            self._write_s = time.monotonic() + READ_S
            event(
                log, logging.WARNING, "cannot read a head's file: retrying", head=head.version, reason=error
            )

    def _read_heads(self) -> dict[int, HeadRecord]:
        return {head.version: head for head in self._store.heads.all(self._task.digest)}

    def _served(self) -> set[bytes]:
        return served_blobs(self._task, list(self._heads.values()), self._state)

    @property
    def retained(self) -> set[int]:
        """The versions of the heads that are current or may become current."""
        return retained_heads(self._state, self._heads)

    def delete_unused(self) -> None:
        """Delete the files and evaluations of heads that can no longer become current, and the oldest records."""
        self._has_unused = False
        retained = self.retained
        self._store.evaluations.delete_except(self._task.digest, retained)
        kept = retained.union(sorted(self._heads)[-self._task.file.limits.kept_heads :])
        if self._heads.keys() - kept:
            self._store.heads.delete_except(self._task.digest, kept)
            self._heads = self._read_heads()
        if self._state.rejected.keys() - kept:
            rejected = {
                version: self._state.rejected[version] for version in self._state.rejected.keys() & kept
            }
            self._state = replace(self._state, rejected=rejected)
            self._store.heads.put_rollout(self._task.digest, self._state)

    def _log_action(self, action: rollout_state.Action) -> None:
        match action:
            case rollout_state.Activate(version=version, reason=reason):
                path = self._store.folder / "head.onnx"
                event(log, logging.INFO, "head activated", version=version, reason=reason or None, file=path)
                notify(HeadActivated(version=version, reason=reason))
            case rollout_state.OfferToCanaries(trial=trial):
                devices = ",".join(trial.awaited[:10])
                event(log, logging.INFO, "head offered to canaries", version=trial.version, devices=devices)
            case rollout_state.Reject(version=version, reason=reason):
                current = self._state.current
                event(log, logging.WARNING, "head rejected", version=version, current=current, reason=reason)
                notify(HeadRejected(version=version, reason=reason))
            case rollout_state.RefuseCommand(reason=reason):
                event(log, logging.WARNING, "operator's command refused", reason=reason)


class CannotRead(StateError):
    """A blob that is not lost cannot be read now."""


def write_current_files(task: Task, store: Store, head: HeadRecord) -> None:
    """Write `head.onnx` and `model.onnx` into the state directory; without a lost blob, delete the older ones.

    The model is written first, so that the digest of `head.onnx` shows that both are written.

    Raises:
        CannotRead: the object store or the disk fails; the older files are kept.
        StateError: the files cannot be written.
    """
    path = store.folder / "head.onnx"
    if not (path.is_file() and file_digest(path) == head.file):
        data = _read(store, head.file, head) if head.file else None
        _replace(store.folder / "model.onnx", _model(task, store, head, data))
        _replace(path, data)


def _model(task: Task, store: Store, head: HeadRecord, data: bytes | None) -> bytes | None:
    """Return backbones and head as one file: the training's if it is still there, otherwise fused again."""
    if data is None:
        return None
    name = f"head-{head.version}" if head.tensors is None else f"round-{head.version - 1}"
    made = store.folder / "training" / name
    if (made / "model.onnx").is_file() and file_digest(made / "head.onnx") == head.file:
        with state_errors(made):
            return (made / "model.onnx").read_bytes()
    files = [_read(store, backbone.digest, head) for backbone in task.manifest.backbones]
    backbones = [file for file in files if file is not None]
    try:
        return fuse(backbones, data) if len(backbones) == len(files) else None
    except BackboneMismatch as error:
        event(log, logging.WARNING, "cannot write model.onnx", head=head.version, reason=error)
        return None


def _read(store: Store, digest: bytes, head: HeadRecord) -> bytes | None:
    try:
        return store.blobs.read(digest)
    except BlobLost as error:
        event(log, logging.ERROR, "cannot read a head's file", head=head.version, reason=error)
        store.report_lost(digest)
        return None
    except StateError as error:
        raise CannotRead(str(error)) from error


def _replace(path: Path, data: bytes | None) -> None:
    """Write a file, or delete an older one."""
    if data is not None:
        write_atomically(path, data)
    else:
        with state_errors(path):
            path.unlink(missing_ok=True)
