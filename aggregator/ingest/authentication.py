"""Who is let in: a frame's signature is looked at before anything of it is kept or read."""

import functools
import time

from aggregator.ingest.validation import Refused
from aggregator.storage.device_keys import MAX_PINNED_DEVICES, Key, refusal_reason
from aggregator.storage.store import Store
from protocol.wire.messages import Frame, Reason
from protocol.wire.signing import is_own_transfer

VERIFIED = 4096
"""Signatures that were found right and are not looked into again: a transfer has one in all of its frames."""

_WORDS: dict[Reason, str] = {
    "revoked": "the key of {device} was revoked; `aggregator enroll {device} --renew` lets it in again",
    "unknown_device": "{device} is not enrolled, and the fleet is closed: `aggregator enroll {device}` lets it in",
    "signature": "another key than the one that {device} is known by",
}


class Gate:
    """Tells a fleet's devices from others.

    Args:
        store: has the keys, which another process may change at any time.
        fleet: its name.
    """

    def __init__(self, store: Store, *, fleet: str) -> None:
        self._keys = store.keys
        self._verified = functools.lru_cache(maxsize=VERIFIED)(functools.partial(_is_own, fleet))

    def admit(self, device: str) -> None:
        """See whether a name is heard at all.

        Raises:
            Refused: it is not, and why.
        """
        self._look(device, None)

    def check(self, device: str, frame: Frame, *, may_pin: bool = True) -> None:
        """See whether a frame is of a device's own transfer; the first key that comes under a name is its own.

        Args:
            device: under whose name it came.
            frame: what came.
            may_pin: keep a key that is the first.

        Raises:
            Refused: it is not, or nobody knows.
            StateError: the key cannot be kept.
        """
        known = self._look(device, frame.key)
        if not self._verified(device, frame.digest, frame.size_bytes, frame.key, frame.signature):
            raise Refused("signature", f"what came as a transfer of {device} is not signed with its key")
        if known is None and may_pin and not self._keys.pin(device, frame.key, now_s=time.time()):
            raise Refused(
                "unknown_device",
                f"{device} is not enrolled, like {MAX_PINNED_DEVICES} others: `aggregator enroll` the fleet's devices",
            )

    def _look(self, device: str, public: bytes | None) -> Key | None:
        known = self._keys.get(device)
        reason = refusal_reason(known, is_closed=self._keys.is_closed(), public=public)
        if reason is not None:
            words = _WORDS[reason].format(device=device)
            raise Refused(reason, words if reason != "signature" else f"{words}; {_way_out(known, device)}")
        return known


def _way_out(known: Key | None, device: str) -> str:
    """What an operator does about a device that comes with another key."""
    if known is not None and known.enrolled:
        return "start it with the folder of its last enrollment"
    return f"if the device has lost its key: `aggregator reset-key {device}`"


def _is_own(fleet: str, device: str, digest: bytes, size_bytes: int, key: bytes, signature: bytes) -> bool:
    return is_own_transfer(key, signature, fleet=fleet, device=device, digest=digest, size_bytes=size_bytes)
