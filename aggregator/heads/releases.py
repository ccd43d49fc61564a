"""Heads for the fleet: what the rollout logic decides is stored, told to devices, and put where people look."""

import logging
import time
from pathlib import Path

import onnx

from aggregator.coordination import rollout
from aggregator.graphs.fuse import fuse
from aggregator.heads.operator_commands import usable_heads
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.tasks.manifests import head_manifest
from aggregator.tasks.retention import needed_blobs, served_blobs
from aggregator.tasks.task import Task
from protocol.errors import BackboneMismatch, StateError
from protocol.storage.blobstore import file_digest, state_errors, write_atomically
from protocol.wire.messages import Evaluation, HeadManifest

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between looks for orders and for devices."""


class Releases:
    """Which head of a task the fleet uses.

    Args:
        task: what the heads are of.
        store: where it goes on from.

    Attributes:
        manifest: what the fleet is told; None if there is no head.
        served: digests of the blobs that devices may ask for.
    """

    def __init__(self, task: Task, store: Store) -> None:
        self._task = task
        self._store = store
        self._settings = task.file.rollout
        self._state = store.heads.rollout(task.digest)
        self._look_s = 0.0
        self._shown = 0
        self._is_due = True
        self.manifest: HeadManifest | None = None
        self._heads = self._read_heads()
        self.served = self._served()
        store.heads.put_rollout(task.digest, self._state)
        self._tidy()
        self._release()

    def tick(self, newest: int) -> None:
        """Let time pass; `newest` is the version of the newest head.

        Raises:
            StateError: what has changed cannot be stored; the next call tries again.
        """
        if newest > self._state.newest:
            self._heads = self._read_heads()
            for version in sorted(self._heads):
                self._take(rollout.HeadAdded(version, time.time()))
            self._tidy()
        if time.monotonic() < self._look_s:
            return
        self._look_s = time.monotonic() + LOOK_S
        self._take_orders()
        if self._state.trial is not None:
            self._take(rollout.Ticked(time.time(), self._store.devices.online()))
        self._release()

    def take(self, device: str, evaluation: Evaluation) -> None:
        """Take what a device says of a head.

        Raises:
            StateError: what has changed cannot be stored.
        """
        self._take(rollout.Evaluated(device, evaluation.head_version, answer_of(evaluation)))

    def go_back(self) -> None:
        """Go back to what the store has: what was taken since could not be stored."""
        self._state = self._store.heads.rollout(self._task.digest)
        self._shown, self._is_due = 0, True

    def _take_orders(self) -> None:
        for order in self._store.commands.pending(self._task.digest):
            heads = usable_heads(self._store, self._task.digest)
            try:
                with self._store.transaction():  # or else a kill in between would carry it out twice
                    actions = self._take(rollout.CommandReceived(order.kind, order.version, heads))
                    why = next(
                        (action.reason for action in actions if isinstance(action, rollout.RefuseCommand)), ""
                    )
                    self._store.commands.finish(order.number, why)
            except StateError:
                self.go_back()
                raise

    def _take(self, event: rollout.Event) -> tuple[rollout.Action, ...]:
        state, actions = rollout.step(self._state, event, settings=self._settings)
        if state != self._state:
            self._store.heads.put_rollout(self._task.digest, state)
            self._state, self._is_due = state, True
            # Whatever cannot be written below: what devices are told to use sooner or later is there for them.
            self.served = self._served()
            self._release()
        for action in actions:
            self._tell(action)
        return actions

    def _release(self) -> None:
        """Say what holds."""
        state, heads = self._state, self._heads
        if state.current and state.current != self._shown:
            self._show(heads[state.current])
        if not state.current or not self._is_due:
            return
        trial = state.trial
        self.manifest = head_manifest(
            self._task.digest,
            heads[state.current],
            candidate=heads[trial.version] if trial else None,
            canary_rank_limit=trial.rank_limit if trial else 0,
        )
        self._is_due = False

    def _read_heads(self) -> dict[int, HeadRecord]:
        return {row.version: row for row in self._store.heads.all(self._task.digest)}

    def _served(self) -> set[bytes]:
        return served_blobs(self._task, list(self._heads.values()), self._state)

    def _tidy(self) -> None:
        """Forget the heads that nobody can be told to use any more: their files, and what devices said of them."""
        self._store.evaluations.delete_except(
            self._task.digest, rollout.retained_heads(self._state, self._heads)
        )
        self._store.blobs.keep_only(needed_blobs(self._task, self._store))

    def _show(self, row: HeadRecord) -> None:
        """Put the current head where people look for it; the model first, so that the head says whether both are."""
        path = self._store.folder / "head.onnx"
        if not (path.is_file() and file_digest(path) == row.file):
            head = self._read(row.file) if row.file else None
            _put(self._store.folder / "model.onnx", self._model(row, head))
            _put(path, head)
        self._shown = row.version

    def _read(self, digest: bytes) -> bytes | None:
        try:
            return self._store.blobs.read(digest)
        except StateError as error:
            log.error("there is no file of head %d: %s", self._state.current, error)
            return None

    def _model(self, row: HeadRecord, head: bytes | None) -> bytes | None:
        """Backbone and head as one file, if there is one backbone; as the training has left it, or made again."""
        manifest = self._task.manifest
        if head is None or len(manifest.backbones) != 1:
            return None
        name = f"head-{row.version}" if row.tensors is None else f"round-{row.version - 1}"
        made = self._store.folder / "training" / name
        if (made / "model.onnx").is_file() and file_digest(made / "head.onnx") == row.file:
            with state_errors(made):
                return (made / "model.onnx").read_bytes()
        backbone = self._read(manifest.backbones[0].digest)
        try:
            return None if backbone is None else fuse(backbone, head)
        except (BackboneMismatch, onnx.checker.ValidationError, ValueError, RuntimeError) as error:
            log.warning("no model.onnx of head %d: %s", row.version, error)
            return None

    def _tell(self, action: rollout.Action) -> None:
        path = self._store.folder / "head.onnx"
        match action:
            case rollout.Activate(version=version, reason=reason):
                log.info("head %d goes to all devices%s; %s", version, f": {reason}" if reason else "", path)
            case rollout.OfferToCanaries(trial=trial):
                log.info(
                    "head %d is a candidate: it waits for %s", trial.version, ", ".join(trial.awaited[:10])
                )
            case rollout.Reject(version=version, reason=reason):
                log.warning("head %d is rejected, head %d stays: %s", version, self._state.current, reason)
            case rollout.RefuseCommand(reason=reason):
                log.warning("an order was not carried out: %s", reason)


def answer_of(evaluation: Evaluation) -> rollout.CanaryResult:
    """What an evaluation says to the rollout logic."""
    right = sum(evaluation.correct)
    return rollout.CanaryResult(
        correct=right,
        images=right + sum(evaluation.incorrect),
        previous_correct=sum(evaluation.previous_correct) if evaluation.previous_correct else None,
        problem=evaluation.problem,
    )


def _put(path: Path, data: bytes | None) -> None:
    """Write a file; where there is none, an older one must not be taken for it."""
    if data is not None:
        write_atomically(path, data)
    else:
        with state_errors(path):
            path.unlink(missing_ok=True)
