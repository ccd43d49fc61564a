"""`edge-client serve` and `watch` as child processes of the service: started again when they end, and ended with it."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from protocol.children import end_with, ending
from protocol.log import event
from protocol.retry_delay import MAX_DELAY_S, retry_delay_s
from protocol.threads import start_thread

log = logging.getLogger(__name__)

TICK_S = 0.5
GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""


class _Program:
    """A command that is run again and again, as a child process whose standard input is held open by this one."""

    def __init__(
        self, name: str, arguments: Sequence[str], *, module: str, delay_s: Callable[[int], float]
    ) -> None:
        self._name = name
        self._command = [sys.executable, "-P", "-m", __name__, module, name, *arguments]
        self._delay_s = delay_s
        self._child: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._started_s = 0.0
        self._due_s = 0.0

    def check(self) -> None:
        """Start the program if it is due, and note if it has ended."""
        if self._child is not None:
            if (status := self._child.poll()) is not None:
                self._release()
                self._retry_later(f"program ended: {ending(status)}")
        elif time.monotonic() >= self._due_s:
            self._started_s = time.monotonic()
            try:
                # In a session of its own: Ctrl-C of a terminal is for the service.
                self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
            except OSError as error:
                self._retry_later("program not started", reason=os.strerror(error.errno or 0))
            else:
                event(log, logging.INFO, "program started", program=self._name, pid=self._child.pid)

    def _retry_later(self, text: str, **fields: Any) -> None:
        now_s = time.monotonic()
        if now_s - self._started_s > MAX_DELAY_S:
            self._failures = 0
        retry_s = self._delay_s(self._failures)
        self._failures, self._due_s = self._failures + 1, now_s + retry_s
        event(log, logging.ERROR, text, program=self._name, **fields, retry_s=retry_s)

    def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def end(self, *, until_s: float) -> None:
        """Wait for the end of a terminated program, and kill it at `until_s`."""
        if self._child is None:
            return
        try:
            self._child.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            event(log, logging.WARNING, "program killed", program=self._name, pid=self._child.pid)
            self._child.kill()
            self._child.wait()
        self._release()

    def _release(self) -> None:
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
        self._child = None


@contextlib.contextmanager
def running(
    programs: Mapping[str, Sequence[str]],
    *,
    module: str = "edge_client.cli",
    delay_s: Callable[[int], float] = retry_delay_s,
    grace_s: float = GRACE_S,
) -> Iterator[None]:
    """Run commands of a module with arguments beside the service, and end them with it.

    A command that ends is started again, after `delay_s` of the times before. It also ends when the service is killed.
    """
    started = [_Program(name, given, module=module, delay_s=delay_s) for name, given in programs.items()]
    is_over = threading.Event()

    def supervise() -> None:
        while not is_over.is_set():
            for program in started:
                program.check()
            is_over.wait(TICK_S)

    supervisor = start_thread(supervise, name="programs", on_failure=lambda _: None) if started else None
    try:
        yield
    finally:
        is_over.set()
        if supervisor is not None:
            supervisor.join()
        for program in started:
            program.terminate()
        until_s = time.monotonic() + grace_s
        for program in started:
            program.end(until_s=until_s)


if __name__ == "__main__":
    import runpy

    end_with(0)
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
