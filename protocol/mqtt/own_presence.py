"""A program's presence on its own topic, and other programs that publish there with the same key."""

import os
import platform
import time

from protocol.errors import ConfigError
from protocol.mqtt.events import Outgoing
from protocol.wire.codec import encode
from protocol.wire.messages import Presence, PresenceState
from protocol.wire.presence import INSTANCE_BYTES, Duplicate, Reaction, Start, is_newer, observe
from protocol.wire.signing import is_own_presence, public_key, sign_presence


class Replaced(ConfigError):
    """Another program with the same key has started later: this one stays out until an operator decides."""

    def __init__(self, duplicate: Duplicate, *, command: str) -> None:
        super().__init__(
            f"another program with the same key was started later, at {duplicate.where}: this one stays out. Delete "
            f"this copy of the state and the keys, or run `{command}` on it to continue here instead"
        )
        self.duplicate = duplicate


class OwnPresence:
    """The presence of this start of a program, signed with the program's private key (32 bytes)."""

    def __init__(self, *, epoch: int, topic: str, key: bytes) -> None:
        self._start = Start(epoch, os.urandom(INSTANCE_BYTES))
        self._topic = topic
        self._key = key
        self._ip = ""
        self.final_state: PresenceState = "stopped"
        """The state that is published at the end."""

    @property
    def epoch(self) -> int:
        """Return the epoch, which grows if the broker has retained a greater one."""
        return self._start.epoch

    @property
    def client_id(self) -> str:
        """Return a suffix for the MQTT client id: brokers differ in how they treat two clients with the same id."""
        return self._start.instance.hex()[:12]

    def connected(self, ip: str) -> None:
        """Set the address that is published from now on."""
        self._ip = ip

    def outgoing(self, state: PresenceState) -> Outgoing:
        presence = Presence(
            state=state,
            epoch=self._start.epoch,
            instance=self._start.instance,
            address="/".join(filter(None, (platform.node()[:128], self._ip))),
        )
        return Outgoing(self._topic, encode(sign_presence(presence, key=self._key, topic=self._topic)), True)

    def has_signed(self, presence: Presence) -> bool:
        return is_own_presence(presence, public=public_key(self._key), topic=self._topic)

    def react(self, presence: Presence, *, may_end: bool) -> Reaction:
        """Return the reaction to a presence on this topic, and change the epoch.

        `may_end` allows `END` after a presence with another key, which any client of an open fleet can send.
        """
        if self.has_signed(presence):
            self._start, reaction = observe(self._start, presence)
            if reaction is Reaction.STAY_OUT:
                self.final_state = "replaced"
            return reaction
        if may_end and is_newer(presence.epoch, own=self.epoch, now_s=time.time()):
            return Reaction.END
        # Not after each one: the other program may do the same.
        is_outdated = presence.state != "online" or presence.epoch > self.epoch
        return Reaction.PUBLISH if is_outdated else Reaction.NONE


def duplicate_of(presence: Presence, *, started_later: bool) -> Duplicate:
    """Return what is stored about the other program that has published a presence with this program's key."""
    return Duplicate(
        instance=presence.instance.hex(),
        epoch=presence.epoch,
        address=presence.address,
        seen_s=time.time(),
        started_later=started_later,
    )


def require_not_replaced(duplicate: Duplicate, *, command: str) -> None:
    """Raise Replaced if another program with the same key has started later; `command` makes this one start."""
    if duplicate.started_later:
        raise Replaced(duplicate, command=command)
