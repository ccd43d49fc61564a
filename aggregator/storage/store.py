"""What must survive a restart: SQLite for what happened, blobs beside it for what is large."""

import contextlib
import json
import sqlite3
import urllib.parse
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from aggregator.coordination.rollout import CommandKind, initial_state
from aggregator.coordination.rollout import State as Rollout
from aggregator.coordination.rounds import DeviceDecisions, Entry, State
from aggregator.storage.device_keys import MAX_STRANGERS, Keys
from aggregator.storage.migrations import SCHEMA_VERSION, migrate, version_of
from protocol.errors import StateError
from protocol.storage.blobstore import BlobStore, state_errors
from protocol.storage.folder_lock import FolderLock
from protocol.wire.messages import BlobRef, Evaluation

MAX_REFUSALS = 1000
"""Devices and reasons that are told apart in the counts of what was refused."""

_EPSILON = "epsilon/"


@dataclass(frozen=True)
class SubmissionRow:
    """A submission that was accepted."""

    device: str
    entry: Entry
    size_bytes: int
    images: int
    prototypes: int
    per_class: Mapping[int, int]
    """Prototypes of each class index."""


@dataclass(frozen=True)
class HeadRow:
    """A head that was made."""

    version: int
    task: bytes
    digest: bytes
    size_bytes: int
    trained_s: float
    prototypes: int
    members: Mapping[str, str]
    """Device to the hex digest of the submission of its that the head was made of."""
    metrics: Mapping[str, float]
    tensors: BlobRef | None = None
    """With rounds: what the round that it closed has left to the next one."""
    file: bytes = b""
    """The file that needs nothing but features, as a blob; empty where an older protofleet has not kept it."""
    aside: Mapping[str, str] = field(default_factory=dict)
    """As `members`, of the devices whose submissions were judged and left out."""


REVOKED = "its key was revoked"
"""Why a device is quarantined whose submissions do not even come to be judged."""


@dataclass(frozen=True)
class Aside:
    """A device whose prototypes are not trained on: why, since when, and since when all the same (unix seconds)."""

    why: str
    since_s: float
    readmitted_s: float | None = None


@dataclass(frozen=True)
class Closing:
    """A collection that has closed: the head that is being made, and of what."""

    task: bytes
    version: int
    members: Mapping[str, Entry]


