"""A small HTTP server with limits: on bytes and time of a request, on connections, and on images in memory.

`http.server` parses the requests, because a device installs no web framework. It has no limits of its own. Each
connection has one request.

waitress 3.0.2 was tried in its place. It receives a body, on disk above 512 kB, before an application can refuse
a missing token. It limits idle time only, so that a client holds a connection without end by single bytes. At its limit
of connections no address has a share. It resets a connection that a client still writes to: 3 of 20 answers about too
large bodies were lost. Each would be code of our own over its internals.
"""

import hmac
import io
import json
import logging
import re
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from edge_client.apps.http.connections import BUSY, Connections, TokenGuesses
from edge_client.apps.http.options import ServerOptions, host_of, is_loopback
from protocol.errors import ConfigError, UnreadableImage
from protocol.log import event

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32 * 1024
"""Of a request: its line and its headers."""

HEAD_S = 5.0
"""Time limit for receiving them."""

REQUEST_S = 30.0
"""Time limit for receiving a request."""

MIN_BYTES_PER_S = 1024
"""Rate of a request's bytes below which its time limit is shorter: GRACE_S more than they take at this rate."""

GRACE_S = 10.0

WAIT_S = 10.0
"""Time limit for the predictions before it, and for receiving the answer."""

MAX_IMAGES = 4
"""Limit of the received bytes in memory, in images of the largest size; one image at a time is decoded."""

_PART_BYTES = 2**16


