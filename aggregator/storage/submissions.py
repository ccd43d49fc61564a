"""Accepted submissions, of which the newest per device and task counts."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from aggregator.coordination.rounds import Entry
from protocol.storage.database import Database


@dataclass(frozen=True)
class SubmissionRecord:
    """An accepted submission."""

    device: str
    entry: Entry
    size_bytes: int
    images: int
    prototypes: int
    per_class: Mapping[int, int]
    """Prototypes per class index."""


class Submissions:
    """The table `submissions`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, task: bytes, record: SubmissionRecord) -> None:
        """Store a device's submission in place of its previous one."""
        self._database.write(
            "INSERT OR REPLACE INTO submissions VALUES (?, ?, ?, ?)",
            *(task, record.device, record.entry.digest, msgspec.json.encode(record).decode()),
        )

    def all(self, task: bytes) -> dict[str, SubmissionRecord]:
        """Return the newest submission of each device to a task."""
        rows = self._database.read(
            "SELECT device, record FROM submissions WHERE task = ? ORDER BY device", task
        )
        return {device: msgspec.json.decode(record, type=SubmissionRecord) for device, record in rows}

    def digests_of_other_tasks(self, task: bytes) -> set[bytes]:
        """Return the digests of the submissions to all tasks but this one."""
        rows = self._database.read("SELECT digest FROM submissions WHERE task != ?", task)
        return {digest for (digest,) in rows}

    def delete(self, task: bytes, device: str) -> None:
        """Delete a device's submission to a task."""
        self._database.write("DELETE FROM submissions WHERE task = ? AND device = ?", task, device)

    def delete_device(self, device: str) -> None:
        """Delete a device's submissions to all tasks."""
        self._database.write("DELETE FROM submissions WHERE device = ?", device)

    def reset_sequence(self, device: str) -> None:
        """Let the device's next submission replace the stored ones whatever its sequence number."""
        self._database.write(
            "UPDATE submissions SET record = json_set(record, '$.entry.sequence', 0) WHERE device = ?", device
        )
