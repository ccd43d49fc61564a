"""Authentication of devices: a signature is verified before anything in a message is read or stored."""

import functools
import time

from aggregator.intake.validation import Refused
from aggregator.storage.keys import MAX_PINNED_DEVICES, Key, refusal_reason
from aggregator.storage.store import Store
from protocol.wire.messages import Frame, Presence, PrivacyRecord, Reason
from protocol.wire.signing import is_own_presence, is_own_record, is_own_transfer
from protocol.wire.topics import device_topic

VERIFIED = 4096
"""Signatures cached as valid: all frames of a transfer carry the same one."""

_DETAILS: dict[Reason, str] = {
    "revoked": "the key of {device} was revoked; `aggregator enroll {device} --renew` enrolls it again",
    "unknown_device": "{device} is not enrolled, and the fleet is closed: `aggregator enroll {device}` enrolls it",
}


class FrameAuthenticator:
    """Verifies that frames and presences come from the device of their topic."""

    def __init__(self, store: Store, *, fleet: str) -> None:
        self._keys = store.keys
        self._fleet = fleet
        self._verify = functools.lru_cache(maxsize=VERIFIED)(functools.partial(is_own_transfer, fleet=fleet))

    def check_name(self, device: str, *, public: bytes | None = None) -> Key | None:
        """Return a device's key, if one is known.

        Raises Refused if it was revoked or is not `public`, or the device is not enrolled in a closed fleet.
        """
        known = self._keys.get(device)
        reason = refusal_reason(known, is_closed=self._keys.is_closed(), public=public)
        if reason == "signature":
            remedy = f"if the device has lost its key: `aggregator reset-key {device}`"
            if known is not None and known.enrolled:
                remedy = "start it with the folder of its last enrollment"
            raise Refused(reason, f"the key is not the one known for {device}; {remedy}")
        if reason is not None:
            raise Refused(reason, _DETAILS[reason].format(device=device))
        return known

    def check(self, device: str, frame: Frame) -> None:
        """Check a frame's signature; an open fleet pins the first key of each device.

        Raises Refused if it is another device's or the device is not accepted, StateError if the key cannot be stored.
        """
        known = self.check_name(device, public=frame.key)
        transfer = {"device": device, "digest": frame.digest, "size_bytes": frame.size_bytes}
        if not self._verify(frame.key, frame.signature, **transfer):
            raise Refused("signature", f"the transfer is not signed with the key of {device}")
        if known is None and not self._keys.pin(device, frame.key, now_s=time.time()):
            raise Refused(
                "unknown_device",
                f"{device} is not enrolled, like {MAX_PINNED_DEVICES} others: `aggregator enroll` the fleet's devices",
            )

    def check_record(self, device: str, record: PrivacyRecord) -> None:
        """Check the signature of a device's record of its releases, as that of a presence; raises Refused."""
        self.check_name(device, public=record.key)
        if not is_own_record(record, public=record.key, topic=device_topic(self._fleet, device, "get")):
            raise Refused("signature", f"the record is not signed with the key of {device}")

    def check_presence(self, device: str, presence: Presence) -> None:
        """Check a presence's signature; a device whose key is not known may sign with any.

        Raises Refused if it is another device's or the device is not accepted.
        """
        self.check_name(device, public=presence.key)
        topic = device_topic(self._fleet, device, "state")
        if not is_own_presence(presence, public=presence.key, topic=topic):
            raise Refused("signature", f"the presence is not signed with the key of {device}")
