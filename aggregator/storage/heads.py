"""Trained heads: their rollout, their evaluations by devices, and an operator's commands about them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from aggregator.config.training_packages import INSTALL
from aggregator.coordination import rollout_state
from aggregator.coordination.rollout_state import HeadCommand, without_forgotten
from aggregator.storage.devices import ForgottenDevices
from aggregator.storage.submissions import NEXT_CHANGE, newest_change, retire_number
from protocol.storage.facts import Tables
from protocol.wire.messages import BlobRef, Evaluation

CALIBRATED_FROM = "calibrated_from"
"""The metric of a calibrated head that names the version whose weights it has."""

ADAPTER_MISSING = "adapter_missing"
"""The metric, 1, of a head in closed form for which an adapter would have been trained with PyTorch."""

NO_PYTORCH = f"PyTorch is not installed: {INSTALL}"


@dataclass(frozen=True)
class HeadRecord:
    """A trained head."""

    version: int
    task: bytes
    digest: bytes
    size_bytes: int
    trained_s: float
    prototypes: int
    members: Mapping[str, str]
    """Device to the hex digest of its submission, for those that the head was trained on; only of the newest head."""
    metrics: Mapping[str, float]
    tensors: BlobRef | None = None
    """The tensors that the next round starts from, if the task has rounds."""
    file: bytes = b""
    """Digest of the ONNX file that needs only features."""
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Like `members`, for the submissions that outlier detection excluded."""
    warning: str = ""
    """Why outliers were not quarantined."""
    limited: tuple[str, ...] = ()
    """Which devices' images count only in part, and by which rule."""
    former_members: int = 0
    """Number of members of an older head."""

    @property
    def devices(self) -> int:
        return len(self.members) or self.former_members


@dataclass
class Heads:
    """The tables `heads` and `rollouts`."""

    _database: Tables
    _forgotten: ForgottenDevices

    def add(self, head: HeadRecord) -> None:
        """Store a head, and of the one before only the number of its members: only the newest head's are needed."""
        record = msgspec.json.encode(head).decode()
        self._database.write("INSERT INTO heads VALUES (?, ?, ?)", head.task, head.version, record)
        rows = self._database.read(
            "SELECT record FROM heads WHERE task = ? AND version < ? ORDER BY version DESC LIMIT 1",
            *(head.task, head.version),
        )
        for (older,) in rows:
            before = self._database.decode(older, HeadRecord)
            before = replace(before, members={}, quarantined={}, former_members=before.devices)
            self._database.write(
                "UPDATE heads SET record = ? WHERE task = ? AND version = ?",
                *(msgspec.json.encode(before).decode(), head.task, before.version),
            )

    def all(self, task: bytes | None = None) -> list[HeadRecord]:
        """Return the heads of a task, or of all tasks, oldest first."""
        rows = self._database.read(
            "SELECT record FROM heads WHERE task = ? OR ? ORDER BY version", task or b"", task is None
        )
        return [self._database.decode(record, HeadRecord) for (record,) in rows]

    def delete_except(self, task: bytes, versions: Collection[int]) -> None:
        stored = self._database.read("SELECT version FROM heads WHERE task = ?", task)
        for version in sorted({version for (version,) in stored} - set(versions)):
            self._database.write("DELETE FROM heads WHERE task = ? AND version = ?", task, version)

    def put_rollout(self, task: bytes, state: rollout_state.State) -> None:
        value = msgspec.json.encode(state).decode()
        self._database.write(
            "INSERT INTO rollouts VALUES (?, ?) ON CONFLICT (task) DO UPDATE SET state = excluded.state",
            *(task, value),
        )

    def rollout(self, task: bytes) -> rollout_state.State:
        """Return which head of a task is current, candidate or rejected; without a rollout, all were used in turn."""
        rows = self._database.read("SELECT state FROM rollouts WHERE task = ?", task)
        if rows:
            state = self._database.decode(rows[0][0], rollout_state.State)
        else:
            state = rollout_state.initial_state(head.version for head in self.all(task))
        return without_forgotten(state, self._forgotten.newest_head(task))


