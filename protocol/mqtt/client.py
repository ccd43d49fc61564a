"""One connection to a broker, used once. The only import of paho.

paho's callbacks only pass values on, and paho never reconnects by itself: `reconnecting_session` does.

Workarounds, each for one program; where one is in the code, a comment names the program:

- amqtt reads an MQTT 5 will as one of 3.1.1, waits for the rest of it, and never answers. A broker that is not known to
  speak MQTT 5 is therefore connected to without a will first.
- amqtt delivers retained messages of all topics to every client. Those that were not subscribed are ignored.
- amqtt acknowledges a publication, and drops it when the connection ends right after. Final publications on subscribed
  topics are therefore awaited as received messages.
- NATS: a cluster without one of its three servers refuses every third filter, at random (nats-io/nats-server, issue
  5498). Filters that are refused without a reason are subscribed again, at most `SUBSCRIBE_ATTEMPTS` times.
- paho raises various exceptions on bytes that are not MQTT, such as a topic that is not UTF-8, which end its thread.
- paho raises AttributeError if its thread ends while it is stopped (eclipse-paho/paho.mqtt.python, issue 872).
- paho waits for its socket with `select`, which takes 1,024 files on Linux.
"""

import contextlib
import select
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, LogLevel, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from protocol.mqtt import diagnostics
from protocol.mqtt.events import Acknowledged, Closed, Connected, Outgoing, Received
from protocol.mqtt.tls import BrokerAccess, BrokerAddress

KEEPALIVE_S = 30

SUBSCRIBE_ATTEMPTS = 8

SUBSCRIBE_TIMEOUT_S = 30.0
"""For one answer: a cluster that has lost a server needs seconds for each filter."""

MAX_AT_QOS_0 = 256
"""Unacknowledged messages at QoS 0 beyond which a session with `manual_ack` drops them: nothing slows their sender."""

Version = MQTTProtocolVersion

VERSIONS = (Version.MQTTv5, Version.MQTTv311)
"""Versions of MQTT, in the order in which they are tried."""


ConnectionEvent = Connected | Closed | Acknowledged | Received


@dataclass(frozen=True)
class ConnectionOptions:
    """Options of all connections of a session."""

    broker: BrokerAddress
    access: BrokerAccess
    tls: ssl.SSLContext | None
    """The context for `access`; None without encryption."""
    client_id: str
    """Unique on the broker, which may use the name in the client's certificate instead."""
    subscriptions: tuple[str, ...]
    """Topic filters, subscribed at QoS 1. A message arrives at QoS 0 if a client or a bridge has sent it so."""
    will: Callable[[], Outgoing] | None
    """Makes the message that the broker publishes if this client disappears, anew for each connection."""
    window: int
    """Maximum number of publications in flight, unless the broker accepts fewer."""
    manual_ack: bool
    """Leave messages unacknowledged until `Connection.acknowledge` is called."""
    was_accepted: bool = False
    """A broker has accepted these options before."""


class _Client(mqtt.Client):
    """paho's client, with a callback for an exception that ends its thread."""

    on_crash: Callable[[Exception], None]

    def _thread_main(self) -> None:
        try:
            super()._thread_main()
        except Exception as error:
            self.on_crash(error)


def stop_thread(client: mqtt.Client) -> None:
    """Stop a client's network thread."""
    with contextlib.suppress(AttributeError):  # paho
        client.loop_stop()


