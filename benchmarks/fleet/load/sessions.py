"""Broker connections of many clients on one thread, where `protocol.mqtt.reconnecting_session` has two for each.

The connection, the publication window and the delays before reconnecting are those of the programs.
"""

import heapq
import random
import selectors
import time
from collections import deque
from collections.abc import Callable
from itertools import count

from protocol.mqtt.client import Connection, ConnectionEvent, ConnectionOptions, Version
from protocol.mqtt.events import Acknowledged, Closed, Connected, Disconnected, Event, Outgoing, Received
from protocol.mqtt.publisher import Publisher
from protocol.mqtt.reconnect_delay import Backoff
from protocol.mqtt.reconnecting_session import CONNECT_TIMEOUT_S

KEEPALIVE_CHECK_S = 5.0
CALLS_AT_ONCE = 8
"""Timers that run before the sockets are read again."""


class Loop:
    """Sockets and timers of all clients of a process."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function later."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), call))

    def run_once(self) -> None:
        """Handle the sockets that are ready, and some of the timers that are due."""
        wait_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else 1.0
        for key, mask in self.selector.select(wait_s):
            key.data(mask)
        now_s = time.monotonic()
        for _ in range(CALLS_AT_ONCE):
            if self._timers and self._timers[0][0] <= now_s:
                heapq.heappop(self._timers)[2]()


class PolledConnection(Connection):
    """A connection that is read and written when its owner says so."""

    def open(self, *, timeout_s: float) -> Closed | None:
        """Open the network connection and send the first packet; None on success."""
        try:
            self._open_socket(timeout_s)
        except OSError as error:
            return Closed(str(error))
        return None

    def fileno(self) -> int:
        """Return the socket's number; -1 if it is closed."""
        opened = self._client.socket()
        return -1 if opened is None else opened.fileno()

    def use(self, mask: int) -> None:
        """Read and write what the socket is ready for."""
        if mask & selectors.EVENT_READ:
            self._client.loop_read()
        if mask & selectors.EVENT_WRITE:
            self._client.loop_write()

    def wanted(self) -> int:
        """Return what the socket is to be watched for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._client.want_write() else 0)

    def keep_alive(self) -> None:
        """Ping the broker if nothing else was sent, and give up if it does not answer."""
        self._client.loop_misc()


class PolledSession:
    """A connection that is restored when it ends, like `reconnecting_session.Session`, for brokers with MQTT 5."""

    def __init__(self, options: ConnectionOptions, loop: Loop, *, on_event: Callable[[Event], None]) -> None:
        self.attempts = 0
        """Connections that were opened or refused."""
        self._options = options
        self._loop = loop
        self._on_event = on_event
        self._publisher = Publisher(on_event)
        self._happened: deque[ConnectionEvent] = deque()
        self._connection: PolledConnection | None = None
        self._fileno = -1
        self._watched = 0
        self._backoff = Backoff(1, random.uniform)

    @property
    def is_connected(self) -> bool:
        """True if the connection is open and subscribed."""
        return self._publisher.is_connected

    def connect(self) -> None:
        """Open a connection."""
        self.attempts += 1
        self._publisher.discard()
        self._connection = connection = PolledConnection(
            self._options, Version.MQTTv5, lambda _, event: self._happened.append(event)
        )
        if (end := connection.open(timeout_s=CONNECT_TIMEOUT_S)) is not None:
            self._end(connection, end)
            return
        self._fileno, self._watched = connection.fileno(), connection.wanted()
        self._loop.selector.register(self._fileno, self._watched, self._use)
        self._loop.after(CONNECT_TIMEOUT_S, lambda: self._check_answer(connection))
        self._loop.after(KEEPALIVE_CHECK_S * random.random(), lambda: self._keep_alive(connection))

    def send(self, outgoing: Outgoing) -> None:
        """Publish at QoS 1, in order; dropped without a connection."""
        if self._publisher.is_connected:
            self._publisher.add([outgoing])

    def _use(self, mask: int) -> None:
        if self._connection is not None:
            self._connection.use(mask)
            self._handle()

    def _handle(self) -> None:
        """Handle what has happened: outside of paho's callbacks, so that answers are sent at once."""
        connection = self._connection
        while self._happened and connection is not None:
            match self._happened.popleft():
                case Received() as received:
                    self._on_event(received)
                case Acknowledged(mid, denial):
                    self._publisher.acknowledge(mid, denial)
                case Connected() as connected:
                    self._publisher.begin(connection)
                    self._on_event(connected)
                    self._publisher.send_queued()
                case Closed() as end:
                    self._end(connection, end)
                    return
        if connection is not None and (wanted := connection.wanted()) != self._watched:
            self._watched = wanted
            self._loop.selector.modify(self._fileno, wanted, self._use)

    def _end(self, connection: PolledConnection, end: Closed) -> None:
        """Close the connection, and open another one after a delay."""
        pause_s = self._backoff.pause_s(connected_s=connection.connected_s(), messages=connection.messages)
        self._connection = None
        self._publisher.end()
        if self._fileno >= 0:
            self._loop.selector.unregister(self._fileno)
        self._fileno = -1
        connection.close()
        self._happened.clear()
        self._on_event(Disconnected(end.reason, pause_s))
        self._loop.after(pause_s, self.connect)

    def _check_answer(self, connection: PolledConnection) -> None:
        """End the connection if the broker's next answer is not here in time."""
        if self._connection is not connection or connection.deadline_s is None:
            return
        if (left_s := connection.deadline_s - time.monotonic()) > 0:
            self._loop.after(left_s, lambda: self._check_answer(connection))
        else:
            self._end(connection, Closed("the broker does not answer"))

    def _keep_alive(self, connection: PolledConnection) -> None:
        if self._connection is connection:
            connection.keep_alive()
            self._handle()
            self._loop.after(KEEPALIVE_CHECK_S, lambda: self._keep_alive(connection))
