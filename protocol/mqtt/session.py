"""A connection to a broker that comes back by itself, with events on a queue.

paho is kept on a short lead, for reasons measured: at most `window` messages are inside it at any time, its
callbacks only put something on a queue, and every connection gets a fresh client, so that nothing that was
queued for a dead connection is sent again behind our back. A session promises nothing across connections:
whoever sends looks at `Connected` and at the receiver's own receipts.

It speaks MQTT 5 where the broker does, for what that says of its limits and of what it denies, and 3.1.1 elsewhere.
"""

import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol.mqtt.client import VERSIONS, Acknowledged, Closed, Connection, Ready, Terms, Version
from protocol.mqtt.events import (
    Connected,
    Disconnected,
    Drained,
    Event,
    Outgoing,
    Received,
    Token,
    Unsendable,
)
from protocol.mqtt.packet_limits import Experience, packet_bytes
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, BrokerAddress, open_tls, parse_broker

__all__ = [
    "BrokerAccess",
    "BrokerAddress",
    "Connected",
    "Disconnected",
    "Drained",
    "Event",
    "Outgoing",
    "Received",
    "Session",
    "Token",
    "Unsendable",
    "parse_broker",
]

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 15.0
LONGEST_PAUSE_S = 60.0
FAREWELL_S = 2.0

OF_USE_MESSAGES = 16
"""More than what is said at the beginning of every connection."""


@dataclass(frozen=True)
class _Echoed:
    """The broker has passed on one of our last words, to ourselves among others."""

    connection: object


@dataclass(frozen=True)
class _Stop:
    """End the session after saying this."""

    farewell: tuple[Outgoing, ...]


_Command = Outgoing | Closed | Ready | Acknowledged | _Echoed | _Stop


def pause_s(failures: int, uniform: Callable[[float, float], float]) -> float:
    """Seconds before the next try: exponential with full jitter, so that a fleet does not return as one."""
    return uniform(0.2, min(LONGEST_PAUSE_S, 2.0 ** min(failures, 10)))


def failures_after(failures: int, *, lived_s: float, paused_s: float, carried: int) -> int:
    """Failures in a row after one more connection has ended, or could not be made.

    Only a connection that was of use begins a new count: a broker that ends every connection at the first
    publication is not called in a loop.

    Args:
        failures: so far.
        lived_s: how long the connection stood; 0 if there was none. It was of use if it has outlived its pause.
        paused_s: the pause before it.
        carried: messages that came in over it, or were acknowledged. It was of use if it brought things forward.
    """
    return 1 if lived_s > paused_s or carried >= OF_USE_MESSAGES else failures + 1


@dataclass(frozen=True)
class _End:
    """How a connection ended, or why there was none."""

    reason: str
    unanswered: bool = False
    lived_s: float = 0.0
    carried: int = 0


@dataclass
class _Traffic:
    """What is on its way over one connection."""

    connection: Connection
    waiting: deque[Outgoing]
    max_packet_bytes: int | None = None
    ready_s: float | None = None
    is_drained: bool = True
    in_flight: dict[int, tuple[Outgoing, int]] = field(default_factory=dict)
    """With its packet size, by message id."""
    denied: dict[str, Outgoing] = field(default_factory=dict)
    """What the broker was to keep and will not take, by topic: nobody sends it again, as they do all else."""
    again_s: float | None = None
    """When that is tried again."""

    def lived_s(self) -> float:
        """Seconds for which it has been of use."""
        return 0.0 if self.ready_s is None else time.monotonic() - self.ready_s

    def ask(self, outgoing: Outgoing) -> None:
        """Let something wait for its turn; it takes the place of what was denied on its topic."""
        self.denied.pop(outgoing.topic, None)
        self.waiting.append(outgoing)

    def put_off(self, outgoing: Outgoing) -> None:
        """Keep what was denied for another try, unless it is said anew soon or was not for the broker to keep."""
        underway = [*self.waiting, *(other for other, _ in self.in_flight.values())]
        if outgoing.retain and all(other.topic != outgoing.topic for other in underway):
            self.denied[outgoing.topic] = outgoing
            self.again_s = self.again_s or time.monotonic() + LONGEST_PAUSE_S

    def try_again(self) -> None:
        """Let all wait for its turn that was denied: an access list may be mended while a connection stands."""
        self.waiting.extend(self.denied.values())
        self.denied.clear()
        self.again_s = None


