"""Jobs that the aggregator runs as processes: inputs and outputs are files in a folder, progress goes to stdout."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from aggregator.algorithms.algorithm import OneShot, RoundAlgorithm, Training
from aggregator.algorithms.fedtc.train_head import FedTC
from aggregator.algorithms.registry import configured
from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.config.schema import Robust
from aggregator.intake.validation import Refused, read_message
from aggregator.storage.blobs import open_blobs, read_each
from aggregator.training.robust.weights import Counting
from protocol.errors import BackboneMismatch, BlobLost, ProtofleetError, StateError
from protocol.models.onnx_metadata import HeadMetadata
from protocol.storage.blobstore import write_atomically
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_MANIFEST_BYTES, Submission, TaskManifest


class SubmissionsJob(msgspec.Struct, frozen=True, kw_only=True):
    """Make head `version` of submissions: `head.onnx` and `model.onnx`."""

    version: int
    task: str
    """Hex digest of the task manifest, a blob."""
    members: dict[str, str]
    """Device to the hex digest of its submission, a blob, in the order to train on."""
    blobs: str
    """A folder, or s3://BUCKET/PREFIX."""
    feature_size: int
    folder: str

    def manifest(self) -> TaskManifest:
        data = open_blobs(self.blobs).read(bytes.fromhex(self.task))
        return decode(data, TaskManifest, max_bytes=MAX_MANIFEST_BYTES)

    def submissions(self, devices: Iterable[str] | None = None) -> Iterator[tuple[str, Submission]]:
        """Yield each device, or each of these, and its submission; those that are lost are missing.

        Raises:
            BlobLost: after the last one, if some were lost.
            ProtofleetError: a blob is no submission.
        """
        chosen, lost = list(self.members if devices is None else devices), None
        digests = (bytes.fromhex(self.members[device]) for device in chosen)
        for device, payload in zip(chosen, read_each(open_blobs(self.blobs), digests), strict=True):
            if isinstance(payload, BlobLost):
                lost = payload
                continue
            message = read_message(payload)
            if not isinstance(message, Submission):
                raise ProtofleetError("expected a stored submission, got an evaluation")
            yield device, message
        if lost is not None:
            raise lost

    def metadata(self, manifest: TaskManifest, training: dict[str, float]) -> HeadMetadata:
        return HeadMetadata(
            classes=manifest.classes,
            version=self.version,
            task=self.task,
            backbones=tuple(backbone.digest.hex() for backbone in manifest.backbones),
            feature_size=self.feature_size,
            training=training,
        )

    def write_head(self, head: bytes, manifest: TaskManifest) -> None:
        """Write `head.onnx`, and `model.onnx` if the backbones can be read and fused with the head."""
        from aggregator.graphs.fused_model import fuse  # onnx, which `aggregator release` does not need

        write_atomically(Path(self.folder) / "head.onnx", head)
        blobs = open_blobs(self.blobs)
        with contextlib.suppress(BackboneMismatch, StateError):  # the aggregator tries it again, and logs why
            backbones = [blobs.read(backbone.digest) for backbone in manifest.backbones]
            write_atomically(Path(self.folder) / "model.onnx", fuse(backbones, head))


class CollectionJob(SubmissionsJob, frozen=True, kw_only=True):
    """Make a head of a collection of submissions."""

    released: tuple[str, ...] = ()
    """Devices that are not quarantined, whatever outlier detection finds."""
    robust: Robust = Robust()
    has_novelty: bool = False
    """The head has the output `novelty`."""


class HeadJob(CollectionJob, frozen=True, kw_only=True):
    """Make a head of prototypes."""

    algorithm: str = FedTC.name
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    """Those of the algorithm."""
    training: Training
    widths: tuple[int, ...] = ()
    """The number of values of each backbone in a prototype."""

    @property
    def method(self) -> OneShot:
        method = configured(self.algorithm, self.settings)
        if not isinstance(method, OneShot):
            raise ProtofleetError(f"expected a one-shot algorithm, got {self.algorithm!r}")
        return method


class StatisticsJob(CollectionJob, frozen=True, kw_only=True, dict=True):
    """Solve for a head from sums."""

    random_features: int = 0
    seed: int = 0
    columns: tuple[tuple[int, int], ...] = ()
    normalized: bool = False
    engine: Literal["local", "ray"] = "local"

    @cached_property
    def feature_map(self) -> FeatureMap:
        return FeatureMap(self.feature_size, self.random_features, self.seed, self.columns, self.normalized)

    @property
    def compares_devices(self) -> bool:
        return self.robust.detect_outliers or self.robust.max_multiple > 0


class NoisySumsJob(CollectionJob, frozen=True, kw_only=True):
    """Solve for a head from sums with noise.

    With a second operator, `members` are masked, and `total.bin` is the sum of theirs and of all earlier lists.
    """

    masks: str = ""
    """Hex digest of the second operator's reply, a blob; empty without a second operator."""
    total: str = ""
    """Hex digest of the sum of earlier lists, a blob; empty without any."""
    devices: int = 0
    """Devices in that sum."""


