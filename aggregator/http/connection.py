"""An HTTP connection with a time limit on what the client does: uvicorn has none but between requests."""

import asyncio
import resource
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from aggregator.http.gateway import MAX_MESSAGE_BYTES, MAX_PHONES
from aggregator.http.settings import HttpSettings

REQUEST_S = 30.0
"""Time limit for a request's headers, for its body, and for the client to receive anything of an answer."""

MAX_CONNECTIONS = MAX_PHONES + 256
"""Open connections, beyond which requests are answered with 503."""

DESCRIPTORS = MAX_CONNECTIONS + MAX_PHONES + 128
"""HTTP connections, the gateway's connections to the broker, and files."""


class TimedConnection(H11Protocol):
    """A connection that is closed if its client does nothing for REQUEST_S to twice as long.

    A client that waits for events does nothing, too, but its request is complete: it is not closed.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        if self._timer is not None:  # a WebSocket has pings
            self._timer.cancel()
        if not all(value.isascii() for _, value in event.headers):  # the library would raise
            self.send_400_response("expected headers in ASCII")
            return
        super().handle_websocket_upgrade(event)

    def _watch(self, before: Any) -> None:
        unsent_bytes = self.transport.get_write_buffer_size()
        is_waiting = self.conn.their_state in {h11.IDLE, h11.SEND_BODY} or unsent_bytes > 0
        now = (self.cycle, unsent_bytes) if is_waiting else None  # `cycle` is another one for each request
        if now is not None and now == before:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(REQUEST_S, self._watch, now)


def allow_descriptors() -> None:
    """Raise this process's soft limit of descriptors to DESCRIPTORS, if its hard limit allows so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def server_config(app: Any, settings: HttpSettings) -> uvicorn.Config:
    """Return uvicorn's settings for an application that browsers reach directly."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="websockets-sansio",
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
        http=TimedConnection,
        loop="asyncio",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
