"""A socket that reads ahead, since paho asks for single bytes: one system call for several packets."""

import ssl
from typing import Any

BUFFER_BYTES = 256 * 1024


class BufferedSocket:
    """A connected socket with the methods that paho uses.

    `recv` returns views of one buffer: each is valid until the next call.
    """

    def __init__(self, opened: Any) -> None:
        self._socket = opened
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._stop = 0

    def recv(self, size: int) -> Any:
        """Return at most so many bytes, none at the end of the connection; raises what the socket's `recv` does."""
        if self._start == self._stop:
            self._start = self._stop = 0
            self._stop = self._socket.recv_into(self._buffer)
        start, self._start = self._start, min(self._start + size, self._stop)
        return self._buffer[start : self._start]

    def pending(self) -> int:
        """Return the number of bytes that can be received without the network."""
        decrypted = self._socket.pending() if isinstance(self._socket, ssl.SSLSocket) else 0
        return self._stop - self._start + decrypted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)
