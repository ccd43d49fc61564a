"""Trained heads, and the rollout state of each task."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from aggregator.coordination import canary_rollout
from protocol.storage.database import Database
from protocol.wire.messages import BlobRef


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
    """Device to the hex digest of its submission, for the submissions that the head was trained on."""
    metrics: Mapping[str, float]
    tensors: BlobRef | None = None
    """With rounds: the tensors that the next round starts from."""
    file: bytes = b""
    """Digest of the ONNX file that needs only features."""
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Like `members`, for the submissions that outlier detection excluded."""


class Heads:
    """The tables `heads` and `rollouts`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, head: HeadRecord) -> None:
        """Store a head."""
        record = msgspec.json.encode(head).decode()
        self._database.write("INSERT INTO heads VALUES (?, ?, ?)", head.task, head.version, record)

    def all(self, task: bytes | None = None) -> list[HeadRecord]:
        """Return the heads of a task, or of all tasks, oldest first."""
        rows = self._database.read(
            "SELECT record FROM heads WHERE task = ?1 OR ?1 IS NULL ORDER BY version", task
        )
        return [msgspec.json.decode(record, type=HeadRecord) for (record,) in rows]

    def put_rollout(self, task: bytes, state: canary_rollout.State) -> None:
        """Store which head of a task is current, candidate or rejected."""
        value = msgspec.json.encode(state).decode()
        self._database.write("INSERT OR REPLACE INTO rollouts VALUES (?, ?)", task, value)

    def rollout(self, task: bytes) -> canary_rollout.State:
        """Return which head of a task is current, candidate or rejected; without a rollout, all were used in turn."""
        rows = self._database.read("SELECT state FROM rollouts WHERE task = ?", task)
        if rows:
            return msgspec.json.decode(rows[0][0], type=canary_rollout.State)
        return canary_rollout.initial_state(head.version for head in self.all(task))
