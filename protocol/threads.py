"""Threads that a program depends on, whose crashes are reported, and the cores for threads that compute."""

import logging
import os
import threading
from collections.abc import Callable

from protocol.errors import ThreadFailed, problem_of_system
from protocol.log import observed, observer

log = logging.getLogger(__name__)


def available_cores() -> int:
    """Return the number of CPU cores that this process may use, which a container or `taskset` can limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # noqa: TID251 - where there is no affinity


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
