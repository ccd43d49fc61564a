"""A phone as the page is one: it joins by a link, and speaks MQTT through the aggregator's gateway."""

import contextlib
import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPSConnection
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec
import paho.mqtt.client as mqtt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from paho.mqtt.enums import CallbackAPIVersion
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.sync.connection import Connection
from websockets.typing import Subprotocol

from protocol.wire.joining import JoinAnswer, JoinLink, JoinRequest, open_answer, signed_request
from protocol.wire.signing import public_key, sign_connection

CONNECT = b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00"
"""Of MQTT 3.1.1, without a client id."""


@dataclass
class Phone:
    """A phone with a link, and a name; `ca` is the file with the authority of the server's certificate."""

    link: JoinLink
    device: str
    ca: str | None = None
    key: bytes = field(default_factory=lambda: Ed25519PrivateKey.generate().private_bytes_raw())

    @property
    def tls(self) -> ssl.SSLContext | None:
        if not self.link.address.startswith("https"):
            return None
        context = ssl.create_default_context(cafile=self.ca)
        # `web_socket` sends in one thread and receives in another, during which Python's SSL must not receive the
        # session tickets of TLS 1.3: now and then, the request would be lost.
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        return context

    def request(self, **changed: Any) -> JoinRequest:
        asked = signed_request(self.link, self.device, "phone", key=public_key(self.key))
        return msgspec.structs.replace(asked, **changed)

    def post(self, request: JoinRequest, **headers: str) -> tuple[int, bytes]:
        """Return the status and the body of the answer to a request."""
        body, given = msgspec.json.encode(request), {"content-type": "application/json", **headers}
        return self._ask("POST", "/join/enroll", body, given)

    def join(self) -> JoinAnswer:
        status, body = self.post(request := self.request())
        assert status == 200, body
        return open_answer(body, link=self.link, request=request)

    def challenge(self) -> str:
        return str(json.loads(self._ask("GET", "/join/challenge")[1])["challenge"])

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[int, bytes]:
        where = urlsplit(self.link.address).netloc
        made = HTTPConnection(where, timeout=60)
        if self.tls is not None:
            made = HTTPSConnection(where, timeout=60, context=self.tls)
        with contextlib.closing(made) as connection:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return response.status, response.read()

    def query(self, **changed: str) -> str:
        """Return the query of a connection, signed with the own key unless values are changed."""
        values = {"fleet": self.link.fleet, "device": self.device, "challenge": self.challenge(), **changed}
        signature = sign_connection(
            values["challenge"], key=self.key, fleet=values["fleet"], device=values["device"]
        )
        return urlencode({"signature": signature.hex(), **values})

    def web_socket(self, query: str | None = None, *, name: str = "localhost", **options: Any) -> Connection:
        """Open a WebSocket, which is accepted before the phone is; `name` is that of the server."""
        address = self.link.address.replace("http", "ws", 1).replace("localhost", name)
        url = f"{address}/join/mqtt?{query or self.query()}"
        return connect(
            url, subprotocols=[Subprotocol("mqtt")], ssl=self.tls, proxy=None, open_timeout=120, **options
        )

    @contextlib.contextmanager
    def connected(self, query: str | None = None) -> Iterator[Connection]:
        """Open a WebSocket, and connect to the broker."""
        with self.web_socket(query) as socket:
            socket.send(CONNECT)
            assert socket.recv(timeout=120)[:1] == b"\x20", "no CONNACK"
            yield socket

    def refused(self, query: str | None = None) -> tuple[int, str]:
        """Return the code and the reason with which a connection is closed before a packet is sent."""
        with self.web_socket(query) as socket:
            return closing(socket)

    @contextlib.contextmanager
    def client(self, client_id: str = "") -> Iterator[mqtt.Client]:
        """Return an MQTT client that is connecting to the gateway, by default with the client id of the page."""
        client = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            client_id or self.device,
            protocol=mqtt.MQTTv5,
            transport="websockets",
            reconnect_on_failure=False,
        )
        if self.tls is not None:
            client.tls_set_context(self.tls)
        address = urlsplit(self.link.address)
        assert address.hostname is not None
        assert address.port is not None
        client.ws_set_options(f"/join/mqtt?{self.query()}")
        client.connect(address.hostname, address.port)
        client.loop_start()
        try:
            yield client
        finally:
            client.disconnect()
            client.loop_stop()


def closing(socket: Connection) -> tuple[int, str]:
    """Return the code and the reason with which the server closes a WebSocket; what it sends before is ignored."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            socket.recv(timeout=120)
    assert socket.close_code is not None
    return socket.close_code, socket.close_reason or ""