class RoundJob(SubmissionsJob, frozen=True, kw_only=True):
    """Close round `version - 1`: also write `tensors.bin`, which the next round starts from."""

    algorithm: str
    settings: dict[str, Any]
    """Those of the algorithm."""
    robust: Robust
    tensors: str
    """Hex digest of the round's tensors, a blob."""

    @property
    def method(self) -> RoundAlgorithm:
        return in_rounds(self.algorithm, self.settings)


class CalibrationJob(SubmissionsJob, frozen=True, kw_only=True):
    """Make head `version` of the one before, which has the same members: only its confidence is another."""

    head: str
    """Hex digest of the file of head `version - 1`, a blob."""
    correct: tuple[float, ...]
    """Correct predictions of held-out images in each bin of confidence."""
    images: tuple[float, ...]
    """Held-out images in each bin."""
    novelty: tuple[float, ...] = ()
    """Held-out images in each bin of novelty; empty if the head has none."""


class CompileJob(msgspec.Struct, frozen=True, kw_only=True):
    """Build the graphs that devices run: `init.onnx`, `step.onnx`, `project.onnx` and `head.onnx`."""

    algorithm: str
    settings: dict[str, Any]
    """Those of the algorithm."""
    feature_size: int
    num_classes: int
    seed: int
    folder: str

    @property
    def method(self) -> RoundAlgorithm:
        return in_rounds(self.algorithm, self.settings)


def in_rounds(algorithm: str, settings: Mapping[str, Any]) -> RoundAlgorithm:
    """Return an algorithm of rounds with settings; raises ProtofleetError for another one."""
    method = configured(algorithm, settings)
    if not isinstance(method, RoundAlgorithm):
        raise ProtofleetError(f"{algorithm} has no rounds")
    return method


OOM_SCORE = "500"
"""Score (at most 1000) of a job: Linux kills the process with the highest one first."""

FEW_PROTOTYPES = 5
"""A class with fewer rests on too few images for a reliable head."""

RESULT_FILE = "result.json"

UNUSABLE = "a list of the second operator cannot be used"
"""Begins the reason for which a list is left out of all heads."""

TOTAL_FILE = "total.bin"
"""The sum of all lists that a second operator has opened."""

WorkerJob = HeadJob | StatisticsJob | NoisySumsJob | RoundJob | CalibrationJob
"""A job that a worker may run, `aggregator train`."""

Job = WorkerJob | CompileJob
J = TypeVar("J", HeadJob, StatisticsJob, NoisySumsJob, RoundJob, CalibrationJob, CompileJob)
Part = TypeVar("Part")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A job's result beside its files."""

    metrics: dict[str, float]
    prototypes: int = 0
    quarantined: dict[str, str] = {}
    """Devices that the head was made without, with reasons."""
    warning: str = ""
    """Why outliers were not quarantined; empty if all of them were."""
    few_prototypes: dict[str, int] = {}
    """Classes with fewer than FEW_PROTOTYPES prototypes, or images of class sums, and how many they have."""
    counting: Counting = Counting(0, 0)


def checked_parts(
    submissions: Iterable[tuple[str, Submission]], check: Callable[[Submission], Part]
) -> tuple[dict[str, Part], dict[str, str]]:
    """Return what `check` makes of each device's submission, and the devices whose are invalid, with reasons.

    They were valid when they arrived, perhaps by the rules of an older version of this program. Each is checked before
    the next one is read; `check` raises Refused for one that is invalid.

    Raises:
        Refused: none is valid.
    """
    parts: dict[str, Part] = {}
    refused: dict[str, Refused] = {}
    for device, submission in submissions:
        try:
            parts[device] = check(submission)
        except Refused as error:
            refused[device] = error
    if refused and not parts:
        raise next(reversed(refused.values()))
    return parts, {device: f"its submission is refused: {error.detail}" for device, error in refused.items()}


def report_progress(figures: dict[str, float | str]) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def write_result(job: J, run: Callable[[J], Result]) -> None:
    """Run a job; `result.json` in its folder is written last."""
    write_atomically(Path(job.folder) / RESULT_FILE, msgspec.json.encode(run(job)))


def read_result(job: Job) -> Result:
    """Return what a job has written.

    Raises:
        OSError: there is no result.
        ProtofleetError: it is no result, such as one with a number that is not finite.
    """
    data = (Path(job.folder) / RESULT_FILE).read_bytes()
    try:
        return msgspec.json.decode(data, type=Result)
    except msgspec.MsgspecError as error:
        raise ProtofleetError(f"invalid {RESULT_FILE}: {error}") from error


def run_as_program(job_type: type[J], run: Callable[[J], Result]) -> None:
    """Run the job in the file named on the command line.

    When memory runs out, Linux kills the job, which is repeated, rather than the aggregator or the broker.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE, encoding="ascii")
    try:
        job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=job_type)
        write_result(job, run)
    except ProtofleetError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
