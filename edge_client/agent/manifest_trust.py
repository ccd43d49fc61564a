"""Which manifests a device believes: those that its one aggregator has signed, and none older than it has seen. Pure.

What the broker hands out may be of anybody, and of any time. A release that was seen is kept with the digest of what
was said then, so that a repetition is told from something else under the same number.
"""

from collections.abc import Mapping

import msgspec

from protocol.errors import ProtofleetError
from protocol.wire.codec import digest_of
from protocol.wire.messages import Reason, Signed
from protocol.wire.topics import FleetChannel


class UntrustedManifest(ProtofleetError):
    """A manifest that is not of this device's aggregator, or not its last word.

    Args:
        reason: for the program.
        detail: for a person.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason: Reason = reason


class ManifestTrust(msgspec.Struct, frozen=True):
    """What a device knows of its aggregator.

    Args:
        key: its public key, 32 bytes; None before anything was heard of it.
        heard: the greatest release seen on each channel, and the sha256 of what was said with it.
    """

    key: bytes | None = None
    heard: Mapping[str, tuple[int, bytes]] = {}


def given(trust: ManifestTrust, key: bytes | None) -> ManifestTrust:
    """Believe the key that a person has given; what another one has said counts no more."""
    return trust if key is None or key == trust.key else ManifestTrust(key)


def believe(trust: ManifestTrust, channel: FleetChannel, signed: Signed) -> ManifestTrust:
    """What is known after a manifest whose signature is right: the first key that is heard is believed.

    Raises:
        Disbelieved: it is signed with another key, older than what was seen, or not what was said with its number.
    """
    if trust.key not in (None, signed.key):
        raise UntrustedManifest(
            "signature",
            f"the {channel} is signed by another aggregator, whose key begins with {signed.key.hex()[:16]}; expected "
            f"{(trust.key or b'').hex()[:16]}. If the aggregator has lost its state, start with --aggregator-key and "
            "what `aggregator status` shows",
        )
    release, digest = trust.heard.get(channel, (0, b""))
    said = signed.release, digest_of(signed.body)
    if signed.release < release or (signed.release == release and said[1] != digest):
        raise UntrustedManifest(
            "replayed", f"the {channel} has release {signed.release}, but release {release} was seen before"
        )
    return msgspec.structs.replace(trust, key=signed.key, heard={**trust.heard, channel: said})
