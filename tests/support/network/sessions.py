"""MQTT sessions and HTTP requests for tests, and a server that is not a broker."""

import contextlib
import faulthandler
import http.client
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from protocol.errors import ThreadFailed
from protocol.mqtt.client import stop_thread
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Disconnected, Event, Session
from protocol.mqtt.tls import BrokerAccess, Brokers

E = TypeVar("E", bound=Event)
TIMEOUT_S = 240


class EventLog:
    """A session's events, in order; `seen` has those that were waited for or skipped."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.put = self._events.put
        self.seen: list[Event] = []

    def wait(self, kind: type[E]) -> E:
        """Wait for the next event of a kind; events before it are skipped, except the end of the session's thread."""
        waited_s = 0.0
        while waited_s < TIMEOUT_S:
            start_s = time.monotonic()
            with suppress(queue.Empty):
                event = self._events.get(timeout=1)
                self.seen.append(event)
                if isinstance(event, kind):
                    return event
                if isinstance(event, ThreadFailed):
                    raise event
            # If the machine was paused meanwhile, that counts as one second.
            waited_s += min(1.0, time.monotonic() - start_s)
        faulthandler.dump_traceback()
        raise TimeoutError(f"no {kind.__name__} in {TIMEOUT_S} s after {self.seen}")

    def rest(self) -> list[Event]:
        """Return the events that were not waited for yet."""
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events


def leaked(ear: EventLog) -> tuple[int, int]:
    """Return how many files and threads eight failed connections have left open."""

    def count() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    for _ in range(2):
        ear.wait(Disconnected)
    files, threads = count()
    for _ in range(8):
        ear.wait(Disconnected)
    return count()[0] - files, count()[1] - threads


@contextmanager
def running(
    broker: Brokers, client_id: str, *topics: str, **options: Any
) -> Iterator[tuple[Session, EventLog]]:
    """Run a session as long as the context lasts."""
    log = EventLog()
    session = Session(broker, client_id=client_id, subscriptions=topics, on_event=log.put, **options)
    session.start()
    try:
        yield session, log
    finally:
        session.stop()


class Publish(Protocol):
    """Publishes a message, and returns once the broker has it (at QoS 0: once it is sent)."""

    def __call__(self, topic: str, payload: bytes, *, qos: int, retain: bool = False) -> None: ...


@contextmanager
def other_client(broker: BrokerAddress) -> Iterator[Publish]:
    """Connect another MQTT client than this project's, which publishes at any QoS."""
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.connect(broker.host, broker.port)
    client.loop_start()

    def publish(topic: str, payload: bytes, *, qos: int, retain: bool = False) -> None:
        client.publish(topic, payload, qos=qos, retain=retain).wait_for_publish(TIMEOUT_S)

    yield publish
    client.disconnect()
    stop_thread(client)


def refusal(broker: BrokerAddress, access: BrokerAccess) -> str:
    """Return why a session is refused."""
    with running(broker, "a", access=access) as (_, log):
        reason = log.wait(Disconnected).reason
        assert Connected not in map(type, log.seen)
        return reason


@contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[tuple[BrokerAddress, list[float]]]:
    """Let `answer` handle each connection to a port; yields its address and the times of the connections."""
    times: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                times.append(time.monotonic())
                with connection:
                    answer(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield BrokerAddress("127.0.0.1", server.getsockname()[1]), times
        server.shutdown(socket.SHUT_RDWR)


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
