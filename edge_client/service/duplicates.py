"""Presences on the device's own topic: a copy of this device, or another client under its name."""

import logging
from collections.abc import Callable

from edge_client.config import Settings
from edge_client.service.publisher import Publisher
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import Epoch
from protocol.errors import BadSignature, ConfigError
from protocol.log import event
from protocol.mqtt.own_presence import Replaced, duplicate_of
from protocol.wire.messages import Presence
from protocol.wire.presence import Duplicate, Reaction

log = logging.getLogger(__name__)

TAKE_OVER = "edge-client take-over"


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
        self.warning = ""
        """The warning for the operator; empty if no other program has used this device's key."""
        self._settings = settings
        self._store = store
        self._publisher = publisher
        self._refuse = refuse

    def check(self, presence: Presence, *, is_connected: bool) -> None:
        """Replace an outdated presence; raises ConfigError if another program replaces this one."""
        own, settings = self._publisher.presence, self._settings
        is_closed = settings.identity.signing_key is not None
        if is_closed and not own.has_signed(presence):
            topic = self._publisher.topic("state")
            self._refuse(topic, BadSignature("the presence is not signed with this device's key"))
        reaction = own.react(presence, is_closed=is_closed)
        if reaction is Reaction.END:
            raise ConfigError(
                f"another edge-client is online as {settings.device_id!r}, at "
                f"{presence.address or 'an unknown address'}: give each its own --device-id"
            )
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

    def _warn(self, found: Duplicate) -> None:
        if self._store.get(Duplicate).instance == found.instance and self.warning:
            return
        self._store.set(found)
        text = (
            "a copy of this device was started earlier, and stays out: delete its state and keys, or enroll it under a "
            "name of its own"
        )
        self.warning = f"{text}; it ran at {found.where}"
        event(log, logging.WARNING, text, address=found.address, instance=found.instance, epoch=found.epoch)
