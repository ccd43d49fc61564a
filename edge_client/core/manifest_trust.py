"""Verifies that manifests are from the device's aggregator, and not older than those seen before.

A broker can deliver manifests from any sender and of any age. The last release of each channel is stored with the
digest of its content, so that a repetition is distinguished from other content with the same release number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from protocol.errors import ProtofleetError
from protocol.wire.codec import digest_of
from protocol.wire.messages import Reason, Signed
from protocol.wire.topics import FleetChannel


class ManifestTrust(msgspec.Struct, frozen=True):
    """A device's knowledge of its aggregator.

    `key` is its public key, 32 bytes, or None before the first manifest. `seen` has the greatest release of each
    channel and the sha256 of its content, `expires_s` its end, and `issued_s` the date of the last new manifest, in
    unix seconds. `number` is that of the key's certificate, or 0; only `root`, if it is known, signs certificates of
    later keys. `configured` is the key that the operator gave, with the date of the enrollment: the aggregator may have
    replaced it since.
    """

    key: bytes | None = None
    number: int = 0
    root: bytes | None = None
    configured: tuple[bytes, float] | None = None
    seen: Mapping[str, tuple[int, bytes]] = {}
    expires_s: Mapping[str, int] = {}
    issued_s: int = 0


class UntrustedManifest(ProtofleetError):
    """A manifest that is from another aggregator, or out of date: a reason for programs, a text for the operator.

    `trust` is the trust after it: certificates count even if the manifest is out of date.
    """

    def __init__(self, reason: Reason, detail: str, trust: ManifestTrust) -> None:
        super().__init__(detail)
        self.reason: Reason = reason
        self.trust = trust


@dataclass(frozen=True)
class Identity:
    """The keys that the operator gave a device: its own, and those that it trusts."""

    aggregator_key: bytes | None = None
    """Public, 32 bytes; None trusts the first key received."""
    aggregator_key_number: int = 0
    """The number of the key's certificate."""
    root_key: bytes | None = None
    """Public, 32 bytes: it signs the aggregator's later keys. None if it is not known."""
    signing_key: bytes | None = field(default=None, repr=False)
    """Private, 32 bytes; None uses the one in the state directory."""
    enrolled_s: float = 0.0
    """When the device was enrolled, unix seconds; the time is later than that, whatever the clock says."""


def with_operator_key(trust: ManifestTrust, identity: Identity) -> ManifestTrust:
    """Return the trust with the key that the operator gave; another key resets the releases seen.

    A key that was given before, in the same enrollment, changes nothing.
    """
    key = identity.aggregator_key
    if key is None or (configured := (key, identity.enrolled_s)) == trust.configured:
        return trust
    number, root = identity.aggregator_key_number, identity.root_key
    if key != trust.key:
        return ManifestTrust(key, number, root, configured)
    number, root = max(number, trust.number), root or trust.root
    return msgspec.structs.replace(trust, configured=configured, number=number, root=root)


def with_certificates(trust: ManifestTrust, signed: Signed) -> ManifestTrust:
    """Return the trust after the certificates in a manifest, whose signatures are valid.

    A certificate counts if the root has signed it, or the trusted key while no root is known, and if its number is
    greater than that of the trusted key: an old one cannot bring an old key back. Releases are counted anew with each
    key: a stolen one may have signed the greatest number, above which its successor could sign nothing.
    """
    for each in sorted(signed.certificates, key=lambda each: each.number):
        is_first_use = trust.key is None and each.key == signed.key
        if each.number > trust.number and (is_first_use or each.signer == (trust.root or trust.key)):
            trust = msgspec.structs.replace(
                trust,
                key=None if is_first_use else each.key,
                number=each.number,
                root=each.root or trust.root,
                seen=trust.seen if is_first_use or each.key == trust.key else {},
            )
    return trust


def verify(trust: ManifestTrust, channel: FleetChannel, signed: Signed) -> ManifestTrust:
    """Return the trust after a manifest with a valid signature; the first key received is trusted.

    Raises:
        UntrustedManifest: it has another key, an older release, or other content for the same release.
    """
    before, trust = trust, with_certificates(trust, signed)
    if trust.key not in (None, signed.key):
        raise UntrustedManifest(
            "signature",
            f"the {channel} is signed by another aggregator: expected the key {(trust.key or b'').hex()[:16]}..., got "
            f"{signed.key.hex()[:16]}...; if the aggregator has lost its state, start with --aggregator-key and the "
            "key from `aggregator status`",
            before,
        )
    release, digest = trust.seen.get(channel, (0, b""))
    new = signed.release, digest_of(signed.body)
    if signed.release < release or (signed.release == release and new[1] != digest):
        raise UntrustedManifest(
            "replayed",
            f"the {channel} has release {signed.release}, but release {release} was seen before",
            trust,
        )
    if signed.release == release:
        return trust
    return msgspec.structs.replace(
        trust,
        key=signed.key,
        seen={**trust.seen, channel: new},
        expires_s={**trust.expires_s, channel: signed.expires_s},
        issued_s=signed.issued_s,
    )


def expired(trust: ManifestTrust, *, now_s: float) -> frozenset[str]:
    """Return the channels whose newest manifest has expired: an attacker may withhold newer ones."""
    return frozenset(channel for channel, end_s in trust.expires_s.items() if end_s < now_s)


@dataclass(frozen=True)
class TimeEstimate:
    """The time as a device knows it that may have no battery-backed clock.

    `floor_s` is the date of the last new manifest or of the enrollment, in unix seconds, and `since_s` when it was
    learned, on a monotonic clock.
    """

    floor_s: float
    since_s: float

    def now_s(self, *, clock_s: float, monotonic_s: float) -> float:
        """Return the clock's time, or the floor and the time since then if the clock is behind."""
        return max(clock_s, self.floor_s + monotonic_s - self.since_s)
