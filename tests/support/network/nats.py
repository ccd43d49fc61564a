"""Three NATS servers in a cluster, whose MQTT listeners a fleet uses as its brokers.

What matters in the configuration:

- `stream_replicas: 3`: messages, retained messages and sessions are on all servers. Three is the least that survives
  the loss of one.
- No `consumer_replicas`: with 1, the subscriptions of clients on other servers can be lost with the killed one, and
  nothing tells those clients.
- `consumer_inactive_threshold`: what a killed server's clients had subscribed is removed after that time. Without it,
  messages for them are kept for ever.
- `server_name` and `cluster.name` are required.
- Newer versions (2.15.1, not 2.10.27) have `js_api_timeout` in `mqtt`: with "1s" a refused subscription costs a second
  instead of four.
"""

import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from protocol.mqtt.reconnecting_session import BrokerAddress, Connected
from tests.support.network.brokers import free_address
from tests.support.network.sessions import running
from tests.support.programs import find_program

SERVERS = 3
START_TIMEOUT_S = 240.0
CONFIGURATION = """\
server_name: server-{number}
listen: "{client}"
jetstream {{ store_dir: "{folder}/jetstream-{number}", max_memory_store: 256MB, max_file_store: 1GB }}
cluster {{ name: fleet, listen: "{route}", routes: [{routes}] }}
mqtt {{ listen: "{mqtt}", stream_replicas: 3, consumer_inactive_threshold: "5m" }}
"""


def nats_program() -> str | None:
    """Return the path of nats-server; None if it is not installed."""
    return find_program("nats-server")


needs_nats = pytest.mark.skipif(
    nats_program() is None, reason="nats-server is not installed: apt-get install nats-server"
)


class NatsCluster:
    """Three NATS servers; as a context, it ends them.

    Attributes:
        brokers: the addresses of their MQTT listeners.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.brokers = tuple(free_address() for _ in range(SERVERS))
        self._routes = tuple(free_address() for _ in range(SERVERS))
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._processes = [self._start(number) for number in range(SERVERS)]
            for broker in self.brokers:
                self._wait_for(broker)
                # A server's first client lets it create the streams, or load the retained messages.
                with running(broker, "first", "first") as (_, log):
                    log.wait(Connected)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def kill(self, number: int) -> None:
        """End a server with `kill -9`."""
        self._processes[number].kill()
        self._processes[number].wait()

    def log(self, number: int) -> str:
        return (self.folder / f"nats-{number}.log").read_text(errors="replace")

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        config = self.folder / f"nats-{number}.conf"
        config.write_text(
            CONFIGURATION.format(
                number=number,
                folder=self.folder,
                client=free_address(),
                route=self._routes[number],
                routes=", ".join(f'"nats://{route}"' for route in self._routes),
                mqtt=self.brokers[number],
            ),
            encoding="utf-8",
        )
        with (self.folder / f"nats-{number}.log").open("ab") as log:
            return subprocess.Popen([nats_program() or "nats-server", "-c", config], stdout=log, stderr=log)

    def _wait_for(self, broker: BrokerAddress) -> None:
        """Wait until a server accepts MQTT connections, which it does when JetStream has a leader."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and all(process.poll() is None for process in self._processes):
            with suppress(OSError), socket.create_connection((broker.host, broker.port), timeout=1):
                return
            time.sleep(0.02)
        raise RuntimeError(f"NATS did not start on {broker}: {[self.log(n)[-1000:] for n in range(SERVERS)]}")

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
