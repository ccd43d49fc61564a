"""Addresses of brokers, and how to connect: trusted authorities, client certificate, password."""

import ipaddress
import re
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509

PORT = 1883
TLS_PORT = 8883
WEBSOCKET_PORT, WEBSOCKET_TLS_PORT = 80, 443

_ADDRESS = re.compile(
    r"(?P<scheme>wss?://)?(?:\[(?P<ipv6>[^]]+)\]|(?P<host>\w[\w.-]*))(?::(?P<port>[0-9]{1,5}))?(?P<path>/[\x21-\x7e]*)?"
)

EXPIRY_WARNING = timedelta(days=30)
"""How long before its end a certificate causes a warning."""


@dataclass(frozen=True)
class BrokerAddress:
    """A broker's host name or IP address, and port; with a path, MQTT goes through a WebSocket."""

    host: str
    port: int = PORT
    path: str | None = None

    def __str__(self) -> str:
        address = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        return address if self.path is None else f"ws://{address}{self.path}"

    @property
    def is_local(self) -> bool:
        """True if the broker runs on this machine, so that connections to it cross no network."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


Brokers = BrokerAddress | tuple[BrokerAddress, ...]
"""A broker's address, or those of a cluster, which are tried in turn."""


@dataclass(frozen=True)
class BrokerAccess:
    """TLS settings and credentials for a broker."""

    tls: bool = False
    """Encrypt, and verify the broker's certificate and host name."""
    ca: Path | None = None
    """Certificates (PEM) of the trusted authorities; None for the system's."""
    certificate: Path | None = None
    """The client certificate (PEM), if the broker requires one."""
    key: Path | None = None
    """Its private key (PEM, without a password)."""
    username: str | None = None
    password: str | None = field(default=None, repr=False)


NO_AUTHENTICATION = BrokerAccess()
"""Access to a broker that admits every client."""


def parse_broker(text: str, *, tls: bool = False) -> BrokerAddress:
    """Parse `HOST`, `HOST:PORT`, `[IPv6]` or `[IPv6]:PORT`, by default with MQTT's port; or `ws://HOST:PORT/PATH`.

    Raises:
        ConfigError: it is none of these, `wss://` without `tls`, or IPv6 without brackets that may end with a port.
    """
    address = text.strip(" ")
    host, _, last = address.rpartition(":")
    if _is_ipv6(address) and _is_ipv6(host) and last.isdecimal():
        raise ConfigError(f"{address} has a port or none: give [{host}]:{last} or [{address}]")
    found = _ADDRESS.fullmatch(f"[{address}]" if _is_ipv6(address) else address)
    if found is not None and (found["ipv6"] is None or _is_ipv6(found["ipv6"])):
        scheme, path = found["scheme"], found["path"]
        if scheme == "wss://" and not tls:
            raise ConfigError(f"{text} needs TLS: give --tls, or --tls-ca with the broker's authority")
        ports = (WEBSOCKET_PORT, WEBSOCKET_TLS_PORT) if scheme else (PORT, TLS_PORT)
        port = int(found["port"] or ports[tls])
        if 0 < port < 65536 and (scheme or not path):
            return BrokerAddress(found["host"] or found["ipv6"], port, (path or "/mqtt") if scheme else None)
    text = f"expected the broker as HOST or HOST:PORT, [IPV6]:PORT, or ws://HOST:PORT/PATH, got {text!r}"
    raise ConfigError(text)


def parse_brokers(text: str, *, tls: bool = False) -> tuple[BrokerAddress, ...]:
    """Parse one or more addresses, separated by commas, like `parse_broker`; none is repeated."""
    return tuple(dict.fromkeys(parse_broker(each, tls=tls) for each in text.split(",")))


