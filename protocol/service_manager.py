"""Signals of a service manager, and notifications to systemd (`sd_notify(3)`)."""

import contextlib
import os
import signal
import socket
import sys
import time
import types
from collections.abc import Callable
from typing import Literal

INTERVAL_S = 10.0
"""Time between two signs of life; far below the units' `WatchdogSec`."""


_is_terminated = False


def stop_on_terminate() -> None:
    """Exit with status 0 on SIGTERM, which service managers send, and on SIGHUP, which a closed terminal does."""
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, _stop)


def _stop(_number: int, _frame: types.FrameType | None) -> None:
    global _is_terminated  # noqa: PLW0603 - a process has one
    _is_terminated = True
    sys.exit(0)


class ServiceManager:
    """The service manager that started this program, if any; the main loop calls `alive` in each iteration."""

    def __init__(self) -> None:
        self._due_s = 0.0

    def ready(self) -> None:
        notify("READY=1")

    def alive(self) -> None:
        """Report that the main loop runs, at most every `INTERVAL_S`.

        Raises SystemExit after a signal to stop that arrived where Python ignores exceptions, as in a finalizer.
        """
        if _is_terminated:
            sys.exit(0)
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + INTERVAL_S
            notify("WATCHDOG=1")


State = Literal["READY=1", "WATCHDOG=1"]


def notify_systemd(state: State) -> None:
    """Send a state to systemd, if it has started this program as a service that notifies."""
    if not (address := os.environ.get("NOTIFY_SOCKET", "")):
        return
    # A leading @ stands for the null byte of an abstract address.
    address = address.replace("@", "\0", 1) if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)  # a sign of life that cannot be sent is not worth waiting for
        sender.connect(address)
        sender.send(state.encode())


notify: Callable[[State], None] = notify_systemd
"""Sends a state to the service manager; the program of a supervisor replaces it."""
