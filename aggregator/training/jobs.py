"""Jobs: values that name the blobs that they read. Each is run in a folder, where it leaves its files.

A class is a kind of job: its tag names it in `job.json`, and `module` has the function `run` that computes it.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from aggregator.algorithms.algorithm import OneShot, RoundAlgorithm, Training
from aggregator.algorithms.fedtc.train_head import FedTC
from aggregator.algorithms.registry import configured
from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.config.schema import Robust
from aggregator.intake.validation import Refused, read_message
from aggregator.storage.blobs import Blobs
from aggregator.training.robust.weights import Counting
from protocol.errors import BackboneMismatch, BlobLost, ProtofleetError, StateError
from protocol.models.onnx_metadata import HeadMetadata
from protocol.storage.blobstore import write_atomically
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_MANIFEST_BYTES, Submission, TaskManifest

Report = Callable[[dict[str, float | str]], None]
"""Takes figures of a job's progress: device, prototypes, epoch, epochs or loss."""


@dataclass(frozen=True)
class Workspace:
    """Where a job runs: the blobs that it reads, the folder of its files, and what takes its progress."""

    blobs: Blobs
    folder: Path
    report: Report


class Job(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """A job of any kind."""

    module: ClassVar[str]
    """The module whose `run` computes a job in a workspace and returns its Result."""

    @property
    def name(self) -> str:
        """Name of the job's folder."""
        raise NotImplementedError


class BlobJob(Job, frozen=True, kw_only=True):
    """Make head `version`: `head.onnx` and `model.onnx`, of blobs."""

    is_calibration: ClassVar[bool] = False
    """The job makes another version of the newest head, and is not repeated if it fails."""

    version: int
    attempt: int = 0
    """The number of the training of this head, from 1."""
    task: str
    """Hex digest of the task manifest, a blob."""
    feature_size: int

    @property
    def name(self) -> str:
        return folder_name(self.task, self.version, self.attempt)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that it makes; `model.onnx` may be missing."""
        return (HEAD_FILE, MODEL_FILE)

    @property
    def gpus(self) -> int:
        """GPUs that the job reserves on a cluster."""
        return 0

    def blobs(self, manifest: TaskManifest) -> list[bytes]:
        """Return the digests of the blobs that the job reads; it can do without the backbones."""
        return [bytes.fromhex(self.task), *(backbone.digest for backbone in manifest.backbones)]

    def manifest(self, blobs: Blobs) -> TaskManifest:
        return decode(blobs.read(bytes.fromhex(self.task)), TaskManifest, max_bytes=MAX_MANIFEST_BYTES)

    def metadata(self, manifest: TaskManifest, training: dict[str, float]) -> HeadMetadata:
        return HeadMetadata(
            classes=manifest.classes,
            version=self.version,
            task=self.task,
            backbones=tuple(backbone.digest.hex() for backbone in manifest.backbones),
            feature_size=self.feature_size,
            training=training,
        )


class SubmissionsJob(BlobJob, frozen=True, kw_only=True):
    """Make a head of submissions."""

    members: dict[str, str]
    """Device to the hex digest of its submission, a blob, in the order to train on."""

    def blobs(self, manifest: TaskManifest) -> list[bytes]:
        return [*super().blobs(manifest), *map(bytes.fromhex, self.members.values())]

    def submissions(
        self, blobs: Blobs, devices: Iterable[str] | None = None
    ) -> Iterator[tuple[str, Submission]]:
        """Yield each device, or each of these, and its submission; those that are lost are missing.

        Raises:
            BlobLost: after the last one, if some were lost.
            ProtofleetError: a blob is no submission.
        """
        chosen, lost = list(self.members if devices is None else devices), None
        digests = (bytes.fromhex(self.members[device]) for device in chosen)
        for device, payload in zip(chosen, blobs.read_each(digests), strict=True):
            if isinstance(payload, BlobLost):
                lost = payload
                continue
            message = read_message(payload)
            if not isinstance(message, Submission):
                raise ProtofleetError("expected a stored submission, got an evaluation")
            yield device, message
        if lost is not None:
            raise lost


class CollectionJob(SubmissionsJob, frozen=True, kw_only=True):
    """Make a head of a collection of submissions."""

    released: tuple[str, ...] = ()
    """Devices that are not quarantined, whatever outlier detection finds."""
    robust: Robust = Robust()
    has_novelty: bool = False
    """The head has the output `novelty`."""


class HeadJob(CollectionJob, frozen=True, kw_only=True, tag="head"):
    """Make a head of prototypes."""

    module = "aggregator.training.head_job"

    algorithm: str = FedTC.name
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    """The algorithm's settings by name."""
    training: Training
    widths: tuple[int, ...] = ()
    """The number of values of each backbone in a prototype."""

    @property
    def method(self) -> OneShot:
        method = configured(self.algorithm, self.settings)
        if not isinstance(method, OneShot):
            raise ProtofleetError(f"expected a one-shot algorithm, got {self.algorithm!r}")
        return method

    @property
    def gpus(self) -> int:
        return self.training.gpus


class StatisticsJob(CollectionJob, frozen=True, kw_only=True, dict=True, tag="statistics"):
    """Solve for a head from sums."""

    module = "aggregator.training.statistics_job"

    random_features: int = 0
    seed: int = 0
    columns: tuple[tuple[int, int], ...] = ()
    normalized: bool = False

    @cached_property
    def feature_map(self) -> FeatureMap:
        return FeatureMap(self.feature_size, self.random_features, self.seed, self.columns, self.normalized)

    @property
    def compares_devices(self) -> bool:
        return self.robust.detect_outliers or self.robust.max_multiple > 0


class NoisySumsJob(CollectionJob, frozen=True, kw_only=True, tag="noisy-sums"):
    """Solve for a head from sums with noise.

    With a second operator, these are the sums of a list and of all earlier ones, whose total is `total.bin`; no
    submission is read.
    """

    module = "aggregator.sums.noisy_sums_job"

    masked: str = ""
    """Hex digest of the sum of the list's masked values, a blob; empty without a second operator."""
    masks: str = ""
    """Hex digest of the second operator's reply, a blob; empty without a second operator."""
    listed: int = 0
    """Devices in the list."""
    total: str = ""
    """Hex digest of the sum of earlier lists, a blob; empty without any."""
    devices: int = 0
    """Devices in that sum of earlier lists."""

    @property
    def files(self) -> tuple[str, ...]:
        return (*super().files, *((TOTAL_FILE,) if self.masks else ()))

    def blobs(self, manifest: TaskManifest) -> list[bytes]:
        maps = [] if manifest.statistics is None else [manifest.statistics.map.digest]
        sums = map(bytes.fromhex, filter(None, (self.masked, self.masks, self.total)))
        return [*super().blobs(manifest), *maps, *sums]


class RoundJob(SubmissionsJob, frozen=True, kw_only=True, tag="round"):
    """Close round `version - 1`: also write `tensors.bin`, which the next round starts from."""

    module = "aggregator.training.round_job"

    algorithm: str
    settings: dict[str, Any]
    """The algorithm's settings by name."""
    robust: Robust
    tensors: str
    """Hex digest of the round's tensors, a blob."""

    @property
    def method(self) -> RoundAlgorithm:
        return in_rounds(self.algorithm, self.settings)

    @property
    def files(self) -> tuple[str, ...]:
        return (*super().files, TENSORS_FILE)

    def blobs(self, manifest: TaskManifest) -> list[bytes]:
        program = manifest.program
        graphs = [] if program is None else [program.init.digest, program.head.digest]
        return [*super().blobs(manifest), bytes.fromhex(self.tensors), *graphs]


class CalibrationJob(BlobJob, frozen=True, kw_only=True, tag="calibration"):
    """Make head `version` of the one before, of the same devices: only its confidence is another."""

    module = "aggregator.training.calibration_job"
    is_calibration = True

    head: str
    """Hex digest of the file of head `version - 1`, a blob."""
    correct: tuple[float, ...]
    """Correct predictions of held-out images in each bin of confidence."""
    images: tuple[float, ...]
    """Held-out images in each bin."""
    novelty: tuple[float, ...] = ()
    """Held-out images in each bin of novelty; empty if the head has none."""

    def blobs(self, manifest: TaskManifest) -> list[bytes]:
        return [*super().blobs(manifest), bytes.fromhex(self.head)]


class CompileJob(Job, frozen=True, kw_only=True, tag="compile"):
    """Build the graphs that devices run, of no blobs: `init.onnx`, `step.onnx`, `project.onnx` and `head.onnx`."""

    module = "aggregator.tasks.graph_cache"

    algorithm: str
    settings: dict[str, Any]
    """The algorithm's settings by name."""
    feature_size: int
    num_classes: int
    seed: int

    @property
    def name(self) -> str:
        return "export"

    @property
    def method(self) -> RoundAlgorithm:
        return in_rounds(self.algorithm, self.settings)


def folder_name(task: str, version: int, attempt: int) -> str:
    """Return the name of the folder of a head's training, of which there is one with a task, version and attempt."""
    return f"head-{version}-{attempt}-{task[:8]}"


def in_rounds(algorithm: str, settings: Mapping[str, Any]) -> RoundAlgorithm:
    """Return an algorithm of rounds with settings; raises ProtofleetError for another one."""
    method = configured(algorithm, settings)
    if not isinstance(method, RoundAlgorithm):
        raise ProtofleetError(f"{algorithm} has no rounds")
    return method


JOB_FILE, RESULT_FILE = "job.json", "result.json"

HEAD_FILE = "head.onnx"
MODEL_FILE = "model.onnx"
TENSORS_FILE = "tensors.bin"

TOTAL_FILE = "total.bin"
"""The sum of all lists that a second operator has opened."""

Kind = HeadJob | StatisticsJob | NoisySumsJob | RoundJob | CalibrationJob | CompileJob
"""All kinds, by which `job.json` is decoded."""

Part = TypeVar("Part")


class ListUnusable(ProtofleetError):
    """A list that a second operator has opened cannot be used, and is left out of all heads."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"a list of the second operator cannot be used: {reason}")


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why a job has made nothing."""

    reason: str
    kind: Literal["error", "lost", "list"] = "error"
    """A list that cannot be used, submissions that are lost, or anything else."""
    lost: tuple[str, ...] = ()
    """Hex digests of the lost submissions."""
    damaged: str = ""
    """Hex digest of another file that is missing or damaged."""


def failure_of(job: Job, blobs: Blobs, error: ProtofleetError) -> Failure:
    """Return the failure of a job that an error has ended."""
    if isinstance(error, BlobLost) and isinstance(job, SubmissionsJob):
        # Reading has moved damaged ones to another folder.
        lost = tuple(digest for digest in job.members.values() if bytes.fromhex(digest) not in blobs)
        if lost:
            return Failure(reason=str(error), kind="lost", lost=lost)
    if isinstance(error, BlobLost):
        return Failure(reason=str(error), damaged=error.digest.hex())
    return Failure(reason=str(error), kind="list" if isinstance(error, ListUnusable) else "error")


class Result(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A job's result beside its files."""

    metrics: dict[str, float]
    prototypes: int = 0
    """Or the images in them, where devices may upload principal prototypes."""
    quarantined: dict[str, str] = {}
    """Devices that the head was made without, with reasons."""
    warning: str = ""
    """Why outliers were not quarantined; empty if all of them were."""
    few_prototypes: dict[str, int] = {}
    """Classes with fewer than FEW_PROTOTYPES prototypes or images of class sums, or with fewer than FEW_IMAGES images
    where devices may upload principal prototypes, and how many they have."""
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


def write_head(head: bytes, manifest: TaskManifest, workspace: Workspace) -> None:
    """Write `head.onnx`, and `model.onnx` if the backbones can be read and fused with the head."""
    from aggregator.graphs.fused_model import fuse  # onnx, which `aggregator release` does not need

    write_atomically(workspace.folder / HEAD_FILE, head)
    with contextlib.suppress(BackboneMismatch, StateError):  # the aggregator tries it again, and logs why
        backbones = [workspace.blobs.read(backbone.digest) for backbone in manifest.backbones]
        write_atomically(workspace.folder / MODEL_FILE, fuse(backbones, head))


def read_result(folder: Path) -> Result | Failure:
    """Return what a job has written.

    Raises:
        OSError: there is no result.
        ProtofleetError: it is no result, such as one with a number that is not finite.
    """
    data = (folder / RESULT_FILE).read_bytes()
    try:
        return msgspec.json.decode(data, type=Result | Failure)
    except msgspec.MsgspecError as error:
        raise ProtofleetError(f"invalid {RESULT_FILE}: {error}") from error
