"""Records the project's functions that a process enters. It is imported as the process starts, before its program."""

import mmap
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

FOLDER = "PROTOFLEET_TRACE_FOLDER"
"""The environment variable that names the folder of the traces."""
WINDOW = "window"
"""A file of one byte in that folder: the window that is traced now; 0 for none."""
ROOT = Path(__file__).parents[3]
PACKAGES = tuple(f"{ROOT / package}{os.sep}" for package in ("aggregator", "edge_client", "protocol"))


def start() -> None:
    """Write each function to `FOLDER/PID` when it is entered first in a window: window, time (ns), file and name.

    Without lambdas and comprehensions, generated methods, and what modules call while they are imported.
    """
    folder = Path(os.environ[FOLDER])
    with (folder / WINDOW).open("rb") as file:
        window = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    output = os.open(folder / str(os.getpid()), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    entered: set[tuple[int, CodeType]] = set()

    def trace(frame: FrameType, _event: str, _argument: object) -> None:
        key = window[0], frame.f_code
        if not key[0] or key in entered:
            return
        if _is_function(frame.f_code):
            if _is_importing(frame):
                return  # it may be called again
            place = Path(frame.f_code.co_filename).relative_to(ROOT)
            os.write(output, f"{key[0]} {time.monotonic_ns()} {place}:{frame.f_code.co_qualname}\n".encode())
        entered.add(key)

    # A global trace function that returns None is called once a call, and for nothing else.
    threading.settrace(trace)
    sys.settrace(trace)


def _is_function(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGES) and "<" not in code.co_qualname.replace("<locals>", "")


def _is_importing(frame: FrameType) -> bool:
    """Return True if a module of the project, but not the program, is being executed."""
    each: FrameType | None = frame
    while each is not None:
        is_module = each.f_code.co_name == "<module>" and each.f_code.co_filename.startswith(PACKAGES)
        if is_module and each.f_globals["__name__"] != "__main__":
            return True
        each = each.f_back
    return False
