"""A thread that carries commands out on a store, as the loop of a running aggregator does."""

import contextlib
import queue
import threading
from collections.abc import Iterator

from aggregator.commands.command_socket import CommandSocket, Request
from aggregator.storage.store import Store
from protocol.errors import StateError, ThreadFailed


@contextlib.contextmanager
def taking_commands(store: Store) -> Iterator[list[Request]]:
    """Take commands on a store that is locked; yields all requests so far."""
    events: queue.SimpleQueue[Request | ThreadFailed | None] = queue.SimpleQueue()
    seen: list[Request] = []

    def carry_out() -> None:
        while (request := events.get()) is not None:
            assert isinstance(request, Request)
            seen.append(request)
            with contextlib.suppress(StateError):
                if (done := request.carry_out(store)) is not None:
                    request.answer(done)

    thread = threading.Thread(target=carry_out)
    thread.start()
    store.is_served = True
    try:
        commands = CommandSocket(store.folder, events.put)
        try:
            yield seen
        finally:
            commands.stop()
    finally:
        events.put(None)
        thread.join()
