"""Time limits for what ONNX Runtime does: a watchdog ends runs, and the program where that has no effect."""

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.log import event

log = logging.getLogger(__name__)

POLL_S = 0.25

GRACE_S = 60.0
"""How long a run may go on after its time limit, in an operator that cannot be interrupted, before the program ends."""


@dataclass(eq=False)
class _Run:
    """A run's ONNX Runtime options, and its time limit, a time of the monotonic clock."""

    options: Any
    until_s: float


class _Watchdog(threading.Thread):
    """Ends runs that exceed their time limit; a thread for each run would often cost more than the run."""

    def __init__(self) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._changed = threading.Condition()
        self._runs: set[_Run] = set()

    def watch(self, run: _Run) -> None:
        """Terminate a run at its time limit, and the program if that has no effect."""
        with self._changed:
            if not self.is_alive():
                self.start()
            self._runs.add(run)
            self._changed.notify()

    def release(self, run: _Run) -> None:
        with self._changed:
            self._runs.remove(run)

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._runs)
                for run in self._runs:
                    late_s = time.monotonic() - run.until_s
                    run.options.terminate = run.options.terminate or late_s >= 0
                    if late_s > GRACE_S:
                        _end_program()
            time.sleep(POLL_S)


_WATCHDOG = _Watchdog()


def _end_program() -> None:
    text = "a graph does not end and cannot be interrupted: the program exits, which counts as a crash"
    event(log, logging.CRITICAL, text, grace_s=GRACE_S)
    os._exit(1)


@contextlib.contextmanager
def time_limit(limit_s: float) -> Iterator[Any]:
    """Yield ONNX Runtime options that end a run after a time, between two operators or iterations of a loop."""
    from edge_client.graphs.session import require_runtime  # numpy: only who runs a graph needs it

    options = require_runtime().RunOptions()
    # Without it ONNX Runtime's Python code raises and catches an error in each run with bound arrays: 30 us.
    options.add_run_config_entry("gpu_graph_id", "0")
    run = _Run(options, time.monotonic() + limit_s)
    _WATCHDOG.watch(run)
    try:
        yield options
    except Exception as error:
        if options.terminate:
            raise TimeoutError(f"it exceeded the time limit of {limit_s:.0f} s") from error
        raise
    finally:
        _WATCHDOG.release(run)


@contextlib.contextmanager
def load_limit(limit_s: float) -> Iterator[None]:
    """End the program with a traceback if the body takes longer: it may hold Python's lock, so no thread can."""
    with contextlib.ExitStack() as opened:
        # There is no standard error without a terminal or a service manager.
        file = sys.__stderr__ or opened.enter_context(Path(os.devnull).open("w", encoding="ascii"))
        faulthandler.dump_traceback_later(limit_s, exit=True, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
