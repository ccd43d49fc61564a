"""The server of the web application, and what it hears from its supervisor."""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import uvicorn

from aggregator.http.app import make_app
from aggregator.http.connection import allow_descriptors, server_config
from aggregator.http.settings import HttpSettings, write_token
from aggregator.http.snapshots import Snapshots
from aggregator.rates import LINES_AT_ONCE, LINES_PER_S, TokenBuckets
from aggregator.supervised import ServeState, decode
from protocol.cli import start_logging
from protocol.errors import StateError
from protocol.log import event

log = logging.getLogger(__name__)


def serve(settings: HttpSettings, pipe: Connection) -> None:
    """Serve until SIGTERM."""
    start_logging(verbose=False)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    allow_descriptors()
    limit = _LimitedLines()
    for name in ("asyncio", "uvicorn.error", "aggregator.http.access", "aggregator.http.gateway"):
        logging.getLogger(name).addFilter(limit)
    snapshots = Snapshots(Path(settings.state))
    threading.Thread(target=_hear, args=(pipe, settings, snapshots), name="supervisor", daemon=True).start()
    asyncio.run(_serve(settings, snapshots))


def _hear(pipe: Connection, settings: HttpSettings, snapshots: Snapshots) -> None:
    """Take note of the state of `serve`, and write the token once that has made the state directory."""
    is_written = False
    with contextlib.suppress(EOFError, OSError):  # the supervisor has ended, and this process with it
        while True:
            serve = decode(pipe.recv_bytes(), ServeState)
            snapshots.problem = serve.problem
            if serve.is_ready and not is_written:
                try:
                    write_token(settings)
                    is_written = True
                except StateError as error:
                    event(log, logging.WARNING, "token of the dashboard not written", reason=error)


class _LimitedLines(logging.Filter):
    """Limits lines that clients cause, by logger and message: an unlimited log fills the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = TokenBuckets[tuple[str, str]](capacity=LINES_AT_ONCE, per_s=LINES_PER_S)

    def filter(self, record: logging.LogRecord) -> bool:
        return self._lines.take((record.name, str(record.msg)), now_s=time.monotonic())


class _Uvicorn(uvicorn.Server):
    """Ends the streams of events before it waits for the end of all requests."""

    def __init__(self, config: uvicorn.Config, snapshots: Snapshots) -> None:
        super().__init__(config)
        self._snapshots = snapshots

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._snapshots.end()
        await super().shutdown(sockets)


async def _serve(settings: HttpSettings, snapshots: Snapshots) -> None:
    config = server_config(make_app(settings, snapshots), settings)
    with socket.socket(fileno=settings.socket) as listening:
        await _Uvicorn(config, snapshots).serve(sockets=[listening])
