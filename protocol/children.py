"""Child processes of a service: started with a pipe, heard, and killed.

A service decides and keeps the state; what runs foreign code, or takes long, is a child, which may end at any
instruction. A supervisor's services are its children, too. A child is in a session of its own: Ctrl-C reaches only the
service, and all of its processes can be killed together. It ends with its service: it holds the read end of a pipe to
which the service never writes, and whose write end only the service holds.
"""

import contextlib
import errno
import fcntl
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, Protocol

from protocol.errors import StateError, ThreadFailed
from protocol.threads import start_thread

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 2**28
"""Of a message on the pipe."""

MAX_LINE_BYTES = 2**13
"""Of a line that a child writes to standard error; the rest of a longer one is a line of its own."""

OOM_SCORE = 900
"""If memory is short, Linux kills a child before its service."""

MAX_EXIT_S = 5.0
"""A child that has closed its pipe is killed after this time."""


_ENDED = {None, errno.EPIPE, errno.ECONNRESET}
"""Errors of the pipe of a child that has ended, of which the first is of a pipe that is closed here, too."""


class Process(Protocol):
    """The used part of `subprocess.Popen`."""

    stderr: IO[bytes] | None
    ended: int | None
    """A descriptor that is readable once it has ended, where the system has one."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, or the negative number of the signal that ended it."""

    def terminate(self) -> None:
        """Send it SIGTERM."""

    def kill(self) -> None:
        """Kill it, and the processes that it has started."""