class Session:
    """A connection to a broker for the life of a program.

    Args:
        broker: where to connect.
        client_id: unique on the broker; a broker may put the name in our certificate in its place.
        subscriptions: topic filters, subscribed at QoS 1 on every connect.
        on_event: called from the session's threads; it must only put the event somewhere.
        access: how to be let in.
        will: what the broker says of us when we vanish.
        window: publications inside paho at any time, unless the broker wants fewer.
        manual_ack: a message counts as unacknowledged to the broker until `acknowledge` is called with it.

    Raises:
        ConfigError: a certificate or key cannot be used.
    """

    def __init__(
        self,
        broker: BrokerAddress,
        *,
        client_id: str,
        subscriptions: Sequence[str],
        on_event: Callable[[Event], None],
        access: BrokerAccess = NO_AUTHENTICATION,
        will: Outgoing | None = None,
        window: int = 8,
        manual_ack: bool = False,
    ) -> None:
        self._terms = Terms(
            broker=broker,
            access=access,
            tls=open_tls(access),
            client_id=client_id,
            subscriptions=tuple(subscriptions),
            will=will,
            window=window,
            manual_ack=manual_ack,
        )
        self._on_event = on_event
        self._version: Version | None = None
        self._experience = Experience()
        self._unsendable: set[tuple[str, str]] = set()
        self._connection: Connection | None = None
        self._last_words: set[tuple[str, bytes]] = set()
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mqtt-session", daemon=True)

    def start(self) -> None:
        """Begin to connect, in the background, for as long as it takes."""
        self._thread.start()

    def send(self, outgoing: Outgoing) -> None:
        """Publish at QoS 1 in order; dropped if there is no connection, or it ends before its turn.

        What the broker is to retain and denies is sent again every minute, until it is taken or something else is
        said on its topic.
        """
        self._inbox.put(outgoing)

    def acknowledge(self, received: Received) -> None:
        """Tell the broker, with `manual_ack`, that a message is safe; from any thread.

        Does nothing if the connection that it came in on is gone: a broker forgets what it has sent there.
        """
        token = received.token
        connection = self._connection
        if token is not None and connection is not None and token.connection is connection:
            connection.acknowledge(token.mid)

    def stop(self, farewell: Sequence[Outgoing] = (), *, timeout_s: float = 5.0) -> None:
        """Say the last words, disconnect and end the thread."""
        self._inbox.put(_Stop(tuple(farewell)))
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        failures, told, retry_s = 0, "", 0.0
        while True:
            end = self._try()
            if end is None:
                return
            failures = failures_after(failures, lived_s=end.lived_s, paused_s=retry_s, carried=end.carried)
            retry_s = pause_s(failures, random.uniform)
            self._on_event(Disconnected(end.reason, retry_s, repeated=end.reason == told and not end.lived_s))
            told = end.reason
            if self._idle(retry_s):
                return

    def _try(self) -> _End | None:
        """Be connected, in the version of MQTT that the broker took last, or else in the other one.

        Returns:
            How that ended; None if we were told to stop.
        """
        end: _End | None = None
        waiting: deque[Outgoing] = deque()
        for version in sorted(VERSIONS, key=lambda version: version is not self._version):
            end = self._try_in(version, waiting)
            if end is None or not end.unanswered:
                break
        return end

    def _try_in(self, version: Version, waiting: deque[Outgoing]) -> _End | None:
        is_new = version is Version.MQTTv5 and version is not self._version
        if is_new and self._terms.will is not None:
            # amqtt reads an MQTT 5 will as one of 3.1.1, waits for the rest of it, and answers nothing: so a
            # broker that is not known to speak MQTT 5 is first asked without one.
            end = self._live(self._made(version, bare=True), waiting)
            if self._version is not version:
                return end
        return self._live(self._made(version, bare=False), waiting)

    def _made(self, version: Version, *, bare: bool) -> Connection:
        """A fresh connection that puts what happens to it in our inbox."""
        return Connection(self._terms, version, bare=bare, signal=self._inbox.put, hear=self._hear)

    def _live(self, connection: Connection, waiting: deque[Outgoing]) -> _End | None:
        """One connection from its beginning to its end; None if we were told to stop."""
        # Before anything can come in: a broker may hand out messages ahead of what makes the session ready.
        self._connection = connection
        failure = connection.open(timeout_s=CONNECT_TIMEOUT_S)
        if failure is not None:
            connection.close()
            return _End(failure)
        traffic = _Traffic(connection, waiting)
        end = self._serve(traffic)
        self._connection = None
        if connection.version is not Version.MQTTv5 and traffic.ready_s is not None:
            self._learn(traffic)
        connection.close()
        return end

    def _learn(self, traffic: _Traffic) -> None:
        """See in the end of a connection whether a publication was too large for the broker."""
        known = self._experience.limit_bytes
        self._experience = self._experience.ended(size for _, size in traffic.in_flight.values())
        if self._experience.limit_bytes != known:
            log.warning(
                "the broker has hung up over a large message again: it gets at most %d bytes at once from now on",
                self._experience.limit_bytes,
            )

    def _hear(self, received: Received) -> None:
        self._on_event(received)
        if (received.topic, received.payload) in self._last_words:
            self._inbox.put(_Echoed(self._connection))

    def _next(self, traffic: _Traffic, deadline: float | None) -> _Command | None:
        """The next command that concerns this connection; None once the deadline has passed."""
        while True:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                command = self._inbox.get(timeout=timeout)
            except queue.Empty:
                return None
            if getattr(command, "connection", traffic.connection) is traffic.connection:
                return command

    def _serve(self, traffic: _Traffic) -> _End | None:
        """Feed one connection until it ends; None if we were told to stop."""
        connection = traffic.connection
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            match self._next(traffic, deadline if traffic.ready_s is None else traffic.again_s):
                case None if traffic.ready_s is not None:
                    traffic.try_again()
                case None:
                    unanswered = not connection.is_answered
                    return _End(f"the broker at {self._terms.broker} does not answer", unanswered=unanswered)
                case _Stop() as stop:
                    self._farewell(traffic, stop.farewell)
                    return None
                case Closed() as closed:
                    return _End(closed.reason, closed.unanswered, traffic.lived_s(), connection.carried)
                case Ready():
                    self._version = connection.version
                    if connection.bare:
                        return _End("it speaks MQTT 5")
                    self._begin(traffic)
                case Acknowledged() as answer:
                    self._settle(traffic, answer)
                case Outgoing() as outgoing:
                    traffic.ask(outgoing)
            self._pump(traffic)

    def _begin(self, traffic: _Traffic) -> None:
        """Take up a connection that stands."""
        is_v5 = traffic.connection.version is Version.MQTTv5
        traffic.ready_s = time.monotonic()
        traffic.max_packet_bytes = (
            traffic.connection.max_packet_bytes if is_v5 else self._experience.limit_bytes
        )
        self._on_event(Connected(traffic.max_packet_bytes))

    def _settle(self, traffic: _Traffic, answer: Acknowledged) -> None:
        """Take note of what the broker says to a publication."""
        outgoing, size_bytes = traffic.in_flight.pop(answer.mid)
        if answer.denial:
            way_out = "; look at the broker's access list" if answer.denial == "Not authorized" else ""
            self._say_unsendable(outgoing.topic, answer.denial, answer.denial + way_out)
            traffic.put_off(outgoing)
        else:
            self._experience = self._experience.acknowledged(size_bytes)

    def _say_unsendable(self, topic: str, cause: str, reason: str) -> None:
        repeated = (topic, cause) in self._unsendable
        self._unsendable.add((topic, cause))
        self._on_event(Unsendable(topic, reason, repeated))

    def _pump(self, traffic: _Traffic) -> None:
        """Give paho what there is room for, and say so when all is through."""
        if traffic.ready_s is None:
            return
        traffic.is_drained = traffic.is_drained and not traffic.waiting
        while traffic.waiting and len(traffic.in_flight) < traffic.connection.window:
            outgoing = traffic.waiting[0]
            size_bytes = packet_bytes(outgoing.topic, len(outgoing.payload))
            limit = traffic.max_packet_bytes
            if limit is not None and size_bytes > limit:
                reason = f"it has {size_bytes} bytes, and the broker takes {limit}; raise its max_packet_size"
                self._say_unsendable(outgoing.topic, "size", reason)
            else:
                traffic.in_flight[traffic.connection.publish(outgoing)] = (outgoing, size_bytes)
            traffic.waiting.popleft()
        if not traffic.is_drained and not traffic.waiting and not traffic.in_flight:
            traffic.is_drained = True
            self._on_event(Drained())

    def _farewell(self, traffic: _Traffic, farewell: Sequence[Outgoing]) -> None:
        """Say the last words, and wait until they are through.

        A broker may acknowledge them and forget them when the connection ends right after: amqtt does. So where
        we listen to them ourselves, we wait to hear them.
        """
        if traffic.ready_s is None:
            return
        heard = set(self._terms.subscriptions)
        self._last_words = {(word.topic, word.payload) for word in farewell if word.topic in heard}
        echoes = len(self._last_words)
        traffic.waiting.extend(farewell)
        deadline = time.monotonic() + FAREWELL_S
        self._pump(traffic)
        while traffic.in_flight or traffic.waiting or echoes:
            match self._next(traffic, deadline):
                case None | Closed():
                    return
                case Acknowledged() as answer:
                    self._settle(traffic, answer)
                    self._pump(traffic)
                case _Echoed():
                    echoes -= 1

    def _idle(self, seconds: float) -> bool:
        """Wait without a connection; returns whether to stop."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                if isinstance(self._inbox.get(timeout=left), _Stop):
                    return True
            except queue.Empty:
                return False
        return False
