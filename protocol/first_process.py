"""SIGTERM for process 1, as in a container: every program imports this module before all others.

Linux ignores a signal without a handler for process 1. Imports take half a second, and commands that run until
interrupted set a handler of their own later.
"""

import os
import signal
import sys


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)


if os.getpid() == 1:
    signal.signal(signal.SIGTERM, _end)
