"""The time of a job, the memory of all processes that it has started or uses, and a Ray cluster of this machine."""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from aggregator.training.jobs import HeadJob, StatisticsJob
from aggregator.training.runner import PROGRAMS
from protocol.errors import ProtofleetError
from protocol.wire.codec import digest_of

POLL_S = 0.25

AS_OTHERS = {"RAY_worker_niceness": "0"}
"""Ray's workers have niceness 15 by default: beside other programs on the same machine they would wait for these."""

LOOKING_SHARE = 0.02
"""Greatest share of the time that is spent with looking at the processes."""

OBJECT_STORE_BYTES = 200 * 2**20
"""Memory of each simulated machine's object store: more than the chunks that are on their way."""


@dataclass(frozen=True)
class JobCost:
    """The cost of one job."""

    wall_s: float
    cpu_s: float
    """Processor time of all processes, while the job ran."""
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
    folder, ended, watched = Path(job.folder), threading.Event(), _Watched()
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    started_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", PROGRAMS[type(job)], str(folder / "job.json")],
        stdout=subprocess.DEVNULL,
        env={**os.environ, **AS_OTHERS},
    )

    def watch() -> None:
        wait_s = POLL_S
        while not ended.wait(wait_s):
            began_s = time.thread_time()
            watched.look()
            wait_s = max(POLL_S, (time.thread_time() - began_s) / LOOKING_SHARE)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        code = process.wait()
        wall_s = time.perf_counter() - started_s
    finally:
        ended.set()
        watcher.join()
    if code:
        raise ProtofleetError(f"a job has failed: exit status {code}")
    head = digest_of((folder / "head.onnx").read_bytes()).hex()
    return JobCost(wall_s, watched.cpu_s, watched.memory_bytes, watched.program_bytes, head)


class _Watched:
    """Resource use of all descendants of this process since it was made."""

    def __init__(self) -> None:
        self.memory_bytes = 0
        self.program_bytes = 0
        self._before: dict[int, float] = {}
        self._cpu_s: dict[int, float] = {}
        self.look()
        self._before = dict(self._cpu_s)

    @property
    def cpu_s(self) -> float:
        """Processor time, as last seen of each process."""
        return sum(used - self._before.get(pid, 0) for pid, used in self._cpu_s.items())

    def look(self) -> None:
        """Read the memory, with a part of each page that processes share, and the processor time."""
        every = without_files = 0
        for each in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError, psutil.Error):  # it has ended
                text = Path(f"/proc/{each.pid}/smaps_rollup").read_text(encoding="ascii")
                kilobytes = {name: int(value.split()[0]) for name, value in _fields(text)}
                every += 1024 * kilobytes.get("Pss", 0)
                without_files += 1024 * (kilobytes.get("Pss", 0) - kilobytes.get("Pss_File", 0))
                self._cpu_s[each.pid] = sum(each.cpu_times()[:2])
        self.memory_bytes = max(self.memory_bytes, every)
        self.program_bytes = max(self.program_bytes, without_files)


def _fields(text: str) -> list[tuple[str, str]]:
    lines = [line.partition(":") for line in text.splitlines()[1:]]
    return [(name, value) for name, _, value in lines if value.strip()]


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set variables and restore them, and no others: Ray sets some of its own, which it needs for the next cluster."""
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


@contextlib.contextmanager
def machines(number: int) -> Iterator[str]:
    """Start a cluster of so many machines with one worker each, all of them here; yield RAY_ADDRESS."""
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    with (
        tempfile.TemporaryDirectory(
            prefix="pf-", ignore_cleanup_errors=True
        ) as folder,  # sockets: a short path
        environment(RAY_TMPDIR=folder, **AS_OTHERS),
    ):
        (Path(folder) / "ray").mkdir()
        cluster = Cluster(initialize_head=True, head_node_args=options)
        try:
            for _ in range(number - 1):
                cluster.add_node(**options)
            cluster.wait_for_nodes()
            yield str(cluster.address)
        finally:
            cluster.shutdown()
