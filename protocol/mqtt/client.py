"""One connection to a broker, made, used and closed once. The only import of paho.

paho's callbacks only put something somewhere, and a connection is never made again by itself: `session` does that.
"""

import contextlib
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, LogLevel, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from protocol.mqtt import diagnostics
from protocol.mqtt.events import Outgoing, Received, Token
from protocol.mqtt.tls import BrokerAccess, BrokerAddress

KEEPALIVE_S = 30

Version = MQTTProtocolVersion

VERSIONS = (Version.MQTTv5, Version.MQTTv311)
"""In the order in which they are tried on a broker that is not known yet."""


@dataclass(frozen=True)
class Closed:
    """A connection ended, or was refused; `unanswered` if that may be for the version of MQTT."""

    connection: object
    reason: str
    unanswered: bool = False


@dataclass(frozen=True)
class Ready:
    """A connection is up and subscribed."""

    connection: object


@dataclass(frozen=True)
class Acknowledged:
    """The broker took one of ours, or says why not."""

    connection: object
    mid: int
    denial: str = ""


Signal = Closed | Ready | Acknowledged


@dataclass(frozen=True)
class Terms:
    """What every connection of a session has in common.

    Args:
        broker: where to connect.
        access: how to be let in.
        tls: made of it; None without encryption.
        client_id: unique on the broker.
        subscriptions: topic filters, subscribed at QoS 1.
        will: what the broker says of us when we vanish.
        window: publications inside paho at any time, unless the broker wants fewer.
        manual_ack: a message counts as unacknowledged to the broker until `Connection.acknowledge`.
    """

    broker: BrokerAddress
    access: BrokerAccess
    tls: ssl.SSLContext | None
    client_id: str
    subscriptions: tuple[str, ...]
    will: Outgoing | None
    window: int
    manual_ack: bool


class _Client(mqtt.Client):
    """paho's client, which tells of an error that ends its thread: else nobody would hear of it, or of anything more.

    paho raises what it likes over bytes that are no MQTT, a topic that is no UTF-8 among them.
    """

    broken: Callable[[Exception], None]

    def _thread_main(self) -> None:
        try:
            super()._thread_main()
        except Exception as error:
            self.broken(error)