def addresses_of(brokers: Brokers) -> tuple[BrokerAddress, ...]:
    """Return the addresses to try, in order."""
    return (brokers,) if isinstance(brokers, BrokerAddress) else brokers


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def open_tls(access: BrokerAccess) -> ssl.SSLContext | None:
    """Return the TLS context for connections, with all files loaded; None without TLS.

    Raises ConfigError if a file cannot be read or is not PEM, or the key does not match the certificate.
    """
    if not access.tls:
        return None
    try:
        # This verifies the broker's certificate and host name; no setting disables it.
        context = ssl.create_default_context(cafile=access.ca)
    except OSError as error:
        raise _unreadable(error, f"the authority's certificate {access.ca}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.hostname_checks_common_name = False
    if access.certificate is not None and access.key is not None:
        _load_certificate(context, access.certificate, access.key)
    return context


def check_server_files(certificate: Path, key: Path) -> None:
    """Raise ConfigError if a server's certificate (PEM) and key cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(context, certificate, key, advice="give the key that the certificate was made for")


def server_warnings(certificate: Path, key: Path) -> list[str]:
    """Return warnings to log of a server's files, as `warnings` does."""
    expiry = expiry_warning(certificate, datetime.now(UTC), advice="renew it, and restart the aggregator")
    return list(filter(None, [readable_by_others(key), expiry]))


def _load_certificate(
    context: ssl.SSLContext, certificate: Path, key: Path, *, advice: str = "give both from one enrollment"
) -> None:
    what = ""
    try:
        for file in (certificate, key):
            what = str(file)
            file.open("rb").close()
        what = f"the certificate {certificate} with the key {key}"
        # Without a password given here, OpenSSL would prompt for it on a terminal.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            text = f"the key {key} does not match the certificate {certificate}: {advice}"
            raise ConfigError(text) from error
        raise _unreadable(error, what) from error


def _unreadable(error: OSError, what: str) -> ConfigError:
    if isinstance(error, ssl.SSLError):
        return ConfigError(f"cannot use {what}: expected PEM, and a key without a password")
    return ConfigError(f"cannot read {what}: {error.strerror or error}")


def warnings(access: BrokerAccess, brokers: Brokers) -> list[str]:
    """Return warnings to log before connecting: secrets that others can read, and a certificate that expires soon."""
    found = []
    remote = ", ".join(str(each) for each in addresses_of(brokers) if not each.is_local)
    if access.password is not None and not access.tls and remote:
        found.append(
            f"the password is sent to {remote} without encryption, and others can read it: give --tls-ca FILE or --tls"
        )
    if access.key is not None:
        found.append(readable_by_others(access.key))
    if access.certificate is not None:
        found.append(expiry_warning(access.certificate, datetime.now(UTC)))
    return list(filter(None, found))


def expiry_warning(certificate: Path, now: datetime, *, advice: str = "") -> str:
    """Return a warning if a certificate (PEM) expires within 30 days; empty otherwise, or if it cannot be read.

    Without an advice, the one for a certificate of the fleet.
    """
    from cryptography import x509

    try:
        read = x509.load_pem_x509_certificate(certificate.read_bytes())
        end = read.not_valid_after_utc
    except (OSError, ValueError):
        return ""  # an error where it is used
    if end - now > EXPIRY_WARNING:
        return ""
    what = f"expired on {end:%Y-%m-%d}" if end <= now else f"expires on {end:%Y-%m-%d}"
    return f"the certificate {certificate} {what}: {advice or _renewal(read)}"


def _renewal(certificate: "x509.Certificate") -> str:
    from cryptography.x509.oid import NameOID

    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    name, is_program, _ = str(names[0].value if names else "").partition("@")  # DEVICE, or PROGRAM@FLEET
    if certificate.issuer == certificate.subject or (is_program and name == "aggregator"):
        return "see docs/operations/enrollment.md#renew-certificates"
    if is_program:
        return "renew it with `aggregator enroll-sums --out DIR`"
    return f"renew it with `aggregator enroll {name} --renew --out DIR`"


def readable_by_others(secret: Path) -> str:
    """Return a warning if every user of this machine can read a secret file; empty otherwise."""
    try:
        is_readable = bool(secret.stat().st_mode & 0o004)
    except OSError:
        return ""
    return f"every user of this machine can read {secret}: chmod 600 {secret}" if is_readable else ""
