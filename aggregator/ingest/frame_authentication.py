"""Authentication of devices: a frame's signature is verified before anything in it is read or stored."""

import functools
import time

from aggregator.ingest.validation import Refused
from aggregator.storage.device_keys import MAX_PINNED_DEVICES, Key, refusal_reason
from aggregator.storage.store import Store
from protocol.wire.messages import Frame, Reason
from protocol.wire.signing import is_own_transfer

VERIFIED = 4096
"""Signatures cached as valid: all frames of a transfer carry the same one."""

_DETAILS: dict[Reason, str] = {
    "revoked": "the key of {device} was revoked; `aggregator enroll {device} --renew` enrolls it again",
    "unknown_device": "{device} is not enrolled, and the fleet is closed: `aggregator enroll {device}` enrolls it",
    "signature": "the key is not the one known for {device}",
}


class FrameAuthenticator:
    """Verifies that frames come from the device that their topic names, with keys that any process may change."""

    def __init__(self, store: Store, *, fleet: str) -> None:
        self._keys = store.keys
        self._verify = functools.lru_cache(maxsize=VERIFIED)(functools.partial(_is_own, fleet))

    def check_name(self, device: str) -> None:
        """Raise Refused if a device's key was revoked, or it is not enrolled in a closed fleet."""
        self._known_key(device, None)

    def check(self, device: str, frame: Frame, *, may_pin: bool = True) -> None:
        """Check a frame's signature; an open fleet pins the first key of each device if `may_pin`.

        Raises Refused if it is another device's or the device is not accepted, StateError if the key cannot be stored.
        """
        known = self._known_key(device, frame.key)
        if not self._verify(device, frame.digest, frame.size_bytes, frame.key, frame.signature):
            raise Refused("signature", f"the transfer is not signed with the key of {device}")
        if known is None and may_pin and not self._keys.pin(device, frame.key, now_s=time.time()):
            raise Refused(
                "unknown_device",
                f"{device} is not enrolled, like {MAX_PINNED_DEVICES} others: `aggregator enroll` the fleet's devices",
            )

    def _known_key(self, device: str, public: bytes | None) -> Key | None:
        known = self._keys.get(device)
        reason = refusal_reason(known, is_closed=self._keys.is_closed(), public=public)
        if reason is not None:
            detail = _DETAILS[reason].format(device=device)
            raise Refused(reason, detail if reason != "signature" else f"{detail}; {_remedy(known, device)}")
        return known


def _remedy(known: Key | None, device: str) -> str:
    if known is not None and known.enrolled:
        return "start it with the folder of its last enrollment"
    return f"if the device has lost its key: `aggregator reset-key {device}`"


def _is_own(fleet: str, device: str, digest: bytes, size_bytes: int, key: bytes, signature: bytes) -> bool:
    return is_own_transfer(key, signature, fleet=fleet, device=device, digest=digest, size_bytes=size_bytes)
