"""Checks of a broker: reachable, TLS, login, what a client may publish, packet limit."""

import contextlib
import queue
import socket
import ssl
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Self

from protocol.doctor.findings import Finding
from protocol.errors import ConfigError
from protocol.mqtt import diagnostics
from protocol.mqtt.events import Connected, Disconnected, Drained, Event, Outgoing, Received, Unsendable
from protocol.mqtt.publisher import DISCONNECTS_TO_INFER, packet_bytes
from protocol.mqtt.reconnecting_session import Session
from protocol.mqtt.tls import (
    EXPIRY_WARNING,
    BrokerAccess,
    BrokerAddress,
    expiry_warning,
    open_tls,
    readable_by_others,
)
from protocol.wire.transfer import ENVELOPE_BYTES, chunk_bytes

TIMEOUT_S = 15.0

LEAST_PACKET_BYTES = 8 * 1024
"""Packet limit of a broker below which there is a warning: the smaller, the slower transfers are."""

DELIVERY_S = 3.0
"""Time in which a broker sends a retained message, and returns one that was published."""

_RAISE_LIMIT = "raise the broker's packet limit (mosquitto: `max_packet_size`, `message_size_limit`)"


def check_network(broker: BrokerAddress, access: BrokerAccess) -> list[Finding]:
    """Check that the broker accepts a connection, and its certificate."""
    try:
        with socket.create_connection((broker.host, broker.port), timeout=TIMEOUT_S) as connection:
            reached = Finding("broker", "ok", f"{broker} accepts connections")
            return [reached, *_check_tls(connection, broker, access)]
    except OSError as error:
        text = diagnostics.connect_error(error, broker, BrokerAccess())
        action = "check the address and port, that the broker runs (an embedded one: its aggregator), and the firewalls"
        return [Finding("broker", "failed", text, action)]


def _check_tls(connection: socket.socket, broker: BrokerAddress, access: BrokerAccess) -> Iterator[Finding]:
    try:
        context = open_tls(access)
    except ConfigError as error:
        yield Finding(
            "tls", "failed", str(error), "correct --tls-ca, --tls-cert and --tls-key, or the enrollment"
        )
        return
    if context is None:
        if broker.is_local:
            yield Finding("tls", "skipped", "no TLS, on this machine only")
        else:
            text = "no TLS: others on the network can read and change all messages"
            yield Finding("tls", "warning", text, "close the fleet: aggregator enroll-broker, enroll")
        return
    try:
        with context.wrap_socket(connection, server_hostname=broker.host) as encrypted:
            certificate, version = encrypted.getpeercert() or {}, encrypted.version()
    except (OSError, ValueError) as error:
        text = diagnostics.connect_error(error, broker, access)
        yield Finding(
            "tls", "failed", text, "see the message; `openssl s_client -connect HOST:PORT` shows more"
        )
        return
    end = datetime.fromtimestamp(ssl.cert_time_to_seconds(str(certificate["notAfter"])), UTC)
    text = f"{version}, the broker's certificate is valid until {end:%Y-%m-%d}"
    if end - datetime.now(UTC) < EXPIRY_WARNING:
        yield Finding("tls", "warning", text, "renew it: aggregator enroll-broker")
    else:
        yield Finding("tls", "ok", text)
    own = access.certificate
    if own is not None and (warning := expiry_warning(own, datetime.now(UTC))):
        yield Finding("tls", "warning", warning, "see docs/operations/enrollment.md#renew-certificates")
    if access.key is not None and (warning := readable_by_others(access.key)):
        yield Finding("tls", "warning", warning, f"chmod 600 {access.key}")


