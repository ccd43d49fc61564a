"""The job that solves for a head from sums with noise.

Devices are not compared, and all count fully: what a device uploads under differential privacy can be any values.
"""

import math
import time

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.statistics.noisy_ridge import NoisyTotal, Shortening, of_features, solve_noisy
from aggregator.algorithms.statistics.ridge import TEMPERATURE
from aggregator.intake.validation import Expectation, check_noisy_sums
from aggregator.training.head_job import write_checked
from aggregator.training.jobs import (
    TOTAL_FILE,
    ListUnusable,
    NoisySumsJob,
    Result,
    Workspace,
    checked_parts,
)
from aggregator.training.robust.weights import Counting
from protocol.errors import ProtofleetError
from protocol.statistics.integer_rows import MAX_VALUE, triangle_size
from protocol.statistics.noisy_sums import UNITS, deviations, share_of_noise
from protocol.statistics.public_map import read_map
from protocol.statistics.second_moment import from_triangle
from protocol.storage.blobstore import write_atomically
from protocol.wire.arrays import to_array, to_tensor
from protocol.wire.codec import decode, encode
from protocol.wire.messages import Submission, SumReply, Tensor, Tensors

LARGEST = 8.0
"""Deviations that no noise exceeds."""

FALSE = "no images have such sums: a device has lied, or the second operator, whose signature is stored"


def run(job: NoisySumsJob, workspace: Workspace) -> Result:
    """Solve for a head, verify its ONNX file, and write it. The same submissions in any order make the same bytes.

    Raises:
        ProtofleetError: the submissions give no head, or ONNX Runtime computes something else.
    """
    manifest = job.manifest(workspace.blobs)
    wanted, statistics = manifest.differential_privacy, manifest.statistics
    if wanted is None or statistics is None:
        raise ProtofleetError("expected a task with differential privacy")
    started_s = time.perf_counter()
    public = read_map(workspace.blobs.read(statistics.map.digest))
    expectation = Expectation(bytes.fromhex(job.task), manifest, statistics.size)
    operator = manifest.second_operator
    if operator is None:
        counts, sums, second_moment, devices, invalid = _added(job, workspace, expectation)
        share = wanted.noise_multiplier
    else:
        share = share_of_noise(wanted.noise_multiplier, honest=operator.honest)
        counts, sums, second_moment = _opened(job, workspace, expectation, share)
        devices, invalid = job.devices + job.listed, {}
    images = max(1, round(int(counts.sum()) / UNITS))
    workspace.report({"prototypes": images})
    noise_multiplier = share * math.sqrt(devices)
    total = NoisyTotal(
        counts=counts, sums=sums, second_moment=second_moment, noise_multiplier=noise_multiplier
    )
    _require_laws(total)
    layer, ridge = solve_noisy(total)
    figures = {"strength": ridge, "temperature": TEMPERATURE}
    layers = [of_features(layer, public)]
    metrics = write_checked(job, workspace, manifest, layers, figures, feature_map=Shortening(public))
    return Result(
        prototypes=images,
        metrics={**metrics, "seconds": time.perf_counter() - started_s},
        quarantined=invalid,
        counting=Counting(images, images),
    )


