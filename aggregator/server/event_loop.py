"""The event loop of the programs that handle the messages of devices: one event at a time, on one thread."""

import contextlib
import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from aggregator.intake.accepted_submissions import AcceptedSubmissions
from aggregator.intake.receiver import Receiver
from aggregator.intake.validation import expectation_of
from aggregator.messaging.blob_sender import BlobSender
from aggregator.messaging.publisher import Publisher
from aggregator.server.device_messages import DeviceMessages
from aggregator.server.store_view import StoreView
from aggregator.server.traffic_meter import TrafficMeter
from aggregator.storage.store import Store
from aggregator.storage.stored_values import IntakeTask
from aggregator.training.runner import Finished, Progress
from protocol.errors import NotLeader, ProtofleetError, StateError, ThreadFailed
from protocol.log import event as log_event
from protocol.mqtt import reconnecting_session as mqtt
from protocol.service_manager import ServiceManager
from protocol.storage.blobstore import BlobStore
from protocol.wire.messages import TaskManifest
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


class TaskReplaced(ProtofleetError):
    """Another task is served."""


class Program(Protocol):
    """A program's work beside the messages of devices."""

    def accepts(self, message: mqtt.Received) -> bool:
        """Return False for a message that is not for the intake."""
        ...

    def handle(self, event: Event) -> None:
        """Handle an event other than a message; raises StateError."""
        ...

    def tick(self, *, is_resumed: bool) -> None:
        """Let time pass, after a stop of the intake if `is_resumed`."""
        ...


class MessageIntake:
    """Stores the messages of devices, a batch in one transaction, and answers them once they are durable."""

    def __init__(
        self,
        store: Store,
        task: IntakeTask,
        manifest: TaskManifest,
        *,
        receiver: Receiver,
        publisher: Publisher,
        blob_sender: BlobSender,
    ) -> None:
        self.store = store
        self.receiver = receiver
        self.publisher = publisher
        self.blob_sender = blob_sender
        self.view = StoreView(store, task)
        self._accepted = AcceptedSubmissions(task.digest, task.settings, store)
        self._traffic = TrafficMeter(store)
        self._messages = DeviceMessages(
            task=task,
            expectation=expectation_of(task, manifest),
            store=store,
            receiver=receiver,
            view=self.view,
            accepted=self._accepted,
            blob_sender=blob_sender,
        )

    def handle(self, messages: list[mqtt.Received]) -> None:
        """Store all messages durably, or none; then answer them. Raises TaskReplaced if another task is served."""
        self._traffic.received += sum(len(message.payload) for message in messages)
        try:
            self._store(messages)
            self._accepted.log()
            self.receiver.commit()
        except StateError as error:
            self.receiver.stop(error)
            self._messages.discard()
            for message in messages:  # again, now that the intake is stopped
                with self.receiver.guard():
                    self._messages.read(message.topic, message.payload)
                    self._messages.store_items()
        for device, receipt in self._messages.receipts:
            self.publisher.publish_to_device(device, "ack", receipt)
        self._messages.receipts.clear()

    def _store(self, messages: list[mqtt.Received]) -> None:
        """Store all messages durably; raises StateError if one cannot be stored: then none is.

        Most of the work comes before the transaction, in which no other program can write. The blobs of a folder get
        their names within it, since the aggregator deletes those that it does not know.
        """
        self._refresh()
        with self.store.snapshot():
            for message in messages:
                self._messages.read(message.topic, message.payload)
        self.store.database.check_file()
        if not isinstance(self.store.blobs, BlobStore):
            self._accepted.flush()
        if self._messages.has_items():
            with self.store.transaction():
                self._refresh()
                self._messages.store_items()
                self._accepted.count_unused()
                self._accepted.flush()

    def _refresh(self) -> None:
        if not self.view.refresh():
            self.store.check_lead()
            raise TaskReplaced("another task is served")

    def tick(self) -> bool:
        """Let time pass; returns True if a stopped intake was resumed just now."""
        self.blob_sender.send()
        is_resumed = self.receiver.tick()
        with self.receiver.guard():
            self._refresh()
            if self.view.deleted:
                self.receiver.drop(self.view.deleted)
                self.view.deleted.clear()
            self._traffic.keep(sent=self.publisher.sent_bytes)
        return is_resumed

    def close(self) -> None:
        self.publisher.stop()
        with contextlib.suppress(NotLeader), self.receiver.guard():
            self._traffic.keep(sent=self.publisher.sent_bytes, at_once=True)
        self.receiver.close()


class EventLoop:
    """Handles the events of a program until `Stop`.

    Args:
        intake: of the program.
        program: what it does beside the intake.
        events: may have events of other threads.
    """

    def __init__(self, intake: MessageIntake, program: Program, events: Events) -> None:
        self._intake = intake
        self._program = program
        self._events = events
        self._is_stopped = False

    def run(self, stop: Callable[[], None] = lambda: None) -> None:
        """Handle events; `stop` is called at the end, before the connection is closed.

        Raises:
            ThreadFailed: a thread that the program depends on has ended.
            NotLeader: another aggregator leads.
            TaskReplaced: another program serves another task.
        """
        self._intake.publisher.start()
        try:
            manager = ServiceManager()
            manager.ready()
            while not self._is_stopped:
                manager.alive()
                self.handle(self._next_batch())
        finally:
            stop()
            self._intake.close()

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
        intake, receiver = self._intake, self._intake.receiver
        with receiver.guard():
            intake.store.check_lead()
        for is_message, group in groupby(batch, key=lambda event: isinstance(event, mqtt.Received)):
            events = list(group)
            if is_message:
                messages = [event for event in events if isinstance(event, mqtt.Received)]
                intake.handle([message for message in messages if self._program.accepts(message)])
                intake.publisher.acknowledge(messages)
            else:
                for event in events:
                    with receiver.guard():
                        self._handle_event(event)
        intake.publisher.acknowledge([])
        self._program.tick(is_resumed=intake.tick())

    def _handle_event(self, event: Event) -> None:
        match event:
            case mqtt.Connected(max_packet_bytes=limit):
                self._intake.publisher.chunk_bytes = chunk_bytes(limit)
            case mqtt.Disconnected(reason=reason, retry_s=retry_s, repeated=repeated, broker=broker):
                self._intake.blob_sender.forget()
                level = logging.DEBUG if repeated else logging.WARNING
                log_event(log, level, reason, broker=broker, retry_s=retry_s)
            case mqtt.Unsendable(topic=topic, reason=reason, repeated=repeated):
                level = logging.DEBUG if repeated else logging.ERROR
                log_event(log, level, "publication refused by the broker", topic=topic, reason=reason)
            case mqtt.Drained():
                self._intake.blob_sender.drained()
            case ThreadFailed():
                raise event
            case Stop():
                self._is_stopped = True
        self._program.handle(event)
