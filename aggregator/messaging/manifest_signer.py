"""Signatures and release numbers of manifests: a device accepts a manifest only after those with smaller numbers."""

import logging
import time
from pathlib import Path

from aggregator.security.identity import identity_folder, locked_identity
from aggregator.storage.store import Store
from aggregator.storage.stored_values import ManifestNumbers, SigningKey
from protocol.errors import BadSignature, MalformedMessage
from protocol.log import event
from protocol.storage.keyfile import read_or_make_key
from protocol.wire.codec import digest_of
from protocol.wire.signing import open_manifest, public_key, sign_manifest
from protocol.wire.topics import FleetChannel

log = logging.getLogger(__name__)


def identity_of(state: Path) -> bytes:
    """Return the aggregator's private key, 32 bytes, created at the first start.

    Raises ConfigError if the file does not hold such a key, and StateError if it cannot be written.
    """
    with locked_identity(state):
        return read_or_make_key(identity_folder(state) / "signing.key")


class ManifestSigner:
    """Signs the manifests of one fleet with `key`, 32 bytes; the store keeps the release numbers."""

    def __init__(self, store: Store, *, key: bytes, fleet: str) -> None:
        self._store = store
        self._key = key
        self._fleet = fleet
        stored = store.facts.get(ManifestNumbers)
        self._releases = dict(stored.numbers) if stored is not None else {}
        self._signed: dict[FleetChannel, tuple[bytes, bytes]] = {}
        self._is_unkept = False
        found, before = SigningKey(public_key(key).hex()), store.facts.get(SigningKey)
        if before is not None and before != found:
            event(
                log,
                logging.WARNING,
                "identity/signing.key is not the key that devices trust: restore it from a backup, or start every "
                "device once with --aggregator-key, and enroll again those that were enrolled",
                trusted=before.public,
                found=found.public,
            )
        store.facts.put(found)

    def sign(self, channel: FleetChannel, body: bytes) -> bytes:
        """Return a signed manifest, with a new number if it differs from the last one or is the first of this start.

        `keep` makes the number durable.
        """
        digest, payload = self._signed.get(channel, (b"", b""))
        if digest == digest_of(body):
            return payload
        # It follows the clock, so that a lost or restored state gives no smaller number.
        release = max(self._releases.get(channel, 0) + 1, int(time.time()))
        payload = sign_manifest(body, key=self._key, fleet=self._fleet, channel=channel, release=release)
        self._releases[channel] = release
        self._signed[channel] = digest_of(body), payload
        self._is_unkept = True
        return payload

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
        _, signed = self._signed.get(channel, (b"", b""))
        if payload != signed and found.release >= self._releases.get(channel, 0):
            self._releases[channel] = found.release
            self._signed.pop(channel, None)
        return True

    def keep(self) -> None:
        """Store the numbers.

        Raises StateError if that fails. Then only the clock keeps the next start from using smaller ones.
        """
        if self._is_unkept:
            self._store.facts.put(ManifestNumbers(self._releases))
            self._is_unkept = False
