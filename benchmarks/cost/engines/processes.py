"""The time of a job, and the memory of all processes that it has started or uses."""

import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from aggregator.training.jobs import HeadJob, StatisticsJob
from aggregator.training.runner import PROGRAMS
from protocol.errors import ProtofleetError
from protocol.wire.codec import digest_of

POLL_S = 0.25


@dataclass(frozen=True)
class JobCost:
    """The cost of one job."""

    wall_s: float
    memory_bytes: int
    """Peak of all processes; memory that they share counts once."""
    program_bytes: int
    """Peak without the parts of files that are in memory, which the system drops where it needs room."""
    head: str
    """Hex digest of `head.onnx`."""


def run_job(job: HeadJob | StatisticsJob) -> JobCost:
    """Run a job as the aggregator does; the memory is that of this process's children.

    Raises:
        ProtofleetError: it fails.
    """
    folder, ended, peaks = Path(job.folder), threading.Event(), [(0, 0)]
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    started_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", PROGRAMS[type(job)], str(folder / "job.json")], stdout=subprocess.DEVNULL
    )

    def watch() -> None:
        while not ended.wait(POLL_S):
            peaks.append(_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    wall_s = time.perf_counter() - started_s
    ended.set()
    watcher.join()
    if code:
        raise ProtofleetError(f"a job has failed: exit status {code}")
    every, without_files = (max(each) for each in zip(*peaks, strict=True))
    return JobCost(wall_s, every, without_files, digest_of((folder / "head.onnx").read_bytes()).hex())


def _memory() -> tuple[int, int]:
    """Return the memory of all descendants, bytes, with a part of each page that they share, with and without files."""
    every = without_files = 0
    for each in psutil.Process().children(recursive=True):
        try:
            text = Path(f"/proc/{each.pid}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            continue  # it has ended
        kilobytes = {name: int(value.split()[0]) for name, value in _fields(text)}
        every += 1024 * kilobytes.get("Pss", 0)
        without_files += 1024 * (kilobytes.get("Pss", 0) - kilobytes.get("Pss_File", 0))
    return every, without_files


def _fields(text: str) -> list[tuple[str, str]]:
    lines = [line.partition(":") for line in text.splitlines()[1:]]
    return [(name, value) for name, _, value in lines if value.strip()]
