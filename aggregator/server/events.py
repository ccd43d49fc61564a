"""Events of the aggregator, which its threads put into one queue, and batches of them."""

import contextlib
import queue
from dataclasses import dataclass

from aggregator.commands.command_socket import Request
from aggregator.job_processes import JobEvent
from aggregator.tasks.restoration import Verified
from protocol.mqtt import reconnecting_session as mqtt

TICK_S = 0.5

BATCH_EVENTS = 256
"""Events handled before their messages are made durable together."""

BATCH_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class Stop:
    """The program that runs the aggregator wants it to end."""


Event = mqtt.Event | JobEvent | Request | Verified | Stop
Events = queue.SimpleQueue[Event]


def next_batch(events: Events) -> list[Event]:
    """Return the events that have arrived, at most a batch; none if nothing arrives for `TICK_S`."""
    batch: list[Event] = []
    size_bytes = 0
    with contextlib.suppress(queue.Empty):
        batch.append(events.get(timeout=TICK_S))
        while len(batch) < BATCH_EVENTS and size_bytes < BATCH_BYTES:
            batch.append(event := events.get_nowait())
            size_bytes += len(event.payload) if isinstance(event, mqtt.Received) else 0
    return batch
