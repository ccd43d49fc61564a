"""What is said to the whole fleet: signed, and numbered so that nothing older is believed after it."""

import logging
import time
from pathlib import Path

from aggregator.security.identity import identity_folder, locked_identity
from aggregator.storage.facts import ManifestNumbers, SigningKey
from aggregator.storage.store import Store
from protocol.errors import BadSignature, MalformedMessage
from protocol.storage.keyfile import read_or_make_key
from protocol.wire.codec import digest_of
from protocol.wire.signing import open_manifest, public_key, sign_manifest
from protocol.wire.topics import FleetChannel

log = logging.getLogger(__name__)


def identity_of(state: Path) -> bytes:
    """The aggregator's private key, 32 bytes, which is made at the first start.

    Raises:
        ConfigError: the file holds no such key.
        StateError: it cannot be written.
    """
    with locked_identity(state):
        return read_or_make_key(identity_folder(state) / "signing.key")


def next_release(last: int, *, now_s: float) -> int:
    """A number greater than the last one. It follows the clock: a state of earlier, or a lost one, gives no smaller."""
    return max(last + 1, int(now_s))


class Herald:
    """Signs what stands on the fleet's topics.

    Args:
        store: keeps the numbers.
        key: the aggregator's private key, 32 bytes.
        fleet: its name.
    """

    def __init__(self, store: Store, *, key: bytes, fleet: str) -> None:
        self._store = store
        self._key = key
        self._fleet = fleet
        stored = store.facts.get(ManifestNumbers)
        self._releases = dict(stored.numbers) if stored is not None else {}
        self._said: dict[FleetChannel, tuple[bytes, bytes]] = {}
        self._is_unkept = False
        self._know(public_key(key).hex())

    def _know(self, key: str) -> None:
        """Keep by which key devices know us, and say so if they know another."""
        before = self._store.facts.get(SigningKey)
        if before is not None and before.public != key:
            log.warning(
                "identity/signing.key is another than the one that devices believe, %s: put that one back from a "
                "backup, or start every device once with --aggregator-key %s, and enrol those anew that were enrolled",
                *(before.public, key),
            )
        self._store.facts.put(SigningKey(key))

    def sign(self, channel: FleetChannel, body: bytes) -> bytes:
        """A manifest as it is retained: with a new number if it is another one than before, or the first of a start.

        `keep` makes the number durable.
        """
        digest, payload = self._said.get(channel, (b"", b""))
        if digest == digest_of(body):
            return payload
        release = next_release(self._releases.get(channel, 0), now_s=time.time())
        payload = sign_manifest(body, key=self._key, fleet=self._fleet, channel=channel, release=release)
        self._releases[channel] = release
        self._said[channel] = digest_of(body), payload
        self._is_unkept = True
        return payload

    def has_said(self, channel: FleetChannel, payload: bytes) -> bool:
        """Whether a manifest that stands on the broker is of ours.

        If we do not know of its number, as our state is an older one and the clock was ahead when it was given, what is
        said from now on has a greater one: else no device would believe it.
        """
        try:
            signed = open_manifest(payload, fleet=self._fleet, channel=channel)
        except (BadSignature, MalformedMessage):
            return False
        if signed.key != public_key(self._key):
            return False
        _, said = self._said.get(channel, (b"", b""))
        if payload != said and signed.release >= self._releases.get(channel, 0):
            self._releases[channel] = signed.release
            self._said.pop(channel, None)
        return True

    def keep(self) -> None:
        """Keep the numbers that were given.

        Raises:
            StateError: they cannot be kept now. Then only the clock keeps the next start from giving smaller ones.
        """
        if self._is_unkept:
            self._store.facts.put(ManifestNumbers(self._releases))
            self._is_unkept = False
