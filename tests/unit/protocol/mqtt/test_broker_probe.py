"""`doctor` connects a second time, as the programs do, before it reports that the broker ends connections."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from protocol.doctor.broker import BrokerProbe
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.mqtt.tls import NO_AUTHENTICATION
from tests.support.network.brokers import needs_mosquitto

pytestmark = needs_mosquitto


@contextmanager
def _ending(broker: BrokerAddress, connections: int) -> Iterator[BrokerAddress]:
    """Forward to a broker, and end the first connections after its first answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def forward(source: socket.socket, target: socket.socket, *, ends: bool) -> None:
            with suppress(OSError), source, target:
                while data := source.recv(4096):
                    target.sendall(data)
                    if ends:
                        break
                for each in (source, target):
                    each.shutdown(socket.SHUT_RDWR)

        def accept() -> None:
            with suppress(OSError):
                number = 0
                while True:
                    client, _ = server.accept()
                    number += 1
                    to_broker = socket.create_connection((broker.host, broker.port))
                    ends = number <= connections
                    for source, target, is_answer in ((client, to_broker, False), (to_broker, client, True)):
                        thread = threading.Thread(
                            target=forward,
                            args=(source.dup(), target.dup()),
                            kwargs={"ends": ends and is_answer},
                        )
                        thread.start()
                    client.close()
                    to_broker.close()

        threading.Thread(target=accept, daemon=True).start()
        yield BrokerAddress(*server.getsockname())


def _status(address: BrokerAddress) -> str:
    with BrokerProbe(address, NO_AUTHENTICATION, subscriptions=("a",)) as probe:
        return probe.open().status


def test_one_lost_connection_is_no_failure(broker: BrokerAddress) -> None:
    with _ending(broker, connections=0) as address:
        assert _status(address) == "ok"
    with _ending(broker, connections=1) as address:
        assert _status(address) == "ok"


def test_a_broker_that_ends_every_connection_is_a_failure(broker: BrokerAddress) -> None:
    with _ending(broker, connections=100) as address:
        assert _status(address) == "failed"
