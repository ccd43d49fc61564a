"""Where the HTTP server listens, and what it requires of a request."""

import ipaddress
import re
from dataclasses import dataclass

from protocol.errors import ConfigError

_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^]]+)\]|(?P<host>[^]/:[]+)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class ServerOptions:
    """Where a server listens, and what it requires of a request."""

    host: str = "127.0.0.1"
    port: int = 8090
    token: str | None = None
    """Required of a prediction unless it is None."""
    max_image_bytes: int = 32 * 1024**2

    @property
    def is_local(self) -> bool:
        """True if it can be reached from this machine only."""
        return is_loopback(self.host)


def parse_options(address: str, *, token: str | None, max_image_bytes: int) -> ServerOptions:
    """Return the options for an address `HOST:PORT` or `[IPv6]:PORT`.

    Raises:
        ConfigError: it is none, or can be reached from other machines and there is no token.
    """
    found = _ADDRESS.fullmatch(address.strip())
    if found is None or int(found["port"]) > 65535:
        raise ConfigError(f"expected the address to listen on as HOST:PORT, got {address!r}")
    options = ServerOptions(found["host"] or found["ipv6"], int(found["port"]), token, max_image_bytes)
    if token is None and not options.is_local:
        raise ConfigError(
            f"any client that reaches {options.host} could use it: give --http-token-file, or listen on 127.0.0.1"
        )
    return options


def host_of(header: str) -> str:
    """Return the name or address in a header Host, without its port."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


def is_loopback(host: str) -> bool:
    """Return True if a name or address leads to this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
