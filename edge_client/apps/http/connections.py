"""Clients of the HTTP server: whose connection ends for a new one, and how many wrong tokens an address may send.

A client without the token can hold a connection, but no place that another client needs.
"""

import contextlib
import ipaddress
import socket
import threading
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

MAX_CONNECTIONS = 32

WRONG_TOKENS, WRONG_TOKEN_S = 20, 0.25
"""Wrong tokens of an address that are answered at once, and the seconds for each further one."""

BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(eq=False)
class _Connection:
    source: Hashable
    is_held: bool = False


class Connections:
    """At most MAX_CONNECTIONS open connections, of which those with an authorized request are held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, _Connection] = {}
        """The oldest first."""

    def add(self, connection: socket.socket, address: str) -> bool:
        """Add a connection; return False if there are MAX_CONNECTIONS, and all are held.

        Of those that are not, the oldest one of the address that has the most ends for the new one.
        """
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                waiting = {each: state.source for each, state in self._open.items() if not state.is_held}
                if not waiting:
                    return False
                counts = Counter(waiting.values())
                oldest = max(waiting, key=lambda each: counts[waiting[each]])
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.send(BUSY, socket.MSG_DONTWAIT)
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[connection] = _Connection(source_of(address))
        return True

    def remove(self, connection: socket.socket) -> None:
        """Remove a connection that has ended."""
        with self._lock:
            self._open.pop(connection, None)

    def hold(self, connection: socket.socket, *, is_held: bool = True) -> None:
        """Set whether no new connection ends this one; raises ConnectionAbortedError if one has."""
        with self._lock:
            if connection not in self._open:
                raise ConnectionAbortedError("ended for a new connection")
            self._open[connection].is_held = is_held


class TokenGuesses:
    """The wrong tokens of each address: WRONG_TOKENS are answered at once, then one in WRONG_TOKEN_S.

    A correct token is not answered either while there are too many wrong ones: the answer would end the search.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_s: dict[Hashable, float] = {}

    def may_answer(self, address: str, *, is_correct: bool, now_s: float) -> bool:
        """Return False if the address has sent too many wrong tokens; count this one if it is wrong."""
        source = source_of(address)
        with self._lock:
            self._until_s = {each: until_s for each, until_s in self._until_s.items() if until_s > now_s}
            until_s = self._until_s.get(source, now_s) + WRONG_TOKEN_S
            if until_s - now_s > WRONG_TOKENS * WRONG_TOKEN_S:
                return False
            if not is_correct:
                self._until_s[source] = until_s
            return True


def source_of(address: str) -> Hashable:
    """Return an IPv4 address, or the first half of an IPv6 address: one client has all of a half."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return parsed.ipv4_mapped or int(parsed) >> 64
    return parsed
