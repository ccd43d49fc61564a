"""The HTTP server's process: started again if it ends, and gone with its aggregator."""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from aggregator.http.process import HttpOptions, HttpServer
from aggregator.http.settings import HttpAddress
from tests.support.fleets.fleet import wait_until
from tests.unit.aggregator.http.servers import serving

AGGREGATOR = """
import sys, time
from pathlib import Path
from aggregator.http.process import HttpOptions, HttpServer
from aggregator.http.settings import HttpAddress
address = HttpAddress("127.0.0.1", int(sys.argv[2]))
server = HttpServer(HttpOptions(address=address, is_default=False, token=None, hosts=()), Path(sys.argv[1]))
server.start()
time.sleep(600)
"""


def servers() -> list[psutil.Process]:
    """Return the server processes that this one has started."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "aggregator.http" in child.cmdline()]


def test_server_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same port, after a crash."""
    monkeypatch.setattr("aggregator.http.process.retry_delay_s", lambda _: 0.1)
    with serving(tmp_path) as (client, _):
        (process,) = servers()
        process.kill()
        process.wait()
        assert client.get("/healthz").status == 200  # the socket is the aggregator's: the request waits


def test_killed_aggregator_leaves_no_server(tmp_path: Path) -> None:
    """The port is free for its next start."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listening:
        port = listening.getsockname()[1]
    parent = subprocess.Popen([sys.executable, "-c", AGGREGATOR, str(tmp_path), str(port)])
    try:
        wait_until("the server", lambda: answers(port), diagnostics=str)
    finally:
        parent.kill()
        parent.wait()
    options = HttpOptions(address=HttpAddress("127.0.0.1", port), is_default=False, token=None, hosts=())
    HttpServer(options, tmp_path).stop()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        connection.settimeout(5)
        return connection.recv(64).startswith(b"HTTP/1.1 200")
    return False
