"""A connection to a broker, or to one of several, that is restored when it ends; events go to a callback.

At most `window` publications are inside paho at any time, its callbacks only put something on a queue, and every
connection has a fresh client, so that paho sends nothing again that was meant for an earlier connection. A session
guarantees nothing across connections: the caller relies on `Connected` and on receipts from the receiver.

It speaks MQTT 5 if the broker does, which announces packet limits and denials, and 3.1.1 otherwise.
"""

import queue
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING

from protocol.mqtt.client import VERSIONS, Connection, ConnectionEvent, ConnectionOptions, Version
from protocol.mqtt.events import (
    Acknowledged,
    Closed,
    Connected,
    Disconnected,
    Drained,
    Event,
    Outgoing,
    Received,
    Unsendable,
)
from protocol.mqtt.publisher import Publisher
from protocol.mqtt.reconnect_delay import Backoff
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, BrokerAddress, Brokers, addresses_of, open_tls
from protocol.threads import start_thread

if TYPE_CHECKING:
    import threading

__all__ = [
    "BrokerAddress",
    "Connected",
    "Disconnected",
    "Drained",
    "Event",
    "Outgoing",
    "Received",
    "Session",
    "Unsendable",
]

CONNECT_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 4.0
WAIT_S = 0.5
"""Seconds between two calls of `may_connect`."""


@dataclass(frozen=True)
class _Stop:
    """End the session after these publications."""

    final: tuple[Outgoing, ...]


_Command = Outgoing | ConnectionEvent | _Stop


