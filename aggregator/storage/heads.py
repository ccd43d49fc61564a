"""Trained heads: their rollout, and their evaluations by devices."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from aggregator.config.training_packages import INSTALL
from aggregator.coordination import rollout_state
from aggregator.coordination.canary_comparison import CanaryResult
from aggregator.coordination.rollout_state import without_forgotten
from aggregator.storage.changes import change
from aggregator.storage.quarantine import ForgottenDevices
from protocol.storage.facts import Tables
from protocol.wire.messages import BlobRef, Evaluation

CALIBRATED_FROM = "calibrated_from"
"""The metric of a calibrated head that names the version whose weights it has."""

ADAPTER_MISSING = "adapter_missing"
"""The metric, 1, of a head in closed form for which an adapter would have been trained with PyTorch."""

NO_PYTORCH = f"PyTorch is not installed: {INSTALL}"


HeadState = Literal["planned", "training", "made", "trial", "current", "earlier", "rejected"]
"""A head is planned, trained (more than once if a training fails), made, and then used by some or all devices.

Of the heads that were current, `earlier` ones, a rollback returns to those with a `place`.
"""

HeadKind = Literal["training", "round", "sum", "calibration"]


class TrainingProgress(msgspec.Struct, frozen=True):
    """The running training of a head."""

    version: int
    epoch: int = 0
    epochs: int | None = None
    loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class HeadRecord:
    """A head of a task, from its plan on."""

    task: bytes
    version: int
    kind: HeadKind = "training"
    state: HeadState = "planned"

    up_to: int = 0
    """The number of the last change that it covers: later submissions are in no head yet."""
    members: bytes = b""
    """Digest of the blob that names the submissions it is planned of (`Store.members`)."""
    devices: int = 0
    """Devices that it is made of, without those that were excluded; until then, those it is planned of."""

    attempt: int = 0
    """Trainings of it that were started."""
    started_s: float = 0.0
    """When the last of them was (elapsed seconds); 0 for a calibration, which is no training."""
    progress: TrainingProgress | None = None
    failures: int = 0
    """Trainings of it that have failed."""
    problem: str = ""
    """Why the last one has failed."""
    failed_s: float = 0.0
    """When (unix seconds)."""
    retry_s: float = 0.0
    """When the next one starts (elapsed seconds)."""

    digest: bytes = b""
    """Digest of the blob that devices download."""
    size_bytes: int = 0
    trained_s: float = 0.0
    prototypes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    tensors: BlobRef | None = None
    """The tensors that the next round starts from, if the task has rounds."""
    file: bytes = b""
    """Digest of the ONNX file that needs only features."""
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Device to the hex digest of its submission, for those that outlier detection excluded; of the newest head."""
    warning: str = ""
    """Why outliers were not quarantined."""
    limited: tuple[str, ...] = ()
    """Which devices' images count only in part, and by which rule."""

    place: int = 0
    """The order of heads that a rollback returns to, the last one last; 0 for the others."""
    is_watched: bool = False
    """The current head is rejected if too many devices cannot use it."""
    trial: rollout_state.Trial | None = None
    """The canaries of a candidate, without their answers, which are its evaluations."""
    reason: str = ""
    """Why it is not to be used."""


def is_planned(head: HeadRecord) -> bool:
    """Return True if a head is not made yet."""
    return head.state in {"planned", "training"}


def placed(head: HeadRecord, rollout: rollout_state.State) -> HeadRecord:
    """Return a head with its part of a rollout."""
    version, trial = head.version, rollout.trial
    if is_planned(head) or version > rollout.newest:
        return head
    reason, place, is_trial = (
        rollout.rejected.get(version, ""),
        0,
        trial is not None and trial.version == version,
    )
    state: HeadState = "rejected" if reason else "earlier"
    if version in rollout.earlier:
        state, place = "earlier", rollout.earlier.index(version) + 1
    elif version == rollout.current:
        state = "current"
    elif is_trial:
        state = "trial"
    return replace(
        head,
        state=state,
        place=place,
        reason=reason,
        is_watched=rollout.is_watched and state == "current",
        trial=replace(trial, answers={}) if trial is not None and is_trial else None,
    )


def rollout_of(heads: Iterable[HeadRecord]) -> rollout_state.State:
    """Return the rollout that heads are part of, without the canaries' answers."""
    known = [head for head in heads if not is_planned(head) and head.state != "made"]
    current = next((head for head in known if head.state == "current"), None)
    return rollout_state.State(
        newest=max((head.version for head in known), default=0),
        current=current.version if current is not None else 0,
        earlier=tuple(head.version for head in sorted(known, key=lambda head: head.place) if head.place),
        is_watched=current is not None and current.is_watched,
        trial=next((head.trial for head in known if head.trial is not None), None),
        rejected={head.version: head.reason for head in known if head.reason},
    )


