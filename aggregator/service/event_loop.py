"""The event loop of the programs that handle the messages of devices: one event at a time, on one thread."""

import contextlib
import logging
import queue
from dataclasses import dataclass
from itertools import groupby

from aggregator.heads.accepted_submissions import AcceptedSubmissions
from aggregator.ingest.receiver import Receiver
from aggregator.messaging.blob_sender import BlobSender
from aggregator.messaging.publisher import Publisher
from aggregator.service.device_messages import DeviceMessages
from aggregator.service.traffic_meter import TrafficMeter
from aggregator.storage.store import Store
from aggregator.training.runner import Finished, Progress
from protocol.errors import NotLeader, StateError, ThreadFailed
from protocol.log import event as log_event
from protocol.mqtt import reconnecting_session as mqtt
from protocol.service_manager import ServiceManager
from protocol.wire.transfer import chunk_bytes

log = logging.getLogger(__name__)

TICK_S = 0.5

BATCH_EVENTS = 256
"""Events handled before their messages are made durable together."""

BATCH_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class Stop:
    """The program that runs the event loop wants it to end."""


Event = mqtt.Event | Progress | Finished | Stop
Events = queue.SimpleQueue[Event]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The objects that an event loop works with."""

    store: Store
    receiver: Receiver
    publisher: Publisher
    blob_sender: BlobSender
    accepted: AcceptedSubmissions
    messages: DeviceMessages


class EventLoop:
    """An event loop; a subclass defines what else happens than messages of devices."""

    def __init__(self, parts: Parts, *, events: Events) -> None:
        self._parts = parts
        self._events = events
        self._traffic = TrafficMeter(parts.store)
        self._is_over = False
        self.is_stopped = False
        """`Stop` was among the events."""

    def run(self) -> None:
        """Handle events until `Stop`, or until the subclass ends it.

        Raises ThreadFailed if a thread that it depends on has ended, and NotLeader if another aggregator leads.
        """
        parts = self._parts
        parts.publisher.start()
        try:
            manager = ServiceManager()
            manager.ready()
            while not (self._is_over or self.is_stopped):
                manager.alive()
                self.handle(self._next_batch())
        finally:
            self._stop()
            parts.publisher.stop()
            with contextlib.suppress(NotLeader), parts.receiver.guard():
                self._traffic.keep(sent=parts.publisher.sent_bytes, at_once=True)
            parts.receiver.close()

    def _next_batch(self) -> list[Event]:
        """Return the events that have arrived, at most a batch; none if nothing arrives for `TICK_S`."""
        batch: list[Event] = []
        size_bytes = 0
        with contextlib.suppress(queue.Empty):
            batch.append(self._events.get(timeout=TICK_S))
            while len(batch) < BATCH_EVENTS and size_bytes < BATCH_BYTES:
                batch.append(event := self._events.get_nowait())
                size_bytes += len(event.payload) if isinstance(event, mqtt.Received) else 0
        return batch

    def handle(self, batch: list[Event]) -> None:
        """Handle a batch of events, and let time pass."""
        parts = self._parts
        with parts.receiver.guard():
            parts.store.check_lead()
        for is_message, group in groupby(batch, key=lambda event: isinstance(event, mqtt.Received)):
            events = list(group)
            if is_message:
                self._handle_messages([event for event in events if isinstance(event, mqtt.Received)])
            else:
                for event in events:
                    with parts.receiver.guard():
                        self._handle_event(event)
        parts.publisher.acknowledge([])
        parts.blob_sender.send()
        if parts.receiver.tick():
            self._resumed()
        self._tick()
        with parts.receiver.guard():
            self._traffic.keep(sent=parts.publisher.sent_bytes)

    def _handle_messages(self, messages: list[mqtt.Received]) -> None:
        """Store all messages durably, or none; then answer them, and acknowledge them to the broker."""
        parts = self._parts
        self._traffic.received += sum(len(message.payload) for message in messages)
        try:
            self._store_messages(messages)
            parts.accepted.log()
            parts.receiver.commit()
        except StateError as error:
            parts.receiver.stop(error)
            self._reload()
            parts.messages.clear()
            for message in messages:  # again, now that the intake is stopped
                with parts.receiver.guard():
                    self._handle_message(message)
        self._answer()
        for device, receipt in parts.messages.receipts:
            parts.publisher.publish_to_device(device, "ack", receipt)
        parts.messages.receipts.clear()
        parts.publisher.acknowledge(messages)

    def _store_messages(self, messages: list[mqtt.Received]) -> None:
        """Store all messages durably; raises StateError if one cannot be stored: then none is."""
        with self._parts.store.transaction():
            for message in messages:
                self._handle_message(message)
            self._parts.accepted.flush()

    def _handle_message(self, message: mqtt.Received) -> None:
        self._parts.messages.handle(message.topic, message.payload)

    def _handle_event(self, event: Event) -> None:
        publisher = self._parts.publisher
        match event:
            case mqtt.Connected(max_packet_bytes=limit):
                publisher.chunk_bytes = chunk_bytes(limit)
                self._connected(event)
            case mqtt.Disconnected(reason=reason, retry_s=retry_s, repeated=repeated, broker=broker):
                self._parts.blob_sender.forget()
                self._disconnected()
                level = logging.DEBUG if repeated else logging.WARNING
                log_event(log, level, reason, broker=broker, retry_s=retry_s)
            case mqtt.Unsendable(topic=topic, reason=reason, repeated=repeated):
                level = logging.DEBUG if repeated else logging.ERROR
                log_event(log, level, "publication refused by the broker", topic=topic, reason=reason)
            case mqtt.Drained():
                self._parts.blob_sender.drained()
            case ThreadFailed():
                raise event
            case Stop():
                self.is_stopped = True
            case Progress() | Finished():
                self._trained(event)

    def _answer(self) -> None:
        """Publish what follows from messages that are durable now, before their receipts."""

    def _connected(self, event: mqtt.Connected) -> None:
        """Publish what a broker needs that was just connected."""

    def _disconnected(self) -> None:
        """Note that there is no connection."""

    def _trained(self, event: Progress | Finished) -> None:
        """Apply the progress or the end of a training; raises StateError."""

    def _reload(self) -> None:
        """Return to the stored state; while it cannot be read, the intake stays stopped."""

    def _resumed(self) -> None:
        """Continue after a stop of the intake."""
        self._reload()

    def _tick(self) -> None:
        """Let time pass."""

    def _stop(self) -> None:
        """End what the program has started, before it disconnects."""