@dataclass(frozen=True)
class Order:
    """What an operator wants to be done about heads."""

    number: int
    kind: CommandKind
    version: int | None


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
            self._check_schema(read_only=read_only)
        self.keys = Keys(self._read, self._write)

    def _check_schema(self, *, read_only: bool) -> None:
        version = version_of(self._db)
        if version <= SCHEMA_VERSION and not read_only:
            migrate(self._db)
        elif 0 < version < SCHEMA_VERSION:
            raise StateError(
                f"{self.folder} was written by an older protofleet: start `aggregator run` on it first"
            )
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

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Write everything within at its end, durably, or nothing.

        Raises:
            StateError: it cannot be written.
        """
        with self._sqlite_errors():
            # At once: what is read within would else be too old to be written upon, once another process writes.
            self._db.execute("BEGIN IMMEDIATE")
        try:
            with self.keys.held():
                yield
            with self._sqlite_errors():
                self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")  # some failures have done so themselves
            raise

    def try_to_write(self) -> None:
        """See whether anything can be stored.

        Raises:
            StateError: the disk is full, or the database cannot be written.
        """
        self._write("UPDATE facts SET value = value WHERE key = 'epoch'")

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

    def see_epsilon(self, device: str, total: float) -> None:
        """Keep the most that a device has said to have spent on privacy, over all tasks."""
        most = max(total, float(self.fact(_EPSILON + device, "0")))
        self.set_fact(_EPSILON + device, json.dumps(most))

    def epsilons(self) -> dict[str, float]:
        """The most that devices have said to have spent on privacy, of those that have said anything."""
        said = self.facts(_EPSILON).items()
        return {key.removeprefix(_EPSILON): float(json.loads(value)) for key, value in said}

    def forget_fact(self, key: str) -> None:
        """Drop a single value."""
        self._write("DELETE FROM facts WHERE key = ?", key)

    def facts(self, prefix: str) -> dict[str, str]:
        """The values whose names begin like this."""
        return dict(
            self._read("SELECT key, value FROM facts WHERE substr(key, 1, ?) = ?", len(prefix), prefix)
        )

    def has_room_for(self, device: str) -> bool:
        """Whether a device is known, or is not one name too many: anybody can make up any number of them."""
        return bool(
            self._read(
                "SELECT 1 FROM devices WHERE device = ? UNION ALL SELECT 1 FROM keys WHERE device = ? AND enrolled "
                "UNION ALL SELECT 1 WHERE (SELECT count(*) FROM devices) < ?",
                device, device, MAX_STRANGERS,
            )
        )  # fmt: skip

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
            "INSERT OR REPLACE INTO submissions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            task, row.device, row.entry.sequence, row.entry.digest, row.entry.received_s, row.size_bytes,
            row.images, row.prototypes, json.dumps(dict(row.per_class)), row.entry.round,
        )  # fmt: skip

    def submissions(self, task: bytes) -> dict[str, SubmissionRow]:
        """The newest submission of each device to a task."""
        rows = self._read(
            "SELECT device, sequence, digest, received_s, round, size_bytes, images, prototypes, per_class "
            "FROM submissions WHERE task = ? ORDER BY device",
            task,
        )
        return {
            device: SubmissionRow(
                device=device,
                entry=Entry(*entry),
                size_bytes=size_bytes,
                images=images,
                prototypes=prototypes,
                per_class={int(label): count for label, count in json.loads(per_class).items()},
            )
            for device, *entry, size_bytes, images, prototypes, per_class in rows
        }

    def forget_submission(self, task: bytes, device: str) -> None:
        """Drop a device's submission, as if it had never come."""
        self._write("DELETE FROM submissions WHERE task = ? AND device = ?", task, device)

    def begin_anew(self, device: str, *, without: bool) -> None:
        """Let a device come with another key: of what came under its name before, nothing stands in its way.

        Args:
            device: its name, which somebody else may have used.
            without: what it has uploaded is gone; or else it counts until the device uploads something else,
                whatever the numbers.
        """
        if without:
            self._write("DELETE FROM submissions WHERE device = ?", device)
        self._write("UPDATE submissions SET sequence = 0 WHERE device = ?", device)
        self._write("UPDATE devices SET state = 'unknown', epoch = 0 WHERE device = ?", device)
        self._write("DELETE FROM quarantined WHERE device = ? AND why = ?", device, REVOKED)

    def writes_of_others(self) -> int:
        """A number that changes when another process has written."""
        return int(self._read("PRAGMA data_version")[0][0])

    def submissions_to_others(self, task: bytes) -> set[bytes]:
        """The digests of what was submitted to other tasks than this one."""
        return {digest for (digest,) in self._read("SELECT digest FROM submissions WHERE task != ?", task)}

    def keep_head(self, head: HeadRow) -> None:
        """Keep a head."""
        self._write(
            "INSERT INTO heads VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            head.version, head.task, head.digest, head.size_bytes, head.trained_s, head.prototypes,
            json.dumps(dict(head.members)), json.dumps(dict(head.metrics)),
            msgspec.json.encode(head.tensors).decode(), head.file, json.dumps(dict(head.aside)),
        )  # fmt: skip

    def heads(self, task: bytes | None = None) -> list[HeadRow]:
        """Every head, of a task or of all, oldest first."""
        rows = self._read(
            "SELECT version, task, digest, size_bytes, trained_s, prototypes, members, metrics, tensors, file, aside "
            "FROM heads WHERE task = ? OR ? IS NULL ORDER BY version",
            task,
            task,
        )
        return [
            HeadRow(
                *(version, task, digest, size_bytes, trained_s, prototypes),
                members=json.loads(members),
                metrics=json.loads(metrics),
                tensors=msgspec.json.decode(tensors, type=BlobRef | None),
                file=file,
                aside=json.loads(aside),
            )
            for *(
                version,
                task,
                digest,
                size_bytes,
                trained_s,
                prototypes,
            ), members, metrics, tensors, file, aside in rows
        ]

    def set_closing(self, closing: Closing | None) -> None:
        """Keep what a head is being made of, so that a restart goes on with the very same; None: of nothing."""
        self.set_fact("closing", msgspec.json.encode(closing).decode())

    def _closing(self, task: bytes, version: int) -> Closing | None:
        closing = msgspec.json.decode(self.fact("closing", "null"), type=Closing | None)
        return closing if closing and (closing.task, closing.version) == (task, version) else None

    def quarantined(self, task: bytes, device: str, *, why: str, now_s: float) -> None:
        """Train on nothing of a device from now on; one that was readmitted no longer is."""
        self._write(
            "INSERT INTO quarantined (task, device, since_s, why) VALUES (?, ?, ?, ?) ON CONFLICT (task, device) "
            "DO UPDATE SET why = excluded.why, readmitted_s = NULL, "
            "since_s = CASE WHEN readmitted_s IS NULL THEN since_s ELSE excluded.since_s END",
            task, device, now_s, why,
        )  # fmt: skip

    def readmit(self, task: bytes, device: str, *, now_s: float) -> None:
        """Train on what a device uploads, whatever is found in it, until it is quarantined again."""
        self._write(
            "UPDATE quarantined SET readmitted_s = ? WHERE task = ? AND device = ? AND readmitted_s IS NULL",
            *(now_s, task, device),
        )

    def forget_aside(self, task: bytes, device: str) -> None:
        """Take back that a device was quarantined, as if it had never been."""
        self._write("DELETE FROM quarantined WHERE task = ? AND device = ?", task, device)

    def asides(self, task: bytes) -> dict[str, Aside]:
        """The devices that were quarantined, those that were readmitted since among them."""
        rows = self._read(
            "SELECT device, why, since_s, readmitted_s FROM quarantined WHERE task = ? ORDER BY device", task
        )
        return {device: Aside(why, since_s, readmitted_s) for device, why, since_s, readmitted_s in rows}

    def keep_evaluation(self, device: str, evaluation: Evaluation, *, digest: bytes, now_s: float) -> None:
        """Keep how a head did on a device's held-out images, in the place of what was said before."""
        self._write(
            "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            evaluation.task, device, evaluation.head_version, digest, now_s,
            json.dumps(evaluation.correct), json.dumps(evaluation.incorrect), json.dumps(evaluation.previous_correct),
            evaluation.problem,
        )  # fmt: skip

    def forget_evaluations(self, task: bytes, *, but: Collection[int]) -> None:
        """Drop what devices said of heads, but of these."""
        marks = ", ".join("?" * len(but))
        self._write(
            f"DELETE FROM evaluations WHERE task = ? AND head_version NOT IN ({marks})",  # noqa: S608 - marks
            task,
            *but,
        )

    def evaluations(self, task: bytes, head_version: int) -> dict[str, Evaluation]:
        """What each device said of one head."""
        return {
            device: Evaluation(
                task=task,
                head_version=head_version,
                correct=tuple(json.loads(right)),
                incorrect=tuple(json.loads(wrong)),
                previous_correct=tuple(json.loads(before)),
                problem=problem,
            )
            for device, right, wrong, before, problem in self._read(
                "SELECT device, right, wrong, before, problem FROM evaluations "
                "WHERE task = ? AND head_version = ? ORDER BY device",
                task, head_version,
            )
        }  # fmt: skip

    def keep_rollout(self, task: bytes, state: Rollout) -> None:
        """Keep which head of a task is used, tried and rejected."""
        self._write(
            "INSERT OR REPLACE INTO rollouts VALUES (?, ?)", task, msgspec.json.encode(state).decode()
        )

    def rollout(self, task: bytes) -> Rollout:
        """Which head of a task is used, tried and rejected; at first, all there are were used in turn."""
        rows = self._read("SELECT state FROM rollouts WHERE task = ?", task)
        if rows:
            return msgspec.json.decode(rows[0][0], type=Rollout)
        return initial_state(head.version for head in self.heads(task))

    def online(self) -> frozenset[str]:
        """The devices that are there, and are heard: who was revoked or not enrolled cannot say that it goes."""
        rows = self._read(
            "SELECT device, enrolled, revoked_s FROM devices LEFT JOIN keys USING (device) WHERE state = 'online'"
        )
        is_closed = self.keys.is_closed()
        return frozenset(
            device
            for device, enrolled, revoked_s in rows
            if revoked_s is None and (enrolled or not is_closed)
        )

    def place_order(self, task: bytes, kind: CommandKind, version: int | None) -> int:
        """Leave an order to the aggregator that works on a task; returns its number."""
        return int(
            self._read(
                "INSERT INTO orders (task, kind, version) VALUES (?, ?, ?) RETURNING number",
                task,
                kind,
                version,
            )[0][0]
        )

    def orders(self, task: bytes) -> list[Order]:
        """Those of a task that nobody has taken yet, the oldest first."""
        rows = self._read(
            "SELECT number, kind, version FROM orders WHERE task = ? AND outcome IS NULL ORDER BY number",
            task,
        )
        return [Order(*row) for row in rows]

    def take_order(self, number: int, outcome: str) -> None:
        """Say what has become of an order: empty if it was carried out, else why not."""
        self._write("UPDATE orders SET outcome = ? WHERE number = ?", outcome, number)

    def outcome_of(self, number: int) -> str | None:
        """What has become of an order; None if nobody has taken it yet."""
        outcome: str | None = self._read("SELECT outcome FROM orders WHERE number = ?", number)[0][0]
        return outcome

    def holds(self, device: str, digest: bytes) -> bool:
        """Whether this payload of a device was taken and still stands."""
        return bool(
            self._read(
                "SELECT 1 FROM submissions WHERE device = ? AND digest = ? "
                "UNION ALL SELECT 1 FROM evaluations WHERE device = ? AND digest = ?",
                device, digest, device, digest,
            )
        )  # fmt: skip

    def count_refusal(self, device: str, *, reason: str, detail: str, now_s: float, times: int = 1) -> bool:
        """Count something refused; returns whether it is the first of its device and reason.

        What is one name too many is counted under `?`: anybody can make up any number of them. Those that an operator
        has enrolled always have their own.
        """
        known = self._read("SELECT 1 FROM refusals WHERE device = ? AND reason = ?", device, reason)
        if not (known or device == "?" or self._has_room_to_refuse(device)):
            return self.count_refusal("?", reason=reason, detail=detail, now_s=now_s, times=times)
        self._write(
            "INSERT INTO refusals VALUES (?, ?, ?, ?, ?) ON CONFLICT (device, reason) "
            "DO UPDATE SET count = count + excluded.count, last_s = excluded.last_s, detail = excluded.detail",
            device, reason, times, now_s, detail,
        )  # fmt: skip
        return not known

    def _has_room_to_refuse(self, device: str) -> bool:
        known = self.keys.key_of(device)
        if known is not None and known.enrolled:
            return True
        return int(self._read("SELECT count(*) FROM refusals")[0][0]) < MAX_REFUSALS

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
        version, members, aside = (
            (heads[-1].version, heads[-1].members, heads[-1].aside) if heads else (0, {}, {})
        )
        closing = self._closing(task, version + 1)
        return State(
            submissions=submissions,
            covered={
                device: Entry(sequence=0, digest=bytes.fromhex(digest), received_s=0.0)
                for device, digest in {**members, **aside}.items()
            },
            training=closing.members if closing else None,
            head_version=version,
            excluded=frozenset(aside),
            decisions=self.decisions(task),
        )

    def decisions(self, task: bytes) -> DeviceDecisions:
        """Who does not count at all, and who counts whatever is found in what they upload."""
        asides = self.asides(task)
        barred = (device for device, one in asides.items() if one.why == REVOKED and one.readmitted_s is None)
        return DeviceDecisions(
            # A key is revoked whatever the task was then.
            quarantined=self.keys.revoked().union(barred),
            released=frozenset(device for device, one in asides.items() if one.readmitted_s is not None),
            enrolled=self.keys.enrolled(),
        )


def open_folder(folder: Path) -> Path:
    """Make the state directory.

    Raises:
        StateError: it cannot be made.
    """
    with state_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder
