"""Signatures and release numbers of manifests: a device accepts a manifest only after those with smaller numbers."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from aggregator.security.identity import identity_folder, locked_identity
from aggregator.security.key_rotation import certificate_chain, key_certificates, root_of
from aggregator.storage.store import Store
from aggregator.storage.stored_values import ManifestNumbers, SigningKey
from protocol.errors import BadSignature, MalformedMessage
from protocol.log import event
from protocol.storage.keyfile import read_or_make_key
from protocol.wire.codec import digest_of
from protocol.wire.presence import MAX_CLOCK_SKEW_S
from protocol.wire.signing import open_manifest, public_key, sign_manifest
from protocol.wire.topics import FleetChannel

log = logging.getLogger(__name__)


VALIDITY_S = 30 * 86400
"""A device takes no new work from a manifest that is older: an attacker may withhold newer ones."""

REFRESH_S = 86400
"""A manifest is signed again after this time, long before it expires."""


@dataclass(frozen=True)
class _Last:
    """The last signed manifest of a channel."""

    digest: bytes
    payload: bytes
    issued_s: int


def identity_of(state: Path) -> bytes:
    """Return the aggregator's private key, 32 bytes, created at the first start.

    Raises ConfigError if the file does not hold such a key, and StateError if it cannot be written.
    """
    with locked_identity(state):
        return read_or_make_key(identity_folder(state) / "signing.key")


class ManifestSigner:
    """Signs the manifests of one fleet with `key`, 32 bytes; the store keeps the release numbers.

    A new key starts with the clock's, whatever was signed with the one before.
    """

    def __init__(self, store: Store, *, key: bytes, fleet: str) -> None:
        self._store = store
        self._key = key
        self._fleet = fleet
        self._public = public_key(key).hex()
        stored = store.facts.get(ManifestNumbers)
        self._releases = dict(stored.numbers) if stored is not None and stored.key == self._public else {}
        self._signed: dict[FleetChannel, _Last] = {}
        self._is_unkept = False
        certificates = key_certificates(store.folder, public_key(key))
        self._certificates = certificate_chain(certificates)
        found, before = SigningKey(self._public, root_of(certificates).hex()), store.facts.get(SigningKey)
        # `rotate-key` may have been killed between the key and the database; devices follow the certificates.
        replaced = {self._public, *(key.hex() for each in certificates for key in (each.signer, each.key))}
        if before is not None and before.public not in replaced:
            event(
                log,
                logging.WARNING,
                "identity/signing.key is not the key that devices trust: restore it from a backup, or start every "
                "device once with --aggregator-key, and enroll again those that were enrolled",
                trusted=before.public,
                found=self._public,
            )
        store.facts.put(found)

    def sign(self, channel: FleetChannel, body: bytes) -> bytes:
        """Return a signed manifest, with a new number if it differs from the last one, is the first or is due.

        `keep` makes the number durable.
        """
        last, now_s = self._signed.get(channel), int(time.time())
        if last is not None and last.digest == digest_of(body) and not _is_due(last, now_s):
            return last.payload
        # It follows the clock, so that a lost or restored state gives no smaller number.
        release = max(self._releases.get(channel, 0) + 1, now_s)
        payload = sign_manifest(
            body,
            key=self._key,
            fleet=self._fleet,
            channel=channel,
            release=release,
            issued_s=now_s,
            expires_s=now_s + VALIDITY_S,
            certificates=self._certificates,
        )
        self._releases[channel] = release
        self._signed[channel] = _Last(digest_of(body), payload, now_s)
        self._is_unkept = True
        return payload

    def due(self) -> list[FleetChannel]:
        """Return the channels whose manifests are to be signed and published again."""
        now_s = int(time.time())
        return [channel for channel, last in self._signed.items() if _is_due(last, now_s)]

    def has_signed(self, channel: FleetChannel, payload: bytes) -> bool:
        """Return True if this aggregator's key has signed a manifest.

        If its number is unknown, because the state is older and the clock was ahead, the next number is greater: no
        device would accept another one.
        """
        try:
            found = open_manifest(payload, fleet=self._fleet, channel=channel)
        except (BadSignature, MalformedMessage):
            return False
        if found.key != public_key(self._key):
            return False
        last = self._signed.get(channel)
        if (last is None or payload != last.payload) and found.release >= self._releases.get(channel, 0):
            self._releases[channel] = found.release
            self._signed.pop(channel, None)
        return True

    def keep(self) -> None:
        """Store the numbers.

        Raises StateError if that fails. Then only the clock keeps the next start from using smaller ones.
        """
        if self._is_unkept:
            self._store.facts.put(ManifestNumbers(self._releases, self._public))
            self._is_unkept = False


def _is_due(last: _Last, now_s: int) -> bool:
    """Return True if a manifest is a day old, or dated in the future by a clock that has been corrected since."""
    return not -MAX_CLOCK_SKEW_S <= now_s - last.issued_s < REFRESH_S
