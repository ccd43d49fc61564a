"""The publications of a session: queued in order, at most a window of them in flight, denied ones retried."""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from protocol.log import event
from protocol.mqtt import reconnect_delay
from protocol.mqtt.client import Connection
from protocol.mqtt.events import Drained, Event, Outgoing, Unsendable

if TYPE_CHECKING:
    from protocol.mqtt.tls import BrokerAddress

log = logging.getLogger(__name__)

MAX_REPORTED = 10_000
"""Refused publications in memory, of which each is reported once: a client can make up any number of names."""

MIN_LIMIT_BYTES = 4096
"""No lower limit is inferred."""

DISCONNECTS_TO_INFER = 2
"""Consecutive connections that end during a large publication before its size is taken to be the reason."""


def packet_bytes(topic: str, payload_bytes: int) -> int:
    """Return the packet size of a QoS 1 publication in MQTT 5 without properties: one more than in 3.1.1."""
    rest = 2 + len(topic.encode()) + 2 + 1 + payload_bytes
    length_bytes = max(1, (rest.bit_length() + 6) // 7)
    return 1 + length_bytes + rest


@dataclass(frozen=True)
class InferredLimit:
    """The packet limit that a broker does not announce, inferred from how its connections end.

    MQTT 3.1.1 has no announcement, and not every limit is announced in MQTT 5 (mosquitto: `message_size_limit`). A
    broker closes the connection when a packet is too large, and a bad network may do so at any time. The limit is
    lowered after two consecutive connections that ended during a packet larger than any that was acknowledged.
    """

    limit_bytes: int | None = None
    """The largest packet to send from now on."""
    acknowledged_bytes: int = 0
    """The largest packet that the broker has acknowledged."""
    disconnects: int = 0

    def acknowledged(self, size_bytes: int) -> "InferredLimit":
        return replace(self, acknowledged_bytes=max(self.acknowledged_bytes, size_bytes))

    def disconnected(self, in_flight: Iterable[int]) -> "InferredLimit":
        """Return the limit after a connection ended while packets of these sizes were not acknowledged."""
        largest = max(in_flight, default=0)
        if largest <= self.acknowledged_bytes:
            return replace(self, disconnects=0)
        if self.disconnects + 1 < DISCONNECTS_TO_INFER:
            return replace(self, disconnects=self.disconnects + 1)
        limit = max(largest // 2, self.acknowledged_bytes, MIN_LIMIT_BYTES)
        return replace(self, disconnects=0, limit_bytes=limit if limit < largest else self.limit_bytes)


class Publisher:
    """Sends publications over one connection after another, and reports `Unsendable` and `Drained`."""

    def __init__(self, report: Callable[[Event], None]) -> None:
        self._report = report
        self._inferred: defaultdict[BrokerAddress, InferredLimit] = defaultdict(InferredLimit)
        """By broker: a session with several connects to each in turn."""
        self._reported: set[tuple[str, str]] = set()
        """Topic and cause of each `Unsendable`."""
        self.discard()

    def discard(self) -> None:
        """Drop pending publications: they must not go out over a later connection."""
        self._connection: Connection | None = None
        self._limit_bytes: int | None = None
        self._queue: deque[Outgoing] = deque()
        self._in_flight: dict[int, tuple[Outgoing, int]] = {}
        """Publication and packet size by message id."""
        self._denied: dict[str, Outgoing] = {}
        """Retained publications that the broker denied, by topic."""
        self._is_drained = True
        self.retry_at_s: float | None = None
        """When `retry_denied` is due, by `time.monotonic`."""

    def begin(self, connection: Connection) -> int | None:
        """Use a connection that is ready; returns its packet limit in bytes, None if it is not known."""
        self._connection = connection
        limits = (connection.max_packet_bytes, self._inferred[connection.broker].limit_bytes)
        self._limit_bytes = min(filter(None, limits), default=None)
        return self._limit_bytes

    def end(self) -> None:
        """Drop everything after a connection has ended, and infer whether a packet was too large.

        Does nothing if the connection was never ready: the queue then waits for the other version of MQTT.
        """
        if self._connection is None:
            return
        broker = self._connection.broker
        known = self._inferred[broker]
        inferred = known.disconnected(size for _, size in self._in_flight.values())
        self._inferred[broker] = inferred
        if inferred.limit_bytes != known.limit_bytes:
            text = "broker disconnects on large packets: packet limit set"
            event(log, logging.WARNING, text, bytes=inferred.limit_bytes, broker=broker)
        self.discard()

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._in_flight

    @property
    def backlog(self) -> int:
        """The number of publications that are queued or in flight."""
        return len(self._queue) + len(self._in_flight)

    def add(self, publications: Iterable[Outgoing]) -> None:
        """Queue publications; each replaces a denied one on its topic."""
        for outgoing in publications:
            self._denied.pop(outgoing.topic, None)
            self._queue.append(outgoing)
        self.send_queued()

    def send_queued(self) -> None:
        """Send as many publications as the window admits, and report `Drained` after the last acknowledgement."""
        connection = self._connection
        if connection is None:
            return
        self._is_drained = self._is_drained and not self._queue
        while self._queue and len(self._in_flight) < connection.window:
            outgoing = self._queue[0]
            size_bytes = packet_bytes(outgoing.topic, len(outgoing.payload))
            limit = self._limit_bytes
            if limit is not None and size_bytes > limit:
                reason = f"it has {size_bytes} bytes, the broker accepts {limit}: raise its packet limit"
                self._report_unsendable(outgoing.topic, "size", reason)
            else:
                self._in_flight[connection.publish(outgoing)] = (outgoing, size_bytes)
            self._queue.popleft()
        if not self._is_drained and self.is_idle:
            self._is_drained = True
            self._report(Drained())

    def acknowledge(self, mid: int, denial: str) -> None:
        """Record the broker's answer to a publication; `denial` is empty if it was accepted."""
        outgoing, size_bytes = self._in_flight.pop(mid)
        if not denial:
            if self._connection is not None:
                broker = self._connection.broker
                self._inferred[broker] = self._inferred[broker].acknowledged(size_bytes)
        else:
            way_out = ": change the broker's access list" if denial == "Not authorized" else ""
            self._report_unsendable(outgoing.topic, denial, denial + way_out)
            self._retry_later(outgoing)
        self.send_queued()

    def _retry_later(self, outgoing: Outgoing) -> None:
        """Keep a denied publication that is to be retained, unless a newer one of its topic is on its way."""
        later = [*self._queue, *(other for other, _ in self._in_flight.values())]
        if outgoing.retain and all(other.topic != outgoing.topic for other in later):
            self._denied[outgoing.topic] = outgoing
            self.retry_at_s = self.retry_at_s or time.monotonic() + reconnect_delay.MAX_RETRY_DELAY_S

    def retry_denied(self) -> None:
        """Queue what was denied again: the broker's access list may have been changed meanwhile."""
        self._queue.extend(self._denied.values())
        self._denied.clear()
        self.retry_at_s = None
        self.send_queued()

    def _report_unsendable(self, topic: str, cause: str, reason: str) -> None:
        repeated = (topic, cause) in self._reported
        if len(self._reported) >= MAX_REPORTED:
            self._reported.clear()
        self._reported.add((topic, cause))
        self._report(Unsendable(topic, reason, repeated))
