"""The HTTP server as a subprocess of the aggregator, so that no request takes time or memory from the intake.

It reads the state directory as `aggregator status` does, and leaves operator commands there as the command line does.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from aggregator.http.settings import TOKEN_FILE, HttpAddress, HttpSettings, listen, new_token
from protocol.errors import ConfigError, ThreadFailed
from protocol.log import event
from protocol.retry_delay import retry_delay_s
from protocol.storage.blobstore import state_errors
from protocol.threads import start_thread

log = logging.getLogger(__name__)

LISTEN_TIMEOUT_S = 3.0
"""Time for the server of an aggregator that was killed to release the port."""


@contextlib.contextmanager
def http_server(settings: HttpSettings | None, state: Path) -> Iterator[int | None]:
    """Run the subprocess, started again if it ends; yield its port, or None if it is off or its default port is taken.

    Raises:
        ConfigError: it cannot listen on the given address.
    """
    listening = _listen(settings) if settings is not None else None
    if settings is None or listening is None:
        yield None
        return
    with listening:
        port = int(listening.getsockname()[1])
        token = settings.token or new_token(state)
        where = None if settings.token else state / TOKEN_FILE
        url = f"http://{HttpAddress(settings.address.host, port)}/"
        event(log, logging.INFO, "dashboard started", url=url, token_file=where)
        server = _Subprocess(replace(settings, state=str(state), socket=listening.fileno(), token=token))
        start_thread(server.run, name="http", on_failure=_report)
        try:
            yield port
        finally:
            server.stop()


def _report(failure: ThreadFailed) -> None:
    event(log, logging.ERROR, "dashboard ended: restart the aggregator", reason=failure)


class _Subprocess:
    """The subprocess of a server, started again if it ends."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        for attempt in range(sys.maxsize):
            with self._lock:
                if self._stopping.is_set():
                    return
                process = self._process = _spawn(self._settings)
            code = process.wait()
            delay_s = retry_delay_s(attempt)
            if not self._stopping.is_set():
                event(log, logging.ERROR, "dashboard ended", exit_status=code, retry_s=delay_s)
            if self._stopping.wait(delay_s):
                return

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _spawn(settings: HttpSettings) -> subprocess.Popen[bytes]:
    with state_errors(Path(sys.executable)):
        # A new session: Ctrl-C reaches only the aggregator. The standard input stays open for as long as the
        # aggregator lives.
        process = subprocess.Popen(
            [sys.executable, "-m", "aggregator.http"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(settings.socket,),
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        with contextlib.suppress(BrokenPipeError):  # it has ended, as `run` reports
            if process.stdin is not None:
                process.stdin.write(msgspec.json.encode(settings) + b"\n")
                process.stdin.flush()
    return process


def _listen(settings: HttpSettings) -> socket.socket | None:
    """Return a socket that listens on the address; None if it is the default one, and taken."""
    deadline_s = time.monotonic() + LISTEN_TIMEOUT_S
    while True:
        try:
            return listen(settings.address)
        except ConfigError as error:
            if time.monotonic() <= deadline_s:
                time.sleep(0.1)
                continue
            if not settings.is_default:
                raise
            event(log, logging.WARNING, "no dashboard: give --http another address", reason=error)
            return None
