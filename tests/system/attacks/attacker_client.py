"""An MQTT client that publishes anything to any topic, and returns the broker's answers."""

import contextlib
import itertools
import queue
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.reasoncodes import ReasonCode

from protocol.mqtt.client import stop_thread
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, open_tls

TIMEOUT_S = 240.0


@dataclass(frozen=True)
class ReceivedMessage:
    topic: str
    payload: bytes
    retained: bool


class AttackerClient:
    """A client without the product's checks.

    Args:
        will: topic and payload of a retained last will.
        on_message: called from the client's thread with each message.
    """

    def __init__(
        self,
        address: BrokerAddress,
        access: BrokerAccess = NO_AUTHENTICATION,
        *,
        will: tuple[str, bytes] | None = None,
        on_message: Callable[[ReceivedMessage], object] = lambda _: None,
    ) -> None:
        self.received: list[ReceivedMessage] = []
        self._address = address
        self._on_message = on_message
        self._answers: queue.SimpleQueue[tuple[str, int, ReasonCode | str]] = queue.SimpleQueue()
        self._client = mqtt.Client(
            CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5, reconnect_on_failure=False
        )
        self._client.max_inflight_messages_set(1000)
        if (tls := open_tls(access)) is not None:
            self._client.tls_set_context(tls)
        if access.username is not None:
            self._client.username_pw_set(access.username, access.password)
        if will is not None:
            self._client.will_set(*will, qos=1, retain=True)
        answer = self._answers.put
        self._client.on_connect = lambda _c, _d, _f, code, _p: answer(("connect", 0, code))
        self._client.on_disconnect = lambda *_: answer(("closed", 0, "closed"))
        self._client.on_publish = lambda _c, _d, mid, code, _p: answer(("publish", mid, code))
        self._client.on_subscribe = lambda _c, _d, mid, codes, _p: answer(("subscribe", mid, codes[0]))
        self._client.on_message = self._receive

    def connect(self) -> bool:
        """Connect; returns whether the broker has accepted."""
        try:
            self._client.connect(self._address.host, self._address.port, keepalive=600)
        except OSError:
            return False
        self._client.loop_start()
        return self._accepted("connect", 0)

    def __enter__(self) -> Self:
        assert self.connect(), f"{self._address} has refused this client"
        return self

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()
        stop_thread(self._client)

    def vanish(self) -> None:
        """End without DISCONNECT, so that the broker publishes the last will."""
        sock = self._client.socket()
        if isinstance(sock, socket.socket):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        stop_thread(self._client)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> bool:
        """Publish; returns whether the broker has accepted."""
        return self._accepted("publish", self._client.publish(topic, payload, qos=1, retain=retain).mid)

    def publish_without_waiting(self, topic: str, payload: bytes) -> None:
        self._client.publish(topic, payload, qos=1)

    def subscribe(self, topic: str) -> bool:
        """Subscribe; returns whether the broker grants it, which does not mean that anything arrives."""
        return self._accepted("subscribe", self._client.subscribe(topic, qos=1)[1] or 0)

    def flood(self, messages: Iterable[tuple[str, bytes]]) -> None:
        """Publish messages as fast as the broker accepts them."""
        for count, (topic, payload) in enumerate(messages, 1):
            mid = self._client.publish(topic, payload, qos=1).mid
            if count % 500 == 0:
                self._accepted("publish", mid)
        self.publish("flooded", b"")

    def _accepted(self, kind: str, mid: int) -> bool:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answered, number, code = self._answers.get(timeout=max(0.01, deadline - time.monotonic()))
            if answered == "closed":
                return False
            if (answered, number) == (kind, mid):
                return isinstance(code, ReasonCode) and not code.is_failure

    def _receive(self, _c: mqtt.Client, _d: Any, received: mqtt.MQTTMessage) -> None:
        message = ReceivedMessage(received.topic, bytes(received.payload), received.retain)
        self.received.append(message)
        self._on_message(message)


class TrafficMonitor(AttackerClient):
    """A client that receives everything the broker distributes."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._marks = itertools.count()
        assert self.subscribe("#")
        self.settle()
        self.received.clear()
        return self

    def settle(self) -> None:
        """Wait until all that the broker has accepted so far has arrived."""
        topic = f"monitor/{id(self)}/{next(self._marks)}"
        assert self.publish(topic, b"mark")
        deadline = time.monotonic() + TIMEOUT_S
        while not any(message.topic == topic for message in self.received):
            assert time.monotonic() < deadline, "the broker distributes nothing any more"
            time.sleep(0.005)

    def payloads(self, topic: str) -> list[bytes]:
        """Return the payloads that were published on a topic, without retained ones."""
        return [one.payload for one in self.received if one.topic == topic and not one.retained]


def raw_publish(address: BrokerAddress, access: BrokerAccess, topic: bytes, payload: bytes) -> bool:
    """Publish to a topic that no client library accepts; returns whether it was acknowledged."""
    tls = open_tls(access)
    with contextlib.ExitStack() as stack:
        sock: socket.socket = stack.enter_context(
            socket.create_connection((address.host, address.port), timeout=60)
        )
        if tls is not None:
            sock = stack.enter_context(tls.wrap_socket(sock, server_hostname=address.host))
        try:
            sock.sendall(_packet(0x10, _text(b"MQTT") + b"\x04\x02\x00\x3c" + _text(b"")))
            if sock.recv(4)[3:] != b"\0":
                return False
            sock.sendall(_packet(0x32, _text(topic) + b"\x00\x01" + payload))
            return sock.recv(4)[:1] == b"\x40"
        except OSError:
            return False


def _text(value: bytes) -> bytes:
    return struct.pack(">H", len(value)) + value


def _packet(kind: int, body: bytes) -> bytes:
    assert len(body) < 128, "the length of a longer packet has several bytes"
    return bytes([kind, len(body)]) + body
