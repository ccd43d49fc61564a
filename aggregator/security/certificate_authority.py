"""X.509 of one fleet: its CA, certificates for the broker and its clients, and the certificate revocation list.

The project has its own CA so that every device gets a certificate without an external PKI. The functions are pure:
PEM bytes, names and times in, PEM bytes out. Every key is P-256, which every TLS library supports.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protocol.errors import ConfigError

CA_DAYS = 7300
"""Twenty years: when the CA certificate expires, no client can connect."""

MAX_COMMON_NAME = 64
"""Characters of a common name (RFC 5280, appendix A, ub-common-name)."""

BACKDATED = timedelta(days=1)
"""Start of validity before the time of issue, for clocks that are slow."""

_UNUSED_KEY_USAGES = dict.fromkeys(
    ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
     "decipher_only"),
    False,
)  # fmt: skip
_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)\Z")
"""One part of a host name (RFC 1123, 2.1)."""


Key = ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey
"""Of a certificate's owner: the public one if the owner keeps the private one."""


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key, both PEM; no key if the client keeps it."""

    certificate: bytes
    key: bytes = field(repr=False)

    @property
    def serial(self) -> int:
        return x509.load_pem_x509_certificate(self.certificate).serial_number


def create_ca(fleet: str, *, now: datetime) -> Issued:
    """Create a fleet's CA, which can sign certificates but no other CA (RFC 5280, 4.2.1.9)."""
    key = ec.generate_private_key(ec.SECP256R1())
    organization = x509.NameAttribute(NameOID.ORGANIZATION_NAME, "protofleet")
    name = x509.Name([organization, x509.NameAttribute(NameOID.COMMON_NAME, fleet)])
    builder = _builder(name, key, issuer=name, now=now, until=now + timedelta(days=CA_DAYS), is_ca=True)
    return _issued(builder.sign(key, hashes.SHA256()), key)


def issue_client(ca: Issued, name: str, *, now: datetime, days: int, public: bytes = b"") -> Issued:
    """Issue a certificate for a client of the broker, with `name` as its common name.

    `public` is the public key (PEM) of a client that keeps its private key.

    Raises:
        ConfigError: the name is too long for a certificate, the CA is not valid now, or the key cannot be used.
    """
    key = _client_key(public) if public else ec.generate_private_key(ec.SECP256R1())
    return _issue(ca, name, key, now=now, days=days, use=ExtendedKeyUsageOID.CLIENT_AUTH)


def _client_key(public: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = load_pem_public_key(public)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError("expected a public key in PEM for the certificate") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ConfigError("expected a public key on the curve P-256 for the certificate")
    return key


def issue_server(ca: Issued, hosts: Sequence[str], *, now: datetime, days: int) -> Issued:
    """Issue a certificate for a broker with these host names and IP addresses.

    Raises:
        ConfigError: one of them is neither, or the CA is not valid now.
    """
    names = x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys(hosts)])
    key = ec.generate_private_key(ec.SECP256R1())
    return _issue(ca, "broker", key, names, now=now, days=days, use=ExtendedKeyUsageOID.SERVER_AUTH)


def revocation_list(ca: Issued, revoked: Mapping[int, datetime], *, now: datetime) -> bytes:
    """Return the CA's certificate revocation list (PEM) of serial numbers and times.

    It is valid as long as the CA: with a list that has expired, or that begins in the future because a clock was ahead,
    OpenSSL refuses every client.
    """
    certificate, key = _load(ca)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(certificate.subject)
        .last_update(certificate.not_valid_before_utc)
        .next_update(certificate.not_valid_after_utc)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .add_extension(x509.CRLNumber(int(now.timestamp())), critical=False)
    )
    for serial, since in revoked.items():
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(since).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def utc_now() -> datetime:
    """Return the time to the second, the resolution of certificates."""
    return datetime.now(UTC).replace(microsecond=0)


def _issue(
    ca: Issued,
    name: str,
    key: Key,
    *extensions: x509.ExtensionType,
    now: datetime,
    days: int,
    use: x509.ObjectIdentifier,
) -> Issued:
    if len(name) > MAX_COMMON_NAME:
        raise ConfigError(
            f"{name!r} is too long for a certificate: choose a name of at most {MAX_COMMON_NAME} characters"
        )
    ca_certificate, ca_key = _load(ca)
    begin, end = ca_certificate.not_valid_before_utc, ca_certificate.not_valid_after_utc
    if not begin <= now < end:
        raise ConfigError(
            f"the fleet's CA is valid from {begin:%Y-%m-%d} to {end:%Y-%m-%d}, and the clock of this machine says "
            f"{now:%Y-%m-%d}: set the clock; if it was wrong when the CA was created, move ca.*, aggregator.* and "
            "revoked.crl in `identity` away, keep the other files, and enroll the broker and every device again"
        )
    until = min(now + timedelta(days=days), end)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(subject, key, issuer=ca_certificate.subject, now=now, until=until, is_ca=False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    for extension in (x509.ExtendedKeyUsage([use]), identifier, *extensions):
        builder = builder.add_extension(extension, critical=False)
    return _issued(builder.sign(ca_key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name,
    key: Key,
    *,
    issuer: x509.Name,
    now: datetime,
    until: datetime,
    is_ca: bool,
) -> x509.CertificateBuilder:
    usage = x509.KeyUsage(
        digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, **_UNUSED_KEY_USAGES
    )
    constraints = x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None)
    serial = x509.random_serial_number()
    public = key if isinstance(key, ec.EllipticCurvePublicKey) else key.public_key()
    return (
        x509.CertificateBuilder(issuer, subject, public, serial, now - BACKDATED, until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        pass
    labels = host.split(".")
    if len(host) > 253 or not all(map(_LABEL.match, labels)) or labels[-1].isdecimal():
        raise ConfigError(f"expected a host name or an IP address, without a port, got {host!r}")
    return x509.DNSName(host)


def _load(ca: Issued) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate(ca.certificate)
        key = load_pem_private_key(ca.key, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"cannot read the fleet's CA: {error}; restore it from a backup") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError(
            "key and certificate of the fleet's CA do not match: restore both from the same backup"
        )
    return certificate, key


def _issued(certificate: x509.Certificate, key: Key) -> Issued:
    private = b""
    if isinstance(key, ec.EllipticCurvePrivateKey):
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Issued(certificate=certificate.public_bytes(Encoding.PEM), key=private)
