"""Snapshots of the fleet's status: one for each change, shared by all requests and browsers."""

import asyncio
import contextlib
import gzip
import hashlib
import math
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from aggregator.status.collect import collect_status
from aggregator.status.model import Status
from aggregator.storage.open_store import open_store, recorded_location
from protocol.errors import ProtofleetError
from protocol.storage.folder_lock import FolderLock
from protocol.storage.state_folder import database_of

if TYPE_CHECKING:
    from aggregator.storage.store import Store

POLL_S = 0.5
"""Seconds after which a watching browser receives a change."""

REST = 4.0
"""Times as long as a snapshot took, before the next one is made: at most a fifth of a processor."""

KEEP_ALIVE_S = 15.0
"""Seconds without a change after which a watching browser receives something nevertheless."""

INDEX_HEADER_BYTES = 48
"""Of the WAL-index, SQLite's file `-shm` (sqlite.org/walformat.html)."""

_COMPRESSION = 1
"""Of gzip: a fourth of the size in a tenth of the time of its best."""


@dataclass(frozen=True)
class Snapshot:
    """The fleet's status at one time, and its JSON, encoded and compressed once for all requests."""

    problem: str
    """Why there is none; then all else is empty."""
    status: Status | None = None
    body: bytes = b""
    compressed: bytes = b""
    version: str = ""
    """Of the contents: other contents have another one."""
    made_s: float = 0.0
    """Unix seconds."""


class Snapshots:
    """Reads a state directory when it has changed and a request or a browser asks."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._stamps = Stamps(state)
        self._stamp: object = None
        self._checked_s = -math.inf
        self._next_s = 0.0
        self._snapshot = Snapshot("")
        self._reading = asyncio.Lock()
        self._ended = asyncio.Event()
        self.problem = ""
        """Why the program `serve` has ended, by its supervisor; empty while it runs."""

    async def end(self) -> None:
        self._ended.set()
        async with self._reading:
            self._stamps.close()

    async def current(self, *, max_age_s: float = 0.0) -> Snapshot:
        """Return the newest snapshot, made anew if the state has changed and the last one is old enough.

        The state is not examined again within `max_age_s` seconds.
        """
        async with self._reading:
            now_s = time.monotonic()
            if now_s >= max(self._next_s, self._checked_s + max_age_s):
                self._checked_s = now_s
                stamp = await asyncio.to_thread(self._stamps.read)
                if stamp != self._stamp:
                    start_s = time.monotonic()
                    self._snapshot = await asyncio.to_thread(read_snapshot, self._state)
                    self._stamp = None if self._snapshot.problem else stamp
                    took_s = time.monotonic() - start_s
                    self._next_s = start_s + took_s + max(POLL_S / 2, REST * took_s)
            return self._snapshot

    async def changes(self) -> AsyncIterator[str | None]:
        """Yield the version of the newest snapshot, then each later one; None if nothing changes for `KEEP_ALIVE_S`."""
        seen, sent_s = "", -math.inf
        while not self._ended.is_set():
            version = (await self.current(max_age_s=POLL_S / 2)).version
            if version != seen or time.monotonic() >= sent_s + KEEP_ALIVE_S:
                yield version if version != seen else None
                seen, sent_s = version, time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), POLL_S)


def read_snapshot(state: Path) -> Snapshot:
    """Return a snapshot of a state directory; one with a problem if it cannot be read."""
    try:
        with contextlib.closing(open_store(state, read_only=True)) as store:
            status = collect_status(store)
    except ProtofleetError as error:
        text = str(error)
        return Snapshot(text, version=_version(text.encode()), made_s=time.time())
    body = msgspec.json.encode(status)
    return Snapshot("", status, body, gzip.compress(body, _COMPRESSION), _version(body), time.time())


def _version(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()[:16]


class Stamps:
    """Finds out whether anything has changed that a snapshot of a state directory shows.

    Tables elsewhere are asked on a connection that stays open; of those in the directory the files tell.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self._store: Store | None = None

    def read(self) -> object:
        """Return a value that changes when anything changes."""
        files = [self._state / name for name in ("intake.json", "head.onnx", "model.onnx")]
        try:
            if recorded_location(self._state) is not None:
                return _times(files), self._elsewhere()
            database = database_of("aggregator", self._state)
            files += [database, database.with_name(f"{database.name}-wal")]
            return _times(files), _log_index(database), FolderLock(self._state).is_taken()
        except ProtofleetError as error:
            return _times(files), str(error)

    def _elsewhere(self) -> object:
        if self._store is None:
            self._store = open_store(self._state, read_only=True)
        return self._store.database.data_version(), self._store.database.is_locked()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def _log_index(database: Path) -> bytes:
    """Return the header of SQLite's index of its log; empty without one.

    SQLite writes a transaction into the log, syncs it, which may take seconds, and only then lets readers see it, by
    this header.
    """
    with contextlib.suppress(OSError), database.with_name(f"{database.name}-shm").open("rb") as file:
        return file.read(INDEX_HEADER_BYTES)
    return b""


def _times(files: Iterable[Path]) -> list[tuple[int, int, int] | None]:
    """Return the time of the last write, the size and the number of each file; None if there is none."""
    times: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            found = file.stat()
        except OSError:
            times.append(None)
        else:
            times.append((found.st_mtime_ns, found.st_size, found.st_ino))
    return times