class Connection:
    """A fresh client of paho's.

    Args:
        terms: what it has in common with others.
        version: of MQTT.
        bare: without a will and subscriptions, to see whether the broker speaks this version.
        signal: called from paho's thread with what happens to it; must only put it somewhere.
        hear: likewise with what comes in.
    """

    def __init__(
        self,
        terms: Terms,
        version: Version,
        *,
        bare: bool,
        signal: Callable[[Signal], None],
        hear: Callable[[Received], None],
    ) -> None:
        self.version = version
        self.bare = bare
        self.window = terms.window
        self.max_packet_bytes: int | None = None
        self.is_answered = False
        self.carried = 0
        """Messages that came in, or were acknowledged."""
        self._terms = terms
        self._signal = signal
        self._hear = hear
        self._said = ""
        self._client = self._make_client()

    def open(self, *, timeout_s: float) -> str | None:
        """Connect, in the background once the network does; returns why it failed."""
        terms = self._terms
        self._client.connect_timeout = timeout_s
        try:
            self._client.connect(terms.broker.host, terms.broker.port, keepalive=KEEPALIVE_S)
        except (OSError, ValueError) as error:
            return diagnostics.no_connection(error, terms.broker, terms.access)
        self._client.loop_start()
        return None

    def publish(self, outgoing: Outgoing) -> int:
        """Publish at QoS 1; returns the message id, also if this very publication ends the connection."""
        return self._client.publish(outgoing.topic, outgoing.payload, qos=1, retain=outgoing.retain).mid

    def acknowledge(self, mid: int) -> None:
        """Tell the broker that a message is safe; from any thread."""
        with contextlib.suppress(OSError):  # the connection ends this very moment
            self._client.ack(mid, 1)

    def close(self) -> None:
        """End it; what it has open is closed with its last reference, which our callbacks must not hold."""
        client = self._client
        client.disconnect()
        client.loop_stop()
        client.on_connect = client.on_disconnect = client.on_message = client.on_publish = None
        client.on_subscribe = client.on_log = None
        client.broken = _nobody

    def _make_client(self) -> _Client:
        terms, is_v5 = self._terms, self.version is Version.MQTTv5
        client = _Client(
            CallbackAPIVersion.VERSION2,
            client_id=terms.client_id,
            clean_session=None if is_v5 else True,
            protocol=self.version,
            reconnect_on_failure=False,
            manual_ack=terms.manual_ack,
        )
        client.max_inflight_messages_set(terms.window)
        if terms.tls is not None:
            client.tls_set_context(terms.tls)
        if terms.access.username is not None:
            client.username_pw_set(terms.access.username, terms.access.password)
        if terms.will is not None and not self.bare:
            client.will_set(terms.will.topic, terms.will.payload, qos=1, retain=terms.will.retain)
        client.broken = self._on_broken
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
        self._client.on_log = None  # it would be told of every packet from now on, in words
        if code.is_failure:
            wrong_version = code == "Unsupported protocol version"
            reason = diagnostics.refused(str(code), self._terms.access)
            self._signal(Closed(self, reason, unanswered=wrong_version))
            return
        self.max_packet_bytes = getattr(properties, "MaximumPacketSize", None)
        self.window = min(self._terms.window, getattr(properties, "ReceiveMaximum", self._terms.window))
        if self._terms.subscriptions and not self.bare:
            self._subscribe(self._terms.subscriptions)
        else:
            self._signal(Ready(self))

    def _subscribe(self, topics: Sequence[str]) -> None:
        if self.version is Version.MQTTv5:
            self._client.subscribe([(topic, SubscribeOptions(qos=1)) for topic in topics])
        else:
            self._client.subscribe([(topic, 1) for topic in topics])

    def _on_subscribe(self, _c: mqtt.Client, _d: Any, _m: int, codes: list[ReasonCode], _p: Any) -> None:
        asked = zip(self._terms.subscriptions, codes, strict=False)
        denied = [topic for topic, code in asked if code.is_failure]
        reason = f"the broker denies subscribing to {', '.join(denied)}"
        self._signal(Closed(self, reason) if denied else Ready(self))

    def _on_disconnect(self, _c: mqtt.Client, _d: Any, _f: Any, code: ReasonCode, _p: Any) -> None:
        reason = f"connection lost: {code}"
        if not self.is_answered:
            reason = diagnostics.lost_before_answer(self._said, self._terms.access)
        self._signal(Closed(self, reason, unanswered=not self.is_answered))

    def _on_broken(self, error: Exception) -> None:
        reason = f"connection lost: the broker says what is no MQTT ({type(error).__name__})"
        self._signal(Closed(self, reason, unanswered=not self.is_answered))

    def _on_publish(self, _c: mqtt.Client, _d: Any, mid: int, code: ReasonCode, _p: Any) -> None:
        self.carried += not code.is_failure
        self._signal(Acknowledged(self, mid, str(code) if code.is_failure else ""))

    def _on_message(self, client: mqtt.Client, _d: Any, message: mqtt.MQTTMessage) -> None:
        if not self._is_subscribed(message.topic):
            client.ack(message.mid, message.qos)
            return
        if message.qos == 0:
            # None of ours: and nothing would hold back who says more of it than we can look at.
            return
        self.carried += 1
        token = Token(self, message.mid) if self._terms.manual_ack else None
        self._hear(Received(message.topic, bytes(message.payload), message.retain, token))

    def _is_subscribed(self, topic: str) -> bool:
        """Whether a message is for us: amqtt hands whoever connects all that is retained for anybody."""
        return any(mqtt.topic_matches_sub(wanted, topic) for wanted in self._terms.subscriptions)

    def _on_log(self, _c: mqtt.Client, _d: Any, level: int, text: str) -> None:
        """Keep what OpenSSL says: paho tells it to nobody else."""
        if level == LogLevel.MQTT_LOG_ERR and "SSL" in text:
            self._said = text


def _nobody(_: Exception) -> None:
    """Who hears of what happens to a connection that was closed."""
