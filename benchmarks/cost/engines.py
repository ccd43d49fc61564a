"""`python -m benchmarks cost engines`: whole jobs in one process, and on a Ray of this machine.

Each of a few simulated submissions is that of many devices.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

import click
import msgspec
import numpy as np
import psutil

from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.graphs.head_export import map_to_onnx, mapped
from aggregator.storage.blobs import FolderBlobs
from aggregator.training.jobs import StatisticsJob
from aggregator.training.runner import PROGRAMS
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from edge_client.data.statistics import to_rows
from protocol.errors import ProtofleetError
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef, Statistics
from protofleet.simulation.fedtc import task_manifest
from protofleet.simulation.statistics import sums_submission

ENGINES = ("local", "ray")
CLASSES, EACH = 10, 20
"""Classes, and images of a device in each."""

DIFFERENT = 50
"""Submissions that the simulated devices share."""

POLL_S, LOOKING_SHARE = 0.25, 0.02
"""Least time between two looks at the processes, and greatest share of the time that these take."""

AS_OTHERS = {"RAY_worker_niceness": "0"}
"""Ray's workers have niceness 15 by default: beside other programs on the same machine they would wait for these."""


@dataclass(frozen=True)
class JobCost:
    """The cost of one job."""

    wall_s: float
    cpu_s: float
    """Processor time of all processes, while the job ran."""
    memory_bytes: int
    """Peak of all processes; memory that they share counts once."""
    head: str
    """Hex digest of `head.onnx`."""


@click.command("engines")
@repeated("--devices", type=click.IntRange(min=1), default=(1_000, 10_000, 100_000))
@click.option("--features", type=click.IntRange(2, 4096), default=64, show_default=True)
@json_option
def command(*, devices: tuple[int, ...], features: int, json_file: Path | None) -> None:
    """Measure the job that makes a head of sums with each engine, of fleets of growing size."""
    table = Table(
        {"devices": ">9,", "engine": ">8", "seconds": ">9.1f", "CPU s": ">8.1f", "peak MB": ">9.0f"}
        | {"seconds, times local": ">22.2f", "memory, times local": ">21.2f"}
    )
    runs = []
    for number in sorted(devices):
        with tempfile.TemporaryDirectory() as folder:
            job = statistics_job(Path(folder), number, features)
            costs = {engine: run_job(msgspec.structs.replace(job, engine=engine)) for engine in ENGINES}
        if len({cost.head for cost in costs.values()}) > 1:
            raise ProtofleetError("the engines make different heads")
        local = costs["local"]
        for engine, cost in costs.items():
            times = cost.wall_s / local.wall_s, cost.memory_bytes / local.memory_bytes
            table.row(number, engine, cost.wall_s, cost.cpu_s, cost.memory_bytes / 1e6, *times)
        runs.append({"devices": number, **{engine: asdict(cost) for engine, cost in costs.items()}})
    write_json(json_file, "engines", tables=[table], features=features, runs=runs)


def statistics_job(folder: Path, devices: int, features: int) -> StatisticsJob:
    """Write the submissions, and return the job that adds those of all devices."""
    feature_map, blobs = FeatureMap(features, 0, seed=0), FolderBlobs(folder / "blobs")
    graph = map_to_onnx(feature_map, num_classes=CLASSES)
    reference = BlobRef(digest=digest_of(graph), size_bytes=len(graph), name="map.onnx")
    manifest = task_manifest(
        "statistics",
        CLASSES,
        alpha=1.0,
        batch_size=1,
        min_images=1,
        seed=0,
        statistics=Statistics(map=reference, size=features),
    )
    task = blobs.put(encode(manifest))
    digests = [blobs.put(each).hex() for each in _payloads(feature_map, features, task=task)]
    return StatisticsJob(
        version=1,
        task=task.hex(),
        members={str(device): digest for device, digest in enumerate(islice(cycle(digests), devices))},
        blobs=str(blobs.folder),
        feature_size=features,
        folder=str(folder),
    )


def _payloads(feature_map: FeatureMap, features: int, *, task: bytes) -> Iterator[bytes]:
    means = np.random.default_rng(99).exponential(size=(CLASSES, features))
    for seed in range(DIFFERENT):
        noise = np.random.default_rng(seed).normal(0, 0.2, (CLASSES, EACH, features))
        values = np.maximum(means[:, None] + noise, 0).astype(np.float32)
        of_class = {label: to_rows(mapped(feature_map, each)) for label, each in enumerate(values)}
        yield encode(sums_submission(of_class, task=task, images=EACH * CLASSES))


def run_job(job: StatisticsJob) -> JobCost:
    """Run a job as the aggregator does; the memory is that of this process's children.

    Raises:
        ProtofleetError: it fails.
    """
    folder, ended, watched = Path(job.folder), threading.Event(), _Watched()
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    command = [sys.executable, "-m", PROGRAMS[type(job)], str(folder / "job.json")]
    watcher = threading.Thread(target=watched.run, args=(ended,))
    watcher.start()
    started_s = time.perf_counter()
    try:
        code = subprocess.run(
            command, stdout=subprocess.DEVNULL, env={**os.environ, **AS_OTHERS}, check=False
        ).returncode
        wall_s = time.perf_counter() - started_s
    finally:
        ended.set()
        watcher.join()
    if code:
        raise ProtofleetError(f"a job has failed: exit status {code}")
    head = digest_of((folder / "head.onnx").read_bytes()).hex()
    return JobCost(wall_s, watched.cpu_s, watched.memory_bytes, head)


class _Watched:
    """Peak memory and processor time of all descendants of this process since it was made."""

    def __init__(self) -> None:
        self.memory_bytes = 0
        self._cpu_s: dict[int, float] = {}
        self._look()
        self._before = dict(self._cpu_s)

    @property
    def cpu_s(self) -> float:
        """Processor time, as last seen of each process."""
        return sum(used - self._before.get(pid, 0) for pid, used in self._cpu_s.items())

    def run(self, ended: threading.Event) -> None:
        """Look at the processes again and again until the end."""
        wait_s = POLL_S
        while not ended.wait(wait_s):
            began_s = time.thread_time()
            self._look()
            wait_s = max(POLL_S, (time.thread_time() - began_s) / LOOKING_SHARE)

    def _look(self) -> None:
        """Read the memory, with a part of each page that processes share, and the processor time."""
        memory_bytes = 0
        for each in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError, psutil.Error):  # it has ended
                text = Path(f"/proc/{each.pid}/smaps_rollup").read_text(encoding="ascii")
                memory_bytes += 1024 * int(text.split("\nPss:")[1].split()[0])
                self._cpu_s[each.pid] = sum(each.cpu_times()[:2])
        self.memory_bytes = max(self.memory_bytes, memory_bytes)
