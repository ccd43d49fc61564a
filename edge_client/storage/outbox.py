"""What is on its way to the aggregator, on the disk: it is to be sent until the aggregator's own receipt is there.

Of each kind at most one item waits: a newer one takes its place, in one transaction with the facts that belong to
it. The submission that was received last stays beside it, for an aggregator that loses its state asks for it again.
"""

import hashlib
import sqlite3
from collections.abc import Mapping
from typing import Any

from edge_client.agent.upload_item import Kind, UploadItem
from edge_client.storage.database import Database, write_facts
from protocol.errors import ProtofleetError
from protocol.wire.codec import digest_of
from protocol.wire.transfer import Ranges

MIB = 1024**2

DEFAULT_MB = 64

LARGEST_MB = 900
"""What SQLite holds in one row."""


class Outbox:
    """The items of one device.

    Args:
        database: where they are.
        limit_bytes: what submissions may take, those that wait and those received together. Evaluations are
            small: a number or two for each class.
    """

    def __init__(self, database: Database, *, limit_bytes: int) -> None:
        self._database = database
        self._limit_bytes = limit_bytes

    def keep(
        self,
        kind: Kind,
        payload: bytes,
        *,
        task: bytes,
        about: str,
        facts: Mapping[str, Any] | None = None,
    ) -> UploadItem:
        """Put something in the place of what waits of its kind, and keep facts with it: all or nothing.

        Args:
            kind: what it is.
            payload: the encoded message.
            task: the task that it belongs to.
            about: what it was made of, as in an `Item`.
            facts: what is to be remembered if, and only if, it is in the box.

        Raises:
            ProtofleetError: a submission is larger than the box; what was there stays.
            StateError: the disk does not take it; likewise.
        """
        size, limit = len(payload), self._limit_bytes
        if kind == "submission" and size > limit:
            raise ProtofleetError(
                f"the submission has {size} bytes and does not fit the outbox, which holds {limit}: raise --outbox-mb"
            )
        digest = digest_of(payload)
        with self._database.transaction() as database:
            database.execute("DELETE FROM outbox WHERE kind = ? AND received = 0", (kind,))
            if kind == "submission":
                _make_room(database, limit - size)
            row = database.execute("INSERT INTO payloads (bytes) VALUES (?)", (payload,)).lastrowid
            values = (kind, task, digest, about, size, row)
            database.execute("INSERT INTO outbox VALUES (?, 0, ?, ?, ?, ?, ?)", values)
            write_facts(database, facts or {})
        return UploadItem(digest, size, kind, task, about)

    def newest_submission(self) -> UploadItem | None:
        """The submission that waits, or else the one that was received last."""
        items = self._items("kind = 'submission' ORDER BY received LIMIT 1")
        return items[0] if items else None

    def items(self) -> tuple[UploadItem, ...]:
        """All there are; submissions first, and what waits before what was received."""
        return self._items("TRUE ORDER BY kind DESC, received")

    def drop_damaged(self) -> int:
        """Delete what the disk has changed: it is of no use to anybody, and is made once more. Returns how many."""
        damaged = [item for item in self.items() if self._digest(item) != item.digest]
        with self._database.transaction() as database:
            database.executemany("DELETE FROM outbox WHERE digest = ?", [(item.digest,) for item in damaged])
        return len(damaged)

    def _digest(self, item: UploadItem) -> bytes:
        sha256 = hashlib.sha256()
        for start in range(0, item.size_bytes, MIB):
            for piece in self.read(item.digest, ((start, start + MIB),)) or ():
                sha256.update(piece)
        return sha256.digest()

    def _items(self, which: str) -> tuple[UploadItem, ...]:
        rows = self._database.read(
            f"SELECT digest, size_bytes, kind, task, about, received FROM outbox WHERE {which}"  # noqa: S608 - ours
        )
        return tuple(
            UploadItem(digest, size, kind, task, about, bool(received))
            for digest, size, kind, task, about, received in rows
        )

    def read(self, digest: bytes, ranges: Ranges) -> list[bytes] | None:
        """The bytes of some ranges of an item, and no others; None if something newer has taken its place."""
        with self._database.reading() as database:
            row = database.execute("SELECT payload FROM outbox WHERE digest = ?", (digest,)).fetchone()
            if row is None:
                return None
            with database.blobopen("payloads", "bytes", row[0], readonly=True) as blob:
                return [bytes(blob[start:stop]) for start, stop in ranges]

    def receive(self, digest: bytes, *, facts: Mapping[str, Any] | None = None) -> bool:
        """The aggregator has an item for good: returns whether it was still waiting.

        The submission stays, in the place of the one received before it; an evaluation goes.

        Args:
            digest: the item's.
            facts: what is to be remembered with it.
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
            write_facts(database, facts or {})
        return True


def _make_room(database: sqlite3.Connection, left_bytes: int) -> None:
    """Let the submission that was received last go if there is no room for it beside the new one."""
    database.execute("DELETE FROM outbox WHERE kind = 'submission' AND size_bytes > ?", (left_bytes,))
