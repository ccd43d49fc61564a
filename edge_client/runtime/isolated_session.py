"""An ONNX Runtime session that has a process of its own for each run, in which no image has been before.

Operators of ONNX Runtime may leave a part of their output as they found the memory (three did in 1.31, for tensors
without values), and a graph can compute with what is there: images and keys, in a program that handles them. The
program started here loads a graph and never reads inputs: it forks a process for each run, which does. So all of them
begin alike.
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
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.runtime.session import open_session
from protocol.errors import StateError

POLL_S = 0.25

MAX_RUN_S = 300
"""Seconds of the CPU after which a run ends by itself, if the device program has ended before it."""

READY = b"ready"


class IsolatedSession:
    """Runs a graph that was validated, on the CPU; `file` is its path or its bytes.

    `start` starts the program that forks: before the first run, and before the first one after `close` or a failure.
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
            StateError: the program that forks was not started.
        """
        connection = self._connection
        if connection is None:
            raise StateError("the process that runs a graph was not started")
        try:
            ends = np.array(json.dumps([list(names), list(feeds)]))
            connection.send_bytes(_packed([ends, *feeds.values()]))
            return _unpacked(_answer(connection, options))
        except (EOFError, OSError) as error:
            self.close()
            raise RuntimeError("it fails, or ends its process") from error
        except BaseException:
            self.close()
            raise

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
            _answer(here, options)
        except (EOFError, OSError) as error:
            self.close()
            raise StateError(f"the process that runs a graph cannot be started: {error}") from error
        except BaseException:
            self.close()
            raise


def _answer(connection: Connection, options: Any) -> bytes:
    while not connection.poll(POLL_S):
        if options.terminate:
            raise TimeoutError("no answer in time")
    return connection.recv_bytes()


def _packed(arrays: Iterable[NDArray[Any]]) -> bytes:
    file = io.BytesIO()
    np.savez(file, *arrays)
    return file.getvalue()


def _unpacked(data: bytes) -> list[NDArray[Any]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return [arrays[f"arr_{number}"] for number in range(len(arrays))]


def main(descriptor: int) -> None:
    """Load a graph, and fork for each run that waits, until one fails or the other end is closed."""
    connection = Connection(descriptor)
    session, _, _ = open_session(connection.recv(), provider="cpu", threads=1)  # a fork has no other thread
    _unpacked(_packed([np.zeros(1)]))  # imports what each fork would import again
    gc.freeze()
    connection.send_bytes(READY)
    while True:
        connection.poll(None)
        process = os.fork()
        if not process:
            _run_one(session, connection)
        if os.waitpid(process, 0)[1]:
            return


def _run_one(session: Any, connection: Connection) -> None:
    """Answer the run that waits, and end the process."""
    code = 1
    try:
        with contextlib.suppress(ValueError, OSError):  # a lower limit holds already
            resource.setrlimit(resource.RLIMIT_CPU, (MAX_RUN_S, MAX_RUN_S))
        ends, *arrays = _unpacked(connection.recv_bytes())
        names, inputs = json.loads(str(ends))
        connection.send_bytes(_packed(session.run(names, dict(zip(inputs, arrays, strict=True)))))
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