class Connection:
    """A connection with its own paho client, from whose thread `on_event` is called with it and an event."""

    def __init__(
        self,
        options: ConnectionOptions,
        version: Version,
        on_event: "Callable[[Connection, ConnectionEvent], None]",
    ) -> None:
        self.version = version
        self.broker = options.broker
        self.window = options.window
        self.max_packet_bytes: int | None = None
        self.is_answered = False
        self.messages = 0
        """Received, or acknowledged by the broker."""
        self.deadline_s: float | None = None
        """When the broker must have answered, by `time.monotonic`; None once the connection is ready."""
        self._options = options
        self._on_event = on_event
        self._tls_error = ""
        self._ready_s: float | None = None
        self._room_at_qos_0 = threading.Semaphore(MAX_AT_QOS_0)
        self._unconfirmed: tuple[str, ...] = ()
        self._attempts = 0
        """How often the unconfirmed filters were subscribed."""
        self._client = self._make_client()

    def open(self, *, timeout_s: float) -> Closed | None:
        """Open the network connection and begin MQTT in the background; None on success."""
        options = self._options
        try:
            self._open_socket(timeout_s)
        except (OSError, ValueError) as error:
            return Closed(diagnostics.connect_error(error, options.broker, options.access))
        try:
            if (opened := self._client.socket()) is not None:  # it may have ended already
                select.select([opened], [], [], 0)
        except ValueError:  # paho would end the connection without a reason
            return Closed(diagnostics.TOO_MANY_FILES)
        self._client.loop_start()
        return None

    def _open_socket(self, timeout_s: float) -> None:
        self._client.connect_timeout = timeout_s
        self._client.connect(self._options.broker.host, self._options.broker.port, keepalive=KEEPALIVE_S)
        self.deadline_s = time.monotonic() + timeout_s

    def connected_s(self) -> float:
        """Return the seconds since the connection was ready; 0 if it never was."""
        return 0.0 if self._ready_s is None else time.monotonic() - self._ready_s

    def _local_address(self) -> str:
        """Return this machine's IP address on the connection; empty if it has ended."""
        with contextlib.suppress(OSError, AttributeError):
            return str(self._client.socket().getsockname()[0])  # type: ignore[union-attr]
        return ""

    def publish(self, outgoing: Outgoing) -> int:
        """Publish at QoS 1; returns the message id, even if this publication ends the connection."""
        return self._client.publish(outgoing.topic, outgoing.payload, qos=1, retain=outgoing.retain).mid

    def acknowledge(self, mid: int) -> None:
        """Acknowledge a received message; from any thread."""
        if mid == 0:
            self._room_at_qos_0.release()
            return
        with contextlib.suppress(OSError):  # the connection is ending
            self._client.ack(mid, 1)

    def close(self) -> None:
        """Disconnect, and drop the callbacks, whose references would keep the socket open."""
        client = self._client
        client.disconnect()
        stop_thread(client)
        client.on_connect = client.on_disconnect = client.on_message = client.on_publish = None
        client.on_subscribe = client.on_log = None
        client.on_crash = lambda _: None

    def _make_client(self) -> _Client:
        options, is_v5 = self._options, self.version is Version.MQTTv5
        client = _Client(
            CallbackAPIVersion.VERSION2,
            client_id=options.client_id,
            clean_session=None if is_v5 else True,
            protocol=self.version,
            reconnect_on_failure=False,
            manual_ack=options.manual_ack,
            transport="tcp" if options.broker.path is None else "websockets",
        )
        if options.broker.path is not None:
            client.ws_set_options(path=options.broker.path)
        client.max_inflight_messages_set(options.window)
        if options.tls is not None:
            client.tls_set_context(options.tls)
        if options.access.username is not None:
            client.username_pw_set(options.access.username, options.access.password)
        if options.will is not None:
            will = options.will()
            client.will_set(will.topic, will.payload, qos=1, retain=will.retain)
        client.on_crash = self._on_crash
        client.on_connect = self._on_connect
        client.on_subscribe = self._on_subscribe
        client.on_disconnect = self._on_disconnect
        client.on_publish = self._on_publish
        client.on_message = self._on_message
        client.on_log = self._on_log
        return client

    def _on_connect(
        self, _c: mqtt.Client, _d: Any, _f: Any, code: ReasonCode, properties: Properties | None
    ) -> None:
        self.is_answered = True
        self._client.on_log = None  # only TLS errors matter; paho would log every packet
        if code.is_failure:
            wrong_version = code == "Unsupported protocol version"
            reason = diagnostics.refused(str(code), self._options.access)
            self._on_event(self, Closed(reason, unanswered=wrong_version))
            return
        self.max_packet_bytes = getattr(properties, "MaximumPacketSize", None)
        self.window = min(self._options.window, getattr(properties, "ReceiveMaximum", self._options.window))
        if self._options.subscriptions:
            self._subscribe(self._options.subscriptions)
        else:
            self._report_ready()

    def _subscribe(self, topics: tuple[str, ...]) -> None:
        self._unconfirmed = topics
        self._attempts += 1
        self.deadline_s = time.monotonic() + SUBSCRIBE_TIMEOUT_S
        qos: Any = SubscribeOptions(qos=1) if self.version is Version.MQTTv5 else 1
        self._client.subscribe([(topic, qos) for topic in topics])

    def _report_ready(self) -> None:
        self._ready_s, self.deadline_s = time.monotonic(), None
        broker, is_v5 = str(self._options.broker), self.version is Version.MQTTv5
        self._on_event(self, Connected(self.max_packet_bytes, self._local_address(), broker, is_v5))

    def _on_subscribe(self, _c: mqtt.Client, _d: Any, _m: int, codes: list[ReasonCode], _p: Any) -> None:
        asked = zip(self._unconfirmed, codes, strict=False)
        failed = {topic: str(code) for topic, code in asked if code.is_failure}
        if not failed:
            self._report_ready()
        elif self._attempts < SUBSCRIBE_ATTEMPTS and set(failed.values()) == {diagnostics.UNSPECIFIED}:
            self._subscribe(tuple(failed))  # NATS
        else:
            topics = ", ".join(failed)
            reason = (
                f"the broker denies subscribing to {topics}: change its access list, or see the broker's log"
            )
            self._on_event(self, Closed(reason))

    def _on_disconnect(self, _c: mqtt.Client, _d: Any, _f: Any, code: ReasonCode, _p: Any) -> None:
        if self.is_answered:
            reason = diagnostics.explained(str(code), unspecified="the broker or the network closed it")
            self._on_event(self, Closed(f"connection lost: {reason}"))
        else:
            options = self._options
            reason = diagnostics.closed_before_answer(
                self._tls_error, options.access, was_accepted=options.was_accepted
            )
            self._on_event(self, Closed(reason, unanswered=True))

    def _on_crash(self, error: Exception) -> None:
        reason = f"connection lost: the broker sends invalid MQTT ({type(error).__name__})"
        self._on_event(self, Closed(reason, unanswered=not self.is_answered))

    def _on_publish(self, _c: mqtt.Client, _d: Any, mid: int, code: ReasonCode, _p: Any) -> None:
        self.messages += not code.is_failure
        self._on_event(self, Acknowledged(mid, diagnostics.explained(str(code)) if code.is_failure else ""))

    def _on_message(self, client: mqtt.Client, _d: Any, message: mqtt.MQTTMessage) -> None:
        if not any(mqtt.topic_matches_sub(topic, message.topic) for topic in self._options.subscriptions):
            client.ack(message.mid, message.qos)  # amqtt
            return
        connection = self if self._options.manual_ack else None
        if connection is not None and message.qos == 0 and not self._room_at_qos_0.acquire(blocking=False):
            return
        self.messages += 1
        payload = bytes(message.payload)
        self._on_event(self, Received(message.topic, payload, message.retain, connection, message.mid))

    def _on_log(self, _c: mqtt.Client, _d: Any, level: int, text: str) -> None:
        # paho reports OpenSSL's errors only here.
        if level == LogLevel.MQTT_LOG_ERR and "SSL" in text:
            self._tls_error = text
