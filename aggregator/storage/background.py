"""Writes in the background: files that are renamed together once they are durable."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from protocol.errors import StateError
from protocol.storage.blobstore import deleted_on_failure, state_errors, sync, write_beside

P = ParamSpec("P")
T = TypeVar("T")


def submit(
    pool: ThreadPoolExecutor, run: Callable[P, T], *arguments: P.args, **options: P.kwargs
) -> Future[T]:
    """Run a function on a thread of a pool; raises StateError if the system does not allow another thread."""
    claim = threading.Lock()

    def claimed() -> T:
        if not claim.acquire(blocking=False):
            raise CancelledError
        return run(*arguments, **options)

    try:
        return pool.submit(claimed)
    except RuntimeError as error:
        claim.acquire(blocking=False)  # the pool has queued it, and would run it on a later thread
        raise StateError(f"cannot start a thread that writes to the disk: {error}") from error


class WriteBatch:
    """Files written like `write_atomically`, in the background and several at a time, which takes a disk no longer."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="writing")
        self._written: dict[Path, Future[Path]] = {}
        self._elsewhere: dict[str, Future[None]] = {}

    def add(self, path: Path, data: bytes) -> None:
        """Start to write a file, which `finish` renames to its path; raises StateError without a thread to do so."""
        self._written[path] = submit(self._pool, write_beside, path, data, is_for_later=True)

    def add_elsewhere(self, name: str, write: Future[None]) -> None:
        """Let `wait` wait for a write to another place, too."""
        self._elsewhere[name] = write

    def __contains__(self, place: Path | str) -> bool:
        return place in self._written or place in self._elsewhere

    def wait(self) -> None:
        """Wait until everything that was added is durable; raises StateError, and deletes it, if a write failed."""
        every: list[Future[Any]] = [*self._written.values(), *self._elsewhere.values()]
        wait(every)
        if failures := [failure for each in every if (failure := each.exception())]:
            self.discard()
            raise failures[0]

    def finish(self) -> None:
        """Do what `wait` does, and rename the files."""
        self.wait()
        written, self._written, self._elsewhere = self._written, {}, {}
        with state_errors(Path()), contextlib.ExitStack() as stack:
            for each in written.values():
                stack.enter_context(deleted_on_failure(each.result()))
            for path, each in written.items():
                each.result().replace(path)
            for folder in {path.parent for path in written}:
                sync(folder)

    def discard(self) -> None:
        """Delete the files that were added since `finish`."""
        wait([each for each in self._elsewhere.values() if not each.cancel()])
        self._elsewhere = {}
        with contextlib.suppress(OSError, StateError):
            self._written = {path: each for path, each in self._written.items() if not each.cancel()}
            wait(self._written.values())
            for each in self._written.values():
                if not each.exception():
                    each.result().unlink(missing_ok=True)
            self._written = {}
