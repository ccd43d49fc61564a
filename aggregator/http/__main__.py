"""The HTTP server's process: settings in a line on its standard input, whose end ends it."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec
import uvicorn

from aggregator.http.app import make_app
from aggregator.http.connection import server_config
from aggregator.http.settings import HttpSettings
from aggregator.http.snapshots import Snapshots
from aggregator.rates import LINES_AT_ONCE, LINES_PER_S, TokenBuckets
from protocol.cli import start_logging

NICENESS = 5
"""Below the aggregator's intake, where the processor is busy."""


def main() -> None:
    """Serve until the standard input ends."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=HttpSettings)
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(NICENESS)
    start_logging(verbose=False)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    limit = _LimitedLines()
    for name in ("uvicorn.error", "aggregator.http.access"):
        logging.getLogger(name).addFilter(limit)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(_serve(settings))


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


async def _serve(settings: HttpSettings) -> None:
    snapshots = Snapshots(Path(settings.state))
    config = server_config(make_app(settings, snapshots))
    with socket.socket(fileno=settings.socket) as listening:
        await _Uvicorn(config, snapshots).serve(sockets=[listening])


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)  # at once: the aggregator's next start needs the port


if __name__ == "__main__":
    main()
