"""The aggregator's state directory: tables in SQLite or PostgreSQL, and blobs."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from aggregator.coordination.round_state import DeviceDecisions, Entry, State
from aggregator.storage.blobs import blobs_of, open_blobs
from aggregator.storage.device_keys import DeviceKeys
from aggregator.storage.devices import REVOKED, Devices, ForgottenDevices, Quarantine, Refusals
from aggregator.storage.heads import Evaluations, Heads, OperatorCommands
from aggregator.storage.location import Location, check_fleet, record, record_newest, recorded
from aggregator.storage.postgresql.database import PostgresDatabase, check_url
from aggregator.storage.postgresql.lead import Standby
from aggregator.storage.programs import Jobs, Receivers
from aggregator.storage.stored_values import (
    BlobLocation,
    FailedTraining,
    LostFiles,
    PendingHead,
    ServedTask,
    TaskPreparation,
)
from aggregator.storage.submissions import SubmissionChanges, Submissions, keep_number, newest_change
from protocol.errors import ConfigError, ProtofleetError, StateError
from protocol.log import event
from protocol.storage.blobstore import delete_temporary_files, state_errors
from protocol.storage.database import Database
from protocol.storage.database_file import DatabaseFile
from protocol.storage.elapsed_clock import ElapsedClock, machine_time
from protocol.storage.facts import Facts
from protocol.storage.folder_lock import FolderLock
from protocol.storage.state_folder import database_of, make_state_folder
from protocol.wire.messages import BlobRef

log = logging.getLogger(__name__)

MIGRATIONS = (
    """
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE devices (
        device TEXT PRIMARY KEY, state TEXT NOT NULL DEFAULT 'unknown', seen_s REAL NOT NULL,
        info TEXT NOT NULL DEFAULT 'null'
    ) STRICT;
    CREATE TABLE epsilons (device TEXT PRIMARY KEY, total REAL NOT NULL) STRICT;
    CREATE TABLE keys (
        device TEXT PRIMARY KEY, public BLOB NOT NULL, enrolled INTEGER NOT NULL, since_s REAL NOT NULL,
        serial TEXT NOT NULL DEFAULT '', revoked_s REAL
    ) STRICT;
    CREATE TABLE revoked_certificates (serial TEXT PRIMARY KEY, since_s REAL NOT NULL) STRICT;
    CREATE TABLE submissions (
        task BLOB NOT NULL, device TEXT NOT NULL, digest BLOB NOT NULL, record TEXT NOT NULL,
        PRIMARY KEY (task, device)
    ) STRICT;
    CREATE TABLE lost_submissions (
        task BLOB NOT NULL, device TEXT NOT NULL, digest BLOB NOT NULL, since_s REAL NOT NULL,
        PRIMARY KEY (task, device)
    ) STRICT;
    CREATE TABLE evaluations (
        task BLOB NOT NULL, device TEXT NOT NULL, head_version INTEGER NOT NULL, digest BLOB NOT NULL,
        received_s REAL NOT NULL, message TEXT NOT NULL, PRIMARY KEY (task, device, head_version)
    ) STRICT;
    CREATE INDEX submission_digests ON submissions (device, digest);
    CREATE INDEX evaluation_digests ON evaluations (device, digest);
    CREATE TABLE heads (
        task BLOB NOT NULL, version INTEGER NOT NULL, record TEXT NOT NULL, PRIMARY KEY (task, version)
    ) STRICT;
    CREATE TABLE rollouts (task BLOB PRIMARY KEY, state TEXT NOT NULL) STRICT;
    CREATE TABLE quarantine (
        task BLOB NOT NULL, device TEXT NOT NULL, since_s REAL NOT NULL, reason TEXT NOT NULL, released_s REAL,
        PRIMARY KEY (task, device)
    ) STRICT;
    CREATE TABLE forgotten (
        task BLOB NOT NULL, device TEXT NOT NULL, head INTEGER NOT NULL, since_s REAL NOT NULL,
        PRIMARY KEY (task, device)
    ) STRICT;
    CREATE TABLE operator_commands (
        number INTEGER PRIMARY KEY, task BLOB NOT NULL, kind TEXT NOT NULL, version INTEGER, outcome TEXT
    ) STRICT;
    CREATE TABLE refusals (
        device TEXT NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL, last_s REAL NOT NULL,
        detail TEXT NOT NULL, PRIMARY KEY (device, reason)
    ) STRICT;
    """,
    """
    CREATE TABLE jobs (
        number INTEGER PRIMARY KEY, task BLOB NOT NULL, kind TEXT NOT NULL, job TEXT NOT NULL,
        digest BLOB NOT NULL UNIQUE, timeout_s REAL NOT NULL, created_s REAL NOT NULL,
        state TEXT NOT NULL DEFAULT 'waiting', worker TEXT NOT NULL DEFAULT '', attempt INTEGER NOT NULL DEFAULT 0,
        lost INTEGER NOT NULL DEFAULT 0, lease_until_s REAL NOT NULL DEFAULT 0, progress TEXT NOT NULL DEFAULT '{}',
        files TEXT NOT NULL DEFAULT '{}', outcome TEXT NOT NULL DEFAULT ''
    ) STRICT;
    """,
    """
    ALTER TABLE submissions ADD COLUMN changed INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE evaluations ADD COLUMN changed INTEGER NOT NULL DEFAULT 0;
    CREATE TABLE deletions (
        task BLOB NOT NULL, device TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (task, device)
    ) STRICT;
    CREATE INDEX submission_changes ON submissions (changed);
    CREATE INDEX evaluation_changes ON evaluations (changed);
    CREATE INDEX deletion_numbers ON deletions (number);
    """,
    """
    ALTER TABLE submissions ADD COLUMN size_bytes INTEGER NOT NULL DEFAULT 0;
    UPDATE submissions SET size_bytes = json_extract(record, '$.size_bytes');
    """,
    """
    CREATE TABLE receivers (name TEXT PRIMARY KEY, reports INTEGER NOT NULL, record TEXT NOT NULL) STRICT;
    """,
)
"""SQL scripts, each from one schema version to the next."""

TASK_TABLES = (
    "deletions",
    "evaluations",
    "forgotten",
    "heads",
    "jobs",
    "lost_submissions",
    "operator_commands",
    "quarantine",
    "rollouts",
    "submissions",
)
"""The tables with a column `task`."""

_ADVICE = (
    "restore it from a backup; without one, move aggregator.sqlite* away and keep identity/: devices send their "
    "submissions again, in a closed fleet after `aggregator enroll DEVICE --renew`"
)
"""Advice for a damaged database."""


class Store:
    """The aggregator's state directory, created if missing; `read_only` reads the state of a running aggregator.

    `lock` keeps other aggregators out of it until `close`; without it, the state of a running aggregator can be
    changed, but not migrated. `blobs` is s3://BUCKET/PREFIX, or empty: then the blobs are where they were before, at
    first in the state directory.

    `database` is a URL of PostgreSQL (`postgresql://[USER@]HOST[:PORT]/DATABASE`), which holds the tables of `fleet`
    in place of an SQLite file; the directory remembers both, and later a Store finds them there. While another one
    leads the fleet there, a Store with `lock` waits, and calls `standby` about every second; without it, it raises.
    A directory holds one fleet: with `fleet`, that is checked.

    Raises ConfigError if it is a device's, another fleet's or among Python source files, and StateError if it cannot be
    used, another protofleet wrote it, or another aggregator has locked it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        read_only: bool = False,
        lock: bool = False,
        blobs: str = "",
        database: str = "",
        fleet: str = "",
        standby: Standby | None = None,
    ) -> None:
        self.folder = folder
        self._lock = FolderLock(folder)
        self._is_aggregator = lock
        location = Location(database, fleet) if database else recorded(folder)
        if location is not None:
            if fleet:
                check_fleet(folder, fleet, location.fleet)
            self.database: Database | PostgresDatabase = self._open_postgresql(
                location, read_only=read_only, lock=lock, standby=standby
            )
        else:
            self.database = self._open_file(read_only=read_only, lock=lock)
        if lock:
            delete_temporary_files(folder)
        self._open_tables(read_only=read_only, blobs=blobs, fleet=fleet)
        if lock:
            self._warn_of_older_tables()

    def _open_file(self, *, read_only: bool, lock: bool) -> Database:
        folder = self.folder
        file = database_of("aggregator", folder)
        if read_only and not file.is_file():
            if (folder / "blobs").is_dir():
                raise StateError(
                    f"cannot use {file}: it is missing, although `aggregator run` has used it: {_ADVICE}"
                )
            raise StateError(f"no aggregator state in {folder}: give the --state of `aggregator run`")
        if not read_only:
            make_state_folder(folder)
        return Database(
            DatabaseFile(
                path=file,
                program="aggregator run",
                migrations=MIGRATIONS,
                read_only=read_only,
                lock=None if lock else self._lock,
                advice=_ADVICE,
            ),
            held=self._lock if lock else None,
        )

    def _open_postgresql(
        self, location: Location, *, read_only: bool, lock: bool, standby: Standby | None
    ) -> PostgresDatabase:
        check_url(location.database)
        before = recorded(self.folder)
        if not read_only:
            make_state_folder(self.folder)
            record(self.folder, location)  # at once: other commands use it while this one is a standby
        try:
            return PostgresDatabase(
                location.database,
                fleet=location.fleet,
                migrations=MIGRATIONS,
                read_only=read_only,
                held=self._lock if lock else None,
                standby=standby,
            )
        except ProtofleetError:
            if not read_only and before is not None:
                record(self.folder, before)  # the new URL may be mistyped
            raise

    def _open_tables(self, *, read_only: bool, blobs: str, fleet: str) -> None:
        self.facts = Facts(self.database)
        try:
            if fleet and (served := self.facts.get(ServedTask)) is not None:
                check_fleet(self.folder, fleet, served.fleet)
            machine = (
                self.database.machine_time if isinstance(self.database, PostgresDatabase) else machine_time
            )
            self.clock = ElapsedClock(self.facts, read_only=read_only, machine=machine)
            if self._is_aggregator:
                self.require_served_blobs()
            if not read_only:
                self.blobs = blobs_of(self.folder, self.facts, blobs)
        except BaseException:
            self.database.close()
            raise
        self.keys = DeviceKeys(self.database, self.facts)
        self.devices = Devices(self.database, self.keys)
        self.refusals = Refusals(self.database, self.keys, self.facts)
        self.submissions = Submissions(self.database)
        self.evaluations = Evaluations(self.database)
        self.forgotten = ForgottenDevices(self.database)
        self.heads = Heads(self.database, self.forgotten)
        self.quarantine = Quarantine(self.database)
        self.commands = OperatorCommands(self.database)
        self.jobs = Jobs(self.database)
        self.receivers = Receivers(self.database)

    def require_blobs(self) -> None:
        """Raise ConfigError if the blobs are in another state directory, which shares the tables with this one."""
        if self._are_blobs_elsewhere():
            raise ConfigError(
                f"the fleet's blobs are in the state directory of `aggregator run`, which {self.folder} is not: give "
                "that one as --state, or start `aggregator run` with --blobs s3://BUCKET/PREFIX"
            )

    def require_served_blobs(self) -> None:
        """Raise ConfigError if another aggregator has served the fleet with the blobs of its own state directory.

        This one would count all of them as lost when it leads.
        """
        if self.facts.get(ServedTask) is not None and self._are_blobs_elsewhere():
            raise ConfigError(
                f"the fleet's blobs are in the state directory of its other aggregator, and there is no {self.folder}/"
                "blobs: start that one with --blobs s3://BUCKET/PREFIX, or mount its folder blobs here. If it is lost, "
                "create an empty one: devices send their submissions again"
            )

    def _are_blobs_elsewhere(self) -> bool:
        stored = self.facts.get(BlobLocation)
        is_shared = isinstance(self.database, PostgresDatabase)
        return is_shared and not (stored and stored.location) and not (self.folder / "blobs").is_dir()

    def is_locked(self) -> bool:
        """Return True if an aggregator is running in this directory, or elsewhere on its tables in PostgreSQL."""
        if isinstance(self.database, PostgresDatabase):
            return self.database.is_locked()
        return self._lock.is_taken()

    def leader(self) -> str:
        """Return the machine of the aggregator that leads the fleet on PostgreSQL; empty if there is none."""
        return self.database.leader() if isinstance(self.database, PostgresDatabase) else ""

    @property
    def is_shared(self) -> bool:
        """True if aggregators on other machines can use the same tables."""
        return isinstance(self.database, PostgresDatabase)

    def leads(self) -> bool:
        """Return False if another aggregator may have taken the fleet's lead, which is possible on PostgreSQL only."""
        return not isinstance(self.database, PostgresDatabase) or self.database.leads()

    def check_lead(self) -> None:
        """Raise NotLeader if another aggregator has taken the lead, and StateError if that cannot be found out."""
        if isinstance(self.database, PostgresDatabase):
            self.database.check_lead()

    def _warn_of_older_tables(self) -> None:
        """Log whether PostgreSQL's tables lack changes that this directory's aggregator has seen."""
        if not isinstance(self.database, PostgresDatabase):
            return
        if lacking := record_newest(self.folder, self.database.found):
            text = (
                "the database is older than this aggregator's last run: repeat each revoke and forget since"
            )
            event(log, logging.WARNING, text, lacking=lacking)

    def close(self) -> None:
        """Close the database and release the lock."""
        if self._is_aggregator and isinstance(self.database, PostgresDatabase) and self.database.leads():
            with contextlib.suppress(StateError):  # only a warning depends on it
                record_newest(self.folder, self.database.newest)
        self.database.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Write everything within durably at its end, or nothing; raises StateError if it cannot be written.

        What was written to a file that has been deleted counts as not written.
        """
        try:
            with self.database.transaction():
                self.keys.refresh()
                yield
            self.database.check_file()
        except BaseException:
            self.keys.drop_cache()
            raise

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all reads within see the database as it is at the first of them; nothing can be written meanwhile."""
        with self.database.snapshot():
            self.keys.refresh()
            yield

    def data_version(self) -> int:
        """Return a number that changes when another process has written."""
        return self.database.data_version()

    def served_task(self) -> ServedTask:
        """Return the task that the aggregator was started with last; raises StateError if it was never started."""
        served = self.facts.get(ServedTask)
        if served is None:
            is_prepared = self.facts.get(TaskPreparation) is not None
            todo = "its graphs are being exported" if is_prepared else "start `aggregator run`"
            raise StateError(f"no task in {self.folder} yet: {todo}")
        return served

    def holds(self, device: str, digest: bytes) -> bool:
        """Return True if a device's submission or evaluation with this digest is stored.

        Raises StateError if the database was deleted, although its contents can still be read.
        """
        self.database.check_file()
        return bool(
            self.database.read(
                "SELECT 1 FROM submissions WHERE device = ? AND digest = ? "
                "UNION ALL SELECT 1 FROM evaluations WHERE device = ? AND digest = ?",
                *(device, digest, device, digest),
            )
        )

    def blob_reader(self) -> Callable[[bytes], bytes]:
        """Return a function that reads a blob, also where this is read only, and leaves damaged files where they are.

        It raises StateError or OSError, and does not verify the digest.
        """
        stored = self.facts.get(BlobLocation)
        if stored is not None and stored.location:
            return open_blobs(stored.location).read
        return lambda digest: (self.folder / "blobs" / digest.hex()).read_bytes()

    def report_lost(self, digest: bytes) -> None:
        """Report a blob that is missing or damaged: the aggregator restores it; raises StateError."""
        with self.transaction():
            known = self.facts.get(LostFiles) or LostFiles(())
            if digest.hex() not in known.digests:
                self.facts.put(LostFiles((*known.digests, digest.hex())))

    def put_blob(self, data: bytes, name: str) -> BlobRef:
        """Store a blob and return the reference to it."""
        return BlobRef(digest=self.blobs.put(data), size_bytes=len(data), name=name)

    def put_file(self, file: Path, *, name: str = "") -> BlobRef:
        """Store a file as a blob, by its own name or another; raises StateError if it cannot be read."""
        with state_errors(file):
            data = file.read_bytes()
        return self.put_blob(data, name or file.name)

    def delete_task(self, task: bytes) -> None:
        """Delete all rows of a task that is never served again, in a transaction of the caller."""
        keep_number(self.database)
        for table in TASK_TABLES:
            self.database.write(f"DELETE FROM {table} WHERE task = ?", task)  # noqa: S608 - of the schema

    def revoke_device(self, device: str, *, now_s: float) -> None:
        """Revoke a device's key and certificate, and quarantine it, in a transaction of the caller."""
        known = self.keys.get(device)
        self.keys.revoke(device, now_s=now_s)
        if known is not None and known.serial:
            self.keys.revoke_certificate(known.serial, now_s=now_s)
        if (served := self.facts.get(ServedTask)) is not None:
            self.quarantine.add(served.digest, device, reason=REVOKED, now_s=now_s)

    def reset_device(self, device: str, *, delete_submissions: bool) -> None:
        """Let a device start over with another key.

        What was uploaded under its name, perhaps by another client, is deleted, or counts until the device uploads
        again, whatever the sequence numbers.
        """
        if delete_submissions:
            self.submissions.delete_device(device)
        self.submissions.reset_sequence(device)
        self.devices.reset_presence(device)
        self.refusals.reset(device)
        self.quarantine.delete_revocation(device)

    def round_state(self, task: bytes) -> State:
        """Return the round logic's state from what is stored for a task."""
        heads = self.heads.all(task)
        newest = heads[-1] if heads else None
        version = newest.version if newest else 0
        covered = {**newest.members, **newest.quarantined} if newest else {}
        pending = self.facts.get(PendingHead)
        is_pending = pending is not None and (pending.task, pending.version) == (task, version + 1)
        failed = self.failed_training(task, version + 1)
        return State(
            submissions=self.entries(task),
            covered={
                device: Entry(sequence=0, digest=bytes.fromhex(digest), received_s=0.0)
                for device, digest in covered.items()
            },
            training=pending.members if pending is not None and is_pending else None,
            failures=failed.failures if failed is not None else 0,
            head_version=version,
            excluded=frozenset(newest.quarantined if newest else ()),
            decisions=self.decisions(task),
        )

    def entries(self, task: bytes) -> dict[str, Entry]:
        """Return the newest submission of each device.

        None has arrived later than now, although a reboot may set the clock back.
        """
        return {device: self._arrived(record.entry) for device, record in self.submissions.all(task).items()}

    def submission_changes(self, task: bytes, *, since: int) -> SubmissionChanges:
        """Return what has changed in the submissions to a task after change number `since`, as `entries` does."""
        changes = self.submissions.changes(task, since=since)
        records = {
            device: replace(record, entry=self._arrived(record.entry))
            for device, record in changes.records.items()
        }
        return replace(changes, records=records)

    def newest_change(self) -> int:
        """Return the number of the last change, before what is read next."""
        return newest_change(self.database)

    def _arrived(self, entry: Entry) -> Entry:
        return (
            entry if entry.received_s <= (now_s := self.clock.now_s()) else replace(entry, received_s=now_s)
        )

    def failed_training(self, task: bytes, version: int) -> FailedTraining | None:
        """Return the last failed training of a head; None if none has failed."""
        failed = self.facts.get(FailedTraining)
        return failed if failed is not None and (failed.task, failed.version) == (task, version) else None

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