class LimitedServer(ThreadingHTTPServer):
    """Answers requests with a handler, each connection in a thread of its own.

    Raises:
        ConfigError: it cannot listen there.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False
    request_queue_size = 128

    def __init__(self, options: ServerOptions, handler: "type[LimitedHandler]") -> None:
        self.options = options
        self._received_bytes = 0
        self._counting, self.turn = threading.Lock(), threading.Lock()
        self.connections, self.guesses = Connections(), TokenGuesses()
        self.address_family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        try:
            super().__init__((options.host, options.port), handler)
        except OSError as error:
            text = f"cannot listen on {options.host}:{options.port}: {error.strerror}; choose another port"
            raise ConfigError(text) from error

    def server_bind(self) -> None:
        """Bind without asking a name server for the host's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def count_bytes(self, size_bytes: int) -> None:
        """Count bytes that were received, not announced, or with a negative number their release; refuse too many."""
        most = MAX_IMAGES * self.options.max_image_bytes
        with self._counting:
            if size_bytes > 0 and self._received_bytes + size_bytes > most:
                raise Refused(503, "too many images at a time: try again")
            self._received_bytes += size_bytes

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the connection's thread, or refuse the connection if there are too many."""
        if self.connections.add(request, client_address[0]):
            try:
                super().process_request(request, client_address)
            except BaseException:  # no further thread
                self.connections.remove(request)
                raise
            return
        with suppress(OSError):
            request.setblocking(False)
            request.send(BUSY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection's request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.remove(request)

    def handle_error(self, *_: object) -> None:
        """Log what a client causes that ends its connection early."""
        log.debug("connection failed", exc_info=sys.exc_info())


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Body(NamedTuple):
    """An answer's body."""

    media_type: str
    data: bytes


Answer = tuple[int, dict[str, Any] | Body]
"""A status, and an object that is sent as JSON, or another body."""


class _Incoming(io.RawIOBase):
    """Reads a request's bytes; raises HTTPException above the limit of bytes, and TimeoutError after the time limit.

    The time limit of a body grows with the bytes, so that a few bytes hold no connection for REQUEST_S.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._started_s = time.monotonic()
        self._received = 0
        self.left = MAX_HEAD_BYTES
        self.is_body = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        limit_s = min(REQUEST_S, GRACE_S + self._received / MIN_BYTES_PER_S) if self.is_body else HEAD_S
        left_s = self._started_s + limit_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        if not self.left:
            raise HTTPException(
                f"more than {MAX_HEAD_BYTES} bytes"
            )  # cut there, a request could seem complete
        received = self._connection.recv_into(buffer, min(len(buffer), self.left))
        self.left -= received
        self._received += received
        return received


class LimitedHandler(BaseHTTPRequestHandler):
    """Answers the request of one connection."""

    # An answer with a status, also for bytes that are no request.
    default_request_version = request_version = "HTTP/1.0"
    requestline = command = ""
    protocol_version = "HTTP/1.1"  # for clients that wait for `100 Continue` before they send an image
    server: LimitedServer
    usage = ""
    """The requests that it answers, for errors."""
    further_headers: tuple[tuple[str, str], ...] = ()
    _waits_for_continue = False

    @property
    def method(self) -> str:
        """GET or POST; a HEAD request has the answer of GET, without its body."""
        return "GET" if self.command == "HEAD" else self.command

    def setup(self) -> None:
        """Read within the limits of bytes and time."""
        super().setup()
        self._incoming = _Incoming(self.connection)
        self.rfile = self._buffered = io.BufferedReader(self._incoming)

    def handle(self) -> None:
        """Answer one request."""
        with suppress(TimeoutError):
            try:
                self.handle_one_request()
            except HTTPException:
                self.send_error(431)

    def do_GET(self) -> None:
        """Answer a GET request."""
        self._answer()

    def do_HEAD(self) -> None:
        """Answer a HEAD request."""
        self._answer()

    def do_POST(self) -> None:
        """Answer a POST request."""
        self._answer()

    def handle_expect_100(self) -> bool:
        """Let the client wait for `100 Continue` until its image is wanted."""
        self._waits_for_continue = True
        return True

    def respond(self) -> Answer:
        """Return the answer to a request of an allowed origin; may raise Refused and UnreadableImage."""
        raise Refused(404, self.usage)

    def _answer(self) -> None:
        self.server.connections.hold(self.connection, is_held=self.server.options.token is None)
        try:
            self.check_origin()
            status, content = self.respond()
        except Refused as refused:
            status, content = refused.status, {"error": str(refused)}
        except UnreadableImage as error:
            status, content = 422, {"error": str(error)}
        except TimeoutError:
            text = f"too slow: expected {MIN_BYTES_PER_S} bytes/s, and all in {REQUEST_S:.0f} s"
            status, content = 408, {"error": text}
        except ConnectionError:
            raise
        except Exception as error:  # whatever an image causes, the server goes on
            event(log, logging.ERROR, "request failed", reason=str(error) or type(error).__name__)
            status, content = 500, {"error": "the request failed: see the log"}
        self._send(status, content)

    def check_origin(self) -> None:
        """Refuse the requests of web pages: without a token, any page could send its images."""
        given = self.headers.get("Host", "")
        if self.server.options.token is None and not is_loopback(host_of(given)):
            raise Refused(421, "expected localhost, 127.0.0.1 or [::1] as Host")
        if self.headers.get("Origin") is not None or "Sec-Fetch-Site" in self.headers:
            raise Refused(403, "requests of web pages are refused")

    def check_token(self) -> None:
        """Raise Refused unless the request has the server's token."""
        if (token := self.server.options.token) is None:
            return
        expected = "expected the token, as `Authorization: Bearer TOKEN`"
        if "Authorization" not in self.headers:
            raise Refused(401, expected)
        scheme, _, given = self.headers["Authorization"].partition(" ")
        is_correct = scheme.lower() == "bearer" and hmac.compare_digest(
            given.strip().encode("latin-1", errors="replace"), token.encode()
        )
        address = self.client_address[0]
        if not self.server.guesses.may_answer(address, is_correct=is_correct, now_s=time.monotonic()):
            raise Refused(429, "too many wrong tokens from this address: try again")
        if not is_correct:
            event(log, logging.WARNING, "request with a wrong token refused", address=address)
            raise Refused(401, expected)
        self.server.connections.hold(self.connection)

    def body_size(self) -> int:
        """Return the size of the request's body, bytes; raise Refused if there is none, or it is too large."""
        if "Transfer-Encoding" in self.headers:
            raise Refused(411, "expected Content-Length instead of Transfer-Encoding")
        given = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,12}", given):
            raise Refused(411, "expected Content-Length and an image as the body")
        if self.headers.get_content_maintype() == "multipart":
            raise Refused(415, "expected the image itself as the body: curl --data-binary @photo.jpg")
        if int(given) > self.server.options.max_image_bytes:
            raise Refused(413, f"expected at most {self.server.options.max_image_bytes} bytes, got {given}")
        return int(given)

    @contextmanager
    def body(self, size_bytes: int) -> Iterator[bytes]:
        """Receive the request's body; memory grows with what arrives, not with what is announced."""
        self._incoming.left += size_bytes  # what was read ahead of the body counted as a part of the headers
        self._incoming.is_body = True
        self.server.connections.hold(self.connection, is_held=self.server.options.token is not None)
        if self._waits_for_continue:
            self.send_response_only(100)
            self.end_headers()
        data = bytearray()
        try:
            while len(data) < size_bytes and (
                part := self._buffered.read1(min(_PART_BYTES, size_bytes - len(data)))
            ):
                self.server.count_bytes(len(part))
                data += part
            self.server.connections.hold(self.connection)
            if len(data) != size_bytes:
                raise Refused(400, f"expected {size_bytes} bytes, got {len(data)}")
            yield bytes(data)
        finally:
            self.server.count_bytes(-len(data))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Give one request at a time the memory and the cores that an image takes; raise Refused after WAIT_S."""
        if not self.server.turn.acquire(timeout=WAIT_S):
            raise Refused(503, f"busy for {WAIT_S:.0f} s: try again")
        try:
            yield
        finally:
            self.server.turn.release()

    def _send(self, status: int, content: dict[str, Any] | Body) -> None:
        if not isinstance(content, Body):
            content = Body("application/json", json.dumps(content).encode() + b"\n")
        self.connection.settimeout(WAIT_S)
        if self.request_version == "HTTP/0.9":
            self.request_version = self.default_request_version  # that version has no status
        self.send_response(status)
        for name, value in (
            ("Content-Type", content.media_type),
            ("Content-Length", str(len(content.data))),
            ("Connection", "close"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cache-Control", "no-store"),
            *self.further_headers,
        ):
            self.send_header(name, value)
        if status in {429, 503}:
            self.send_header("Retry-After", "1")
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content.data)
        self._end_request()

    def _end_request(self) -> None:
        """Discard what the client still sends, for a moment: it could not read an answer beside unread bytes."""
        self.close_connection = True
        with suppress(OSError):
            self.server.connections.hold(self.connection, is_held=False)
            self.connection.shutdown(socket.SHUT_WR)
            until_s = time.monotonic() + 1.0
            while (left_s := until_s - time.monotonic()) > 0:
                self.connection.settimeout(left_s)
                if not self.connection.recv(65_536):
                    return

    def send_error(self, code: int, message: str | None = None, *_: object) -> None:
        """Answer a request that cannot be parsed, or of another method."""
        text = message or self.responses.get(code, ("error",))[0]
        if code == 501:
            code, text = 405, self.usage
        if code in {414, 431}:
            code, text = 431, f"expected at most {MAX_HEAD_BYTES} bytes before the image, and 100 headers"
        self._send(code, {"error": text})

    def version_string(self) -> str:
        """Return the header Server, without versions."""
        return "protofleet"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Log a request at debug level."""
        if log.isEnabledFor(logging.DEBUG):
            event(log, logging.DEBUG, "request", client=self.client_address[0], text=format % args)
