"""Running MQTT sessions for tests, and servers that are no broker."""

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from protocol.mqtt.reconnecting_session import BrokerAddress, Event, Session

E = TypeVar("E", bound=Event)
PATIENCE_S = 120.0


class Ear:
    """A session's events, in order."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.put = self._events.put
        self.heard: list[Event] = []
        """Events that were waited for or skipped."""

    def wait(self, kind: type[E]) -> E:
        """Wait for the next event of a kind; events before it are skipped."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            event = self._events.get(timeout=max(0.01, deadline - time.monotonic()))
            self.heard.append(event)
            if isinstance(event, kind):
                return event

    def rest(self) -> list[Event]:
        """Return the events since."""
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events


@contextmanager
def running(
    broker: BrokerAddress, client_id: str, *topics: str, **options: Any
) -> Iterator[tuple[Session, Ear]]:
    """Run a session as long as the context lasts."""
    ear = Ear()
    made = Session(broker, client_id=client_id, subscriptions=topics, on_event=ear.put, **options)
    made.start()
    try:
        yield made, ear
    finally:
        made.stop()


@contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[tuple[BrokerAddress, list[float]]]:
    """Accept connections without being a broker; with the times of the connections."""
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
