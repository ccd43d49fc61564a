"""Records which of the project's functions a process enters, in phases that another process announces.

The folder in PROTOFLEET_CALLS has a file `phase` with the number of the phase, one byte, and gets a file of lines for
each program: the phase, a tab, and the function, at its first call in the phase. A child process writes to the file of
its parent.
"""

import mmap
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOMS = ("aggregator", "edge_client", "export", "protocol", "protofleet")
ROOT = f"{Path(__file__).parents[1]}/"
FOLDER, PROGRAM = "PROTOFLEET_CALLS", "PROTOFLEET_CALLS_PROGRAM"
IS_FUNCTION = 1
"""CO_OPTIMIZED, a flag that code of modules and classes does not have."""


def name_of(code: CodeType) -> str:
    """Return the file and qualified name of a function of the project; otherwise an empty string.

    Comprehensions and lambdas belong to the function around them.
    """
    room, _, _ = code.co_filename.removeprefix(ROOT).partition("/")
    is_own = code.co_filename.startswith(ROOT) and room in ROOMS
    if not is_own or not code.co_flags & IS_FUNCTION or code.co_name.startswith("<"):
        return ""
    return f"{code.co_filename.removeprefix(ROOT)}:{code.co_qualname}"


def record() -> None:
    """Record the calls of this process, of its later threads and of its forks, if the variables say where."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    calls = os.open(Path(folder) / os.environ[PROGRAM], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with (Path(folder) / "phase").open("rb") as file:
        phase = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    seen = set[tuple[int, CodeType]]()

    def on_call(frame: FrameType, event: str, _argument: Any) -> None:
        call = phase[0], frame.f_code
        if event != "call" or call in seen:
            return
        seen.add(call)
        if name := name_of(frame.f_code):
            os.write(calls, f"{call[0]}\t{name}\n".encode())

    threading.setprofile(on_call)
    sys.setprofile(on_call)
