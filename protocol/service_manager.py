"""Signals of a service manager, and notifications to systemd (`sd_notify(3)`)."""

import contextlib
import os
import signal
import socket
import sys
import time
import types

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
        self._address = os.environ.get("NOTIFY_SOCKET", "")
        self._due_s = 0.0

    def ready(self) -> None:
        self._send(b"READY=1")

    def alive(self) -> None:
        """Report that the main loop runs, at most every `INTERVAL_S`.

        Raises SystemExit after a signal to stop that arrived where Python ignores exceptions, as in a finalizer.
        """
        if _is_terminated:
            sys.exit(0)
        if self._address and time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + INTERVAL_S
            self._send(b"WATCHDOG=1")

    def _send(self, state: bytes) -> None:
        if not self._address:
            return
        # A leading @ stands for the null byte of an abstract address.
        address = self._address.replace("@", "\0", 1) if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)  # a sign of life that cannot be sent is not worth waiting for
            sender.connect(address)
            sender.send(state)
