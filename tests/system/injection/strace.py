"""strace, attached to a stopped program: it records system calls, counts them, and injects faults into them."""

import contextlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

JOBS = "edge-client, its jobs"
"""The process of the first job alone is traced."""

KILLED_IN_JOB = "edge-client, killed in a job"
"""The service is killed while its first job is stopped at a call, and started again at once."""


DETACH_S = 30.0


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
        try:
            self._process.communicate(timeout=DETACH_S)
        except subprocess.TimeoutExpired:  # it misses the end of a process that is killed as it is attached
            self._process.kill()
            self._process.communicate()


def unavailable() -> str:
    """Return why no program can be traced on this system; empty if one can."""
    if shutil.which("strace") is None:
        return "strace is not installed: apt-get install strace"
    command = ["strace", "-o", "/dev/null", sys.executable, "-S", "-c", ""]
    traced = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"strace is not permitted here: {traced.stderr.strip()}" if traced.returncode else ""


CALLS = (
    "openat", "newfstatat", "getdents64", "read", "pread64", "write", "pwrite64", "pwritev", "fsync", "fdatasync",
    "ftruncate", "rename", "unlink", "mkdir", "mmap",
)  # fmt: skip
"""The system calls by which the programs use files and memory."""

_WRITING = frozenset({"openat", "write", "pwrite64", "pwritev", "ftruncate", "mkdir", "rename"})
_INTERRUPTIBLE = frozenset({"openat", "read", "pread64", "write", "pwrite64", "fsync", "fdatasync"})

_LINE = re.compile(r"^(\d+) +(\w+)\((.*)$")
_PATH = re.compile(r'^(?:AT_FDCWD<[^>]*>, )?"([^"]*)"|^-?\d+<([^>]*)>')


@dataclass(frozen=True, order=True)
class Injection:
    """A fault of the `when`th such call of each thread; ENOSPC lasts from there on, as a full disk does."""

    program: str
    call: str
    fault: str
    when: int

    def options(self) -> list[str]:
        kind, fault = "signal" if self.fault == "SIGKILL" else "error", self.fault
        if self.program == KILLED_IN_JOB:
            fault = "SIGSTOP"
        lasting = "+" if self.lasts else ""
        return ["-e", f"inject={self.call}:{kind}={fault}:when={self.when}{lasting}"]

    @property
    def lasts(self) -> bool:
        return self.fault == "ENOSPC"

    def __str__(self) -> str:
        return f"{self.fault} at {self.call} {self.when}{'+' if self.lasts else ''} of {self.program}"


def faults_of(call: str, program: str = "") -> tuple[str, ...]:
    """Return the faults to inject into a system call of a program."""
    if program == KILLED_IN_JOB:
        return ("SIGKILL",)
    if program == JOBS:  # a full disk is the service's as well
        return tuple(fault for fault in faults_of(call) if fault != "ENOSPC")
    if call == "mmap":
        return ("ENOMEM", "SIGKILL")
    errors = ("EIO", *(("ENOSPC",) if call in _WRITING else ()))
    return (*errors, *(("EINTR",) if call in _INTERRUPTIBLE else ()), "SIGKILL")


def trace_files(pid: int, log: Path, injection: Injection | None = None) -> Strace:
    """Trace a stopped program's calls on files, with a fault if one is given."""
    return Strace(pid, log, *_options(injection))


def write_tracing_interpreter(file: Path, log: Path, injection: Injection | None = None) -> None:
    """Write a program that runs this interpreter, and traces it the first time."""
    tracer = shlex.join(["strace", "-D", "-f", "-y", "-o", str(log), *_options(injection)])
    python = shlex.quote(sys.executable)
    first = shlex.quote(str(file.with_suffix(".first")))
    file.write_text(
        f'#!/bin/sh\nmkdir {first} 2>/dev/null && exec {tracer} {python} "$@"\nexec {python} "$@"\n'
    )
    file.chmod(0o755)


def _options(injection: Injection | None) -> list[str]:
    calls = injection.call if injection else ",".join(CALLS)
    return ["-s", "0", *(injection.options() if injection else []), "-e", f"trace={calls}"]


def stopped(log: Path) -> set[int]:
    """Return the processes of a log if one of them is stopped."""
    text = log.read_text(errors="replace") if log.exists() else ""
    if "--- stopped by SIGSTOP ---" not in text:
        return set()
    return {int(match[1]) for match in map(_LINE.match, text.splitlines()) if match}


def calls_below(log: Path, folder: Path) -> dict[str, list[int]]:
    """Return the numbers within their threads of the calls on files below a folder, and of all calls of mmap."""
    counts: Counter[tuple[str, str]] = Counter()
    found: defaultdict[str, set[int]] = defaultdict(set)
    for line in log.read_text(errors="replace").splitlines():
        if match := _LINE.match(line):
            thread, call, rest = match.groups()
            counts[thread, call] += 1
            if call == "mmap" or is_below(rest, folder):
                found[call].add(counts[thread, call])
    return {call: sorted(numbers) for call, numbers in found.items()}


def is_below(arguments: str, folder: Path) -> bool:
    path = _PATH.match(arguments)
    return path is not None and Path(path[1] or path[2] or "/").is_relative_to(folder)


def injected(log: Path, folder: Path) -> tuple[int, int]:
    """Return how often a fault was injected: below a folder or into mmap, and elsewhere; kills count once.

    A call is unfinished where a kill was injected into it. Others are not: a service kills its job at the end.
    """
    inside = outside = kills = 0
    begun: dict[str, str] = {}
    for line in log.read_text(errors="replace").splitlines():
        thread, _, rest = line.partition(" ")
        if match := _LINE.match(line):
            begun[thread] = match[3] if match[2] != "mmap" else f'"{folder}"'
        below = is_below(begun.get(thread, ""), folder)
        if "(INJECTED)" in line:
            inside += below
            outside += not below
        elif "stopped by SIGSTOP" in rest or ("killed by SIGKILL" in rest and below):
            kills = 1
        elif match and not line.endswith(("= ?", "<unfinished ...>")):
            begun[thread] = ""
    return inside + kills, outside
