"""A connection to PostgreSQL on which every call ends, also where nothing answers any more."""

import time
from collections.abc import Generator
from typing import Any

import psycopg

ANSWER_S = 20.0
"""Seconds without a byte after which a server that owes an answer counts as gone.

TCP notices within the same time that a machine is gone, but not that a server, or a proxy before it, is stuck.
"""


class Connection(psycopg.Connection[Any]):
    """A connection that is closed, with an OperationalError, if the server does not answer."""

    def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        """Return the result of a generator of psycopg, which calls this for each communication with the server."""
        try:
            return super().wait(_within(gen, ANSWER_S), *arguments, **options)
        except _NoAnswer:
            self.close()
            raise


class _NoAnswer(psycopg.OperationalError):
    pass


def _within(gen: Any, seconds: float) -> Generator[Any, Any, Any]:
    """Wrap a generator that yields what it waits for, and is sent what is ready: nothing, every tenth of a second."""
    wanted, deadline = next(gen), time.monotonic() + seconds
    while True:
        ready = yield wanted
        if ready:
            deadline = time.monotonic() + seconds
        elif time.monotonic() > deadline:
            raise _NoAnswer(f"PostgreSQL has not answered for {seconds:.0f} s")
        try:
            wanted = gen.send(ready)
        except StopIteration as end:
            return end.value
