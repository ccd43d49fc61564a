"""Runs the program of jobs on threads of the tests' process, where they can replace what it uses."""

import contextlib
import os
import socket
import subprocess
import threading
from multiprocessing.connection import Connection
from typing import IO, Any, ClassVar

from edge_client.graphs.backbone import Backbone
from edge_client.images.extraction import Isolate
from edge_client.job.program import Service, serve


class EndedError(BaseException):
    """Stands for the end of a job's process: nothing handles it."""


class JobThread:
    """A thread in place of a process; killed, it loses its pipe and continues unheard."""

    stderr: IO[bytes] | None = None
    ended: int | None = None
    isolate: ClassVar[Isolate] = Backbone.isolated
    newest: ClassVar["JobThread"]
    _all: ClassVar[list["JobThread"]] = []

    def __init__(self, module: str, pipe: Connection, *_: object) -> None:
        assert module == "edge_client.job"
        self._pipe = Connection(os.dup(pipe.fileno()))
        self._code = 1
        self.killed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job", daemon=True)
        JobThread.newest = self
        JobThread._all.append(self)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("job", timeout or 0)
        return self._code

    def kill(self) -> None:
        self._code = -9
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)
        self.killed.set()

    @classmethod
    def wait_for_killed(cls) -> None:
        """Wait until killed ones have ended, too."""
        for each in cls._all:
            if each._code < 0:
                each._thread.join(60)

    @classmethod
    def kill_all(cls) -> None:
        """Kill all, and wait until they have ended."""
        for each in cls._all:
            each.kill()
        cls.wait_for_killed()
        cls._all.clear()

    def _run(self) -> None:
        try:
            serve(Service(self._pipe), isolate=JobThread.isolate)
            self._code = 0
        except (OSError, EndedError):  # killed
            pass
        finally:
            self._pipe.close()


def die(*_: object, **__: object) -> Any:
    """End the newest job as SIGKILL does: the service hears nothing more of it."""
    JobThread.newest.kill()
    raise EndedError
