"""The HTTP server as a program of `aggregator run`, so that no request takes time or memory from the intake.

It reads the state directory as `aggregator status` does, and sends operator commands as the command line does.
"""

import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from aggregator.http.settings import TOKEN_FILE, HttpAddress, HttpSettings, listen
from protocol.errors import ConfigError
from protocol.log import event

log = logging.getLogger(__name__)

LISTEN_S = 3.0
"""Time for the server of a supervisor that was killed to release the port."""


@contextlib.contextmanager
def listening_settings(settings: HttpSettings | None, state: Path) -> Iterator[HttpSettings | None]:
    """Listen for the server, also while it restarts; yield its settings, or None if its default port is taken.

    Raises:
        ConfigError: the given address cannot be used.
    """
    listening = _listen(settings) if settings is not None else None
    if settings is None or listening is None:
        yield None
        return
    with listening:
        port = int(listening.getsockname()[1])
        where = None if settings.token else state / TOKEN_FILE
        url = f"{settings.scheme}://{HttpAddress(settings.own_name, port)}/"
        event(log, logging.INFO, "dashboard started", url=url, token_file=where)
        yield replace(
            settings,
            state=str(state),
            socket=listening.fileno(),
            token=settings.token or secrets.token_urlsafe(32),
            is_own_token=not settings.token,
        )


def _listen(settings: HttpSettings) -> socket.socket | None:
    """Return a socket that listens on the address; None if it is the default one, and taken."""
    deadline_s = time.monotonic() + LISTEN_S
    is_first = True
    while True:
        try:
            return listen(settings.address)
        except ConfigError as error:
            if time.monotonic() <= deadline_s:
                if is_first:
                    event(log, logging.INFO, "waiting for the address of the dashboard", reason=error)
                is_first = False
                time.sleep(0.1)
                continue
            if not settings.is_default:
                raise
            event(log, logging.WARNING, "no dashboard: give --http another address", reason=error)
            return None
