"""Accepted submissions, of which the newest per device and task counts."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from aggregator.coordination.round_state import Entry
from aggregator.storage.changes import change
from aggregator.storage.stored_values import UnixSeconds
from protocol.storage.facts import Tables
from protocol.wire.messages import MaskedSubmission

_COLUMNS = "device, digest, sequence, round, received_s, size_bytes, images, prototypes, per_class, min_devices, mask"

_PUT = (
    f"INSERT INTO submissions (task, changed, {_COLUMNS}) VALUES ({', '.join('?' * 13)}) "  # noqa: S608 - of the schema
    f"ON CONFLICT (task, device) DO UPDATE SET changed = excluded.changed, "
    + ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS.split(", ")[1:])
)

_MASK = msgspec.msgpack.Decoder(MaskedSubmission)


@dataclass(frozen=True)
class SubmissionRecord:
    """An accepted submission."""

    device: str
    entry: Entry
    size_bytes: int
    """Bytes of the payload; 0 once nothing needs it, and it is deleted."""
    images: int
    prototypes: int
    per_class: Mapping[int, int]
    """Prototypes per class index; images, where the submission has class sums or the task accepts blocks."""
    min_devices: int | None = None
    """Submissions that the device wants in a sum, if it has masked its own."""
    mask: bytes | None = None
    """The encoded `MaskedSubmission`: what a second operator needs of it."""


class StoredMask(NamedTuple):
    """The part of a submission that a second operator needs."""

    digest: bytes
    """Of the submission."""
    message: MaskedSubmission


class LostSubmission(msgspec.Struct, frozen=True):
    """An accepted submission that cannot be read from the disk any more."""

    device: str
    sha256: str
    since_s: Annotated[UnixSeconds, Meta(description="When this was noticed.")]


@dataclass
class Submissions:
    """The tables `submissions` and `lost_submissions`."""

    _database: Tables
    deletions: int = field(default=0, init=False)
    """How often this program has deleted submissions: what was counted before holds until it grows."""

    def put(self, task: bytes, record: SubmissionRecord) -> None:
        """Store a device's submission in place of its previous one, or of one that was lost."""
        entry, per_class = record.entry, msgspec.json.encode(record.per_class).decode()
        with change(self._database) as number:
            self._database.write(
                "DELETE FROM lost_submissions WHERE task = ? AND device = ?", task, record.device
            )
            self._database.write(
                *(_PUT, task, number, record.device, entry.digest, entry.sequence, entry.round),
                *(entry.received_s, record.size_bytes, record.images, record.prototypes, per_class),
                *(record.min_devices, record.mask),
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

    def all(self, task: bytes) -> dict[str, SubmissionRecord]:
        return self._records("task = ? ORDER BY device", task)

    def get(self, task: bytes, device: str) -> SubmissionRecord | None:
        return self._records("task = ? AND device = ?", task, device).get(device)

    def _records(self, clauses: str, *values: Any) -> dict[str, SubmissionRecord]:
        query = f"SELECT {_COLUMNS} FROM submissions WHERE {clauses}"  # noqa: S608 - of this class
        return {row[0]: self._record(row) for row in self._database.read(query, *values)}

    def _record(self, row: tuple[Any, ...]) -> SubmissionRecord:
        device, digest, sequence, number, received_s, size_bytes, images, prototypes, per_class, *masked = row
        entry = Entry(sequence, digest, received_s, number)
        counts = self._database.decode(per_class, dict[int, int])
        return SubmissionRecord(device, entry, size_bytes, images, prototypes, counts, *masked)

    def wanted_devices(self, task: bytes) -> dict[str, int]:
        """Return how many submissions each device that has masked its own wants in a sum."""
        return dict(
            self._database.read(
                "SELECT device, min_devices FROM submissions WHERE task = ? AND min_devices IS NOT NULL", task
            )
        )

    def masked(self, task: bytes) -> dict[str, StoredMask]:
        """Return what a second operator needs of the masked submissions to a task, by device."""
        rows = self._database.read(
            "SELECT device, digest, mask FROM submissions WHERE task = ? AND mask IS NOT NULL", task
        )
        return {device: StoredMask(digest, _MASK.decode(mask)) for device, digest, mask in rows}

    def digests_among(self, digests: Collection[bytes], *, task: bytes, oldest_round: int) -> set[bytes]:
        """Return the digests of submissions among some: to a task, from a round on, or to any other task."""
        if not digests:
            return set()
        marks = ", ".join("?" * len(digests))
        rows = self._database.read(
            f"SELECT digest FROM submissions WHERE digest IN ({marks}) AND size_bytes > 0 "  # noqa: S608 - marks
            "AND (task != ? OR round >= ?)",
            *(*digests, task, oldest_round),
        )
        return {digest for (digest,) in rows}

    def of_device(self, device: str) -> list[tuple[bytes, bytes]]:
        """Return the tasks and digests of a device's submissions, those that are lost included."""
        return self._database.read(
            "SELECT task, digest FROM submissions WHERE device = ? "
            "UNION SELECT task, digest FROM lost_submissions WHERE device = ?",
            *(device, device),
        )

    def discard_payloads(self, task: bytes, devices: Iterable[str]) -> None:
        """Let nothing need the payloads of these submissions any more, in a transaction of the caller."""
        query = "UPDATE submissions SET size_bytes = 0, mask = NULL WHERE task = ? AND device = ?"
        for device in devices:
            self._database.write(query, task, device)

    def has_digest(self, digest: bytes) -> bool:
        return bool(self._database.read("SELECT 1 FROM submissions WHERE digest = ? LIMIT 1", digest))

    def delete(self, device: str, task: bytes | None = None) -> None:
        """Delete a device's submission to a task, or all and those that are lost, in a transaction of the caller."""
        which = device, task or b"", task is None
        self.deletions += 1
        with change(self._database):
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
        self._database.write("UPDATE submissions SET sequence = 0 WHERE device = ?", device)

    def count_again(self, device: str) -> None:
        """Let a device's submissions be new ones, which the next head is made of: they count from now on."""
        with change(self._database) as number:
            self._database.write("UPDATE submissions SET changed = ? WHERE device = ?", number, device)
