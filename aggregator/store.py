"""What must survive a restart: SQLite for what happened, blobs beside it for what is large."""

import contextlib
import json
import sqlite3
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aggregator.rounds import Entry, State
from protocol.blobstore import BlobStore, state_errors
from protocol.errors import StateError
from protocol.lock import FolderLock
from protocol.messages import Evaluation

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE devices (
    device TEXT PRIMARY KEY, state TEXT NOT NULL DEFAULT 'unknown', epoch INTEGER NOT NULL DEFAULT 0,
    seen_s REAL NOT NULL, info TEXT NOT NULL DEFAULT '{}'
) STRICT;
CREATE TABLE submissions (
    task BLOB NOT NULL, device TEXT NOT NULL, sequence INTEGER NOT NULL, digest BLOB NOT NULL,
    received_s REAL NOT NULL, size_bytes INTEGER NOT NULL, pictures INTEGER NOT NULL,
    prototypes INTEGER NOT NULL, per_class TEXT NOT NULL, PRIMARY KEY (task, device)
) STRICT;
CREATE TABLE heads (
    version INTEGER NOT NULL, task BLOB NOT NULL, digest BLOB NOT NULL, size_bytes INTEGER NOT NULL,
    trained_s REAL NOT NULL, prototypes INTEGER NOT NULL, members TEXT NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (task, version)
) STRICT;
CREATE TABLE evaluations (
    task BLOB NOT NULL, device TEXT NOT NULL, head_version INTEGER NOT NULL, digest BLOB NOT NULL,
    received_s REAL NOT NULL, right TEXT NOT NULL, wrong TEXT NOT NULL, PRIMARY KEY (task, device, head_version)
) STRICT;
CREATE TABLE refusals (
    device TEXT NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL, last_s REAL NOT NULL,
    detail TEXT NOT NULL, PRIMARY KEY (device, reason)
) STRICT;
"""


@dataclass(frozen=True)
class SubmissionRow:
    """A submission that was accepted."""

    device: str
    entry: Entry
    size_bytes: int
    pictures: int
    prototypes: int
    per_class: Mapping[int, int]
    """Prototypes of each class index."""


@dataclass(frozen=True)
class HeadRow:
    """A head that was trained."""

    version: int
    task: bytes
    digest: bytes
    size_bytes: int
    trained_s: float
    prototypes: int
    members: Mapping[str, str]
    """Device to the hex digest of the submission of its that the head was trained on."""
    metrics: Mapping[str, float]


class Store:
    """The aggregator's state directory.

    Args:
        folder: made if it is not there.
        read_only: for looking at a running aggregator's state from outside.

    Raises:
        StateError: it cannot be used, or was written by a newer protofleet.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.folder = folder
        self._lock = FolderLock(folder)
        file = folder / "aggregator.sqlite"
        if read_only and not file.is_file():
            raise StateError(f"no aggregator state in {folder}: give the --state of `aggregator run`")
        if not read_only:
            self.blobs = BlobStore(folder / "blobs")
        mode = "ro" if read_only else "rwc"
        with self._sqlite_errors():
            uri = f"file:{urllib.parse.quote(str(file))}?mode={mode}"
            self._db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10)
            if not read_only:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
            self._migrate(create=not read_only)

    def _migrate(self, *, create: bool) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and create:
            self._db.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")
        elif version != SCHEMA_VERSION:
            raise StateError(
                f"{self.folder} was written by another protofleet (schema {version}, expected {SCHEMA_VERSION}): "
                "use that version, or another --state"
            )

    @contextlib.contextmanager
    def _sqlite_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StateError(f"cannot use {self.folder / 'aggregator.sqlite'}: {error}") from error

    def _write(self, sql: str, *values: Any) -> None:
        with self._sqlite_errors():
            self._db.execute(sql, values)

    def _read(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._sqlite_errors():
            return self._db.execute(sql, values).fetchall()

    def lock(self) -> None:
        """Keep other aggregators out of this folder for as long as this process lives.

        Raises:
            StateError: another one is at work in it.
        """
        if not self._lock.take():
            raise StateError(
                f"another aggregator is at work in {self.folder}: stop it, or give this one its own --state"
            )

    def is_locked(self) -> bool:
        """Whether an aggregator is at work in this folder."""
        return self._lock.is_taken()

    def close(self) -> None:
        """Close the database, and leave the folder to others."""
        self._db.close()
        self._lock.release()

    def fact(self, key: str, default: str = "") -> str:
        """A single value by name."""
        rows = self._read("SELECT value FROM facts WHERE key = ?", key)
        return rows[0][0] if rows else default

    def set_fact(self, key: str, value: str) -> None:
        """Keep a single value by name."""
        self._write("INSERT OR REPLACE INTO facts VALUES (?, ?)", key, value)

    def see_device(self, device: str, *, state: str, epoch: int, now_s: float) -> None:
        """Keep a device's presence, unless it is of an older start of the device than what is known."""
        self._write(
            "INSERT INTO devices (device, state, epoch, seen_s) VALUES (?, ?, ?, ?) ON CONFLICT (device) "
            "DO UPDATE SET state = excluded.state, epoch = excluded.epoch, seen_s = excluded.seen_s "
            "WHERE excluded.epoch >= devices.epoch",
            device, state, epoch, now_s,
        )  # fmt: skip

    def keep_info(self, device: str, *, info: str, now_s: float) -> None:
        """Keep what a device says of itself, as JSON."""
        self._write(
            "INSERT INTO devices (device, seen_s, info) VALUES (?, ?, ?) ON CONFLICT (device) "
            "DO UPDATE SET info = excluded.info, seen_s = excluded.seen_s",
            device, now_s, info,
        )  # fmt: skip

    def keep_submission(self, task: bytes, row: SubmissionRow) -> None:
        """Keep a device's newest submission in the place of its older one."""
        self._write(
            "INSERT OR REPLACE INTO submissions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            task, row.device, row.entry.sequence, row.entry.digest, row.entry.received_s, row.size_bytes,
            row.pictures, row.prototypes, json.dumps(dict(row.per_class)),
        )  # fmt: skip

    def submissions(self, task: bytes) -> dict[str, SubmissionRow]:
        """The newest submission of each device to a task."""
        return {
            device: SubmissionRow(
                device=device,
                entry=Entry(sequence, digest, received_s),
                size_bytes=size_bytes,
                pictures=pictures,
                prototypes=prototypes,
                per_class={int(label): count for label, count in json.loads(per_class).items()},
            )
            for device, sequence, digest, received_s, size_bytes, pictures, prototypes, per_class in self._read(
                "SELECT device, sequence, digest, received_s, size_bytes, pictures, prototypes, per_class "
                "FROM submissions WHERE task = ? ORDER BY device",
                task,
            )
        }

    def keep_head(self, head: HeadRow) -> None:
        """Keep a head."""
        self._write(
            "INSERT INTO heads VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            head.version, head.task, head.digest, head.size_bytes, head.trained_s, head.prototypes,
            json.dumps(dict(head.members)), json.dumps(dict(head.metrics)),
        )  # fmt: skip

    def heads(self, task: bytes) -> list[HeadRow]:
        """Every head of a task, oldest first."""
        return [
            HeadRow(
                version, task, digest, size, trained_s, prototypes, json.loads(members), json.loads(metrics)
            )
            for version, digest, size, trained_s, prototypes, members, metrics in self._read(
                "SELECT version, digest, size_bytes, trained_s, prototypes, members, metrics "
                "FROM heads WHERE task = ? ORDER BY version",
                task,
            )
        ]

    def keep_evaluation(self, device: str, evaluation: Evaluation, *, digest: bytes, now_s: float) -> None:
        """Keep how a head did on a device's held-out pictures, in the place of what was said before."""
        self._write(
            "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?)",
            evaluation.task, device, evaluation.head_version, digest, now_s,
            json.dumps(evaluation.right), json.dumps(evaluation.wrong),
        )  # fmt: skip

    def evaluations(self, task: bytes, head_version: int) -> dict[str, tuple[list[int], list[int]]]:
        """Per device, counts of right and wrong per class for one head."""
        return {
            device: (json.loads(right), json.loads(wrong))
            for device, right, wrong in self._read(
                "SELECT device, right, wrong FROM evaluations WHERE task = ? AND head_version = ? ORDER BY device",
                task, head_version,
            )
        }  # fmt: skip

    def holds(self, device: str, digest: bytes) -> bool:
        """Whether this payload of a device was taken and still stands."""
        return bool(
            self._read(
                "SELECT 1 FROM submissions WHERE device = ? AND digest = ? "
                "UNION ALL SELECT 1 FROM evaluations WHERE device = ? AND digest = ?",
                device, digest, device, digest,
            )
        )  # fmt: skip

    def count_refusal(self, device: str, *, reason: str, detail: str, now_s: float) -> bool:
        """Count something refused; returns whether it is the first of its device and reason."""
        known = self._read("SELECT 1 FROM refusals WHERE device = ? AND reason = ?", device, reason)
        self._write(
            "INSERT INTO refusals VALUES (?, ?, 1, ?, ?) ON CONFLICT (device, reason) "
            "DO UPDATE SET count = count + 1, last_s = excluded.last_s, detail = excluded.detail",
            device, reason, now_s, detail,
        )  # fmt: skip
        return not known

    def devices(self) -> list[tuple[str, str, float, dict[str, Any]]]:
        """Name, state, when last heard of (unix seconds) and info of every device."""
        return [
            (device, state, seen_s, json.loads(info))
            for device, state, seen_s, info in self._read(
                "SELECT device, state, seen_s, info FROM devices ORDER BY device"
            )
        ]

    def refusals(self) -> list[tuple[str, str, int, str]]:
        """Device, reason, count and the last detail of everything refused."""
        return [
            (device, reason, count, detail)
            for device, reason, count, detail in self._read(
                "SELECT device, reason, count, detail FROM refusals ORDER BY device, reason"
            )
        ]

    def round_state(self, task: bytes) -> State:
        """The round logic's state, as of what is stored for a task."""
        submissions = {device: row.entry for device, row in self.submissions(task).items()}
        heads = self.heads(task)
        members = heads[-1].members if heads else {}
        covered = {
            device: Entry(sequence=0, digest=bytes.fromhex(digest), received_s=0.0)
            for device, digest in members.items()
        }
        return State(
            submissions=submissions,
            covered=covered,
            head_version=heads[-1].version if heads else 0,
        )


def open_folder(folder: Path) -> Path:
    """Make the state directory.

    Raises:
        StateError: it cannot be made.
    """
    with state_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder
