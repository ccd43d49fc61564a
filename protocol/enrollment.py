"""The folder that enrolls a device in a closed fleet: written by the aggregator, read by the device.

It contains `enrollment.toml`, `ca.crt` (to verify the broker), `device.crt` and `device.key` (to authenticate to the
broker) and `signing.key` (to authenticate to the aggregator).
"""

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from protocol.errors import ConfigError
from protocol.mqtt.tls import BrokerAccess
from protocol.storage.keyfile import read_key
from protocol.wire.messages import Natural
from protocol.wire.signing import public_key

if TYPE_CHECKING:
    from cryptography import x509

FORMAT = 1
WAY_OUT = "use the folder as `aggregator enroll` wrote it"


class EnrollmentCard(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `enrollment.toml`: public keys are in hex, an empty broker is configured on the device."""

    format: int
    device: str
    fleet: str
    broker: str = ""
    key: str
    aggregator_key: str
    aggregator_key_number: Natural = 0
    root_key: str = ""


@dataclass(frozen=True)
class Enrollment:
    """A device's enrollment, whose files belong together."""

    device: str
    fleet: str
    broker: str
    access: BrokerAccess
    signing_key: bytes = field(repr=False)
    """Private, 32 bytes."""
    aggregator_key: bytes
    """Public, 32 bytes."""
    aggregator_key_number: int
    """The number of the key's certificate; 0 if it is the aggregator's first key."""
    root_key: bytes | None
    """Public, 32 bytes: it signs the aggregator's later keys. None if the fleet has none."""
    enrolled_s: float
    """Date of the certificate, unix seconds."""


def card_text(card: EnrollmentCard) -> str:
    values: dict[str, Any] = msgspec.to_builtins(card)
    # A JSON string is a TOML string.
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


def read_card(folder: Path) -> EnrollmentCard:
    """Read `enrollment.toml` in a folder; raises ConfigError if it is missing, damaged, or of a newer protofleet."""
    file = folder / "enrollment.toml"
    try:
        card = msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), EnrollmentCard)
        keys = [bytes.fromhex(key) for key in (card.key, card.aggregator_key)]
        keys += [bytes.fromhex(card.root_key)] if card.root_key else []
    except OSError as error:
        raise ConfigError(f"no enrollment in {folder}: cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged ({error}): {WAY_OUT}") from error
    if card.format != FORMAT:
        raise ConfigError(f"{file} has format {card.format}, expected {FORMAT}: upgrade protofleet here")
    if any(len(key) != 32 for key in keys):
        raise ConfigError(f"{file} is damaged (expected keys of 32 bytes): {WAY_OUT}")
    return card


def read_enrollment(folder: Path) -> Enrollment:
    """Read a device's enrollment; raises ConfigError if a file is missing, damaged or of another enrollment."""
    card = read_card(folder)
    ca, issued = folder / "ca.crt", folder / "device.crt"
    authorities, (certificate, *_) = _certificates(ca), _certificates(issued)
    if _names(certificate) != [card.device]:
        raise ConfigError(f"{issued} is not the certificate of {card.device}: {WAY_OUT}")
    if not any(_is_issued_by(certificate, authority) for authority in authorities):
        raise ConfigError(f"{issued} was not issued by the authority in {ca}: {WAY_OUT}")
    signing_key = read_key(folder / "signing.key", advice=WAY_OUT)
    if public_key(signing_key).hex() != card.key.lower():
        raise ConfigError(f"{folder / 'signing.key'} is not the key of {card.device}: {WAY_OUT}")
    return Enrollment(
        device=card.device,
        fleet=card.fleet,
        broker=card.broker,
        access=BrokerAccess(tls=True, ca=ca, certificate=issued, key=folder / "device.key"),
        signing_key=signing_key,
        aggregator_key=bytes.fromhex(card.aggregator_key),
        aggregator_key_number=card.aggregator_key_number,
        root_key=bytes.fromhex(card.root_key) or None,
        enrolled_s=certificate.not_valid_before_utc.timestamp(),
    )


def _certificates(file: Path) -> "list[x509.Certificate]":
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; {WAY_OUT}") from error
    except (ValueError, x509.InvalidVersion) as error:
        raise ConfigError(f"{file} is not a PEM certificate: {WAY_OUT}") from error


def _names(certificate: "x509.Certificate") -> list[str | bytes]:
    from cryptography.x509.oid import NameOID

    try:
        return [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    except ValueError:
        return []


def _is_issued_by(certificate: "x509.Certificate", authority: "x509.Certificate") -> bool:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True