@dataclass
class Evaluations:
    """The table `evaluations`: results of each head on each device's held-out images."""

    _database: Tables

    def put(self, device: str, evaluation: Evaluation, *, digest: bytes, now_s: float) -> None:
        """Store a device's evaluation of a head in place of its previous one."""
        self._database.write(
            f"INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?, {NEXT_CHANGE}) "  # noqa: S608 - of the schema
            "ON CONFLICT (task, device, head_version) DO UPDATE SET digest = excluded.digest, "
            "received_s = excluded.received_s, message = excluded.message, changed = excluded.changed",
            *(evaluation.task, device, evaluation.head_version, digest, now_s),
            msgspec.json.encode(evaluation).decode(),
        )

    def of_head(self, task: bytes, version: int) -> dict[str, Evaluation]:
        return dict(self._messages("task = ? AND head_version = ? ORDER BY device", task, version))

    def changes(self, task: bytes, *, since: int) -> tuple[list[tuple[str, Evaluation]], int]:
        """Return devices and evaluations that are new after change number `since`, and the number for the next call.

        Some may be returned again by the next call.
        """
        newest = newest_change(self._database)
        return self._messages("task = ? AND changed > ? ORDER BY changed", task, since), newest

    def _messages(self, clauses: str, *values: Any) -> list[tuple[str, Evaluation]]:
        query = f"SELECT device, message FROM evaluations WHERE {clauses}"  # noqa: S608 - of this class
        rows = self._database.read(query, *values)
        return [(device, self._database.decode(message, Evaluation)) for device, message in rows]

    def devices(self, task: bytes, version: int) -> set[str]:
        query = "SELECT device FROM evaluations WHERE task = ? AND head_version = ?"
        return {device for (device,) in self._database.read(query, task, version)}

    def delete_device(self, device: str) -> None:
        """Delete a device's evaluations of all heads, in a transaction of the caller."""
        retire_number(self._database)
        self._database.write("DELETE FROM evaluations WHERE device = ?", device)

    def delete_except(self, task: bytes, versions: Collection[int]) -> None:
        excepted = f"AND head_version NOT IN ({', '.join('?' * len(versions))})" if versions else ""
        with self._database.transaction():
            retire_number(self._database)
            self._database.write(
                f"DELETE FROM evaluations WHERE task = ? {excepted}",  # noqa: S608 - marks
                *(task, *versions),
            )


@dataclass
class OperatorCommands:
    """The table `operator_commands`: what an operator leaves for the running aggregator."""

    _database: Tables

    def add(self, task: bytes, command: HeadCommand) -> int:
        """Store a command for the aggregator that serves a task; returns its number."""
        rows = self._database.read(
            "INSERT INTO operator_commands (task, kind, version) VALUES (?, ?, ?) RETURNING number",
            *(task, command.kind, command.version),
        )
        return int(rows[0][0])

    def pending(self, task: bytes) -> dict[int, HeadCommand]:
        """Return a task's commands without an outcome by number, oldest first."""
        rows = self._database.read(
            "SELECT number, kind, version FROM operator_commands WHERE task = ? AND outcome IS NULL ORDER BY number",
            task,
        )
        return {number: HeadCommand(kind, version) for number, kind, version in rows}

    def finish(self, number: int, outcome: str) -> None:
        """Store a command's outcome: empty if it was carried out, otherwise the reason why not."""
        self._database.write("UPDATE operator_commands SET outcome = ? WHERE number = ?", outcome, number)

    def outcome(self, number: int) -> str | None:
        """Return a command's outcome; None while it is pending."""
        rows = self._database.read("SELECT outcome FROM operator_commands WHERE number = ?", number)
        outcome: str | None = rows[0][0]
        return outcome
