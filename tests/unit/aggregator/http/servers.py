"""The HTTP server's real process on a state directory, and requests to it."""

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aggregator.http.process import listening_settings
from aggregator.http.settings import TOKEN_FILE, HttpAddress, HttpSettings
from aggregator.supervised import ServeState, encode
from protocol.children import Child
from protocol.mqtt.tls import BrokerAddress
from tests.support.fleets.fleet import wait_until

TOKEN = "a token of the operator's"


def own_token(state: Path) -> str:
    """Return the token in a state directory."""
    return (state / TOKEN_FILE).read_text().strip()


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """Requests to a server; `headers` are sent with all of them."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = {**self.headers, **(headers or {})}
        data = None
        if body is not None:
            data, given = json.dumps(body).encode(), {"Content-Type": "application/json", **given}
        with contextlib.closing(connection):
            connection.request(method, path, data, given)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, headers={name.replace("_", "-"): headers[name] for name in headers})

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.request("POST", path, body, {name.replace("_", "-"): headers[name] for name in headers})


@contextlib.contextmanager
def serving(
    state: Path,
    *,
    token: str = "",
    hosts: tuple[str, ...] = (),
    read_token: str = "",
    host: str = "127.0.0.1",
    brokers: tuple[BrokerAddress, ...] = (),
) -> Iterator[tuple[Client, str]]:
    """Run the server's process; yields a client without a token, and the token."""
    settings = HttpSettings(
        address=HttpAddress(host, 0),
        token=token,
        read_token=read_token,
        hosts=hosts,
        public=not token and not read_token,
        brokers=brokers,
    )
    file = state / TOKEN_FILE
    before = own_token(state) if file.exists() else ""
    with started(settings, state) as (client, child):
        child.send(encode(ServeState("", is_ready=True)))
        wait_until(
            "the token",
            lambda: token or (file.exists() and own_token(state) != before),
            diagnostics=lambda: "see its log on stderr",
        )
        yield client, token or own_token(state)


@contextlib.contextmanager
def started(settings: HttpSettings, state: Path) -> Iterator[tuple[Client, Child]]:
    """Run the server's process, as its supervisor does."""
    with listening_settings(settings, state) as given, contextlib.ExitStack() as cleanup:
        assert given is not None
        child = Child(
            "aggregator.http",
            on_message=lambda _: None,
            on_line=None,
            on_end=lambda _: None,
            on_failure=lambda _: None,
            descriptors=(given.socket,),
        )
        cleanup.callback(child.kill)
        child.send(encode(given))
        with socket.socket(fileno=os.dup(given.socket)) as listening:
            yield Client(listening.getsockname()[1]), child
