"""Crashes of the program while it ran something from outside, a task's graphs or a head, counted on disk.

ONNX Runtime runs in the device's own process, so a graph can end it: by a fault in an operator, or by memory that the
system does not have. The count is written before a graph runs and deleted after it worked, as a boot counter is.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from edge_client.storage.disk_space import require_space_for_records
from protocol.errors import CrashedBefore, Interrupted, ProtofleetError
from protocol.storage.database import Database
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import TaskManifest

MAX_CRASHES = 3
"""Crashes in a row after which something is not run again; power loss counts as well."""

MAX_ROWS = 64
"""Counts that are kept, the newest; those of replaced tasks and heads are never deleted otherwise."""


def task_key(manifest: TaskManifest, *, purpose: Literal["build", "install"] = "build") -> bytes:
    """Return the digest by which a task's graphs are counted; it works for one purpose only if it does for this one."""
    return digest_of(encode(manifest) + purpose.encode())


class CrashCounter:
    """Counts how often the program has crashed while it ran a task's graphs or a head."""

    def __init__(self, database: Database, folder: Path) -> None:
        self._database = database
        self._folder = folder
        self._running: bytes | None = None

    def crashes(self, digest: bytes) -> int:
        """Return the number of crashes in a row while the program ran a task's graphs or a head."""
        rows = self._database.read("SELECT starts FROM trials WHERE digest = ?", digest)
        return int(rows[0][0]) - (digest == self._running) if rows else 0

    @contextlib.contextmanager
    def guard(
        self,
        digest: bytes,
        *,
        what: str,
        max_crashes: int | None = MAX_CRASHES,
    ) -> Iterator[Callable[[], None]]:
        """Count a start before the body runs something, and delete the count after it worked.

        Yields a function to call when results are on disk: what crashes the program later is counted anew.
        `max_crashes` is None if it is to run however often it has crashed the program. A graph that is refused, which
        crashes no program, does not count.

        Raises:
            CrashedBefore: it has crashed the program `max_crashes` times.
            DiskAlmostFull: the count might be written, and its deletion not.
        """
        require_space_for_records(self._folder)
        crashes = self.crashes(digest)
        if max_crashes is not None and crashes >= max_crashes:
            times = "once" if crashes == 1 else f"{crashes} times"
            raise CrashedBefore(f"the program ended {times} while it ran {what}")
        self._write(digest, crashes + 1)
        self._running = digest

        def progress() -> None:
            nonlocal crashes
            if crashes:
                crashes = 0
                self._write(digest, 1)

        try:
            yield progress
        except Exception as error:
            if isinstance(error, (ProtofleetError, Interrupted)):
                self._write(digest, crashes)
            raise  # any other error, such as one of memory, ends the program
        except BaseException:
            self._write(digest, crashes)  # stopped by its user
            raise
        else:
            self._write(digest, 0)
        finally:
            self._running = None

    def refuse(self, digest: bytes) -> None:
        """Count as many crashes of a graph as keep it from being run again."""
        self._write(digest, MAX_CRASHES)

    def stop(self) -> None:
        """Do not count the graph that still runs: the program shuts down for another reason."""
        if (digest := self._running) is not None:
            self._database.write(
                "UPDATE trials SET starts = starts - 1 WHERE digest = ? AND starts > 0", digest
            )

    def _write(self, digest: bytes, starts: int) -> None:
        with self._database.transaction() as database:
            if not starts:
                database.execute("DELETE FROM trials WHERE digest = ?", (digest,))
                return
            place = "SELECT ?, ?, coalesce(max(place), 0) + 1 FROM trials"
            database.execute("INSERT OR REPLACE INTO trials " + place, (digest, starts))
            database.execute(
                "DELETE FROM trials WHERE place <= (SELECT max(place) FROM trials) - ?", (MAX_ROWS,)
            )
