"""Presences on the aggregator's own topic: a copy of this aggregator, or another one for the same fleet."""

import logging
import time
from dataclasses import dataclass, field

from msgspec.structs import replace

from aggregator.ingest.receiver import Receiver
from aggregator.ingest.validation import Refused
from aggregator.messaging.publisher import FleetPublisher
from aggregator.storage.devices import UNKNOWN_DEVICE
from aggregator.storage.store import Store
from aggregator.storage.stored_values import ServedTask
from protocol.errors import ConfigError, MalformedMessage
from protocol.log import event
from protocol.mqtt.own_presence import Replaced, duplicate_of
from protocol.wire.codec import decode
from protocol.wire.messages import Presence, Reason
from protocol.wire.presence import Duplicate, Reaction, is_newer

log = logging.getLogger(__name__)

TAKE_OVER = "aggregator take-over"


@dataclass(kw_only=True)
class OwnTopic:
    """Watches the topic of the aggregator's presence."""

    store: Store
    publisher: FleetPublisher
    receiver: Receiver
    fleet: str
    _is_outdated: bool = field(default=False, init=False)

    def observe(self, payload: bytes) -> None:
        """Take note of a presence on the topic.

        Raises:
            Replaced: another aggregator with this key has started later; the caller stores it, after the transaction.
            NotLeader: that one leads the fleet on the same PostgreSQL database.
            ConfigError: another aggregator has started later for this open fleet.
        """
        try:
            presence = decode(payload, Presence, max_bytes=1024)
        except MalformedMessage as error:
            self._refuse("malformed", f"the aggregator's state: {error}")
            return
        own = self.publisher.presence
        reaction = (
            own.observe(presence) if own.has_signed(presence) else self._reaction_to_other_key(presence)
        )
        if reaction is Reaction.STAY_OUT:
            self.store.check_lead()
            raise Replaced(duplicate_of(presence, started_later=True), command=TAKE_OVER)
        if (
            reaction is Reaction.REPORT and not self.store.is_shared
        ):  # there it has led before, and was replaced
            self._report(duplicate_of(presence, started_later=False))
        served = self.store.facts.get(ServedTask)
        if served is not None and own.epoch > served.epoch:
            self.store.facts.put(replace(served, epoch=own.epoch))
        self._is_outdated = self._is_outdated or reaction is not Reaction.NONE

    def publish(self) -> None:
        """Publish the presence again if needed; call it once the epoch is durable."""
        if self._is_outdated:
            self._is_outdated = False
            self.publisher.publish_presence("online")

    def _reaction_to_other_key(self, presence: Presence) -> Reaction:
        own, is_closed = self.publisher.presence.epoch, self.store.keys.is_closed()
        if not is_closed and is_newer(presence.epoch, own=own, now_s=time.time()):
            raise ConfigError(
                f"another aggregator has started for fleet {self.fleet!r} on this broker, at "
                f"{presence.address or 'an unknown address'}, with the key {presence.key.hex() or 'unknown'}: a fleet "
                "has one; stop one of them, or give each task file a fleet of its own"
            )
        if is_closed:
            self._refuse(
                "signature", "an aggregator's presence that is not signed with this aggregator's key"
            )
        elif presence.epoch > own:
            self._refuse(
                "implausible", f"an aggregator's presence with epoch {presence.epoch}, in the future"
            )
        # Not after each one: the other program may do the same.
        is_outdated = presence.state != "online" or presence.epoch > own
        return Reaction.PUBLISH if is_outdated else Reaction.NONE

    def _report(self, found: Duplicate) -> None:
        before = self.store.facts.get(Duplicate)
        if before is not None and before.instance == found.instance:
            return
        self.store.facts.put(found)
        text = (
            "another aggregator with this key was started earlier: it stays out; delete its copy of the state"
        )
        event(log, logging.WARNING, text, address=found.address, instance=found.instance, epoch=found.epoch)

    def _refuse(self, reason: Reason, detail: str) -> None:
        self.receiver.count_refusal(UNKNOWN_DEVICE, Refused(reason, detail))
