"""Whole programs, measured as processes in turns, since the machine may be busy: read the ratios, not the seconds."""

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ProtofleetError

Command = Sequence[str]
"""Arguments of the Python interpreter."""


POLL_S = 0.01


@dataclass(frozen=True)
class Cost:
    """The cost of one run of a program."""

    wall_s: float
    cpu_s: float
    """Of the process and of those that it has waited for."""
    memory_bytes: int
    """Peak, without workers."""


def run(command: Command) -> Cost:
    """Run a program to its end; Linux only.

    Raises:
        ProtofleetError: it failed.
    """
    with tempfile.TemporaryFile() as errors:
        started_s = time.perf_counter()
        process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=errors)
        peak = 0
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            peak = max(peak, peak_memory(process.pid))
            time.sleep(POLL_S)
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started_s
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise ProtofleetError(f"{' '.join(command)}: {errors.read().decode(errors='replace')[-2000:]}")
    return Cost(wall_s, used.ru_utime + used.ru_stime, peak)


def peak_memory(pid: int) -> int:
    """Return the kernel's record of a process's peak memory, bytes; 0 if it has ended.

    `getrusage` would include that of the process that started it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return 0


def in_turns(
    programs: Mapping[str, Callable[[], Command]], *, repetitions: int, warm_up: bool = True
) -> dict[str, list[Cost]]:
    """Run all programs one after the other, so many times, with `warm_up` after one time that does not count.

    Each function prepares a run, which is not measured, and returns its command.
    """
    runs: dict[str, list[Cost]] = {name: [] for name in programs}
    for number in range(not warm_up, repetitions + 1):
        for name, make in programs.items():
            cost = run(make())
            if number:
                runs[name].append(cost)
    return runs


def ratio(runs: Sequence[object], others: Sequence[object], figure: str) -> float:
    """Return the median ratio of a figure between runs that followed each other."""
    return statistics.median(ratios(runs, others, figure))


def ratios(runs: Sequence[object], others: Sequence[object], figure: str) -> list[float]:
    """Return the ratio of a figure between each two runs that followed each other; NaN where the kernel counted 0."""
    pairs: list[tuple[float, float]] = [
        (getattr(one, figure), getattr(other, figure)) for one, other in zip(runs, others, strict=True)
    ]
    return [one / other if other else math.nan for one, other in pairs]


def median(runs: Sequence[object], figure: str) -> float:
    """Return the median of a figure."""
    values: list[float] = [getattr(one, figure) for one in runs]
    return statistics.median(values)
