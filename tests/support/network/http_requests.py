"""HTTP requests, one for each connection."""

import contextlib
import http.client
from collections.abc import Mapping
from types import MappingProxyType

from protocol.mqtt.tls import BrokerAddress

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def request(
    server: BrokerAddress,
    method: str,
    path: str,
    headers: Mapping[str, str] = NO_HEADERS,
    body: bytes | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """Send a request to a server; returns the status, headers and body of the answer."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