Sums = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Counts (C,), class sums (C, D) and second moment."""


def _added(
    job: NoisySumsJob, workspace: Workspace, expectation: Expectation
) -> tuple[*Sums, int, dict[str, str]]:
    """Return the sum of all submissions, the number of valid ones, and the invalid ones with reasons."""
    classes, size = len(expectation.manifest.classes), expectation.prototype_size
    counts, sums = np.zeros(classes, np.int64), np.zeros((classes, size), np.int64)
    second_moment = np.zeros(triangle_size(size), np.int64)

    def add(submission: Submission) -> None:
        part = check_noisy_sums(submission, expectation)
        np.add(counts, part.counts, out=counts)
        np.add(sums, part.sums, out=sums)
        np.add(second_moment, part.second_moment, out=second_moment)

    parts, invalid = checked_parts(job.submissions(workspace.blobs), add)
    return counts, sums, second_moment, len(parts), invalid


def _opened(job: NoisySumsJob, workspace: Workspace, expectation: Expectation, share: float) -> Sums:
    """Return the sum of all lists, which is written to `total.bin`.

    The sum of one is that of masked sums less the sum of masks, modulo 2^32; `share` is a device's noise multiplier.

    Raises:
        ProtofleetError: a blob is lost, or a list cannot be used.
    """
    blobs, classes, size = workspace.blobs, len(expectation.manifest.classes), expectation.prototype_size
    parts = (classes, classes * size, triangle_size(size))
    data = blobs.read(bytes.fromhex(job.masked))
    values = to_array(decode(data, Tensors, max_bytes=len(data)).values["masked"])
    reply = blobs.read(bytes.fromhex(job.masks))
    masks = decode(reply, SumReply, max_bytes=len(reply)).masks
    values = values - (to_array(masks) if isinstance(masks, Tensor) else np.uint32(0))
    total = opened_list(values, classes=classes, size=size, noise_multiplier=share * math.sqrt(job.listed))
    if job.total:
        earlier = blobs.read(bytes.fromhex(job.total))
        total += from_total(decode(earlier, Tensors, max_bytes=len(earlier)))
    write_atomically(workspace.folder / TOTAL_FILE, encode(to_total(total)))
    counts, sums, second_moment = np.split(total, np.cumsum(parts)[:2])
    return counts, sums.reshape(classes, size), second_moment


def opened_list(
    values: NDArray[np.uint32], *, classes: int, size: int, noise_multiplier: float
) -> NDArray[np.int64]:
    """Return the sums of one list, int64 (values,), of what they are modulo 2^32.

    The devices' counts state how many images a list has. An image changes a class sum by `UNITS` times 127 at most, a
    product by half of 127^2, and a square by 0 to 127^2. Up to `most` images, no sum or product leaves -2^31 to 2^31,
    and no square the range of 2^32 that begins below 0 by the noise.

    Raises:
        ProtofleetError: there are more images, or no images have such counts and squares.
    """
    scale = {kind: LARGEST * each for kind, each in deviations(noise_multiplier).items()}
    total = values.view(np.int32).astype(np.int64)
    counts = total[:classes]
    images = max(0, int(counts.sum())) / UNITS
    most = int(
        min(
            (2**31 - scale["sums"]) / (UNITS * MAX_VALUE),
            (2**31 - scale["products"]) * 2 / MAX_VALUE**2,
            (2**32 - 2 * scale["squares"]) / MAX_VALUE**2,
        )
    )
    if images > most:
        raise ListUnusable(
            f"its devices have {images:.0f} images together, and sums of more than {most} can wrap around: "
            "divide the devices among several fleets"
        )
    first = np.arange(size)
    places = classes * (1 + size) + first * size - first * (first - 1) // 2
    squares = total[places]
    squares[squares < -scale["squares"]] += 2**32
    total[places] = squares
    stated = images + scale["counts"] * math.sqrt(classes) / UNITS
    if counts.min() < -scale["counts"] or squares.max() > stated * MAX_VALUE**2 + scale["squares"]:
        raise ListUnusable(FALSE)
    return total


def to_total(values: NDArray[np.int64]) -> Tensors:
    """Return the total of all lists as it is stored: the lower 32 bits and the upper ones."""
    return Tensors(
        values={
            "total": to_tensor((values & 0xFFFFFFFF).astype(np.uint32)),
            "upper": to_tensor((values >> 32).astype(np.int32)),
        }
    )


def from_total(stored: Tensors) -> NDArray[np.int64]:
    """Return the total that `to_total` has stored."""
    lower, upper = (to_array(stored.values[name]).astype(np.int64) for name in ("total", "upper"))
    return (upper << 32) | lower


def _require_laws(total: NoisyTotal) -> None:
    """Raise ProtofleetError unless counts and squares are those of images, but for the noise."""
    scale, size = deviations(total.noise_multiplier), total.sums.shape[1]
    squares = np.diag(from_triangle(total.second_moment, size))
    if total.counts.min() < -LARGEST * scale["counts"] or squares.min() < -LARGEST * scale["squares"]:
        raise ListUnusable(FALSE)
