"""Which head the fleet uses: stores what the rollout logic decides, and makes the fleet's head manifest."""

import time

from aggregator.coordination import canary_rollout, rollout_state
from aggregator.coordination.rollout_state import retained_heads, without_forgotten
from aggregator.heads.current_files import CurrentFiles
from aggregator.heads.head_rate import HOUR_S
from aggregator.heads.rollout_steps import log_action, with_made_heads
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.tasks.manifests import head_ref
from aggregator.tasks.retention import served_blobs
from aggregator.tasks.task_preparation import Task
from protocol.wire.messages import HeadManifest

POLL_S = 0.5
"""Seconds between two decisions."""


class Rollout:
    """Which head of a task the fleet uses: the heads' rows say so, and this changes them."""

    def __init__(self, task: Task, store: Store) -> None:
        self._task = task
        self._store = store
        self._settings = task.file.rollout
        self._poll_s = 0.0
        self._change = -1
        """The number of the change at which nothing was left to decide but by the time."""
        self._heads = dict[int, HeadRecord]()
        """The heads that were made, as they were read last."""
        self.state = rollout_state.State()
        """The rollout, as it was read last."""
        self.files = CurrentFiles(task, store)
        self.manifest: HeadManifest | None = None
        """The manifest to publish; None if there is no head."""
        self.served: set[bytes] = set()
        """Digests of the blobs that devices may request."""
        self._read()
        self.delete_unused()
        self._publish()

    def tick(self, *, at_once: bool = False) -> None:
        """Apply new heads, evaluations and the passing of time to the rollout, and read what a command has changed.

        With `at_once`, a head has been made, or a command carried out.

        Raises StateError if a change cannot be stored; the next call tries again.
        """
        if time.monotonic() < self._poll_s and not at_once:
            return
        self._poll_s = time.monotonic() + POLL_S
        change = self._store.newest_change()
        if change != self._change or self.state.trial is not None:
            self._decide(change)
        self._publish()

    def write_files(self) -> None:
        """Write the files of the current head; raises StateError if they cannot be written."""
        if self.state.current:
            self.files.tick(self._heads[self.state.current])

    def _decide(self, change: int) -> None:
        known = self.state
        with self._store.snapshot():
            self._read()
            after, actions = self._decided()
        if after != self.state:
            with self._store.transaction():
                self._store.heads.put_rollout(self._task.digest, after)
            self._read()
            for action in actions:
                log_action(self._store, self.state, action)
            change = -1  # the next tick decides again
        if change < 0 or self.state.current != known.current:  # also by an operator's command
            self.delete_unused()
        self._change = change

    def _decided(self) -> tuple[rollout_state.State, list[rollout_state.Action]]:
        """Return the rollout after all that has happened, and what follows."""
        now_s = self._store.clock.now_s()
        state, added = with_made_heads(self.state, self._heads, now_s=now_s, settings=self._settings)
        actions = list(added)

        def step(happened: rollout_state.Event) -> None:
            nonlocal state
            state, done = canary_rollout.step(state, happened, settings=self._settings)
            state = without_forgotten(state, state.forgotten)
            actions.extend(done)

        if (trial := state.trial) is not None:
            step(rollout_state.Evaluated(trial.version, {}))  # it has the answers that are stored
        if state.is_watched and (failed := self._failures(state.current)) is not None:
            step(failed)
        if (trial := state.trial) is not None:
            devices = self._heads[trial.version].devices
            step(rollout_state.Ticked(now_s, self._store.devices.online(), devices))
        return state, actions

    def _failures(self, version: int) -> rollout_state.FailuresReported | None:
        """Return which devices cannot use the current head, also long after its start; None if all can."""
        results = self._store.evaluations.results(self._task.digest, version)
        if not any(result.problem for result in results.values()):
            return None
        counts = self._store.decisions(self._task.digest).counts
        problems = {device: result.problem for device, result in results.items() if counts(device)}
        failed = {device: problem for device, problem in problems.items() if problem}
        devices = len(self._store.devices.online() | problems.keys())
        return rollout_state.FailuresReported(version, failed, devices)

    def _read(self) -> None:
        """Read the heads and the rollout; what the manifest will name is served from now on."""
        self._heads = {head.version: head for head in self._store.heads.all(self._task.digest)}
        self.state = self._store.heads.rollout_among(self._heads.values(), self._task.digest)
        self.served = served_blobs(self._task, list(self._heads.values()), self.state)

    def _publish(self) -> None:
        """Make the manifest of the current head."""
        state, heads = self.state, self._heads
        if not state.current:
            return
        trial = state.trial
        self.manifest = HeadManifest(
            task=self._task.digest,
            current=head_ref(heads[state.current]),
            candidate=head_ref(heads[trial.version]) if trial else None,
            canary_rank_limit=trial.rank_limit if trial else 0,
        )

    @property
    def retained(self) -> set[int]:
        """The versions of the heads that are current or may become current."""
        return retained_heads(self.state, self._heads)

    def delete_unused(self) -> None:
        """Delete the evaluations of heads that can no longer become current, and the oldest records."""
        task, retained = self._task.digest, self.retained
        kept = retained.union(sorted(self._heads)[-self._task.file.limits.kept_heads :])
        since_s = self._store.clock.now_s() - HOUR_S  # they count for `limits.heads_per_hour`
        unused = [
            head
            for version, head in self._heads.items()
            if version not in kept and head.started_s <= max(since_s, 0.0)
        ]
        with self._store.transaction():
            self._store.evaluations.delete_except(task, retained)
            for head in unused:
                self._store.heads.delete(task, head.version)
        if unused:
            self._read()
