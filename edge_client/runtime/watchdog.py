"""Runs of graphs that came over the wire are ended if they do not end by themselves."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from edge_client.runtime.backbone import require_runtime

MAX_RUN_S = 120.0
"""Seconds that a head or a graph of a program may take for one batch, which is milliseconds' work."""

LOOK_S = 0.25


class _Guard(threading.Thread):
    """Looks at what is being run from time to time: a thread for each run would cost more than many a run."""

    def __init__(self) -> None:
        super().__init__(name="ending", daemon=True)
        self._lock = threading.Condition()
        self._runs: dict[int, tuple[Any, float]] = {}

    def begin(self, options: Any, until_s: float) -> None:
        """Look at a run until it ends, and end it once that time of the monotonic clock has come."""
        with self._lock:
            self._runs[id(options)] = (options, until_s)
            self._lock.notify()

    def end(self, options: Any) -> None:
        """Look at it no more."""
        with self._lock:
            del self._runs[id(options)]

    def run(self) -> None:
        """Do nothing while nothing is run."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._runs)
                for options, until_s in self._runs.values():
                    if time.monotonic() > until_s:
                        options.terminate = True
            time.sleep(LOOK_S)


_GUARD = _Guard()
_STARTS = threading.Lock()


@contextlib.contextmanager
def ending() -> Iterator[Any]:
    """Options of ONNX Runtime under which a run that takes longer than `MAX_RUN_S` is ended.

    That is between two operators, and in a loop after each turn.

    Raises:
        TimeoutError: it had to be ended.
    """
    with _STARTS:
        if not _GUARD.is_alive():
            _GUARD.start()
    options, limit_s = require_runtime().RunOptions(), MAX_RUN_S
    _GUARD.begin(options, time.monotonic() + limit_s)
    try:
        yield options
    except Exception as error:
        if options.terminate:
            raise TimeoutError(f"it has not come to an end within {limit_s:.0f} s") from error
        raise
    finally:
        _GUARD.end(options)
