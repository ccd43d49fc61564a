"""The aggregator's state directory: tables and blobs."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from aggregator.coordination.round_state import DeviceDecisions, Settings
from aggregator.storage.blobs import Blobs
from aggregator.storage.changes import change, newest_change
from aggregator.storage.counted_submissions import CountedSubmissions
from aggregator.storage.devices import Devices
from aggregator.storage.heads import Evaluations, HeadRecord, Heads
from aggregator.storage.keys import DeviceKeys
from aggregator.storage.quarantine import REVOKED, ForgottenDevices, Quarantine
from aggregator.storage.refusals import Refusals
from aggregator.storage.stored_values import ServedTask, TaskPreparation
from aggregator.storage.submissions import Submissions
from aggregator.storage.usage import Usages
from protocol.errors import StateError
from protocol.storage.blobstore import state_errors
from protocol.storage.elapsed_clock import ElapsedClock
from protocol.storage.facts import Facts, Tables
from protocol.wire.messages import BlobRef

_OF_TASKS = ("quarantine", "forgotten", "lost_submissions", "evaluations", "submissions")
"""Tables with rows of devices for each task."""


class FleetDatabase(Tables, Protocol):
    """The tables of a fleet; each method raises StateError if they cannot be used."""

    def snapshot(self) -> contextlib.AbstractContextManager[Any]:
        """Let all reads of the body see the tables as they are at the first of them, whatever others write."""

    def data_version(self) -> int:
        """Return a number that changes when another process has written."""

    def clock(self, facts: Facts) -> ElapsedClock:
        """Return the clock of all deadlines, kept in these facts."""

    def is_locked(self) -> bool:
        """Return True if an aggregator runs on the tables."""

    def leader(self) -> str:
        """Return the machine of that aggregator, if it may be another one than this."""

    def may_connect(self) -> bool:
        """Return False if another aggregator may have taken this one's place at the broker."""

    def check_folder(self) -> None:
        """Raise ConfigError if the state directory lacks what belongs to the tables, and is elsewhere."""

    def check_writable(self) -> None:
        """Write without changing contents, to find out whether the disk is full."""

    def check_file(self) -> None:
        """Raise StateError if what is written is lost, as to a file that was deleted."""

    def search_damage(self) -> None:
        """Search for damage, which `check_file` reports from then on; called on a thread of its own."""

    def close(self) -> None:
        """Close the tables, and release what keeps other aggregators out."""


