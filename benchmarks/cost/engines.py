"""`python -m benchmarks engines`: whole jobs of `statistics` in one process, and on a Ray of this machine."""

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

import click
import msgspec
import psutil

from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.graphs.head_export import map_to_onnx
from aggregator.training.jobs import StatisticsJob
from benchmarks.cost.sums import CLASSES, manifest_of_sums, payloads_of_sums
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from protocol.errors import ProtofleetError
from protocol.storage.blobstore import BlobStore
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef

SIZES = (1_000, 10_000, 100_000)
ENGINES = ("local", "ray")
POLL_S = 0.25


@dataclass(frozen=True)
class JobCost:
    """The cost of one job."""

    wall_s: float
    memory_bytes: int
    """Peak of the job and of all processes it has started; memory that they share counts once."""
    head: str
    """Hex digest of `head.onnx`."""


@click.command("engines")
@repeated("--devices", type=click.IntRange(min=1), default=SIZES)
@click.option("--features", type=click.IntRange(2, 4096), default=64, show_default=True)
@click.option("--turns", type=click.IntRange(min=1), default=1, show_default=True)
@json_option
def command(*, devices: tuple[int, ...], features: int, turns: int, json_file: Path | None) -> None:
    """Measure the job that makes a head of sums with each engine, in turns, of fleets of growing size."""
    table = Table(
        {"devices": ">9,", "engine": ">8", "seconds": ">9.1f", "peak MB": ">9.0f"}
        | {"seconds, times local": ">22.2f", "memory, times local": ">21.2f"}
    )
    runs = []
    for number in sorted(devices):
        with tempfile.TemporaryDirectory() as folder:
            job = _job(Path(folder), number, features)
            costs: dict[str, list[JobCost]] = {engine: [] for engine in ENGINES}
            for _ in range(turns):
                for engine, found in costs.items():
                    found.append(_measured(msgspec.structs.replace(job, engine=engine)))
        heads = {cost.head for found in costs.values() for cost in found}
        if len(heads) > 1:
            raise ProtofleetError("the engines make different heads")
        medians = {engine: _median(found) for engine, found in costs.items()}
        for engine, (seconds, peak) in medians.items():
            local_s, local_peak = medians["local"]
            table.row(number, engine, seconds, peak / 1e6, seconds / local_s, peak / local_peak)
        runs.append({"devices": number, **{name: [asdict(one) for one in c] for name, c in costs.items()}})
    write_json(json_file, "engines", tables=[table], features=features, runs=runs)


def _median(costs: list[JobCost]) -> tuple[float, float]:
    return (
        statistics.median(cost.wall_s for cost in costs),
        statistics.median(cost.memory_bytes for cost in costs),
    )


def _job(folder: Path, devices: int, features: int) -> StatisticsJob:
    """Write 50 different submissions, which the devices share, and return the job of all devices."""
    feature_map, blobs = FeatureMap(features, 0, seed=0), BlobStore(folder / "blobs")
    graph = map_to_onnx(feature_map, num_classes=CLASSES)
    reference = BlobRef(digest=digest_of(graph), size_bytes=len(graph), name="map.onnx")
    manifest = manifest_of_sums(features, batch_size=1, reference=reference)
    task = blobs.put(encode(manifest))
    digests = [blobs.put(each).hex() for each in payloads_of_sums(manifest, features, task=task)]
    return StatisticsJob(
        version=1,
        task=task.hex(),
        members={str(device): digest for device, digest in enumerate(islice(cycle(digests), devices))},
        blobs=str(blobs.folder),
        feature_size=features,
        folder=str(folder),
    )


def _measured(job: StatisticsJob) -> JobCost:
    """Run a job as the aggregator does; raises ProtofleetError if it fails."""
    folder, ended, peaks = Path(job.folder), threading.Event(), [0]
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    started_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "aggregator.training.statistics_job", str(folder / "job.json")],
        stdout=subprocess.DEVNULL,
    )

    def watch() -> None:
        while not ended.wait(POLL_S):
            peaks.append(_memory(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    wall_s = time.perf_counter() - started_s
    ended.set()
    watcher.join()
    if code:
        raise ProtofleetError(f"the job with engine = {job.engine} has failed")
    return JobCost(wall_s, max(peaks), digest_of((folder / "head.onnx").read_bytes()).hex())


def _memory(pid: int) -> int:
    """Return the memory of a process and its descendants, bytes, with a part of each page that they share."""
    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return 0
    for each in processes:
        try:
            total += each.memory_full_info().pss
        except psutil.Error:
            continue
    return total
