"""The settings of the HTTP server: where it listens, and which requests it accepts."""

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec

from protocol.cli import given_token, require_packages
from protocol.errors import ConfigError
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, BrokerAddress, check_server_files
from protocol.storage.blobstore import write_atomically

DEFAULT_ADDRESS = "127.0.0.1:8080"

OFF = "off"

PACKAGES = ("prometheus_client", "starlette", "uvicorn", "websockets")
"""Packages that the server's process imports."""

TOKEN_FILE = "http-token"  # noqa: S105 - the name of a file
"""In the state directory: the token for commands of an aggregator that was given none."""


@dataclass(frozen=True)
class HttpAddress:
    """An address to listen on; port 0 is any free port."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """True for `localhost` and the loopback addresses, which only this machine reaches."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the HTTP server."""

    address: HttpAddress
    is_default: bool = False
    """No address was given: if it is taken, the aggregator runs without a server."""
    token: str = ""
    """The secret that commands require; empty until the server starts if none was given."""
    is_own_token: bool = False
    """None was given, and the server writes it to the state directory."""
    read_token: str = ""
    """The secret with which a client may only read; empty if there is none."""
    hosts: tuple[str, ...] = ()
    """Names, beside those of loopback, under which browsers reach the server."""
    public: bool = False
    """Reading requires no token."""
    state: str = ""
    """The aggregator's state directory; set when the server starts, like `socket`."""
    socket: int = -1
    """File descriptor of the listening socket."""
    certificate: Path | None = None
    """PEM file with the server's certificate and its issuers' certificates; None for HTTP."""
    key: Path | None = None
    """Its private key (PEM)."""
    brokers: tuple[BrokerAddress, ...] = ()
    """Where the gateway connects phones to."""
    access: BrokerAccess = NO_AUTHENTICATION
    """TLS of the brokers, without the aggregator's certificate and password."""

    @property
    def own_name(self) -> str:
        """A host under which a browser reaches the server."""
        try:
            is_any = ipaddress.ip_address(self.address.host).is_unspecified
        except ValueError:
            is_any = False
        return next(iter(self.hosts), "localhost") if is_any else self.address.host

    @property
    def scheme(self) -> str:
        return "http" if self.certificate is None else "https"


def http_settings(
    address: str | None,
    *,
    token_file: Path | None,
    hosts: tuple[str, ...],
    extras: str,
    read_token_file: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
) -> HttpSettings | None:
    """Return the settings that options and environment give; None if the server is off.

    Raises:
        ConfigError: the address is invalid, or not loopback although there is no token; or certificate or key cannot
            be used.
        RuntimeMissing: a package of the server is not installed.
    """
    if address == OFF:
        return None
    require_packages(*PACKAGES, extras=extras)
    parsed = parse_address(address or DEFAULT_ADDRESS)
    if (certificate is None) != (key is None):
        raise ConfigError("--http-cert and --http-key belong together: give both")
    if certificate is not None and key is not None:
        check_server_files(certificate, key)
    token = given_token(token_file, variable="PROTOFLEET_HTTP_TOKEN")
    read_token = given_token(read_token_file, variable="PROTOFLEET_HTTP_READ_TOKEN")
    if not token and not read_token and not parsed.is_loopback:
        raise ConfigError(
            f"--http {parsed} is reachable from other machines and needs a token: give --http-token-file, "
            "or set PROTOFLEET_HTTP_TOKEN"
        )
    return HttpSettings(
        address=parsed,
        is_default=address is None,
        token=token,
        read_token=read_token,
        hosts=hosts,
        public=not token and not read_token,
        certificate=certificate,
        key=key,
    )


def parse_address(text: str) -> HttpAddress:
    """Parse `HOST:PORT` or `[IPv6]:PORT`; raises ConfigError if the text is neither."""
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if host and port.isascii() and port.isdigit() and int(port) < 65536:
        return HttpAddress(host, int(port))
    raise ConfigError(f"expected --http as HOST:PORT, [IPV6]:PORT or {OFF}, got {text!r}")


def write_token(settings: HttpSettings) -> None:
    """Write an own token to the state directory, readable by its owner only; raises StateError.

    Each start of the aggregator makes one: while the port was free, another user of this machine could have listened on
    it, and received the token of a page that was open.
    """
    if settings.is_own_token:
        write_atomically(Path(settings.state) / TOKEN_FILE, f"{settings.token}\n".encode(), mode=0o600)


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
