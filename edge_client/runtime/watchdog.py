"""A time limit for runs of models that came over the network."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from edge_client.runtime.session import require_runtime

MAX_RUN_S = 120.0
"""Time limit for one batch of a head or a program's graph, which normally takes milliseconds."""

POLL_S = 0.25


class Watchdog(threading.Thread):
    """Ends runs that exceed their time limit; a thread for each run would often cost more than the run."""

    def __init__(self) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._changed = threading.Condition()
        self._runs: dict[int, tuple[Any, float]] = {}

    def watch(self, options: Any, until_s: float) -> None:
        """Terminate the run with these options at a time of the monotonic clock."""
        with self._changed:
            if not self.is_alive():
                self.start()
            self._runs[id(options)] = (options, until_s)
            self._changed.notify()

    def release(self, options: Any) -> None:
        """Stop watching a run."""
        with self._changed:
            del self._runs[id(options)]

    def run(self) -> None:
        """Poll the runs, and sleep while there are none."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._runs)
                for options, until_s in self._runs.values():
                    if time.monotonic() > until_s:
                        options.terminate = True
            time.sleep(POLL_S)


_WATCHDOG = Watchdog()


@contextlib.contextmanager
def run_options() -> Iterator[Any]:
    """Yield ONNX Runtime options that end a run after `MAX_RUN_S`, between two operators or iterations of a loop.

    Raises:
        TimeoutError: the run was ended.
    """
    options, limit_s = require_runtime().RunOptions(), MAX_RUN_S
    _WATCHDOG.watch(options, time.monotonic() + limit_s)
    try:
        yield options
    except Exception as error:
        if options.terminate:
            raise TimeoutError(f"it exceeded the time limit of {limit_s:.0f} s") from error
        raise
    finally:
        _WATCHDOG.release(options)