class Session:
    """A connection to a broker for the lifetime of a program, with the options of `ConnectionOptions`.

    Of several brokers, which forward messages to each other, it uses one at a time: the next one after each connection.

    `on_event` is called from the session's threads, and must return at once. While `may_connect` returns False, no
    connection is opened, and an open one ends before the next publication.

    Raises:
        ConfigError: a certificate or key cannot be used.
    """

    def __init__(  # noqa: PLR0913 - each has a default but three
        self,
        broker: Brokers,
        *,
        client_id: str,
        subscriptions: Sequence[str],
        on_event: Callable[[Event], None],
        access: BrokerAccess = NO_AUTHENTICATION,
        will: Callable[[], Outgoing] | None = None,
        window: int = 8,
        manual_ack: bool = False,
        may_connect: Callable[[], bool] = lambda: True,
    ) -> None:
        self._may_connect = may_connect
        self._addresses = addresses_of(broker)
        self._options = ConnectionOptions(
            broker=self._addresses[0],
            access=access,
            tls=open_tls(access),
            client_id=client_id,
            subscriptions=tuple(subscriptions),
            will=will,
            window=window,
            manual_ack=manual_ack,
        )
        self._on_event = on_event
        self._versions: dict[BrokerAddress, Version] = {}
        """The version of MQTT that each broker accepted last."""
        self._publisher = Publisher(on_event)
        self._connection: Connection | None = None
        self._final: set[tuple[str, bytes]] = set()
        self._inbox: queue.SimpleQueue[tuple[Connection | None, _Command]] = queue.SimpleQueue()
        """Each with the connection whose event it is; None is for whichever is open."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Connect in the background, and retry until it succeeds; raises ThreadFailed if no thread can be started."""
        self._thread = start_thread(self._run, name="mqtt-session", on_failure=self._on_event)

    def send(self, outgoing: Outgoing) -> None:
        """Publish at QoS 1, in order; dropped if there is no connection or it ends first.

        A retained publication that the broker denies is sent again every minute, until it is accepted or another one
        is sent on its topic.
        """
        self._inbox.put((None, outgoing))

    @property
    def backlog(self) -> int:
        """About how many publications the broker has not acknowledged yet; from any thread."""
        return self._inbox.qsize() + self._publisher.backlog

    def acknowledge(self, received: Received) -> None:
        """Acknowledge a message to the broker, with `manual_ack`; from any thread.

        Does nothing if the message's connection has ended: the broker has forgotten its message ids.
        """
        connection = self._connection
        if connection is not None and received.connection is connection:
            connection.acknowledge(received.mid)

    def stop(self, final: Sequence[Outgoing] = (), *, timeout_s: float = 5.0) -> None:
        """Send the final publications, disconnect and end the thread."""
        self._inbox.put((None, _Stop(tuple(final))))
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        backoff = Backoff(len(self._addresses), random.uniform)
        reported: dict[BrokerAddress, str] = {}
        for broker in cycle(self._addresses):
            self._options = replace(self._options, broker=broker, was_accepted=bool(self._versions))
            while not self._may_connect():
                if self._stopped_within(WAIT_S):
                    return
            connection, end = self._connect()
            if end is None:
                return
            connected_s = connection.connected_s()
            pause_s = backoff.pause_s(connected_s=connected_s, messages=connection.messages)
            repeated = end.reason == reported.get(broker) and not connected_s
            self._on_event(Disconnected(end.reason, pause_s, repeated=repeated, broker=str(broker)))
            reported[broker] = end.reason
            if self._stopped_within(pause_s):
                return

    def _stopped_within(self, seconds: float) -> bool:
        """Wait without a connection; returns early, and True, on `stop`."""
        deadline_s = time.monotonic() + seconds
        while True:
            try:
                _, command = self._inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
                if isinstance(command, _Stop):
                    return True
            except queue.Empty:
                return False

    def _connect(self) -> tuple[Connection, Closed | None]:
        """Connect with the MQTT version that the broker accepted last, then with the other one.

        Returns the last connection and why it ended; None after `stop`.
        """
        self._publisher.discard()
        known = self._versions.get(self._options.broker)
        for version in sorted(VERSIONS, key=lambda version: version is not known):
            connection, end = self._connect_with(version)
            if end is None or not end.unanswered:
                break
        return connection, end

    def _connect_with(self, version: Version) -> tuple[Connection, Closed | None]:
        broker = self._options.broker
        if version is Version.MQTTv5 and self._options.will and self._versions.get(broker) is not version:
            # amqtt
            connection, end = self._use(replace(self._options, will=None, subscriptions=()), version)
            if self._versions.get(broker) is not version:
                return connection, end
        return self._use(self._options, version)

    def _use(self, options: ConnectionOptions, version: Version) -> tuple[Connection, Closed | None]:
        """Open a connection and use it until it ends; with other options than the session's, until it is ready."""
        # Assigned before it is open: a broker may deliver messages ahead of the confirmed subscription.
        self._connection = connection = Connection(options, version, self._receive)
        end = connection.open(timeout_s=CONNECT_TIMEOUT_S)
        if end is None:
            end = self._serve(connection, is_probe=options is not self._options)
        self._connection = None
        self._publisher.end()
        connection.close()
        return connection, end

    def _receive(self, connection: Connection, event: ConnectionEvent) -> None:
        """Take an event from the thread of a connection."""
        if isinstance(event, Received):
            self._on_event(event)
        if not isinstance(event, Received) or (event.topic, event.payload) in self._final:
            self._inbox.put((connection, event))

    def _next(self, connection: Connection, until_s: float | None = None) -> _Command | None:
        """Return the next command for a connection; None after its deadline, or that of the next retry.

        While `may_connect` returns False, that is the end of the connection, without another publication.
        """
        command = self._wait(connection, until_s)
        if self._may_connect():
            return command
        is_stop = isinstance(command, _Stop)
        return _Stop(()) if is_stop else Closed("another program may be in this one's place")

    def _wait(self, connection: Connection, until_s: float | None) -> _Command | None:
        while True:
            deadline_s = until_s or connection.deadline_s or self._publisher.retry_at_s
            timeout = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            try:
                source, command = self._inbox.get(timeout=timeout)
            except queue.Empty:
                if deadline_s == (until_s or connection.deadline_s or self._publisher.retry_at_s):
                    return None
                continue
            if source in (None, connection):
                return command

    def _serve(self, connection: Connection, *, is_probe: bool) -> Closed | None:
        """Execute commands until the connection ends; None after `stop`."""
        publisher = self._publisher
        while True:
            match self._next(connection):
                case None if not publisher.is_connected:
                    return self._unanswered(is_accepted=connection.is_answered)
                case None:
                    publisher.retry_denied()
                case _Stop(final):
                    self._send_final(connection, final)
                    return None
                case Closed() as end:
                    return end
                case Connected() as connected:
                    self._versions[self._options.broker] = connection.version
                    if is_probe:
                        return Closed("the broker speaks MQTT 5")
                    self._on_event(replace(connected, max_packet_bytes=publisher.begin(connection)))
                    publisher.send_queued()
                case Acknowledged(mid, denial):
                    publisher.acknowledge(mid, denial)
                case Outgoing() as outgoing:
                    publisher.add([outgoing])

    def _unanswered(self, *, is_accepted: bool) -> Closed:
        reason = "accepts the connection, and does not answer the subscription: see its log"
        return Closed(
            f"the broker at {self._options.broker} {reason if is_accepted else 'does not answer'}",
            unanswered=not is_accepted,
        )

    def _send_final(self, connection: Connection, final: Sequence[Outgoing]) -> None:
        """Send the final publications, and wait until the broker has accepted and, for amqtt, delivered them."""
        self._final = {
            (each.topic, each.payload) for each in final if each.topic in self._options.subscriptions
        }
        awaited = set(self._final)
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        self._publisher.add(final)
        while awaited or not self._publisher.is_idle:
            match self._next(connection, deadline_s):
                case None | Closed():
                    return
                case Acknowledged(mid, denial):
                    self._publisher.acknowledge(mid, denial)
                case Received(topic, payload):
                    awaited.discard((topic, payload))
