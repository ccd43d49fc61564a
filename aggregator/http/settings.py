"""The settings of the HTTP server: where it listens, and which requests it accepts."""

import ipaddress
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec

from protocol.cli import read_secret
from protocol.errors import ConfigError
from protocol.storage.blobstore import write_atomically

DEFAULT_ADDRESS = "127.0.0.1:8080"

OFF = "off"

TOKEN_FILE = "http-token"  # noqa: S105 - the name of a file
"""In the state directory: the token for commands of an aggregator that was given none."""

MIN_TOKEN = 16
"""Characters of a token."""


@dataclass(frozen=True)
class HttpAddress:
    """An address to listen on; port 0 is any free port."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Return True if only this machine reaches it."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that the server's process receives on its standard input."""

    state: str
    """The aggregator's state directory."""
    socket: int
    """File descriptor of the listening socket."""
    token: str
    """The secret that commands require."""
    public: bool
    """Reading requires no token."""
    read_token: str = ""
    """The secret with which a client may only read; empty if there is none."""
    hosts: tuple[str, ...] = ()
    """Names, beside those of loopback, under which browsers reach the server."""


def parse_address(text: str) -> HttpAddress:
    """Parse `HOST:PORT` or `[IPv6]:PORT`; raises ConfigError if the text is neither."""
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if host and port.isascii() and port.isdigit() and int(port) < 65536:
        return HttpAddress(host, int(port))
    raise ConfigError(f"expected --http as HOST:PORT, [IPV6]:PORT or {OFF}, got {text!r}")


def is_loopback(host: str) -> bool:
    """Return True for `localhost` and the loopback addresses."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def given_token(file: Path | None, *, variable: str) -> str | None:
    """Return the token in a file, or in an environment variable; None if there is none.

    Raises:
        ConfigError: the file cannot be read, or the token is too short.
    """
    token = read_secret(file, what="token") if file is not None else os.environ.get(variable)
    if token is not None and len(token) < MIN_TOKEN:
        raise ConfigError(
            f"expected a token of at least {MIN_TOKEN} characters, got {len(token)}: "
            "make one with `openssl rand -hex 32`"
        )
    return token


def new_token(state: Path) -> str:
    """Return a new token, written to the state directory, readable by its owner only.

    Each start of the aggregator makes one: while the port was free, another user of this machine could have listened on
    it, and received the token of a page that was open.
    """
    token = secrets.token_urlsafe(32)
    write_atomically(state / TOKEN_FILE, f"{token}\n".encode(), mode=0o600)
    return token


def own_token(state: Path) -> str:
    """Return the token in the state directory; raises ConfigError if there is none."""
    return read_secret(state / TOKEN_FILE, what="token")


def listen(address: HttpAddress) -> socket.socket:
    """Return a socket that listens on an address; raises ConfigError if that is impossible."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(128)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}: give another --http") from error
    return listening
