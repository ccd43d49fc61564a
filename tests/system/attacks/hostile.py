"""Clients without rules: they publish anything to any topic, and return the broker's answer."""

import contextlib
import queue
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.reasoncodes import ReasonCode

from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, open_tls

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Heard:
    """A message that came."""

    topic: str
    payload: bytes
    retained: bool


class Client:
    """A connection without rules.

    Args:
        address: of a broker.
        access: certificate or password.
        client_id: as in MQTT.
        will: topic and payload of a retained Last Will.
        on_heard: called from a thread of its own with each message.
    """

    def __init__(
        self,
        address: BrokerAddress,
        access: BrokerAccess = NO_AUTHENTICATION,
        *,
        client_id: str = "",
        will: tuple[str, bytes] | None = None,
        on_heard: Callable[[Heard], None] = lambda _: None,
    ) -> None:
        self.heard: list[Heard] = []
        self._address = address
        self._on_heard = on_heard
        self._answers: queue.SimpleQueue[tuple[str, int, ReasonCode | str]] = queue.SimpleQueue()
        self._client = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            protocol=mqtt.MQTTv5,
            reconnect_on_failure=False,
        )
        self._client.max_inflight_messages_set(1000)
        if (tls := open_tls(access)) is not None:
            self._client.tls_set_context(tls)
        if access.username is not None:
            self._client.username_pw_set(access.username, access.password)
        if will is not None:
            self._client.will_set(will[0], will[1], qos=1, retain=True)
        self._client.on_connect = lambda _c, _d, _f, code, _p: self._answers.put(("connect", 0, code))
        self._client.on_disconnect = lambda *_: self._answers.put(("closed", 0, "closed"))
        self._client.on_publish = lambda _c, _d, mid, code, _p: self._answers.put(("publish", mid, code))
        self._client.on_subscribe = lambda _c, _d, mid, codes, _p: self._answers.put(
            ("subscribe", mid, codes[0])
        )
        self._client.on_message = self._hear

    def connect(self) -> bool:
        """Connect; returns whether the broker has accepted."""
        try:
            self._client.connect(self._address.host, self._address.port, keepalive=600)
        except OSError:
            return False
        self._client.loop_start()
        kind, _, code = self._answers.get(timeout=PATIENCE_S)
        return kind == "connect" and isinstance(code, ReasonCode) and not code.is_failure

    def __enter__(self) -> Self:
        assert self.connect(), f"{self._address} has refused this client"
        return self

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def vanish(self) -> None:
        """End without DISCONNECT, so that the broker publishes the last will."""
        sock = self._client.socket()
        if isinstance(sock, socket.socket):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._client.loop_stop()

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> bool:
        """Publish; returns whether the broker has accepted."""
        mid = self._client.publish(topic, payload, qos=1, retain=retain).mid
        return self._answer("publish", mid)

    def say(self, topic: str, payload: bytes) -> None:
        """Publish and do not wait; from any thread."""
        self._client.publish(topic, payload, qos=1)

    def subscribe(self, topic: str) -> bool:
        """Subscribe; returns whether the broker grants it, which does not mean that anything arrives."""
        _, mid = self._client.subscribe(topic, qos=1)
        return self._answer("subscribe", mid or 0)

    def flood(self, messages: Iterable[tuple[str, bytes]]) -> int:
        """Publish messages as fast as the broker accepts them; returns how many."""
        count = 0
        for topic, payload in messages:
            mid = self._client.publish(topic, payload, qos=1).mid
            count += 1
            if count % 500 == 0:
                self._answer("publish", mid)
        self.publish("flooded", b"")
        return count

    def _answer(self, kind: str, mid: int) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            got, number, code = self._answers.get(timeout=max(0.01, deadline - time.monotonic()))
            if got == "closed":
                return False
            if got == kind and number == mid:
                return isinstance(code, ReasonCode) and not code.is_failure

    def _hear(self, _c: mqtt.Client, _d: Any, message: mqtt.MQTTMessage) -> None:
        heard = Heard(message.topic, bytes(message.payload), message.retain)
        self.heard.append(heard)
        self._on_heard(heard)


class Witness(Client):
    """A client that receives everything the broker distributes."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._marks = 0
        self._lock = threading.Lock()
        assert self.subscribe("#")
        self.settle()
        self.heard.clear()
        return self

    def settle(self) -> None:
        """Wait until all that the broker has accepted so far has arrived."""
        with self._lock:
            self._marks += 1
            topic = f"witness/{id(self)}/{self._marks}"
        assert self.publish(topic, b"mark")
        deadline = time.monotonic() + PATIENCE_S
        while not any(heard.topic == topic for heard in self.heard):
            assert time.monotonic() < deadline, "the broker distributes nothing any more"
            time.sleep(0.005)

    def said(self, topic: str) -> list[bytes]:
        """Return the payloads that were published on a topic, without retained ones."""
        return [heard.payload for heard in self.heard if heard.topic == topic and not heard.retained]


def raw_publish(address: BrokerAddress, access: BrokerAccess, topic: bytes, payload: bytes) -> bool:
    """Publish to a topic that no client library accepts; returns whether it was acknowledged."""
    tls = open_tls(access)
    with contextlib.ExitStack() as stack:
        sock: socket.socket = stack.enter_context(
            socket.create_connection((address.host, address.port), timeout=10)
        )
        if tls is not None:
            sock = stack.enter_context(tls.wrap_socket(sock, server_hostname=address.host))
        try:
            sock.sendall(_packet(0x10, _text(b"MQTT") + b"\x04\x02\x00\x3c" + _text(b"")))
            if sock.recv(4)[3:] != b"\0":
                return False
            sock.sendall(_packet(0x32, _text(topic) + b"\x00\x01" + payload))
            return sock.recv(4)[:1] == b"\x40"
        except (OSError, ssl.SSLError):
            return False


def _text(value: bytes) -> bytes:
    return struct.pack(">H", len(value)) + value


def _packet(kind: int, body: bytes) -> bytes:
    size, head = len(body), bytearray([kind])
    while True:
        size, digit = divmod(size, 128)
        head.append(digit | (0x80 if size else 0))
        if not size:
            return bytes(head) + body
