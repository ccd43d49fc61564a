"""Time and memory of the aggregator's job that adds the sums of many devices.

`python -m benchmarks sums` runs the job's own functions on simulated submissions, which are decoded and checked like
stored ones, for growing fleets: the peak of the memory that this adds to the process shows what grows with them.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import numpy as np

from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.graphs.head_export import mapped
from aggregator.intake.validation import Expectation, read_message
from aggregator.training.jobs import StatisticsJob
from aggregator.training.statistics_job import added, weighted
from aggregator.training.statistics_sums import LocalEngine
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from edge_client.data.statistics import to_rows
from protocol.errors import ProtofleetError
from protocol.wire.codec import encode
from protocol.wire.messages import BlobRef, Statistics, Submission, TaskManifest
from protofleet.simulation.fedtc import task_manifest
from protofleet.simulation.statistics import group_submission, sums_submission

CLASSES = 10
DIFFERENT = 50
"""Submissions that the simulated devices share."""

SIZES = (1_000, 10_000, 100_000)

_MAP = BlobRef(digest=bytes(32), size_bytes=1, name="map.onnx")

EACH = 20
"""Images of a device in each class."""


class SimulatedJob(StatisticsJob, frozen=True, kw_only=True):
    """A job whose submissions are not on a disk."""

    payloads: tuple[bytes, ...]

    def submissions(self, devices: Iterable[str] | None = None) -> Iterator[tuple[str, Submission]]:
        """Yield each device and one of the payloads, decoded."""
        for device in self.members if devices is None else devices:
            message = read_message(self.payloads[int(device) % len(self.payloads)])
            if not isinstance(message, Submission):
                raise ProtofleetError("expected a submission")
            yield device, message


@click.command("sums")
@repeated("--devices", type=click.IntRange(min=1), default=SIZES)
@click.option(
    "--features", type=click.IntRange(2, 4096), default=64, show_default=True, help="Values of a row."
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Images of a group."
)
@json_option
def command(*, devices: tuple[int, ...], features: int, batch_size: int, json_file: Path | None) -> None:
    """Measure the job that adds the submissions of fleets of growing size."""
    table = Table({"devices": ">9,", "seconds": ">9.1f", "ms a device": ">13.2f", "added MB": ">9.1f"})
    runs = []
    manifest = manifest_of_sums(features, batch_size=batch_size, reference=_MAP)
    payloads = tuple(payloads_of_sums(manifest, features, task=bytes(32)))
    expectation = Expectation(bytes(32), manifest, features)
    for number in sorted(devices):
        job, engine = _job(number, payloads, features), LocalEngine()
        started_s, before = time.perf_counter(), _reset_peak()
        total, _ = weighted(job, expectation, added(job, expectation, engine), engine)
        seconds, peak = time.perf_counter() - started_s, _memory("VmHWM") - before
        table.row(number, seconds, 1000 * seconds / number, peak / 1e6)
        runs.append({"devices": number, "seconds": seconds, "peak_bytes": peak, "rows": total.rows})
    write_json(json_file, "sums", tables=[table], features=features, batch_size=batch_size, runs=runs)


def _reset_peak() -> int:
    """Let the peak of the process begin now; return its memory."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    """Return a figure of /proc/self/status, bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def manifest_of_sums(features: int, *, batch_size: int, reference: BlobRef) -> TaskManifest:
    """Return a task of sums of rows; `reference` is its map."""
    return task_manifest(
        "statistics",
        CLASSES,
        alpha=1.0,
        batch_size=batch_size,
        min_images=min(2, batch_size),
        seed=0,
        statistics=Statistics(map=reference, size=features),
    )


def payloads_of_sums(manifest: TaskManifest, features: int, *, task: bytes) -> Iterator[bytes]:
    """Yield DIFFERENT submissions to a task."""
    feature_map = FeatureMap(features, 0, seed=0)
    means = np.random.default_rng(99).exponential(size=(CLASSES, features))
    for seed in range(DIFFERENT):
        rng = np.random.default_rng(seed)
        values = np.maximum(means[:, None] + rng.normal(0, 0.2, (CLASSES, EACH, features)), 0)
        of_class = {
            label: to_rows(mapped(feature_map, each)) for label, each in enumerate(values.astype(np.float32))
        }
        count = EACH * CLASSES
        if manifest.batch_size == 1:
            yield encode(sums_submission(of_class, task=task, images=count))
        else:
            yield encode(
                group_submission(of_class, task=task, images=count, batch_size=manifest.batch_size, rng=rng)
            )


def _job(devices: int, payloads: tuple[bytes, ...], features: int) -> SimulatedJob:
    return SimulatedJob(
        version=1,
        task="",
        members={str(device): "00" * 32 for device in range(devices)},
        blobs="",
        feature_size=features,
        random_features=0,
        seed=0,
        folder="",
        payloads=payloads,
    )