class Store:
    """The tables and blobs of an aggregator, which `open_store` opens."""

    blobs: Blobs
    """Missing if the store is read only."""
    is_served = False
    """The running aggregator uses this store, rather than a command or another reader."""

    def __init__(self, folder: Path, database: FleetDatabase) -> None:
        self.folder = folder
        self.database = database
        self.facts = Facts(database)
        self.clock = database.clock(self.facts)
        self.keys = DeviceKeys(database, self.facts)
        self.devices = Devices(database, self.keys)
        self.refusals = Refusals(database, self.facts)
        self.submissions = Submissions(database)
        self.usages = Usages(database)
        self.evaluations = Evaluations(database)
        self.forgotten = ForgottenDevices(database)
        self.heads = Heads(database, self.forgotten, self.evaluations)
        self.quarantine = Quarantine(database)
        self._members: dict[bytes, dict[str, bytes]] = {}
        """The lists of submissions of planned heads, and the one that was read last, by their digests."""

    def close(self) -> None:
        self.database.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Write everything within durably at its end, or nothing; raises StateError if it cannot be written.

        What was written to a file that has been deleted counts as not written.
        """
        try:
            with self.database.transaction():
                yield
            self.database.check_file()
        except BaseException:
            self.keys.drop_cache()
            raise

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all reads within see the database as it is at the first of them; nothing can be written meanwhile."""
        with self.database.snapshot():
            yield

    def served_task(self) -> ServedTask:
        """Return the task that the aggregator was started with last; raises StateError if it was never started."""
        served = self.facts.get(ServedTask)
        if served is None:
            is_prepared = self.facts.get(TaskPreparation) is not None
            todo = "its graphs are being exported" if is_prepared else "start `aggregator run`"
            raise StateError(f"no task in {self.folder} yet: {todo}")
        return served

    def holds(self, device: str, digest: bytes) -> bool:
        """Return True if a device's submission or evaluation with this digest is stored."""
        return bool(
            self.database.read(
                "SELECT 1 FROM submissions WHERE device = ? AND digest = ? "
                "UNION ALL SELECT 1 FROM evaluations WHERE device = ? AND digest = ?",
                *(device, digest, device, digest),
            )
        )

    def put_blob(self, data: bytes, name: str) -> BlobRef:
        return BlobRef(digest=self.blobs.put(data), size_bytes=len(data), name=name)

    def put_file(self, file: Path, *, name: str = "") -> BlobRef:
        """Store a file as a blob, by its own name or another; raises StateError if it cannot be read."""
        with state_errors(file):
            data = file.read_bytes()
        return self.put_blob(data, name or file.name)

    def submissions_of(self, task: bytes, settings: Settings) -> CountedSubmissions:
        """Return the submissions that count for the next head of a task."""
        return CountedSubmissions(self.database, task, settings, is_closed=self.keys.is_closed())

    def put_members(self, members: Mapping[str, bytes]) -> bytes:
        """Store the digests of submissions by device; return the digest of the blob."""
        named = {device: digest.hex() for device, digest in members.items()}
        return self.blobs.put(msgspec.json.encode(named))

    def members(self, head: HeadRecord) -> dict[str, bytes]:
        """Return the digests of the submissions that a head was planned of, by device in order.

        Raises:
            BlobLost: they are lost.
            StateError: they cannot be read, or another head has been made since.
        """
        if head.members not in self._members:
            named = msgspec.json.decode(self.blobs.read(head.members), type=dict[str, str])
            planned = {each.members for each in self.heads.all_planned()}
            self._members = {each: found for each, found in self._members.items() if each in planned}
            self._members[head.members] = {device: bytes.fromhex(digest) for device, digest in named.items()}
        return self._members[head.members]

    def tasks(self) -> set[bytes]:
        """Return the tasks of which something is stored."""
        found = set[bytes]()
        for table in (*_OF_TASKS, "heads"):
            last = b""
            # A row each: a query for all would read every row.
            while rows := self.database.read(
                f"SELECT task FROM {table} WHERE task > ? ORDER BY task LIMIT 1",  # noqa: S608 - of this file
                last,
            ):
                ((last,),) = rows
                found.add(last)
        return found

    def delete_rows(self, task: bytes, most: int) -> bool:
        """Delete rows of a task, `most` at a time and its heads last; return True if there may be more."""
        for table in _OF_TASKS:
            with change(self.database):
                rows = self.database.read(
                    f"DELETE FROM {table} WHERE task = ? AND device IN "  # noqa: S608 - of this file
                    f"(SELECT device FROM {table} WHERE task = ? LIMIT ?) RETURNING 1",
                    *(task, task, most),
                )
            if len(rows) >= most:
                return True
        with change(self.database):
            self.heads.delete_task(task)
            self.submissions.deletions += 1
        return False

    def newest_change(self) -> int:
        """Return the number of the last change, before what is read next."""
        return newest_change(self.database)

    def decisions(self, task: bytes) -> DeviceDecisions:
        """Return which devices count, by their keys and the quarantine."""
        quarantined = self.quarantine.all(task)
        return DeviceDecisions(
            # A revoked key counts for every task.
            quarantined=self.keys.revoked().union(
                device
                for device, entry in quarantined.items()
                if entry.reason == REVOKED and entry.released_s is None
            ),
            released=frozenset(
                device for device, entry in quarantined.items() if entry.released_s is not None
            ),
            enrolled=self.keys.enrolled(),
            forgotten={each.device: each.head for each in self.forgotten.all(task)},
        )
