"""A backbone that runs on each image in a process of its own, in which no other image has ever been.

Operators of ONNX Runtime may leave a part of their output as they found the memory (three did in 1.31, for tensors
without values), and a graph can make features of what an earlier image has left there. The program started here loads
the backbone and never reads an image: it forks a process for each, which does. So all of them begin alike.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from edge_client.runtime.backbone import MAX_IMAGE_S, MAX_LOAD_S, Backbone, open_backbone
from edge_client.runtime.onnx_model import POLL_S, are_runs_interrupted
from protocol.errors import Interrupted, ProtofleetError, StateError

READY = b"ready"


class IsolatedBackbone:
    """A context that runs a backbone on the CPU, on one image at a time; an image that ends its process is refused."""

    def __init__(self, backbone: Backbone) -> None:
        self.metadata = backbone.metadata
        self._file = backbone.file
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def features(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the features, float32 (1, L), of one image as `preprocess` makes it, uint8 (1, H, W, 3).

        Raises:
            ProtofleetError: the backbone fails on it, ends the process, or exceeds the time limit.
            StateError: the program cannot be started.
            Interrupted: the result is no longer needed.
        """
        connection, size = self._connection or self._start(), self.metadata.feature_size
        try:
            connection.send_bytes(np.ascontiguousarray(images).tobytes())
            _wait(connection, MAX_IMAGE_S)
            made = connection.recv_bytes(4 * size)
            return np.frombuffer(made, np.float32).reshape(1, size)
        except (EOFError, OSError, ValueError) as error:
            self._stop()
            raise ProtofleetError("the backbone fails on it, or takes too much time or memory") from error
        except BaseException:
            self._stop()
            raise

    def _start(self) -> Connection:
        here, there = Pipe()
        arguments = [sys.executable, "-P", "-m", __name__, str(self._file), str(there.fileno())]
        try:
            # A new session, so that Ctrl-C does not reach it, and all of its processes can be ended together.
            self._process = subprocess.Popen(
                arguments,
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._connection = here
            there.close()
            _wait(here, MAX_LOAD_S)
            here.recv_bytes(len(READY))
        except (EOFError, OSError) as error:
            self._stop()
            raise StateError(f"the process that runs the backbone cannot be started: {error}") from error
        except BaseException:
            self._stop()
            raise
        finally:
            there.close()
        return here

    def _stop(self) -> None:
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if connection is not None:
            connection.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(connection: Connection, limit_s: float) -> None:
    """Wait for an answer; raises TimeoutError, an OSError, after the limit, and Interrupted for `interrupt_runs`."""
    until_s = time.monotonic() + limit_s
    while not connection.poll(POLL_S):
        if are_runs_interrupted(threading.get_ident()):
            raise Interrupted("the run of the backbone was interrupted")
        if time.monotonic() > until_s:
            raise TimeoutError("no answer in time")


def main(file: Path, descriptor: int) -> None:
    """Load a backbone, and fork for each image that waits, until a process fails or the other end is closed."""
    connection = Connection(descriptor)
    backbone = open_backbone(file, provider="cpu", threads=1)  # no thread would continue in a fork
    connection.send_bytes(READY)
    while True:
        connection.poll(None)
        process = os.fork()
        if not process:
            _run_one(backbone, connection)
        if os.waitpid(process, 0)[1]:
            return


def _run_one(backbone: Backbone, connection: Connection) -> None:
    """Answer with the features of the image that waits, and end the process."""
    spec, code = backbone.metadata.preprocessing, 1
    try:
        with contextlib.suppress(ValueError, OSError):  # a lower limit holds already
            # It may outlive the device program, but not for long.
            resource.setrlimit(resource.RLIMIT_CPU, (int(MAX_IMAGE_S), int(MAX_IMAGE_S)))
        pixels = np.frombuffer(connection.recv_bytes(), np.uint8)
        connection.send_bytes(backbone.features(pixels.reshape(1, spec.height, spec.width, 3)).tobytes())
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