@dataclass
class Heads:
    """The table `heads`."""

    _database: Tables
    _forgotten: ForgottenDevices
    _evaluations: "Evaluations"

    def put(self, head: HeadRecord) -> None:
        """Store a head in place of its earlier record, in a transaction of the caller."""
        record = msgspec.json.encode(head).decode()
        with change(self._database):
            self._database.write(
                "INSERT INTO heads VALUES (?, ?, ?, ?, ?) ON CONFLICT (task, version) DO UPDATE SET "
                "state = excluded.state, started_s = excluded.started_s, record = excluded.record",
                *(head.task, head.version, head.state, head.started_s, record),
            )

    def put_progress(self, head: HeadRecord) -> None:
        """Store the progress of a training, on which nothing depends."""
        record = msgspec.json.encode(head).decode()
        self._database.write(
            "UPDATE heads SET record = ? WHERE task = ? AND version = ?", record, head.task, head.version
        )

    def planned(self, task: bytes) -> HeadRecord | None:
        """Return the head that is planned or trained now; at most one of a task is."""
        return next(iter(self._read("task = ? AND state IN ('planned', 'training')", task)), None)

    def all_planned(self) -> list[HeadRecord]:
        """Return the planned heads of all tasks."""
        return self._read("state IN ('planned', 'training')")

    def newest(self, task: bytes) -> HeadRecord | None:
        """Return the newest head that was made."""
        heads = self._read(
            "task = ? AND state NOT IN ('planned', 'training') ORDER BY version DESC LIMIT 1", task
        )
        return next(iter(heads), None)

    def all(self, task: bytes | None = None) -> list[HeadRecord]:
        """Return the heads of a task that were made, or of all tasks, oldest first."""
        return self._read(
            "(task = ? OR ?) AND state NOT IN ('planned', 'training') ORDER BY version",
            task or b"",
            task is None,
        )

    def _read(self, clauses: str, *values: object) -> list[HeadRecord]:
        rows = self._database.read(f"SELECT record FROM heads WHERE {clauses}", *values)  # noqa: S608 - of this class
        return [self._database.decode(record, HeadRecord) for (record,) in rows]

    def delete(self, task: bytes, version: int) -> None:
        with change(self._database):
            self._database.write("DELETE FROM heads WHERE task = ? AND version = ?", task, version)

    def delete_task(self, task: bytes) -> None:
        with change(self._database):
            self._database.write("DELETE FROM heads WHERE task = ?", task)

    def starts_s(self, task: bytes) -> list[float]:
        """Return when each head of a task was trained last (elapsed seconds), in order; calibrations are not."""
        rows = self._database.read(
            "SELECT started_s FROM heads WHERE task = ? AND started_s > 0 ORDER BY started_s", task
        )
        return [started_s for (started_s,) in rows]

    def put_rollout(self, task: bytes, rollout: rollout_state.State) -> None:
        """Store in the heads of a task what a rollout makes of them, in a transaction of the caller."""
        for head in self.all(task):
            if (after := placed(head, rollout)) != head:
                self.put(after)

    def rollout(self, task: bytes) -> rollout_state.State:
        """Return which head of a task is current, candidate or rejected."""
        return self.rollout_among(self.all(task), task)

    def rollout_among(self, heads: Iterable[HeadRecord], task: bytes) -> rollout_state.State:
        """Return the rollout of all heads of a task that were made."""
        rollout = rollout_of(heads)
        if (trial := rollout.trial) is not None:
            answers = self._evaluations.results(task, trial.version)
            rollout = replace(rollout, trial=replace(trial, answers=answers))
        return without_forgotten(rollout, self._forgotten.newest_head(task))


@dataclass
class Evaluations:
    """The table `evaluations`: results of each head on each device's held-out images."""

    _database: Tables

    def put(self, device: str, evaluation: Evaluation, *, digest: bytes, now_s: float) -> None:
        """Store a device's evaluation of a head in place of its previous one."""
        correct = sum(evaluation.correct)
        with change(self._database):
            self._database.write(
                "INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (task, head_version, device) DO UPDATE SET digest = excluded.digest, "
                "received_s = excluded.received_s, message = excluded.message, "
                "correct = excluded.correct, images = excluded.images, previous_correct = excluded.previous_correct, "
                "problem = excluded.problem",
                *(evaluation.task, device, evaluation.head_version, digest, now_s),
                *(msgspec.json.encode(evaluation).decode(), correct, correct + sum(evaluation.incorrect)),
                *(
                    sum(evaluation.previous_correct) if evaluation.previous_correct else None,
                    evaluation.problem,
                ),
            )

    def of_head(self, task: bytes, version: int) -> dict[str, Evaluation]:
        return dict(self._messages("task = ? AND head_version = ? ORDER BY device", task, version))

    def results(self, task: bytes, version: int) -> dict[str, CanaryResult]:
        """Return how each device has found a head, without figures by class."""
        rows = self._database.read(
            "SELECT device, correct, images, previous_correct, problem FROM evaluations "
            "WHERE task = ? AND head_version = ? ORDER BY device",
            *(task, version),
        )
        return {
            device: CanaryResult(correct=correct, images=images, previous_correct=previous, problem=problem)
            for device, correct, images, previous, problem in rows
        }

    def _messages(self, clauses: str, *values: Any) -> list[tuple[str, Evaluation]]:
        query = f"SELECT device, message FROM evaluations WHERE {clauses}"  # noqa: S608 - of this class
        rows = self._database.read(query, *values)
        return [(device, self._database.decode(message, Evaluation)) for device, message in rows]

    def devices(self, task: bytes, version: int) -> set[str]:
        query = "SELECT device FROM evaluations WHERE task = ? AND head_version = ?"
        return {device for (device,) in self._database.read(query, task, version)}

    def delete_device(self, device: str) -> None:
        """Delete a device's evaluations of all heads, in a transaction of the caller."""
        with change(self._database):
            self._database.write("DELETE FROM evaluations WHERE device = ?", device)

    def delete_except(self, task: bytes, versions: Collection[int]) -> None:
        excepted = f"AND head_version NOT IN ({', '.join('?' * len(versions))})" if versions else ""
        with change(self._database):
            self._database.write(
                f"DELETE FROM evaluations WHERE task = ? {excepted}",  # noqa: S608 - marks
                *(task, *versions),
            )
