"""One MQTT connection that comes back by itself, with events on a queue. The only import of paho.

paho is kept on a short lead, for reasons measured: at most `window` messages are inside it at any time, its
callbacks only put something on a queue, and every connection gets a fresh client, so that nothing that was
queued for a dead connection is sent again behind our back. A session promises nothing across connections:
whoever sends looks at `Connected` and at the receiver's own receipts.
"""

import ipaddress
import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.reasoncodes import ReasonCode

from protocol.errors import ConfigError

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 15.0
LONGEST_PAUSE_S = 60.0
FAREWELL_S = 2.0


@dataclass(frozen=True)
class Broker:
    """Where the broker listens."""

    host: str
    port: int = 1883

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Outgoing:
    """One publication."""

    topic: str
    payload: bytes
    retain: bool = False


@dataclass(frozen=True)
class Connected:
    """The broker accepted us and every subscription."""


@dataclass(frozen=True)
class Disconnected:
    """The connection is gone, or could not be made; the next try comes after `retry_s` seconds.

    `repeated` is set where the try before has ended for the same reason: a person knows it by now.
    """

    reason: str
    retry_s: float
    repeated: bool = False


@dataclass(frozen=True)
class Received:
    """A message came in."""

    topic: str
    payload: bytes


@dataclass(frozen=True)
class Drained:
    """Everything that was sent so far has reached the broker."""


Event = Connected | Disconnected | Received | Drained


@dataclass(frozen=True)
class _Closed:
    """A connection ended, or was refused."""

    client: mqtt.Client
    reason: str


@dataclass(frozen=True)
class _Ready:
    """A connection is up and subscribed."""

    client: mqtt.Client


@dataclass(frozen=True)
class _Acknowledged:
    """The broker took one of ours."""

    client: mqtt.Client


@dataclass(frozen=True)
class _Echoed:
    """The broker has passed on one of our last words, to ourselves among others."""

    client: mqtt.Client


@dataclass(frozen=True)
class _Stop:
    """End the session after saying this."""

    farewell: tuple[Outgoing, ...]


