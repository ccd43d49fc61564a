"""An ONNX Runtime session that has a process of its own for each run, in which no image has been before.

Operators of ONNX Runtime may leave a part of their output as they found the memory (three did in 1.31, for tensors
without values), and a graph can compute with what is there: images and keys, in a program that handles them. The
program started here loads a graph and never reads inputs: for each run it forks a process that does, and that forks the
run and answers, whatever becomes of the run. So all runs begin alike, also those after one that failed: another start
of the program would have other addresses, and a graph can compute with them as well.
"""

import contextlib
import gc
import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edge_client.runtime.session import open_session
from edge_client.runtime.watchdog import POLL_S
from protocol.errors import StateError

MAX_RUN_S = 300
"""Seconds of the CPU after which a run ends by itself, if the device program has ended before it."""

MAX_ANSWER_S = 20.0
"""Time limit for the answer that a run has ended."""

READY = b"ready"

CANCEL = b""
"""Sent to end the run that is not answered yet; has no effect on one that is."""

FAILED = b""
"""The answer if the run fails, or ends its process."""

_CLOSED = 2
"""Exit status of the process for a run, if there is none because the other end is closed."""


class IsolatedSession:
    """Runs a graph that was validated, on the CPU; `file` is its path or its bytes.

    `start` starts the program that forks: before the first run, and before the first one after `close`.
    """

    def __init__(self, file: Path | bytes) -> None:
        self._file = file
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def is_started(self) -> bool:
        """Return whether the program that forks is there."""
        return self._connection is not None

    def run(
        self, names: Sequence[str], feeds: Mapping[str, NDArray[Any]], options: Any
    ) -> list[NDArray[Any]]:
        """Return the named outputs, as `InferenceSession.run` does; `options.terminate` ends the run.

        Raises:
            RuntimeError: it fails, or has ended its process.
            TimeoutError: it was ended.
            StateError: the program that forks was not started, or has ended.
        """
        connection = self._connection
        if connection is None:
            raise StateError("the process that runs a graph was not started")
        try:
            ends = np.array(json.dumps([list(names), list(feeds)]))
            connection.send_bytes(_packed([ends, *feeds.values()]))
            answer = _answer(connection, options)
            if answer is None:
                connection.send_bytes(CANCEL)
                if not connection.poll(MAX_ANSWER_S):
                    raise EOFError
                connection.recv_bytes()
        except (EOFError, OSError) as error:
            self.close()
            raise StateError("the process that runs a graph has ended: try again") from error
        except BaseException:
            self.close()
            raise
        if answer is None:
            raise TimeoutError("no answer in time")
        if answer == FAILED:
            raise RuntimeError("it fails, or ends its process")
        return _unpacked(answer)

    def close(self) -> None:
        """End the program that forks, and its processes."""
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if connection is not None:
            connection.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start(self, options: Any) -> None:
        """Start the program that forks; `options.terminate` ends that.

        It takes none of a run's time: one image's failure would otherwise leave the next one less.

        Raises:
            StateError: it cannot be started.
        """
        try:
            here, there = Pipe()
            with there:
                # A new session, so that Ctrl-C does not reach it, and all of its processes can be ended together.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, str(there.fileno())],
                    pass_fds=(there.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._connection = here
            here.send(self._file)
            if _answer(here, options) is None:
                raise TimeoutError("no answer in time")
        except (EOFError, OSError) as error:
            self.close()
            raise StateError(f"the process that runs a graph cannot be started: {error}") from error
        except BaseException:
            self.close()
            raise


def _answer(connection: Connection, options: Any) -> bytes | None:
    """Wait for an answer; returns None if `options.terminate` comes first."""
    while not connection.poll(POLL_S):
        if options.terminate:
            return None
    return connection.recv_bytes()


def _packed(arrays: Iterable[NDArray[Any]]) -> bytes:
    file = io.BytesIO()
    np.savez(file, *arrays)
    return file.getvalue()


def _unpacked(data: bytes) -> list[NDArray[Any]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return [arrays[f"arr_{number}"] for number in range(len(arrays))]


def main(descriptor: int) -> None:
    """Load a graph, and fork for each run that waits, until the other end is closed."""
    # A service manager sends SIGTERM to all processes; the other one decides when this one ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(descriptor)
    session, _, _ = open_session(connection.recv(), provider="cpu", threads=1)  # a fork has no other thread
    _unpacked(_packed([np.zeros(1)]))  # imports what each fork would import again
    gc.freeze()
    connection.send_bytes(READY)
    status = 0
    while status != _CLOSED:  # whatever else becomes of a run, the next one begins as it did
        connection.poll(None)
        process = os.fork()
        if not process:
            _end_with(lambda: _serve_one(session, connection))
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _end_with(work: Callable[[], int]) -> NoReturn:
    """End a forked process with the status that a function returns."""
    status = 1
    try:
        status = work()
    finally:
        os._exit(status)


def _serve_one(session: Any, connection: Connection) -> int:
    """Fork the run that waits, and answer it."""
    try:
        request = connection.recv_bytes()
    except EOFError:
        return _CLOSED
    if request == CANCEL:  # it came after the answer
        return 0
    here, there = Pipe(duplex=False)
    process = os.fork()
    if not process:
        _end_with(lambda: _run(session, request, there))
    there.close()
    answer = FAILED
    if here in wait([here, connection]):
        with contextlib.suppress(EOFError):
            answer = here.recv_bytes()
    else:
        os.kill(process, signal.SIGKILL)
        connection.recv_bytes()
    os.waitpid(process, 0)
    connection.send_bytes(answer)
    return 0


def _run(session: Any, request: bytes, answers: Connection) -> int:
    with contextlib.suppress(ValueError, OSError):  # a lower limit holds already
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_RUN_S, MAX_RUN_S))
    with contextlib.suppress(OSError):  # of all processes, this one is to end if memory is short
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    ends, *arrays = _unpacked(request)
    names, inputs = json.loads(str(ends))
    answers.send_bytes(_packed(session.run(names, dict(zip(inputs, arrays, strict=True)))))
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
