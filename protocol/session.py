"""One MQTT connection that comes back by itself, with events on a queue. The only import of paho.

paho is kept on a short lead, for reasons measured: at most `window` messages are inside it at any time, its
callbacks only put something on a queue, and every connection gets a fresh client, so that nothing that was
queued for a dead connection is sent again behind our back. A session promises nothing across connections:
whoever sends looks at `Connected` and at the receiver's own receipts.

It speaks MQTT 5 where the broker does, for what that says of its limits and of what it denies, and 3.1.1 elsewhere.
"""

import contextlib
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
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from protocol.errors import ConfigError
from protocol.packets import Experience, packet_bytes

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 15.0
LONGEST_PAUSE_S = 60.0
FAREWELL_S = 2.0

OF_USE_MESSAGES = 16
"""More than what is said at the beginning of every connection."""


VERSIONS = (MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311)
"""In the order in which they are tried on a broker that is not known yet."""


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
    """The broker accepted us and every subscription.

    `max_packet_bytes` is the largest packet that it takes; None where it does not say, and takes all we know of.
    """

    max_packet_bytes: int | None = None


@dataclass(frozen=True)
class Disconnected:
    """The connection is gone, or could not be made; the next try comes after `retry_s` seconds.

    `repeated` is set where the try before has ended for the same reason: a person knows it by now.
    """

    reason: str
    retry_s: float
    repeated: bool = False


@dataclass(frozen=True)
class _Token:
    """Which message of which connection is acknowledged."""

    client: mqtt.Client
    mid: int


@dataclass(frozen=True)
class Received:
    """A message came in. `token` is for `Session.acknowledge`.

    `retained` if the broker has kept it since somebody said it; else it is said at this moment.
    """

    topic: str
    payload: bytes
    retained: bool = field(default=False, compare=False)
    token: _Token | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Unsendable:
    """The broker will not take a publication, now or later, and why; what was sent after it goes on.

    `repeated` is set where the same was said of the topic before.
    """

    topic: str
    reason: str
    repeated: bool = False


@dataclass(frozen=True)
class Drained:
    """Everything that was sent so far has reached the broker, or was called `Unsendable`."""


Event = Connected | Disconnected | Received | Unsendable | Drained


@dataclass(frozen=True)
class _Closed:
    """A connection ended, or was refused; `unanswered` if that may be for the version of MQTT."""

    client: mqtt.Client
    reason: str
    unanswered: bool = False


@dataclass(frozen=True)
class _Ready:
    """A connection is up and subscribed."""

    client: mqtt.Client