_Command = Outgoing | _Closed | _Ready | _Acknowledged | _Echoed | _Stop


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def parse_broker(text: str) -> Broker:
    """`HOST`, `HOST:PORT` or `[IPv6]:PORT` as a broker's address.

    Raises:
        ConfigError: it is none of these.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or (text.count(":") > 1 and not text.startswith("[")):
        host, port = text.strip(), "1883"
    host = host.removeprefix("[").removesuffix("]")
    is_host = _is_ipv6(host) if ":" in host else bool(host) and "/" not in host
    if not is_host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"expected the broker as HOST or HOST:PORT, got {text!r}")
    return Broker(host, int(port))


def pause_s(failures: int, uniform: Callable[[float, float], float]) -> float:
    """Seconds before the next try: exponential with full jitter, so that a fleet does not return as one."""
    return uniform(0.2, min(LONGEST_PAUSE_S, 2.0 ** min(failures, 10)))


@dataclass
class _Connection:
    client: mqtt.Client
    ready: bool = False
    in_flight: int = 0
    waiting: deque[Outgoing] = field(default_factory=deque)


class Session:
    """A connection to a broker for the life of a program.

    Args:
        broker: where to connect.
        client_id: unique on the broker.
        subscriptions: topic filters, subscribed at QoS 1 on every connect.
        on_event: called from the session's threads; it must only put the event somewhere.
        will: what the broker says of us when we vanish.
        window: publications inside paho at any time.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        client_id: str,
        subscriptions: Sequence[str],
        on_event: Callable[[Event], None],
        will: Outgoing | None = None,
        window: int = 8,
        keepalive_s: int = 30,
    ) -> None:
        self._broker = broker
        self._client_id = client_id
        self._subscriptions = [(topic, 1) for topic in subscriptions]
        self._on_event = on_event
        self._will = will
        self._window = window
        self._keepalive_s = keepalive_s
        self._last_words: set[tuple[str, bytes]] = set()
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mqtt-session", daemon=True)

    def start(self) -> None:
        """Begin to connect, in the background, for as long as it takes."""
        self._thread.start()

    def send(self, outgoing: Outgoing) -> None:
        """Publish at QoS 1 in order; dropped if there is no connection, or it ends before its turn."""
        self._inbox.put(outgoing)

    def stop(self, farewell: Sequence[Outgoing] = (), *, timeout_s: float = 5.0) -> None:
        """Say the last words, disconnect and end the thread."""
        self._inbox.put(_Stop(tuple(farewell)))
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        failures, told = 0, ""
        while True:
            connection = _Connection(self._client())
            reason = self._connect(connection.client)
            if reason is None:
                stop, reason = self._serve(connection)
                _close(connection.client)
                if stop is not None:
                    return
            failures = 1 if connection.ready else failures + 1
            retry_s = pause_s(failures, random.uniform)
            self._on_event(Disconnected(reason, retry_s, repeated=reason == told and not connection.ready))
            told = reason
            if self._idle(retry_s):
                return

    def _client(self) -> mqtt.Client:
        client = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            client_id=self._client_id,
            clean_session=True,
            reconnect_on_failure=False,
        )
        client.connect_timeout = CONNECT_TIMEOUT_S
        client.max_inflight_messages_set(self._window)
        if self._will is not None:
            client.will_set(self._will.topic, self._will.payload, qos=1, retain=self._will.retain)

        def on_connect(c: mqtt.Client, _d: Any, _f: Any, code: ReasonCode, _p: Any) -> None:
            if code.is_failure:
                self._inbox.put(_Closed(c, f"refused by the broker: {code}"))
            elif self._subscriptions:
                c.subscribe(self._subscriptions)
            else:
                self._inbox.put(_Ready(c))

        def on_subscribe(c: mqtt.Client, _d: Any, _m: int, codes: list[ReasonCode], _p: Any) -> None:
            denied = [
                topic for (topic, _), code in zip(self._subscriptions, codes, strict=False) if code.is_failure
            ]
            self._inbox.put(
                _Closed(c, f"the broker denies subscribing to {', '.join(denied)}") if denied else _Ready(c)
            )

        def on_disconnect(c: mqtt.Client, _d: Any, _f: Any, code: ReasonCode, _p: Any) -> None:
            self._inbox.put(_Closed(c, f"connection lost: {code}"))

        def on_publish(c: mqtt.Client, _d: Any, _m: int, _code: ReasonCode, _p: Any) -> None:
            self._inbox.put(_Acknowledged(c))

        def on_message(c: mqtt.Client, _d: Any, message: mqtt.MQTTMessage) -> None:
            if self._is_subscribed(message.topic):
                self._hear(c, message)

        client.on_connect = on_connect
        client.on_subscribe = on_subscribe
        client.on_disconnect = on_disconnect
        client.on_publish = on_publish
        client.on_message = on_message
        return client

    def _is_subscribed(self, topic: str) -> bool:
        """Whether a message is for us: amqtt hands whoever connects all that is retained for anybody."""
        return any(mqtt.topic_matches_sub(wanted, topic) for wanted, _ in self._subscriptions)

    def _hear(self, client: mqtt.Client, message: mqtt.MQTTMessage) -> None:
        payload = bytes(message.payload)
        self._on_event(Received(message.topic, payload))
        if (message.topic, payload) in self._last_words:
            self._inbox.put(_Echoed(client))

    def _connect(self, client: mqtt.Client) -> str | None:
        """Open the connection; returns why it failed."""
        try:
            client.connect(self._broker.host, self._broker.port, keepalive=self._keepalive_s)
        except (OSError, ValueError) as error:
            return f"no broker at {self._broker}: {getattr(error, 'strerror', None) or error}"
        client.loop_start()
        return None

    def _next(self, connection: _Connection, deadline: float | None) -> _Command | None:
        """The next command that concerns this connection; None once the deadline has passed."""
        while True:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                command = self._inbox.get(timeout=timeout)
            except queue.Empty:
                return None
            if getattr(command, "client", connection.client) is connection.client:
                return command

    def _serve(self, connection: _Connection) -> tuple[_Stop | None, str]:
        """Feed one connection until it ends; returns the wish to stop, if that is why, and the reason."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            match self._next(connection, None if connection.ready else deadline):
                case None:
                    return None, f"the broker at {self._broker} does not answer"
                case _Stop() as stop:
                    self._farewell(connection, stop.farewell)
                    return stop, "stopped"
                case _Closed() as closed:
                    return None, closed.reason
                case _Ready():
                    connection.ready = True
                    self._on_event(Connected())
                case _Acknowledged():
                    connection.in_flight -= 1
                    if connection.in_flight == 0 and not connection.waiting:
                        self._on_event(Drained())
                case Outgoing() as outgoing:
                    connection.waiting.append(outgoing)
            self._pump(connection)

    def _pump(self, connection: _Connection) -> None:
        while connection.ready and connection.waiting and connection.in_flight < self._window:
            outgoing = connection.waiting.popleft()
            info = connection.client.publish(outgoing.topic, outgoing.payload, qos=1, retain=outgoing.retain)
            if info.rc not in (MQTTErrorCode.MQTT_ERR_SUCCESS, MQTTErrorCode.MQTT_ERR_QUEUE_SIZE):
                return  # the connection is going down; its end comes through the inbox
            connection.in_flight += 1

    def _farewell(self, connection: _Connection, farewell: Sequence[Outgoing]) -> None:
        """Say the last words, and wait until they are through.

        A broker may acknowledge them and forget them when the connection ends right after: amqtt does. So where
        we listen to them ourselves, we wait to hear them.
        """
        if not connection.ready:
            return
        heard = {topic for topic, _ in self._subscriptions}
        self._last_words = {(word.topic, word.payload) for word in farewell if word.topic in heard}
        echoes = len(self._last_words)
        connection.waiting.extend(farewell)
        deadline = time.monotonic() + FAREWELL_S
        self._pump(connection)
        while connection.in_flight or connection.waiting or echoes:
            match self._next(connection, deadline):
                case None | _Closed():
                    return
                case _Acknowledged():
                    connection.in_flight -= 1
                    self._pump(connection)
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


def _close(client: mqtt.Client) -> None:
    client.disconnect()
    client.loop_stop()
