"""Presences on the device's own topic: a copy of this device, or another client under its name."""

import logging
from collections.abc import Callable

from edge_client.config import Settings
from edge_client.service.publisher import Publisher
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import Epoch
from protocol.errors import BadSignature, ConfigError
from protocol.log import event
from protocol.mqtt.own_presence import Replaced, duplicate_of
from protocol.wire.messages import Presence
from protocol.wire.presence import Duplicate, Reaction

log = logging.getLogger(__name__)

TAKE_OVER = "edge-client take-over"

WAY_OUT = "give each its own --device-id"


class OwnTopic:
    """Watches the topic of the device's presence; `refuse` takes its topic and why a presence is refused."""

    def __init__(
        self,
        settings: Settings,
        store: DeviceState,
        publisher: Publisher,
        *,
        refuse: Callable[[str, BadSignature], None],
    ) -> None:
        self._copy_warning = ""
        self._other: Presence | None = None
        """The last presence of another key, while it is online."""
        self._settings = settings
        self._store = store
        self._publisher = publisher
        self._refuse = refuse

    @property
    def warning(self) -> str:
        """The warning for the operator; empty if no other program has used this device's key or name."""
        if self._copy_warning or self._other is None:
            return self._copy_warning
        return f"another device is online under this name, at {_address(self._other)}: {WAY_OUT}"

    def check(self, presence: Presence, *, is_connected: bool) -> None:
        """Replace an outdated presence; raises Replaced if another program with this key was started later."""
        own = self._publisher.presence
        if not own.has_signed(presence):
            self._check_other(presence)
        reaction = own.react(presence, may_end=False)
        if reaction is Reaction.STAY_OUT:
            found = duplicate_of(presence, started_later=True)
            self._store.set(found)
            raise Replaced(found, command=TAKE_OVER)
        if reaction is Reaction.REPORT:
            self._warn(duplicate_of(presence, started_later=False))
        if own.epoch > self._store.get(Epoch).number:
            self._store.set(Epoch(own.epoch))
        if reaction is not Reaction.NONE and is_connected:
            self._publisher.send_presence()

    def check_refused_key(self) -> None:
        """Raise ConfigError if another device is online under this name, and the aggregator has refused this one's key.

        Of two keys under one name the aggregator of an open fleet accepts the one that it has received first.
        """
        if self._other is not None:
            raise ConfigError(
                f"the aggregator knows {self._settings.device_id!r} by another key, and another edge-client is online "
                f"under this name, at {_address(self._other)}: {WAY_OUT}"
            )

    def _check_other(self, presence: Presence) -> None:
        """Take note of a presence with another key: any client of an open fleet can send one."""
        if self._settings.identity.signing_key is not None:
            topic = self._publisher.topic("state")
            self._refuse(topic, BadSignature("the presence is not signed with this device's key"))
            return
        is_new, self._other = self._other is None, presence if presence.state == "online" else None
        if is_new and self._other is not None:
            text = f"another device is online under this name: {WAY_OUT}"
            event(log, logging.WARNING, text, address=presence.address, epoch=presence.epoch)

    def _warn(self, found: Duplicate) -> None:
        if self._store.get(Duplicate).instance == found.instance and self._copy_warning:
            return
        self._store.set(found)
        text = (
            "a copy of this device was started earlier, and stays out: delete its state and keys, or enroll it under a "
            "name of its own"
        )
        self._copy_warning = f"{text}; it ran at {found.where}"
        event(log, logging.WARNING, text, address=found.address, instance=found.instance, epoch=found.epoch)


def _address(presence: Presence) -> str:
    return presence.address or "an unknown address"