class Child:
    """A running child.

    `on_message` gets each message, `on_line` each line of standard error, and `on_end` at last the exit status, or the
    negative number of a signal; all on a thread of the child's own, whose failure `on_failure` gets.

    Args:
        module: the module that runs as the program; it calls `connect`.
        on_line: None if its standard error is that of the service.
        descriptors: open files of the service that it gets, too, with the same numbers.

    Raises:
        StateError: the process cannot be started.
        ThreadFailed: it cannot be heard.
    """

    def __init__(
        self,
        module: str,
        *,
        on_message: Callable[[bytes], None],
        on_line: Callable[[str], None] | None,
        on_end: Callable[[int], None],
        on_failure: Callable[[ThreadFailed], None],
        descriptors: tuple[int, ...] = (),
    ) -> None:
        self._on_message, self._on_line, self._on_end = on_message, on_line, on_end
        self.is_killed = False
        """True once `kill` was called: its end is not its own."""
        self.reason = ""
        """Why it was aborted; empty if it was not."""
        self._sending = threading.Lock()
        self._connection, there = Pipe()
        alive, self._alive = os.pipe()
        try:
            error = subprocess.PIPE if on_line is not None else None
            self._process = launch(module, there, alive, error, descriptors)
        except StateError:
            self._close()
            raise
        except OSError as error:
            self._close()
            raise StateError(f"cannot start a child process: {error.strerror or error}") from error
        finally:
            there.close()
            os.close(alive)
        try:
            self._thread = start_thread(self._hear, name="child", on_failure=on_failure)
        except BaseException:
            self.kill()
            raise

    def send(self, message: bytes) -> None:
        """Send a message; one that has ended gets none, and one that gets none for another reason is aborted."""
        with self._sending:
            try:
                self._connection.send_bytes(message)
            except OSError as error:
                if error.errno not in _ENDED:
                    self.abort(f"cannot send to it: {error.strerror}")

    def kill(self) -> None:
        """Kill the child and the processes that it has started; `on_end` follows."""
        self.is_killed = True
        self._process.kill()

    def terminate(self) -> None:
        """Ask the child by SIGTERM to end; `on_end` follows if it handles the signal."""
        self._process.terminate()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the child, so long at most; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abort(self, reason: str) -> None:
        """Kill a child that fails, which is its own end."""
        self.reason = reason
        self._process.kill()

    def _hear(self) -> None:
        lines = _Lines(self._on_line) if self._on_line is not None else None

        def read_line(stream: IO[bytes]) -> bool:
            with contextlib.suppress(OSError):
                while self._connection.poll() and self._receive(self._connection):
                    """Messages that the child sent before the line, which may be about them."""
            return lines is not None and lines.read(stream)

        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ, self._receive)
            if self._process.stderr is not None:
                selector.register(self._process.stderr, selectors.EVENT_READ, read_line)
            if self._process.ended is not None:
                selector.register(self._process.ended, selectors.EVENT_READ, self._end_group)
            self._read_all(selector)
        try:
            code = self._process.wait(MAX_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._close()
        if self._process.stderr is not None:
            self._process.stderr.close()  # a cycle of references may hold the process for long
        self._on_end(code)

    def _read_all(self, selector: selectors.BaseSelector) -> None:
        """Read until all is closed; kill a child that has closed its pipe and does not end."""
        deadline_s: float | None = None
        while selector.get_map():
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not (ready := selector.select(timeout_s)):
                self._process.kill()
                deadline_s = None
            for key, _ in ready:
                if not key.data(key.fileobj):
                    selector.unregister(key.fileobj)
                    if key.fileobj is self._connection:
                        deadline_s = time.monotonic() + MAX_EXIT_S

    def _receive(self, connection: Connection) -> bool:
        try:
            self._on_message(connection.recv_bytes(MAX_MESSAGE_BYTES))
        except (EOFError, OSError):
            return False
        return True

    def _end_group(self, ended: int) -> bool:
        """Kill what an ended child has forked, which holds the pipe and standard error."""
        self._process.kill()
        os.close(ended)
        return False

    def _close(self) -> None:
        with self._sending:  # else its number may be another file's while a message is sent
            self._connection.close()
        os.close(self._alive)


class _Lines:
    """Splits what a child writes into lines."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = b""

    def read(self, stream: IO[bytes]) -> bool:
        data = os.read(stream.fileno(), MAX_LINE_BYTES)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) >= MAX_LINE_BYTES or not data:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            if text := line.decode(errors="backslashreplace").strip():
                self._on_line(text)
        return bool(data)


def ending(code: int) -> str:
    """Return how a process has ended, for people: by an exit status, or the negative number of a signal."""
    if code == -signal.SIGKILL:
        return "it was killed (SIGKILL), as Linux does when memory runs out"
    if code < 0:
        return f"it was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"exit status {code}"


def kill_group(process: int) -> None:
    """Kill a process that leads a session, and all processes in its group; one that has ended is none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


class _Session(subprocess.Popen[bytes]):
    """A process in a session of its own."""

    ended: int | None = None

    def kill(self) -> None:
        if self.returncode is None:  # else its number may be another process's
            kill_group(self.pid)


def launch_process(
    module: str,
    pipe: Connection,
    alive: int,
    error: int | None = subprocess.PIPE,
    descriptors: tuple[int, ...] = (),
) -> Process:
    """Start a module of this interpreter as a process."""
    if not sys.executable or getattr(sys, "frozen", False):
        raise StateError(
            "expected sys.executable to be a Python interpreter, which runs child processes, got "
            f"{sys.executable!r}: run this service as a program of its own"
        )
    process = _Session(
        [sys.executable, "-P", "-m", module, str(pipe.fileno()), str(alive)],
        pass_fds=(pipe.fileno(), alive, *descriptors),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=error,
        start_new_session=True,
    )
    if (pidfd_open := getattr(os, "pidfd_open", None)) is not None:  # of Linux, and not of every Python there
        with contextlib.suppress(OSError):  # an old kernel, or a container that forbids it
            process.ended = pidfd_open(process.pid)
    return process


launch: Callable[[str, Connection, int, int | None, tuple[int, ...]], Process] = launch_process
"""Starts children; tests replace it to run them on threads."""


def connect(arguments: Sequence[str], *, oom_score: int | None = OOM_SCORE) -> Connection:
    """Return the pipe to the service of this process, which ends when the service does.

    `oom_score` (at most 1000) is None for a child that Linux is not to kill before its service.
    """
    # A service manager sends it to all processes; the service decides.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe, alive = map(int, arguments)
    end_with(alive)
    if oom_score is not None:
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(oom_score), encoding="ascii")
    return Connection(pipe)


def end_with(alive: int) -> None:
    """Kill this process and its group once the other end of a pipe is closed, also within native code."""
    number: Any = getattr(fcntl, "F_SETSIG", None)  # of Linux
    if number is None:
        threading.Thread(target=_wait_for_end, args=(alive,), name="alive", daemon=True).start()
        return
    fcntl.fcntl(alive, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(alive, number, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.read(alive, 1)  # it had ended before
        os._exit(1)


def _wait_for_end(alive: int) -> None:
    os.read(alive, 1)
    kill_group(os.getpgrp())
