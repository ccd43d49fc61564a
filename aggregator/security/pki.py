"""X.509 for one fleet: its authority, the certificates of those it lets in, and the list of those it no longer does.

Pure: what goes in and comes out are PEM bytes, names and times. Every key is P-256, which any TLS library takes.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protocol.errors import ConfigError

AUTHORITY_DAYS = 7300
"""Twenty years: with its authority's end, everybody is locked out."""

LONGEST_CN = 64
"""Characters of a common name (RFC 5280, appendix A, ub-common-name)."""

BACKDATED = timedelta(days=1)
"""For clocks that are slow."""

_NO_USE = dict.fromkeys(
    ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
     "decipher_only"),
    False,
)  # fmt: skip


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key, both PEM; `serial` names it in a list of revoked ones."""

    certificate: bytes
    key: bytes = field(repr=False)
    serial: int


def make_authority(fleet: str, *, now: datetime) -> Issued:
    """The certificate that signs all others of a fleet, and no other authority's (RFC 5280, 4.2.1.9)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "protofleet"),
            x509.NameAttribute(NameOID.COMMON_NAME, fleet),
        ]
    )
    builder = (
        _builder(name, key.public_key(), now=now, until=now + timedelta(days=AUTHORITY_DAYS))
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=False, key_cert_sign=True, crl_sign=True, **_NO_USE),
            critical=True,
        )
    )
    return _issued(builder.sign(key, hashes.SHA256()), key)


def issue_client(authority: Issued, name: str, *, now: datetime, days: int) -> Issued:
    """A certificate with which `name` connects to a broker, and which no broker can show.

    Raises:
        ConfigError: the name is too long for a certificate.
    """
    return _issue(authority, name, now=now, days=days, use=ExtendedKeyUsageOID.CLIENT_AUTH)


def issue_server(authority: Issued, hosts: Sequence[str], *, now: datetime, days: int) -> Issued:
    """A certificate for a broker that is reached under these names and IP addresses; nobody connects with it.

    Raises:
        ConfigError: one of them is neither.
    """
    names = x509.SubjectAlternativeName([_host(host) for host in dict.fromkeys(hosts)])
    return _issue(authority, "broker", now=now, days=days, use=ExtendedKeyUsageOID.SERVER_AUTH, names=names)


def revoked_list(authority: Issued, revoked: Mapping[int, datetime], *, now: datetime) -> bytes:
    """The authority's list of serial numbers that count no longer, as PEM.

    It is good for as long as the authority is: a list that has ended has OpenSSL refuse everybody.
    """
    certificate, key = _opened(authority)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(certificate.subject)
        .last_update(now - BACKDATED)
        .next_update(certificate.not_valid_after_utc)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .add_extension(x509.CRLNumber(int(now.timestamp())), critical=False)
    )
    for serial, since in revoked.items():
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(since).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _issue(
    authority: Issued,
    name: str,
    *,
    now: datetime,
    days: int,
    use: x509.ObjectIdentifier,
    names: x509.SubjectAlternativeName | None = None,
) -> Issued:
    if len(name) > LONGEST_CN:
        raise ConfigError(
            f"{name!r} is too long for a certificate: it takes {LONGEST_CN} characters; choose a shorter name"
        )
    signer, signing = _opened(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    until = min(now + timedelta(days=days), signer.not_valid_after_utc)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        _builder(subject, key.public_key(), now=now, until=until)
        .issuer_name(signer.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=False, crl_sign=False, **_NO_USE),
            critical=True,
        )
        .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False
        )
    )
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    return _issued(builder.sign(signing, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, public: ec.EllipticCurvePublicKey, *, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _host(host: str) -> x509.GeneralName:
    """A broker's address as it stands in a certificate."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        pass
    labels = host.split(".")
    if len(host) > 253 or not all(_is_label(label) for label in labels) or labels[-1].isdecimal():
        raise ConfigError(f"expected a host name or an IP address, without a port, got {host!r}")
    return x509.DNSName(host)


def _is_label(label: str) -> bool:
    """Whether this is one part of a host name (RFC 1123, 2.1)."""
    plain = label.isascii() and label.replace("-", "").isalnum()
    return plain and len(label) <= 63 and not label.startswith("-") and not label.endswith("-")


def _opened(authority: Issued) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The authority, ready to sign.

    Raises:
        ConfigError: its certificate or its key is none, or they are not of each other.
    """
    try:
        certificate = x509.load_pem_x509_certificate(authority.certificate)
        key = load_pem_private_key(authority.key, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the fleet's authority cannot be read: {error}; restore it from a backup"
        ) from error
    encoded = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    is_its_own = key.public_key().public_bytes(*encoded) == certificate.public_key().public_bytes(*encoded)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not is_its_own:
        raise ConfigError(
            "the fleet's authority has another key than its certificate: restore both from a backup"
        )
    return certificate, key


def _issued(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Issued:
    return Issued(
        certificate=certificate.public_bytes(Encoding.PEM),
        key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        serial=certificate.serial_number,
    )


def utc_now() -> datetime:
    """The time, to the second, as certificates have it."""
    return datetime.now(UTC).replace(microsecond=0)
