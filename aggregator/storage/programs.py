"""Programs beside the aggregator: the training jobs of workers.

A job is claimed by one worker at a time, for as long as it renews its lease.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from protocol.storage.facts import Tables

MAX_LOST_WORKERS = 3
"""Workers that may end without a word during a job; after that it has failed."""

FileName = Literal["head.onnx", "model.onnx", "tensors.bin", "total.bin"]
"""A file that a job makes."""

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]

Files = dict[FileName, Digest]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a job; without a result it has failed for `reason`."""

    result: dict[str, Any] | None = None
    """The fields of the job's Result."""
    reason: str = ""
    is_killed: bool = False
    """True if a signal has ended it, not an error of its own."""


@dataclass(frozen=True)
class QueuedJob:
    """A job in the table."""

    number: int
    """Its place in the order, and its name in logs; used again after the job is deleted."""
    digest: bytes
    """Digest of its content, which identifies it."""
    kind: str
    """Name of the job's class."""
    job: str
    """The job as JSON."""
    timeout_s: float
    worker: str
    """The program that runs it; empty while it waits for one."""
    attempt: int
    """Number of times that it was claimed."""
    is_abandoned: bool
    """Too many workers have ended during it."""
    progress: Mapping[str, Any]
    outcome: Outcome | None
    files: Files
    """Digests of the blobs that it has made."""


_COLUMNS = "number, digest, kind, job, timeout_s, worker, attempt, state, lost, lease_until_s, progress, outcome, files"

_CLAIMED = (
    "lost = lost + CASE WHEN state = 'running' THEN 1 ELSE 0 END, state = 'running', worker = ?, "
    "attempt = attempt + 1, lease_until_s = ?, progress = '{}', files = '{}'"
)


class Jobs:
    """The table `jobs`. Times are elapsed seconds of the store's clock."""

    def __init__(self, database: Tables) -> None:
        self._database = database

    def add(self, task: bytes, *, kind: str, job: str, digest: bytes, timeout_s: float, now_s: float) -> None:
        """Store a job in place of all others, unless it is stored already.

        `digest` identifies its content: an equal job that is waiting, running or over is kept as it is.
        """
        with self._database.transaction():
            self._database.write("DELETE FROM jobs WHERE digest != ?", digest)
            self._database.write(
                "INSERT INTO jobs (task, kind, job, digest, timeout_s, created_s) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (digest) DO NOTHING",
                *(task, kind, job, digest, timeout_s, now_s),
            )

    def get(self, digest: bytes, *, now_s: float) -> QueuedJob | None:
        rows = self._database.read(
            f"SELECT {_COLUMNS} FROM jobs WHERE digest = ?",  # noqa: S608
            digest,
        )
        return self._job(rows[0], now_s) if rows else None

    def claim(self, worker: str, *, now_s: float, lease_s: float) -> QueuedJob | None:
        """Return the oldest job that waits, or whose worker's lease is over, as this worker's; None without one."""
        free = "(state = 'waiting' OR (state = 'running' AND lease_until_s < ? AND lost < ?))"
        if not self._database.read(f"SELECT 1 FROM jobs WHERE {free} LIMIT 1", now_s, MAX_LOST_WORKERS):  # noqa: S608
            return None  # without a write, which would hold up others
        with self._database.transaction():
            # The condition stands twice for databases that let another worker claim the same row meanwhile.
            rows = self._database.read(
                f"UPDATE jobs SET {_CLAIMED} WHERE number = (SELECT number FROM jobs WHERE {free} "  # noqa: S608
                f"ORDER BY number LIMIT 1) AND {free} RETURNING {_COLUMNS}",
                *(worker, now_s + lease_s, now_s, MAX_LOST_WORKERS, now_s, MAX_LOST_WORKERS),
            )
        return self._job(rows[0], now_s) if rows else None

    def renew(
        self,
        claimed: QueuedJob,
        *,
        until_s: float,
        progress: Mapping[str, Any],
        files: Mapping[FileName, str] | None = None,
    ) -> bool:
        """Extend a lease, and store the progress; return False if the job is no longer this attempt's.

        `files` are the digests of blobs that the worker is about to store: from now on they are needed.
        """
        return self._change(
            claimed,
            "lease_until_s = ?, progress = ?, files = ?",
            *(until_s, msgspec.json.encode(progress).decode(), msgspec.json.encode(files or {}).decode()),
        )

    def finish(self, claimed: QueuedJob, outcome: Outcome) -> bool:
        """Store a job's end; return False, and store nothing, if the job is no longer this attempt's."""
        return self._change(claimed, "state = 'ended', outcome = ?", msgspec.json.encode(outcome).decode())

    def give_back(self, claimed: QueuedJob) -> None:
        self._change(claimed, "state = 'waiting', worker = ''")

    def _change(self, claimed: QueuedJob, changes: str, *values: Any) -> bool:
        return bool(
            self._database.read(
                f"UPDATE jobs SET {changes} WHERE digest = ? AND worker = ? AND attempt = ? "  # noqa: S608
                "AND state = 'running' RETURNING number",
                *(*values, claimed.digest, claimed.worker, claimed.attempt),
            )
        )

    def delete(self, digest: bytes) -> None:
        self._database.write("DELETE FROM jobs WHERE digest = ?", digest)

    def cancel(self, task: bytes) -> None:
        """Delete a task's jobs: a worker that runs one stops it when it renews its lease."""
        self._database.write("DELETE FROM jobs WHERE task = ?", task)

    def blobs(self) -> set[bytes]:
        rows = self._database.read("SELECT files FROM jobs")
        files = [self._database.decode(text, Files) for (text,) in rows]
        return {bytes.fromhex(digest) for each in files for digest in each.values()}

    def _job(self, row: tuple[Any, ...], now_s: float) -> QueuedJob:
        number, digest, kind, job, timeout_s, worker, attempt, *state_and_files = row
        state, lost, lease_until_s, progress, outcome, files = state_and_files
        decode = self._database.decode
        return QueuedJob(
            *(number, digest, kind, job, timeout_s, worker, attempt),
            is_abandoned=state == "running" and lost >= MAX_LOST_WORKERS and lease_until_s < now_s,
            progress=decode(progress, dict[str, Any]),
            outcome=decode(outcome, Outcome) if state == "ended" else None,
            files=decode(files, Files),
        )
