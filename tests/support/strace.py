"""strace, attached to a stopped program and all that it starts."""

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path


class Strace:
    """strace, which writes the calls of a program to a log.

    Args:
        pid: of the program, which is stopped.
        log: file that is written.
        options: of strace.

    Raises:
        PermissionError: this system does not permit it.
    """

    def __init__(self, pid: int, log: Path, *options: str) -> None:
        command = ["strace", "-f", "-y", "-o", str(log), *options, "-p", str(pid)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        if "attached" not in line:
            self._process.wait()
            raise PermissionError(line.strip())

    def detach(self) -> None:
        """End the trace and all injections; the program continues."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        self._process.communicate()


def unavailable() -> str:
    """Return why no program can be traced on this system; empty if one can."""
    if shutil.which("strace") is None:
        return "strace is not installed: apt-get install strace"
    command = ["strace", "-o", "/dev/null", sys.executable, "-S", "-c", ""]
    traced = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"strace is not permitted here: {traced.stderr.strip()}" if traced.returncode else ""
