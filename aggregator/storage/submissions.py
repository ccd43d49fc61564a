"""Accepted submissions, of which the newest per device and task counts, and the numbers of changes.

A process reads from the tables only what others have changed since the last number that it has seen. Write
transactions run one after the other, so that a greater number is a later one. No number is used again: what is deleted
leaves its row in the table `deletions`, or raises the number of that table's row without a device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from aggregator.coordination.round_state import Entry
from aggregator.storage.devices import UnixSeconds
from protocol.storage.facts import Tables

_NEWEST = (
    "SELECT coalesce(max(number), 0) AS number FROM (SELECT max(changed) AS number FROM submissions "
    "UNION ALL SELECT max(changed) FROM evaluations UNION ALL SELECT max(number) FROM deletions) AS every"
)

NEXT_CHANGE = f"(SELECT number + 1 FROM ({_NEWEST}) AS newest)"  # noqa: S608 - of the schema
"""The number of the change that a statement makes, as a part of the statement."""

_LATER = "ON CONFLICT (task, device) DO UPDATE SET number = excluded.number"


def newest_change(database: Tables) -> int:
    """Return the number of the last change; 0 if there was none."""
    return int(database.read(_NEWEST)[0][0])


def retire_number(database: Tables) -> None:
    """Let no later change have the number of the last one, before rows are deleted, in one transaction."""
    database.write(f"INSERT INTO deletions VALUES (?, '', {NEXT_CHANGE}) {_LATER}", b"")  # noqa: S608 - of the schema


@dataclass(frozen=True)
class SubmissionRecord:
    """An accepted submission."""

    device: str
    entry: Entry
    size_bytes: int
    images: int
    prototypes: int
    per_class: Mapping[int, int]
    """Prototypes per class index; images, where the submission has class sums or the task accepts blocks."""


@dataclass(frozen=True)
class SubmissionChanges:
    """Changes of the submissions to a task since an earlier change."""

    records: Mapping[str, SubmissionRecord]
    """New or replaced submissions, by device."""
    deleted: frozenset[str]
    """Devices whose submission was deleted, and who have not submitted since."""
    newest: int
    """The number of the change from which to read the next time."""


class LostSubmission(msgspec.Struct, frozen=True):
    """An accepted submission that cannot be read from the disk any more."""

    device: str
    sha256: str
    since_s: Annotated[UnixSeconds, Meta(description="When this was noticed.")]


@dataclass
class Submissions:
    """The tables `submissions` and `lost_submissions`."""

    _database: Tables

    def put(self, task: bytes, record: SubmissionRecord) -> None:
        """Store a device's submission in place of its previous one, or of one that was lost."""
        self._database.write(
            "DELETE FROM lost_submissions WHERE task = ? AND device = ?", task, record.device
        )
        self._database.write(
            "INSERT INTO submissions (task, device, digest, record, size_bytes, changed) "  # noqa: S608 - of the schema
            f"VALUES (?, ?, ?, ?, ?, {NEXT_CHANGE}) ON CONFLICT (task, device) DO UPDATE SET digest = excluded.digest, "
            "record = excluded.record, size_bytes = excluded.size_bytes, changed = excluded.changed",
            *(task, record.device, record.entry.digest, msgspec.json.encode(record).decode()),
            record.size_bytes,
        )

    def adopt(
        self,
        task: bytes,
        earlier: bytes,
        *,
        recounted: Callable[[SubmissionRecord], SubmissionRecord] = lambda record: record,
    ) -> int:
        """Let the submissions to an earlier task count for this one, too; returns their number.

        `recounted` returns a record with this task's numbers of prototypes.
        """
        present = self.all(task)
        adopted = [each for device, each in self.all(earlier).items() if device not in present]
        for record in adopted:
            self.put(task, recounted(record))
        return len(adopted)

    def stored_bytes(self) -> int:
        """Return the size of the submissions to all tasks; an adopted one is one."""
        ((size,),) = self._database.read(
            "SELECT COALESCE(SUM(size_bytes), 0) FROM "
            "(SELECT DISTINCT device, digest, size_bytes FROM submissions) AS stored"
        )
        return int(size)

    def added_bytes(self, task: bytes, device: str, *, digest: bytes, size_bytes: int) -> int:
        """Return what a submission would add to `stored_bytes` in place of the device's previous one to the task."""
        rows = self._database.read(
            "SELECT task, digest, size_bytes FROM submissions WHERE device = ?", device
        )
        before = {stored: size for _, stored, size in rows}
        after = {stored: size for other, stored, size in rows if other != task} | {digest: size_bytes}
        return int(sum(after.values()) - sum(before.values()))

    def newest_deletion(self) -> int:
        """Return a number that grows with each deletion."""
        return int(self._database.read("SELECT coalesce(max(number), 0) FROM deletions")[0][0])

    def all(self, task: bytes) -> dict[str, SubmissionRecord]:
        return self._records("task = ? ORDER BY device", task)

    def get(self, task: bytes, device: str) -> SubmissionRecord | None:
        return self._records("task = ? AND device = ?", task, device).get(device)

    def _records(self, clauses: str, *values: Any) -> dict[str, SubmissionRecord]:
        query = f"SELECT device, record FROM submissions WHERE {clauses}"  # noqa: S608 - of this class
        rows = self._database.read(query, *values)
        return {device: self._database.decode(record, SubmissionRecord) for device, record in rows}

    def changes(self, task: bytes, *, since: int) -> SubmissionChanges:
        """Return what has changed after change number `since`; some of it may be returned again by the next call."""
        newest = newest_change(self._database)
        records = self._records("task = ? AND changed > ? ORDER BY changed", task, since)
        return SubmissionChanges(records, self.deleted(task, since=since), newest)

    def deleted(self, task: bytes, *, since: int) -> frozenset[str]:
        """Return the devices whose submission was deleted after change number `since`, and is still missing."""
        rows = self._database.read(
            "SELECT device FROM deletions WHERE task = ? AND number > ? AND NOT EXISTS "
            "(SELECT 1 FROM submissions WHERE task = deletions.task AND device = deletions.device)",
            *(task, since),
        )
        return frozenset(device for (device,) in rows)

    def digests_of_other_tasks(self, task: bytes) -> set[bytes]:
        """Return the digests of the submissions to all tasks but this one."""
        rows = self._database.read("SELECT digest FROM submissions WHERE task != ?", task)
        return {digest for (digest,) in rows}

    def tasks(self) -> set[bytes]:
        """Return the tasks that devices have submitted to, or evaluated heads of."""
        rows = self._database.read(
            "SELECT task FROM submissions UNION SELECT task FROM lost_submissions UNION SELECT task FROM evaluations"
        )
        return {task for (task,) in rows}

    def delete_task(self, task: bytes) -> None:
        """Delete all submissions and evaluations of a task, in a transaction of the caller."""
        retire_number(self._database)
        for table in ("submissions", "lost_submissions", "evaluations"):
            self._database.write(f"DELETE FROM {table} WHERE task = ?", task)  # noqa: S608 - one of three

    def of_device(self, device: str) -> list[tuple[bytes, bytes]]:
        """Return the tasks and digests of a device's submissions, those that are lost included."""
        return self._database.read(
            "SELECT task, digest FROM submissions WHERE device = ? "
            "UNION SELECT task, digest FROM lost_submissions WHERE device = ?",
            *(device, device),
        )

    def has_digest(self, digest: bytes) -> bool:
        return bool(self._database.read("SELECT 1 FROM submissions WHERE digest = ? LIMIT 1", digest))

    def delete(self, device: str, task: bytes | None = None) -> None:
        """Delete a device's submission to a task, or all and those that are lost, in a transaction of the caller."""
        which = device, task or b"", task is None
        self._database.write(
            f"INSERT INTO deletions SELECT task, device, {NEXT_CHANGE} FROM submissions "  # noqa: S608 - of the schema
            f"WHERE device = ? AND (task = ? OR ?) {_LATER}",
            *which,
        )
        self._database.write("DELETE FROM submissions WHERE device = ? AND (task = ? OR ?)", *which)
        if task is None:
            self._database.write("DELETE FROM lost_submissions WHERE device = ?", device)

    def add_lost(self, task: bytes, device: str, digest: bytes, *, now_s: float) -> None:
        self._database.write(
            "INSERT INTO lost_submissions VALUES (?, ?, ?, ?) ON CONFLICT (task, device) "
            "DO UPDATE SET digest = excluded.digest, since_s = excluded.since_s",
            *(task, device, digest, now_s),
        )

    def lost(self, task: bytes) -> list[LostSubmission]:
        """Return the lost submissions whose devices have not submitted since."""
        rows = self._database.read(
            "SELECT device, digest, since_s FROM lost_submissions WHERE task = ? ORDER BY device", task
        )
        return [LostSubmission(device, digest.hex(), since_s) for device, digest, since_s in rows]

    def reset_sequence(self, device: str) -> None:
        """Let the device's next submission replace the stored ones whatever its sequence number."""
        rows = self._database.read("SELECT task, record FROM submissions WHERE device = ?", device)
        for task, text in rows:
            record = self._database.decode(text, SubmissionRecord)
            record = replace(record, entry=replace(record.entry, sequence=0))
            self._database.write(
                f"UPDATE submissions SET record = ?, changed = {NEXT_CHANGE} WHERE task = ? AND device = ?",  # noqa: S608
                *(msgspec.json.encode(record).decode(), task, device),
            )
