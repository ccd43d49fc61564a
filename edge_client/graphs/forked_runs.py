"""A program that has a process of its own for each run, in which no image has been before.

The program is loaded once and forks for each run. It reads neither requests nor answers: a run has a connection of its
own to the device program. So all runs begin alike, also those after one that failed or was killed: another start of the
program would have other addresses, and a graph can compute with those.

Every run has the same budget of time, which is measured on random pixels. A run that needs more is ended: the time of
all runs together has a bound that no image moves, and no image takes the time of another one.
"""

import contextlib
import gc
import io
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.graphs.watchdog import POLL_S
from protocol.errors import StateError

MAX_RUN_S = 300
"""Seconds of the CPU after which a run ends by itself, if the device program has ended before it."""

MAX_OUTPUT_BYTES = 2**26
"""Answer of a run, 64 MiB: one image's features take 4 MiB at most, its pixels 48 MiB."""

READY = DONE = b"."

BUDGET_FACTOR, WALL_FACTOR = 10, 4
"""A run may take ten times the processor time of the slowest sample, and four times that by the clock."""

MIN_BUDGET_S = 0.5
"""Seconds of the CPU that every run may take: less is in the noise of a busy machine."""

SAMPLES = 3
"""Runs on samples."""

UNLIMITED = SimpleNamespace(terminate=False)
"""Options of a run that has no other limit than its budget."""


class ForkedRuns:
    """Runs of a program, `python -m MODULE`, which calls `serve`; `value` is what it loads."""

    def __init__(self, module: str, value: Any) -> None:
        self._module = module
        self._value = value
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._budget_s: float | None = None
        self._used_s = 0.0
        """Processor time of the last run; infinite if it was more than the budget."""

    @property
    def slot_s(self) -> float:
        """Seconds that a run takes at most; infinite without a budget."""
        return math.inf if self._budget_s is None else WALL_FACTOR * self._budget_s

    def start(self, options: Any = UNLIMITED) -> None:
        """Start the program that forks; `options.terminate` ends that.

        Raises:
            StateError: it cannot be started.
            TimeoutError: it was ended.
        """
        try:
            here, there = Pipe()
            with there:
                # In the group of the job that starts it, with which it is killed.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", self._module, str(there.fileno())],
                    pass_fds=(there.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            self._connection = here
            here.send(self._value)
            _answer(here, options)
        except (EOFError, OSError) as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise
            raise StateError(f"the process that handles images cannot be started: {error}") from error

    def set_budget(self, sample: Any, options: Any = UNLIMITED) -> None:
        """Set the time that a run may take by the time of runs on a sample; raises what `answer` raises."""
        self._budget_s, used = None, []
        for _ in range(SAMPLES):
            self.answer(sample, options)
            used.append(self._used_s)
        self._budget_s = max(MIN_BUDGET_S, BUDGET_FACTOR * max(used))

    def answer(self, request: Any, options: Any = UNLIMITED) -> bytes:
        """Return what a run answers to a request; `options.terminate` ends the run.

        Raises:
            RuntimeError: it fails, or has ended its process.
            TimeoutError: it was ended, or takes more than its budget.
            StateError: the program that forks has ended.
        """
        connection = self._connection
        try:
            if connection is None or self._process is None:
                raise EOFError
            here, there = Pipe()
            with here:
                with there:
                    send_handle(connection, there.fileno(), self._process.pid)
                    process = int(connection.recv_bytes(maxlength=20))
                try:
                    return self._answer_of(here, request, options)
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)  # a zombie at the most: it is reaped after `DONE`
                    connection.send_bytes(DONE)
                    self._used_s = float(connection.recv_bytes(maxlength=40))
        except TimeoutError:
            raise
        except RuntimeError as error:
            if math.isfinite(self._used_s):
                raise
            raise TimeoutError(f"it takes more than {self._budget_s:.2g} s of the processor") from error
        except (EOFError, OSError) as error:
            self.close()
            raise StateError("the process that handles images has ended: try again") from error

    def close(self) -> None:
        """End the program that forks, and its processes."""
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()

    def _answer_of(self, run: Connection, request: Any, options: Any) -> bytes:
        try:
            run.send((self._budget_s or MAX_RUN_S, request))
            return _answer(run, options, limit_s=self.slot_s)
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise RuntimeError(
                f"it fails, ends its process, or gives more than {MAX_OUTPUT_BYTES} bytes"
            ) from error


def _answer(connection: Connection, options: Any, *, limit_s: float = math.inf) -> bytes:
    """Wait for an answer; raises TimeoutError if the limit or `options.terminate` comes first."""
    until_s = time.monotonic() + limit_s
    while not connection.poll(max(0.0, min(POLL_S, until_s - time.monotonic()))):
        if options.terminate or time.monotonic() >= until_s:
            raise TimeoutError("no answer in time")
    return connection.recv_bytes(maxlength=MAX_OUTPUT_BYTES)


def packed(arrays: Iterable[NDArray[Any]]) -> bytes:
    """Return arrays as bytes, which are read without running anything in them."""
    file = io.BytesIO()
    for array in arrays:
        np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
    return file.getvalue()


def unpacked(data: bytes) -> list[NDArray[Any]]:
    """Return arrays that take no more memory than their bytes: nothing in them is compressed."""
    file, arrays = io.BytesIO(data), []
    while file.tell() < len(data):
        arrays.append(np.lib.format.read_array(file, allow_pickle=False))
    return arrays


def serve(descriptor: int, load: Callable[[Any], Callable[[Any], bytes]]) -> None:
    """Load a value, and fork for each run, until the other end is closed; `load` returns what answers a request."""
    # A service manager sends SIGTERM to all processes; the other one decides when this one ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(descriptor)
    answer = load(connection.recv())
    unpacked(packed([np.zeros(1)]))  # imports what each fork would import again
    gc.freeze()
    connection.send_bytes(READY)
    with contextlib.suppress(EOFError):
        while True:
            run = recv_handle(connection)
            process = os.fork()
            if not process:
                connection.close()
                _run(answer, Connection(run))
            os.close(run)
            connection.send_bytes(b"%d" % process)
            connection.recv_bytes()
            _, status, used = os.wait4(process, 0)
            took_too_long = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            connection.send_bytes(b"inf" if took_too_long else b"%.6f" % (used.ru_utime + used.ru_stime))


def _run(answer: Callable[[Any], bytes], connection: Connection) -> None:
    """Answer a request and end this process, whatever becomes of it."""
    try:
        with contextlib.suppress(ValueError, OSError):  # a lower limit holds already
            resource.setrlimit(resource.RLIMIT_CPU, (MAX_RUN_S, MAX_RUN_S))
        with contextlib.suppress(OSError):  # of all processes, this one is to end if memory is short
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        budget_s, request = connection.recv()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, budget_s)
        connection.send_bytes(answer(request))
    finally:
        os._exit(0)
