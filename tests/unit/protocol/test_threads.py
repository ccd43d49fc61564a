"""Threads: an error that ends one is reported, and so is one that cannot be started."""

import queue
import threading
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest

from protocol.errors import ThreadFailed
from protocol.threads import start_thread


def test_error_is_reported_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the stack trace; SystemExit ends a thread no less than an error."""
    failures: queue.SimpleQueue[ThreadFailed] = queue.SimpleQueue()
    for cause in (ValueError("oops"), SystemExit(3)):

        def run(error: BaseException = cause) -> None:
            raise error

        start_thread(run, name="worker", on_failure=failures.put).join()
        failure = failures.get_nowait()
        assert failure.__cause__ is cause
        assert str(failure) == f"the thread worker has ended unexpectedly: {type(cause).__name__}: {cause}"
    assert "thread ended unexpectedly: worker" in caplog.text
    assert "Traceback" in caplog.text


def test_failure_of_the_system_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A disk or memory that fails is no error of the program: its log has no stack trace."""
    failures: queue.SimpleQueue[ThreadFailed] = queue.SimpleQueue()

    def run() -> None:
        raise OSError(5, "Input/output error", "/state/blobs")

    start_thread(run, name="worker", on_failure=failures.put).join()
    text = "the thread worker has ended unexpectedly: cannot use /state/blobs: Input/output error"
    assert str(failures.get_nowait()) == text
    assert "Traceback" not in caplog.text


def test_thread_that_returns_is_not_reported() -> None:
    failures: list[ThreadFailed] = []
    start_thread(lambda: None, name="worker", on_failure=failures.append).join()
    assert failures == []


def _no_thread() -> AbstractContextManager[object]:
    return patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))


def test_thread_that_cannot_be_started_is_an_error() -> None:
    said = "cannot start the thread worker: can't start new thread: raise"
    with _no_thread(), pytest.raises(ThreadFailed, match=said):
        start_thread(lambda: None, name="worker", on_failure=lambda _: None)
