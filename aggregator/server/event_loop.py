"""The event loop of the programs that handle the messages of devices: one event at a time, on one thread."""

import contextlib
import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from aggregator.server.message_intake import MessageIntake
from aggregator.training.runner import Finished, Progress
from protocol.errors import ThreadFailed
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
        intake, uploads = self._intake, self._intake.uploads
        with uploads.guard():
            intake.store.database.check_lead()
        for is_message, group in groupby(batch, key=lambda event: isinstance(event, mqtt.Received)):
            events = list(group)
            if is_message:
                messages = [event for event in events if isinstance(event, mqtt.Received)]
                intake.handle([message for message in messages if self._program.accepts(message)])
                intake.publisher.acknowledge(messages)
            else:
                for event in events:
                    with uploads.guard():
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
