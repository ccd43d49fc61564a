"""Uploads on the disk until the aggregator has acknowledged them.

At most one item of each kind waits: a newer one replaces it, in one transaction with the facts that belong to it. The
submission acknowledged last is kept too, for an aggregator that has lost its state and requests it again.
"""

import hashlib
import logging
from collections.abc import Collection
from pathlib import Path

from edge_client.core.state import UploadItem
from edge_client.store.disk_space import require_space
from protocol.errors import ProtofleetError, StateError
from protocol.log import event
from protocol.storage.blobstore import file_digest, state_errors
from protocol.storage.database import Database
from protocol.wire.codec import digest_of
from protocol.wire.transfer import Ranges

log = logging.getLogger(__name__)

LIMIT_BYTES = 900_000_000
"""Of the submissions in the outbox together: SQLite's limit of a row is 1,000,000,000 bytes. How large a submission may
be is the task's to say (`max_submission_mb`)."""

_PIECE_BYTES = 2**20
"""Of an item, read at once."""


def require_room(size_bytes: int) -> None:
    """Raise ProtofleetError if a submission of so many bytes does not fit the outbox."""
    if size_bytes > LIMIT_BYTES:
        raise ProtofleetError(
            f"the submission has {size_bytes:,} bytes and does not fit the outbox, which holds {LIMIT_BYTES:,}: "
            "use fewer features (`layers`) or a larger `min_images` in the task file"
        )


class Outbox:
    """A device's upload queue, in which submissions may take LIMIT_BYTES; evaluations are small."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def keep(self, item: UploadItem, file: Path, *, deletes_keys: bool = False) -> None:
        """Replace the waiting item of a kind, and an equal acknowledged one, by an item whose bytes are in a file.

        With `deletes_keys` the noise keys of releases are deleted in the same transaction.

        Raises:
            ProtofleetError: the submission is larger than the outbox.
            StateError: the file has other bytes, or the disk is full or fails; DiskAlmostFull if a submission would use
                the reserve. In all cases the waiting item stays.
        """
        if file_digest(file) != item.digest:
            raise StateError(f"{file} was changed on disk: try again")
        if item.kind == "submission":
            require_room(item.size_bytes)
            # SQLite writes it to its log first.
            require_space(self._database.path.parent, 2 * item.size_bytes, what="the submission")
        with state_errors(file), self._database.transaction() as database:
            database.execute(
                "DELETE FROM outbox WHERE kind = ? AND (received = 0 OR digest = ?)", (item.kind, item.digest)
            )
            if item.kind == "submission":
                # The acknowledged submission goes if there is no room for it beside the new one.
                most = LIMIT_BYTES - item.size_bytes
                database.execute("DELETE FROM outbox WHERE kind = ? AND size_bytes > ?", (item.kind, most))
            added = database.execute("INSERT INTO payloads (bytes) VALUES (zeroblob(?))", (item.size_bytes,))
            row = added.lastrowid or 0
            with database.blobopen("payloads", "bytes", row) as blob, file.open("rb") as payload:
                while piece := payload.read(_PIECE_BYTES):
                    blob.write(piece)
            values = (item.kind, item.task, item.digest, item.about, item.size_bytes, row)
            database.execute("INSERT INTO outbox VALUES (?, 0, ?, ?, ?, ?, ?)", values)
            if deletes_keys:
                database.execute("UPDATE releases SET key = NULL")

    def assign(self, item: UploadItem) -> None:
        """Let a stored item count for the task that it names now."""
        self._database.write("UPDATE outbox SET task = ? WHERE digest = ?", item.task, item.digest)

    def newest_submission(self) -> UploadItem | None:
        """Return the submission that waits, or else the one acknowledged last."""
        return next((item for item in self.items() if item.kind == "submission"), None)

    def items(self) -> tuple[UploadItem, ...]:
        """Return all items: submissions first, and waiting ones before acknowledged ones."""
        query = (
            "SELECT digest, size_bytes, kind, task, about, received FROM outbox ORDER BY kind DESC, received"
        )
        return tuple(
            UploadItem(digest, size, kind, task, about, bool(received))
            for digest, size, kind, task, about, received in self._database.read(query)
        )

    def drop_damaged(self) -> list[UploadItem]:
        """Delete and return items whose bytes have changed on disk; they are built again."""
        damaged = [item for item in self.items() if self._digest(item) != item.digest]
        self.drop(damaged, log_as="deleted damaged items from the outbox")
        return damaged

    def drop(self, items: Collection[UploadItem], *, log_as: str) -> None:
        """Delete items, and log that."""
        if not items:
            return
        with self._database.transaction() as database:
            database.executemany("DELETE FROM outbox WHERE digest = ?", [(item.digest,) for item in items])
        event(log, logging.WARNING, log_as, items=len(items))

    def _digest(self, item: UploadItem) -> bytes:
        sha256 = hashlib.sha256()
        for start in range(0, item.size_bytes, _PIECE_BYTES):
            for piece in self.read(item.digest, ((start, start + _PIECE_BYTES),)) or ():
                sha256.update(piece)
        return sha256.digest()

    def read(self, digest: bytes, ranges: Ranges) -> list[bytes] | None:
        """Return the bytes of some ranges of an item; None if a newer item has replaced it."""
        with self._database.connection() as database:
            row = database.execute("SELECT payload FROM outbox WHERE digest = ?", (digest,)).fetchone()
            if row is None:
                return None
            with database.blobopen("payloads", "bytes", row[0], readonly=True) as blob:
                return [bytes(blob[start:stop]) for start, stop in ranges]

    def payload(self, item: UploadItem) -> bytes | None:
        """Return all bytes of an item; None if a newer item has replaced it, or they have changed on disk."""
        pieces = self.read(item.digest, ((0, item.size_bytes),))
        return pieces[0] if pieces and digest_of(pieces[0]) == item.digest else None

    def write(self, item: UploadItem, file: Path) -> None:
        """Write the bytes of an item to a file."""
        with state_errors(file), file.open("wb") as written:
            for start in range(0, item.size_bytes, _PIECE_BYTES):
                for piece in self.read(item.digest, ((start, start + _PIECE_BYTES),)) or ():
                    written.write(piece)

    def receive(self, digest: bytes) -> bool:
        """Record that the aggregator has an item for good, and return whether it was still waiting.

        A submission stays, in place of the one acknowledged before it; an evaluation is deleted.
        """
        with self._database.transaction() as database:
            waiting = "FROM outbox WHERE digest = ? AND received = 0"
            row = database.execute(f"SELECT kind {waiting}", (digest,)).fetchone()
            if row is None:
                return False
            if row[0] == "submission":
                database.execute("DELETE FROM outbox WHERE kind = ? AND received = 1", row)
                database.execute("UPDATE outbox SET received = 1 WHERE digest = ?", (digest,))
            else:
                database.execute("DELETE FROM outbox WHERE digest = ?", (digest,))
        return True
