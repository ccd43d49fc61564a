"""Threads that a program depends on: the end of one by an error is reported, so that the program can end too."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from protocol.errors import StateError, ThreadFailed, problem_of_system
from protocol.log import observed, observer

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def start_thread(
    run: Callable[[], None], *, name: str, on_failure: Callable[[ThreadFailed], None]
) -> threading.Thread:
    """Run a function on a daemon thread; an error that ends it is logged and passed to `on_failure`, on that thread.

    Raises:
        ThreadFailed: the thread cannot be started.
    """
    by = observer()

    def guarded() -> None:
        try:
            with observed(by):
                run()
        except BaseException as error:
            problem = problem_of_system(error)
            log.critical("thread ended unexpectedly: %s", name, exc_info=None if problem else error)
            reason = problem or f"{type(error).__name__}: {error}"
            failure = ThreadFailed(f"the thread {name} has ended unexpectedly: {reason}")
            failure.__cause__ = error
            on_failure(failure)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ThreadFailed(
            f"cannot start the thread {name}: {error}: raise the number of threads that the system allows"
        ) from error
    return thread


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
