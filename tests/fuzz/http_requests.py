"""Requests to `edge-client serve`: the bytes of a connection, until the client sends no more."""

import io
import re
import socket
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

from PIL import Image

from edge_client.apps.http.connections import Connections, TokenGuesses
from edge_client.apps.http.options import ServerOptions
from edge_client.apps.http.server import RequestHandler
from edge_client.heads.class_prior import Prior
from edge_client.heads.classifier import Prediction
from edge_client.images.decoding import decoded
from edge_client.store.stored_values import InstalledHead
from tests.fuzz.target import MIB, Target

_HEAD = InstalledHead(head=bytes(32), version=1, backbones=(), classes=("cat",))


def _classify(data: bytes, *, top: int) -> Prediction:
    """Decode the image, and return as many classes as there are."""
    with decoded(data) as image:
        assert image.width > 0
    return Prediction((("cat", 1.0),)[:top], Prior())


_SERVER = cast(
    "Any",
    SimpleNamespace(
        options=ServerOptions(max_image_bytes=32 * MIB),
        heads=SimpleNamespace(follow=lambda: SimpleNamespace(installed=_HEAD, classify=_classify)),
        count_bytes=lambda _: None,
        connections=Connections(),
        guesses=TokenGuesses(),
        turn=threading.Lock(),
    ),
)


def answer_any(data: bytes) -> None:
    """Answer a connection; the answer is one of the documented ones, or none to an incomplete request."""
    client, server = socket.socketpair()
    with client, server:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        assert _SERVER.connections.add(server, "127.0.0.1")
        RequestHandler(server, ("127.0.0.1", 0), _SERVER)
        _SERVER.connections.remove(server)
        server.close()
        answer = b"".join(iter(lambda: client.recv(65_536), b""))
    if answer:
        status = re.match(rb"(HTTP/1\.1 100 Continue\r\n\r\n)?HTTP/1\.1 (\d{3}) ", answer)
        assert status is not None, answer
        assert int(status[2]) in {200, 400, 403, 404, 405, 408, 411, 413, 414, 415, 421, 422, 431, 505}, (
            answer
        )


def _requests() -> Iterable[bytes]:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG")
    image = file.getvalue()
    head = f"POST /predict?top=2 HTTP/1.1\r\nHost: localhost:8090\r\nContent-Length: {len(image)}\r\n"
    yield head.encode() + b"\r\n" + image
    yield head.encode() + b"Expect: 100-continue\r\nContent-Type: image/png\r\n\r\n" + image
    yield b"HEAD /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    yield b"GET /healthz HTTP/1.1\r\nHost: [::1]:8090\r\n\r\n"
    yield b"PUT / HTTP/1.0\r\nOrigin: null\r\nTransfer-Encoding: chunked\r\nContent-Length: 99999999\r\n\r\n"


HTTP = Target("http", answer_any, _requests, max_bytes=16_384, at_least_bytes=2 * MIB, share=0.2)