class BrokerProbe:
    """One client's session with a broker, to find out what it may do. Nothing that it publishes is retained.

    Use as a context manager, after `open`. `subscriptions` are topics to subscribe.
    """

    def __init__(
        self, broker: BrokerAddress, access: BrokerAccess, *, subscriptions: tuple[str, ...] = ()
    ) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._messages: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._received: list[Received] = []
        """Those that were taken from the queue."""
        self._connected: Connected | None = None
        self._session = Session(
            broker,
            client_id=f"pf-doctor-{uuid.uuid4().hex[:12]}",
            subscriptions=subscriptions,
            on_event=self._receive,
            access=access,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.stop()

    def _receive(self, event: Event) -> None:
        if isinstance(event, Received):
            self._messages.put(event)
        else:
            self._events.put(event)

    def open(self) -> Finding:
        """Connect, and subscribe; the connection is open if the finding is ok."""
        self._session.start()
        event = self._events.get()  # the session gives up by itself
        if isinstance(event, Disconnected):
            event = self._events.get()  # it has tried again: a broker may end connections as it starts
        match event:
            case Connected() as connected:
                self._connected = connected
                name = "MQTT 5" if connected.is_v5 else "MQTT 3.1.1"
                return Finding("login", "ok", f"accepted with {name}, and all subscriptions")
            case Disconnected(reason=reason):
                return Finding("login", "failed", reason, "see the message, and the broker's log")
            case failure:
                return Finding("login", "failed", str(failure))

    def check_packets(self, topic: str, *, comes_back: bool) -> Finding:
        """Report the largest packet that the broker announces to accept, and publish a packet of a full frame's size.

        `comes_back` states that the topic is subscribed: then the packet must arrive. Programs of the fleet ignore it.
        """
        limit = self._connected.max_packet_bytes if self._connected is not None else None
        size_bytes = chunk_bytes(limit) + ENVELOPE_BYTES
        # The length takes two bytes more.
        packet = Outgoing(topic, bytes(size_bytes - packet_bytes(topic, 0) - 2))
        if all(isinstance(self._publish(packet), Disconnected) for _ in range(DISCONNECTS_TO_INFER)):
            text = f"the broker ends the connection at a packet of {size_bytes:,} bytes: programs send smaller ones"
            return Finding("packets", "warning", text, _RAISE_LIMIT)
        if comes_back and self._find(lambda received: received.payload == packet.payload) is None:
            text = f"the broker accepts a packet of {size_bytes:,} bytes, and does not deliver it"
            return Finding("packets", "warning", f"{text}: transfers are slow", _RAISE_LIMIT)
        if limit is None:
            return Finding("packets", "ok", f"a packet of {size_bytes:,} bytes passes, no limit is announced")
        text = f"packets of at most {limit:,} bytes"
        if limit < LEAST_PACKET_BYTES:
            return Finding("packets", "warning", f"{text}: transfers are slow", _RAISE_LIMIT)
        return Finding("packets", "ok", text)

    def check_qos(self) -> Iterator[Finding]:
        """Report at which QoS messages have arrived so far."""
        while not self._messages.empty():
            self._received.append(self._messages.get())
        lowered = [received.topic for received in self._received if received.payload and received.is_at_qos_0]
        if lowered:
            text = (
                f"messages arrive at QoS 0, such as {lowered[0]}: some may be lost, and are sent again later"
            )
            action = (
                "let a bridge between brokers forward at QoS 1, in mosquitto `topic # both 1`; "
                "an embedded broker lowers it always"
            )
            yield Finding("qos", "warning", text, action)

    def check_writes(
        self, *, allowed: Iterable[str], denied: Iterable[str], is_closed: bool
    ) -> list[Finding]:
        """Check that the client may publish on some topics, and that it may not on others.

        The messages are empty: programs of the fleet ignore them. `is_closed` makes topics that should be denied, and
        are not, a failure.
        """
        if self._connected is None or not self._connected.is_v5:
            text = "a broker with MQTT 3.1.1 does not tell what it denies"
            return [Finding("acl", "skipped", text, "look for denied publications in its log")]
        lacking = [topic for topic in allowed if not self._may_write(topic)]
        excess = [topic for topic in denied if self._may_write(topic)]
        if lacking:
            text = f"may not publish on {', '.join(lacking)}"
            return [Finding("acl", "failed", text, "allow these topics in the broker's access list")]
        if excess and is_closed:
            text = f"may publish on {', '.join(excess)}: the access list protects nothing"
            return [
                Finding("acl", "failed", text, "use the access list that `aggregator enroll-broker` writes")
            ]
        if excess:
            text = "every client may publish in the name of others: the fleet is open"
            return [Finding("acl", "warning", text, "close the fleet: aggregator enroll-broker, enroll")]
        return [Finding("acl", "ok", "may publish what it must, and nothing in the name of others")]

    def retained(self, topic: str) -> bytes | None:
        """Return the message that the broker retains on a subscribed topic; None if there is none."""
        found = self._find(
            lambda received: received.topic == topic and received.retained and bool(received.payload)
        )
        return None if found is None else found.payload

    def _find(self, is_wanted: Callable[[Received], bool]) -> Received | None:
        """Return a message that has arrived, or arrives in time; None if there is none."""
        until_s = time.monotonic() + DELIVERY_S
        while (found := next(filter(is_wanted, self._received), None)) is None:
            try:
                left_s = max(0.0, until_s - time.monotonic())
                self._received.append(self._messages.get(timeout=left_s))
            except queue.Empty:
                return None
        return found

    def _may_write(self, topic: str) -> bool:
        return isinstance(self._publish(Outgoing(topic, b"")), Drained)

    def _publish(self, outgoing: Outgoing) -> Event | None:
        """Publish; some brokers end the connection instead of denying, and the session connects again."""
        self._session.send(outgoing)
        answer = self._next(Drained, Disconnected, Unsendable)
        if isinstance(answer, Unsendable):
            self._next(Drained)
        if isinstance(answer, Disconnected):
            self._next(Connected)
        return answer

    def _next(self, *kinds: type[Event]) -> Event | None:
        """Return the next event of some kinds; None if there is none in time."""
        until_s = time.monotonic() + TIMEOUT_S
        while (left_s := until_s - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=left_s)
                if isinstance(event, kinds):
                    return event
        return None
