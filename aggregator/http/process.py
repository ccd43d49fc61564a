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
from pathlib import Path

import msgspec

from aggregator.http.settings import (
    DEFAULT_ADDRESS,
    OFF,
    TOKEN_FILE,
    HttpAddress,
    HttpSettings,
    given_token,
    listen,
    new_token,
    parse_address,
)
from protocol.cli import require_packages
from protocol.errors import ConfigError, ThreadFailed
from protocol.log import event
from protocol.rates.retry_delay import retry_delay_s
from protocol.storage.blobstore import state_errors
from protocol.threads import start_thread

log = logging.getLogger(__name__)

LISTEN_TIMEOUT_S = 3.0
"""Time for the server of an aggregator that was killed to release the port."""

PACKAGES = ("prometheus_client", "starlette", "uvicorn")
"""Packages that the subprocess imports."""


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `aggregator run`, validated."""

    address: HttpAddress
    is_default: bool
    """The address was not given: if it is taken, the aggregator runs without a server."""
    token: str | None
    hosts: tuple[str, ...]
    read_token: str | None = None


def http_options(
    address: str | None,
    *,
    token_file: Path | None,
    hosts: tuple[str, ...],
    extras: str,
    read_token_file: Path | None = None,
) -> HttpOptions | None:
    """Return the validated options; None if the server is off.

    Raises:
        ConfigError: the address is invalid, or not loopback although there is no token.
        RuntimeMissing: a package of the server is not installed.
    """
    if address == OFF:
        return None
    require_packages(*PACKAGES, extras=extras)
    parsed = parse_address(address or DEFAULT_ADDRESS)
    token = given_token(token_file, variable="PROTOFLEET_HTTP_TOKEN")
    read_token = given_token(read_token_file, variable="PROTOFLEET_HTTP_READ_TOKEN")
    if token is None and read_token is None and not parsed.is_loopback:
        raise ConfigError(
            f"--http {parsed} is reachable from other machines and needs a token: give --http-token-file, "
            "or set PROTOFLEET_HTTP_TOKEN"
        )
    return HttpOptions(
        address=parsed, is_default=address is None, token=token, hosts=hosts, read_token=read_token
    )


class HttpServer:
    """The subprocess, started again if it ends; raises ConfigError if it cannot listen on its address."""

    def __init__(self, options: HttpOptions, state: Path) -> None:
        self._listening = _listen(options.address)
        self.port = int(self._listening.getsockname()[1])
        self._stopping = threading.Event()
        try:
            token = options.token if options.token is not None else new_token(state)
        except BaseException:
            self._listening.close()
            raise
        self._settings = HttpSettings(
            state=str(state),
            socket=self._listening.fileno(),
            token=token,
            public=options.token is None and options.read_token is None,
            read_token=options.read_token or "",
            hosts=options.hosts,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        shown = HttpAddress(options.address.host, self.port)
        where = state / TOKEN_FILE if options.token is None else None
        event(log, logging.INFO, "dashboard started", url=f"http://{shown}/", token_file=where)

    def start(self) -> None:
        """Start the subprocess, and a thread that starts it again."""

        def report(failure: ThreadFailed) -> None:
            event(log, logging.ERROR, "dashboard ended: restart the aggregator", reason=failure)

        start_thread(self._run, name="http", on_failure=report)

    def stop(self) -> None:
        """End the subprocess and close the port."""
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
        self._listening.close()

    def _run(self) -> None:
        for attempt in range(sys.maxsize):
            with self._lock:
                if self._stopping.is_set():
                    return
                process = self._process = self._spawn()
            code = process.wait()
            delay_s = retry_delay_s(attempt)
            if not self._stopping.is_set():
                event(log, logging.ERROR, "dashboard ended", exit_status=code, retry_s=delay_s)
            if self._stopping.wait(delay_s):
                return

    def _spawn(self) -> subprocess.Popen[bytes]:
        with state_errors(Path(sys.executable)):
            # A new session: Ctrl-C reaches only the aggregator. The standard input stays open for as long as the
            # aggregator lives.
            process = subprocess.Popen(
                [sys.executable, "-m", "aggregator.http"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(self._settings.socket,),
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
            with contextlib.suppress(BrokenPipeError):  # it has ended, as `_run` reports
                if process.stdin is not None:
                    process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
                    process.stdin.flush()
        return process


def start_http(options: HttpOptions | None, state: Path) -> HttpServer | None:
    """Start the server; None if it is off, or its default address is taken.

    Raises:
        ConfigError: it cannot listen on the given address.
    """
    if options is None:
        return None
    try:
        server = HttpServer(options, state)
    except ConfigError as error:
        if not options.is_default:
            raise
        event(log, logging.WARNING, "no dashboard: give --http another address", reason=error)
        return None
    server.start()
    return server


def _listen(address: HttpAddress) -> socket.socket:
    deadline_s = time.monotonic() + LISTEN_TIMEOUT_S
    while True:
        try:
            return listen(address)
        except ConfigError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
