"""The job that solves for a head from sums with noise: `python -m aggregator.training.noisy_sums_job JOB.json`.

Devices are not compared, and all count fully: what a device uploads under differential privacy can be any values.
"""

import math
import time

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.statistics.noisy_ridge import NoisyTotal, of_features, solve_noisy
from aggregator.algorithms.statistics.ridge import TEMPERATURE
from aggregator.intake.validation import Expectation, check_noisy_sums
from aggregator.storage.blobs import open_blobs
from aggregator.training.head_job import write_checked
from aggregator.training.jobs import NoisySumsJob, Result, checked_parts, report_progress, run_as_program
from aggregator.training.robust.weights import Counting
from protocol.errors import ProtofleetError
from protocol.statistics.noisy_sums import UNITS
from protocol.statistics.public_map import read_map
from protocol.statistics.second_moment import triangle_size
from protocol.wire.messages import Submission


def run(job: NoisySumsJob) -> Result:
    """Solve for a head, verify its ONNX file, and write it. The same submissions in any order make the same bytes.

    Raises:
        ProtofleetError: the submissions give no head, or ONNX Runtime computes something else.
    """
    manifest = job.manifest()
    wanted, statistics = manifest.differential_privacy, manifest.statistics
    if wanted is None or statistics is None:
        raise ProtofleetError("expected a task with differential privacy")
    started_s = time.perf_counter()
    public = read_map(open_blobs(job.blobs).read(statistics.map.digest))
    expectation = Expectation(bytes.fromhex(job.task), manifest, statistics.size)
    counts = np.zeros(len(manifest.classes), np.int64)
    sums = np.zeros((len(counts), statistics.size), np.int64)
    second_moment = np.zeros(triangle_size(statistics.size), np.int64)

    def add(submission: Submission) -> NDArray[np.int32]:
        part = check_noisy_sums(submission, expectation)
        np.add(counts, part.counts, out=counts)
        np.add(sums, part.sums, out=sums)
        np.add(second_moment, part.second_moment, out=second_moment)
        return part.counts

    parts, invalid = checked_parts(job.submissions(), add)
    images = max(1, round(int(counts.sum()) / UNITS))
    report_progress({"prototypes": images})
    noise_multiplier = wanted.noise_multiplier * math.sqrt(len(parts))
    total = NoisyTotal(
        counts=counts, sums=sums, second_moment=second_moment, noise_multiplier=noise_multiplier
    )
    layer, ridge = solve_noisy(total)
    features = np.random.default_rng(0).exponential(size=(256, job.feature_size)).astype(np.float32)
    figures = {"strength": ridge, "temperature": TEMPERATURE}
    metrics = write_checked(
        job, manifest, [of_features(layer, public)], figures, features=features, directions=None
    )
    return Result(
        prototypes=images,
        metrics={**metrics, "seconds": time.perf_counter() - started_s},
        quarantined=invalid,
        counting=Counting(images, images),
    )


if __name__ == "__main__":
    run_as_program(NoisySumsJob, run)