@dataclass(frozen=True)
class _Acknowledged:
    """The broker took one of ours, or says why not."""

    client: mqtt.Client
    mid: int
    denial: str = ""


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
class _Connection:
    client: mqtt.Client
    version: MQTTProtocolVersion
    waiting: deque[Outgoing]
    is_trial: bool
    window: int
    max_packet_bytes: int | None = None
    is_answered: bool = False
    ready_s: float | None = None
    is_drained: bool = True
    carried: int = 0
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
        client_id: unique on the broker.
        subscriptions: topic filters, subscribed at QoS 1 on every connect.
        on_event: called from the session's threads; it must only put the event somewhere.
        will: what the broker says of us when we vanish.
        window: publications inside paho at any time, unless the broker wants fewer.
        manual_ack: a message counts as unacknowledged to the broker until `acknowledge` is called with it.
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
        manual_ack: bool = False,
    ) -> None:
        self._broker = broker
        self._client_id = client_id
        self._subscriptions = tuple(subscriptions)
        self._on_event = on_event
        self._will = will
        self._window = window
        self._keepalive_s = keepalive_s
        self._manual_ack = manual_ack
        self._version: MQTTProtocolVersion | None = None
        self._experience = Experience()
        self._unsendable: set[tuple[str, str]] = set()
        self._client: mqtt.Client | None = None
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
        if token is not None and token.client is self._client:
            with contextlib.suppress(OSError):  # the connection ends this very moment
                token.client.ack(token.mid, 1)

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

    def _try_in(self, version: MQTTProtocolVersion, waiting: deque[Outgoing]) -> _End | None:
        is_new = version is MQTTProtocolVersion.MQTTv5 and version is not self._version
        if is_new and self._will is not None:
            # amqtt reads an MQTT 5 will as one of 3.1.1, waits for the rest of it, and answers nothing: so a
            # broker that is not known to speak MQTT 5 is first asked without one.
            end = self._live(self._connection(version, waiting, is_trial=True))
            if self._version is not version:
                return end
        return self._live(self._connection(version, waiting))

    def _live(self, connection: _Connection) -> _End | None:
        """One connection from its beginning to its end; None if we were told to stop."""
        # Before anything can come in: a broker may hand out messages ahead of what makes the session ready.
        self._client = connection.client
        failure = self._connect(connection.client)
        if failure is not None:
            _close(connection.client)
            return _End(failure)
        end = self._serve(connection)
        self._client = None
        if connection.version is not MQTTProtocolVersion.MQTTv5 and connection.ready_s is not None:
            self._learn(connection)
        _close(connection.client)
        return end

    def _learn(self, connection: _Connection) -> None:
        """See in the end of a connection whether a publication was too large for the broker."""
        known = self._experience.limit_bytes
        self._experience = self._experience.ended(size for _, size in connection.in_flight.values())
        if self._experience.limit_bytes != known:
            log.warning(
                "the broker has hung up over a large message again: it gets at most %d bytes at once from now on",
                self._experience.limit_bytes,
            )

    def _connection(
        self, version: MQTTProtocolVersion, waiting: deque[Outgoing], *, is_trial: bool = False
    ) -> _Connection:
        """A fresh client that puts what happens to it in our inbox."""
        is_v5 = version is MQTTProtocolVersion.MQTTv5
        client = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            client_id=self._client_id,
            clean_session=None if is_v5 else True,
            protocol=version,
            reconnect_on_failure=False,
            manual_ack=self._manual_ack,
        )
        client.connect_timeout = CONNECT_TIMEOUT_S
        client.max_inflight_messages_set(self._window)
        if self._will is not None and not is_trial:
            client.will_set(self._will.topic, self._will.payload, qos=1, retain=self._will.retain)
        connection = _Connection(client, version, waiting, is_trial, self._window)

        def on_connect(
            c: mqtt.Client, _d: Any, _f: Any, code: ReasonCode, properties: Properties | None
        ) -> None:
            connection.is_answered = True
            if code.is_failure:
                wrong_version = code == "Unsupported protocol version"
                self._inbox.put(_Closed(c, f"refused by the broker: {code}", unanswered=wrong_version))
                return
            connection.max_packet_bytes = getattr(properties, "MaximumPacketSize", None)
            connection.window = min(self._window, getattr(properties, "ReceiveMaximum", self._window))
            if self._subscriptions and not is_trial:
                _subscribe(c, self._subscriptions, is_v5=is_v5)
            else:
                self._inbox.put(_Ready(c))

        def on_subscribe(c: mqtt.Client, _d: Any, _m: int, codes: list[ReasonCode], _p: Any) -> None:
            denied = [
                topic for topic, code in zip(self._subscriptions, codes, strict=False) if code.is_failure
            ]
            self._inbox.put(
                _Closed(c, f"the broker denies subscribing to {', '.join(denied)}") if denied else _Ready(c)
            )

        def on_disconnect(c: mqtt.Client, _d: Any, _f: Any, code: ReasonCode, _p: Any) -> None:
            self._inbox.put(_Closed(c, f"connection lost: {code}", unanswered=not connection.is_answered))

        def on_publish(c: mqtt.Client, _d: Any, mid: int, code: ReasonCode, _p: Any) -> None:
            connection.carried += not code.is_failure
            self._inbox.put(_Acknowledged(c, mid, str(code) if code.is_failure else ""))

        def on_message(c: mqtt.Client, _d: Any, message: mqtt.MQTTMessage) -> None:
            if self._is_subscribed(message.topic):
                connection.carried += 1
                self._hear(c, message)
            else:
                c.ack(message.mid, message.qos)

        client.on_connect = on_connect
        client.on_subscribe = on_subscribe
        client.on_disconnect = on_disconnect
        client.on_publish = on_publish
        client.on_message = on_message
        return connection

    def _is_subscribed(self, topic: str) -> bool:
        """Whether a message is for us: amqtt hands whoever connects all that is retained for anybody."""
        return any(mqtt.topic_matches_sub(wanted, topic) for wanted in self._subscriptions)

    def _hear(self, client: mqtt.Client, message: mqtt.MQTTMessage) -> None:
        payload = bytes(message.payload)
        token = _Token(client, message.mid) if self._manual_ack and message.qos else None
        self._on_event(Received(message.topic, payload, message.retain, token))
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

    def _serve(self, connection: _Connection) -> _End | None:
        """Feed one connection until it ends; None if we were told to stop."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            match self._next(connection, deadline if connection.ready_s is None else connection.again_s):
                case None if connection.ready_s is not None:
                    connection.try_again()
                case None:
                    unanswered = not connection.is_answered
                    return _End(f"the broker at {self._broker} does not answer", unanswered=unanswered)
                case _Stop() as stop:
                    self._farewell(connection, stop.farewell)
                    return None
                case _Closed() as closed:
                    return _End(closed.reason, closed.unanswered, connection.lived_s(), connection.carried)
                case _Ready():
                    self._version = connection.version
                    if connection.is_trial:
                        return _End("it speaks MQTT 5")
                    self._begin(connection)
                case _Acknowledged() as answer:
                    self._settle(connection, answer)
                case Outgoing() as outgoing:
                    connection.ask(outgoing)
            self._pump(connection)

    def _begin(self, connection: _Connection) -> None:
        """Take up a connection that stands."""
        connection.ready_s = time.monotonic()
        if connection.version is not MQTTProtocolVersion.MQTTv5:
            connection.max_packet_bytes = self._experience.limit_bytes
        self._on_event(Connected(connection.max_packet_bytes))

    def _settle(self, connection: _Connection, answer: _Acknowledged) -> None:
        """Take note of what the broker says to a publication."""
        outgoing, size_bytes = connection.in_flight.pop(answer.mid)
        if answer.denial:
            way_out = "; look at the broker's access list" if answer.denial == "Not authorized" else ""
            self._say_unsendable(outgoing.topic, answer.denial, answer.denial + way_out)
            connection.put_off(outgoing)
        else:
            self._experience = self._experience.acknowledged(size_bytes)

    def _say_unsendable(self, topic: str, cause: str, reason: str) -> None:
        repeated = (topic, cause) in self._unsendable
        self._unsendable.add((topic, cause))
        self._on_event(Unsendable(topic, reason, repeated))

    def _pump(self, connection: _Connection) -> None:
        """Give paho what there is room for, and say so when all is through."""
        if connection.ready_s is None:
            return
        connection.is_drained = connection.is_drained and not connection.waiting
        while connection.waiting and len(connection.in_flight) < connection.window:
            outgoing = connection.waiting[0]
            size_bytes = packet_bytes(outgoing.topic, len(outgoing.payload))
            limit = connection.max_packet_bytes
            if limit is not None and size_bytes > limit:
                reason = f"it has {size_bytes} bytes, and the broker takes {limit}; raise its max_packet_size"
                self._say_unsendable(outgoing.topic, "size", reason)
            else:
                info = connection.client.publish(
                    outgoing.topic, outgoing.payload, qos=1, retain=outgoing.retain
                )
                # Also if paho calls the connection gone: it may be this very publication that has ended it.
                connection.in_flight[info.mid] = (outgoing, size_bytes)
            connection.waiting.popleft()
        if not connection.is_drained and not connection.waiting and not connection.in_flight:
            connection.is_drained = True
            self._on_event(Drained())

    def _farewell(self, connection: _Connection, farewell: Sequence[Outgoing]) -> None:
        """Say the last words, and wait until they are through.

        A broker may acknowledge them and forget them when the connection ends right after: amqtt does. So where
        we listen to them ourselves, we wait to hear them.
        """
        if connection.ready_s is None:
            return
        heard = set(self._subscriptions)
        self._last_words = {(word.topic, word.payload) for word in farewell if word.topic in heard}
        echoes = len(self._last_words)
        connection.waiting.extend(farewell)
        deadline = time.monotonic() + FAREWELL_S
        self._pump(connection)
        while connection.in_flight or connection.waiting or echoes:
            match self._next(connection, deadline):
                case None | _Closed():
                    return
                case _Acknowledged() as answer:
                    self._settle(connection, answer)
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


def _subscribe(client: mqtt.Client, topics: Sequence[str], *, is_v5: bool) -> None:
    if is_v5:
        client.subscribe([(topic, SubscribeOptions(qos=1)) for topic in topics])
    else:
        client.subscribe([(topic, 1) for topic in topics])


def _close(client: mqtt.Client) -> None:
    """End a client; what it has open is closed with its last reference, which our callbacks must not hold."""
    client.disconnect()
    client.loop_stop()
    client.on_connect = client.on_disconnect = client.on_message = client.on_publish = client.on_subscribe = (
        None
    )
