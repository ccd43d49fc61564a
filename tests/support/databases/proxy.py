"""A TCP proxy before PostgreSQL that cuts connections at a chosen statement, or stops to forward."""

import contextlib
import select
import socket
import threading
from typing import Literal

Fault = Literal["request lost", "answer lost", "silent"]
"""A statement is lost, or its answer, with the connection; or nothing is forwarded until the client closes it."""

_BYTES = 65536


class DatabaseProxy:
    """A proxy on a free port of 127.0.0.1.

    Attributes:
        faults: how often a fault was provoked.
    """

    def __init__(self, port: int) -> None:
        self.faults = 0
        self._port = port
        self._fault: Fault = "request lost"
        self._markers: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """The URL of the database, through the proxy."""
        return f"postgresql://fleet@127.0.0.1:{self._listener.getsockname()[1]}/postgres"

    def provoke(self, fault: Fault, *markers: str) -> None:
        """Provoke a fault once, at the first statement with the last of these texts after the others, in order."""
        self._fault, self._markers = fault, [each.encode() for each in markers]

    def close(self) -> None:
        """End all connections, and accept no more."""
        for each in (self._listener, *self._open):
            _end(each)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._port))
                except OSError:
                    _end(client)
                    continue
                self._open += [client, server]
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        """Forward in both directions until one of them ends."""
        statements = _Statements()
        with contextlib.suppress(OSError, ValueError):
            while True:
                readable, _, _ = select.select([client, server], [], [])
                for source in readable:
                    data = source.recv(_BYTES)
                    if not data:
                        raise OSError
                    if source is client and self._is_due(statements.of(data)):
                        self.faults += 1
                        if self._fault == "silent":
                            while client.recv(_BYTES):
                                pass
                        if self._fault == "answer lost":
                            server.sendall(data)
                            server.recv(_BYTES)
                        raise OSError
                    (server if source is client else client).sendall(data)
        _end(client)
        _end(server)

    def _is_due(self, statements: list[bytes]) -> bool:
        for each in statements:
            if self._markers and self._markers[0] in each:
                self._markers.pop(0)
                if not self._markers:
                    return True
        return False


class _Statements:
    """The statements in a client's messages; a prepared one is sent as text only once."""

    def __init__(self) -> None:
        self._rest = b""
        self._prepared: dict[bytes, bytes] = {}

    def of(self, data: bytes) -> list[bytes]:
        """Return the statements that are complete with these bytes."""
        found = []
        self._rest += data
        while len(self._rest) >= 5:
            has_type = self._rest[0] != 0  # the first messages of a connection have none
            end = has_type + int.from_bytes(self._rest[has_type : has_type + 4])
            if len(self._rest) < end:
                break
            kind, body = self._rest[:1], self._rest[has_type + 4 : end]
            self._rest = self._rest[end:]
            if kind == b"Q":
                found.append(body)
            elif kind == b"P":
                name, text, _ = body.split(b"\0", 2)
                self._prepared[name] = text
            elif kind == b"B":
                _, name, _ = body.split(b"\0", 2)
                found.append(self._prepared[name])
        return found


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
