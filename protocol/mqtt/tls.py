"""Where a broker is, and what lets us in: whose certificate we believe, which is ours, or a password."""

import ipaddress
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from protocol.errors import ConfigError

PORT = 1883
TLS_PORT = 8883


@dataclass(frozen=True)
class BrokerAddress:
    """Where the broker listens."""

    host: str
    port: int = PORT

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine, so that what goes there crosses no network."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True)
class BrokerAccess:
    """How to be let in.

    Args:
        tls: encrypt, and believe the broker only if its certificate is right for its host name.
        ca: certificates (PEM) of the authorities to believe; None for those that the system knows.
        certificate: ours (PEM), for brokers that want one.
        key: its private key (PEM, without a password).
        username: for brokers that want a password.
        password: likewise.
    """

    tls: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)


ENDS_SOON = timedelta(days=30)
"""So long before its end, a certificate is worth a line."""

NO_AUTHENTICATION = BrokerAccess()
"""For a broker that lets everybody in."""


def parse_broker(text: str, *, tls: bool = False) -> BrokerAddress:
    """`HOST`, `HOST:PORT` or `[IPv6]:PORT` as a broker's address; without a port it is MQTT's own, over TLS or not.

    Raises:
        ConfigError: it is none of these.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or (text.count(":") > 1 and not text.startswith("[")):
        host, port = text.strip(), str(TLS_PORT if tls else PORT)
    host = host.removeprefix("[").removesuffix("]")
    is_host = _is_ipv6(host) if ":" in host else bool(host) and "/" not in host
    if not is_host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"expected the broker as HOST or HOST:PORT, got {text!r}")
    return BrokerAddress(host, int(port))


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def open_tls(access: BrokerAccess) -> ssl.SSLContext | None:
    """What encrypts our connections, with every file read; None if nothing does.

    Raises:
        ConfigError: a file cannot be read, is not what it should be, or the key is not the certificate's.
    """
    if not access.tls:
        return None
    try:
        # Verifies the broker's certificate and its host name; nothing here can switch that off.
        context = ssl.create_default_context(cafile=access.ca)
    except OSError as error:
        raise _unreadable(error, f"the authority's certificate {access.ca}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.hostname_checks_common_name = False
    if access.certificate is not None and access.key is not None:
        _check_readable(access.certificate, access.key)
        try:
            # The password of a key that has one would be asked for on a terminal that a service does not have.
            context.load_cert_chain(access.certificate, access.key, password="")
        except OSError as error:
            if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
                raise ConfigError(
                    f"the key {access.key} is not that of the certificate {access.certificate}: "
                    "give both of one enrollment"
                ) from error
            raise _unreadable(
                error, f"the certificate {access.certificate} with the key {access.key}"
            ) from error
    return context


def _check_readable(*files: Path) -> None:
    """Name the one of two files that is missing, which OpenSSL does not."""
    for file in files:
        try:
            file.open("rb").close()
        except OSError as error:
            raise _unreadable(error, str(file)) from error


def _unreadable(error: OSError, what: str) -> ConfigError:
    if isinstance(error, ssl.SSLError):
        return ConfigError(f"cannot use {what}: expected PEM, and a key without a password")
    return ConfigError(f"cannot read {what}: {error.strerror or error}")


def warnings(access: BrokerAccess, broker: BrokerAddress) -> list[str]:
    """What somebody should know before a connection is made: secrets that others can read, and what ends soon."""
    said = []
    if access.password is not None and not access.tls and not broker.is_here:
        said.append(
            f"the password goes to {broker} without encryption: give --ca FILE or --tls, or others can read it"
        )
    if access.key is not None and (warning := readable_by_others(access.key)):
        said.append(warning)
    if access.certificate is not None and (ending := ends_soon(access.certificate, datetime.now(UTC))):
        said.append(ending)
    return said


def ends_soon(certificate: Path, now: datetime) -> str:
    """A line if a certificate (PEM) counts for no more than 30 days; else nothing, as for what is none."""
    from cryptography import x509

    try:
        end = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        return ""  # told where it is used
    if end - now > ENDS_SOON:
        return ""
    return f"the certificate {certificate} counts until {end:%Y-%m-%d}: make another with `aggregator enroll --renew`"


def readable_by_others(secret: Path) -> str:
    """A line if everybody on this machine can read a file that should be a secret; else nothing."""
    try:
        is_readable = bool(secret.stat().st_mode & 0o004)
    except OSError:
        return ""
    return f"everybody on this machine can read {secret}: chmod 600 {secret}" if is_readable else ""
