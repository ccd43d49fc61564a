"""The status: each figure once, with its description, and with its metrics or its line where it has any.

`aggregator status` and `docs/status.schema.json`, the HTTP API and `/metrics` are made from it. A new figure is a field
here or in the struct of its part, and an argument where the struct is made, in `collect.py` or beside it. A time is a
timestamp, never an age: a snapshot is kept until something changes.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from aggregator.status.annotations import Line, Metric, number, total
from aggregator.status.devices import Device
from aggregator.status.forecast import Forecast
from aggregator.status.heads import Head, of_current, of_newest
from aggregator.status.privacy import NEARLY, Privacy, Sums
from aggregator.storage.heads import TrainingProgress
from aggregator.storage.quarantine import ForgottenDevice, QuarantinedDevice
from aggregator.storage.refusals import Refusal
from aggregator.storage.stop_reason import StopReason
from aggregator.storage.stored_values import UnixSeconds
from aggregator.storage.submissions import LostSubmission
from protocol.wire.presence import Duplicate

LATELY_S = 600.0
"""Seconds for which a device with a refused message counts as one."""


class Enrollment(msgspec.Struct, frozen=True, kw_only=True):
    """The number of known device keys."""

    closed: Annotated[bool, Meta(description="Only enrolled devices are accepted.")]
    enrolled: int
    first_use: Annotated[int, Meta(description="Keys stored at their first use.")]
    revoked: int


class FailedTraining(msgspec.Struct, frozen=True, kw_only=True):
    """The last failed training of the next head, or closing of the open round."""

    version: Annotated[int, Meta(description="Of the head that it was to make.")]
    failures: Annotated[int, Meta(description="Trainings of this head that have failed.")]
    reason: str
    failed_s: UnixSeconds
    retry_at_s: Annotated[
        UnixSeconds, Meta(description="When it is repeated at the latest, if the aggregator runs.")
    ]


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """The open round."""

    number: Annotated[int, Meta(description="Number of the open round."), Metric("round")]
    rounds: Annotated[int, Meta(description="Rounds of the task."), Metric("rounds")]
    over: Annotated[bool, Meta(description="All rounds are over.")]
    min_devices: int
    devices: Annotated[
        tuple[str, ...],
        Meta(description="Devices that have submitted for the open round."),
        Metric("round_devices", value=len),
    ]
    carried: Annotated[tuple[str, ...], Meta(description="Devices whose earlier submission still counts.")]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A head that canaries evaluate first."""

    version: int
    canaries: tuple[str, ...]
    awaited: Annotated[tuple[str, ...], Meta(description="Canaries that have not answered yet.")]
    since_s: UnixSeconds
    summary: Annotated[str, Meta(description="Results of the canaries that have answered.")]


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """The heads that devices use."""

    newest: Annotated[int, Meta(description="Version of the newest head; 0 if there is none.")]
    current: Annotated[int, Meta(description="Version of the current head; 0 if there is none.")]
    candidate: Candidate | None


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """The prototypes of a class, and the devices that have submitted them."""

    prototypes: int
    devices: int


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """A quota of the task file, and how much of it the fleet uses."""

    used: float
    limit: Annotated[float | None, Meta(description="Null where nothing is set.")]

    @property
    def is_nearly_used_up(self) -> bool:
        """True from NEARLY of the limit on."""
        return self.limit is not None and self.used >= NEARLY * self.limit


class Quotas(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet's quotas, of the task file's `[limits]`."""

    devices: Annotated[Quota, Meta(description="Devices with a valid key: `max_devices`.")]
    storage_bytes: Annotated[Quota, Meta(description="Submissions of all tasks: `max_storage_mb`.")]
    uploads: Annotated[
        Quota,
        Meta(description="Submissions accepted within the hour: `uploads_per_hour`; 0 if that is not set."),
    ]

    def usages(self) -> Iterator[tuple[Quota, str]]:
        """Yield each quota that is set, and how much of it is used."""
        for quota, unit, what in (
            (self.devices, 1, "devices (limits.max_devices)"),
            (self.storage_bytes, 1024**2, "MiB of submissions (limits.max_storage_mb)"),
            (self.uploads, 1, "uploads an hour (limits.uploads_per_hour)"),
        ):
            if quota.limit is not None:
                yield quota, f"{quota.used / unit:.4g} of {quota.limit / unit:.4g} {what}"

    def __str__(self) -> str:
        return ", ".join(text for _, text in self.usages())


class Attention(msgspec.Struct, frozen=True):
    """A condition that needs an operator."""

    level: Literal["error", "warning"]
    title: Annotated[str, Meta(description="The condition in a few words.")]
    text: Annotated[str, Meta(description="Its reason or place, and what to do.")]


def _set(value: object) -> bool:
    return value is not None


def _of_quotas(figure: Callable[[Quota], float | None]) -> Callable[[Quotas], Mapping[str, float]]:
    def values(quotas: Quotas) -> Mapping[str, float]:
        figures = {name: figure(quota) for name, quota in msgspec.structs.asdict(quotas).items()}
        return {name: value for name, value in figures.items() if value is not None}

    return values


def _refused(by_reason: Callable[..., Mapping[str, int]]) -> Metric:
    text = "Messages of devices that were refused, by reason."
    return Metric("refused_messages", text, by_reason, label="reason", is_counter=True)


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an aggregator and its fleet."""

    attention: Annotated[tuple[Attention, ...], Meta(description="What needs an operator, worst first.")]
    running: Annotated[
        bool,
        Meta(description="`aggregator run` is running."),
        Metric("aggregator_running", "1 if `aggregator run` is running."),
    ]
    leader: Annotated[
        str,
        Meta(
            description="The machine of the aggregator that runs, if the tables are elsewhere; otherwise empty."
        ),
    ]
    intake: Annotated[
        StopReason,
        Metric(
            "intake_stopped", "1 if uploads cannot be stored.", lambda intake: intake.stopped_s is not None
        ),
    ]
    aggregator_key: Annotated[str, Meta(description="Public key in hex: `edge-client --aggregator-key`.")]
    root_key: Annotated[
        str,
        Meta(description="Public key in hex that signs the later ones; empty if none does."),
        Line("root key"),
    ]
    duplicate: Annotated[
        Duplicate | None,
        Meta(description="Another aggregator with this key that has run at the same time."),
        Metric("duplicate_aggregator", "1 if another aggregator uses this key.", _set),
    ]
    enrollment: Annotated[
        Enrollment,
        Metric(
            "device_keys",
            "Known keys of devices, by kind.",
            lambda keys: {"enrolled": keys.enrolled, "first_use": keys.first_use, "revoked": keys.revoked},
            label="kind",
        ),
    ]
    fleet: str
    algorithm: str
    task: Annotated[str, Meta(description="sha256 of the task manifest.")]
    preparing: Annotated[
        str,
        Meta(
            description="Algorithm of a task whose graphs are being exported, before it is served; or empty."
        ),
    ]
    classes: Annotated[tuple[str, ...], Metric("classes", "Classes of the task.", len)]
    counted: Annotated[
        Literal["prototypes", "images"],
        Meta(
            description="What the numbers of prototypes count: where devices may upload principal prototypes, the "
            "images in all of them."
        ),
    ]
    quorum: Annotated[
        int, Meta(description="Devices that the first head waits for."), Metric("quorum_devices")
    ]
    retrain_after: int
    training: Annotated[
        TrainingProgress | None, Metric("training_running", "1 while a head is trained.", _set)
    ]
    failed_training: Annotated[
        FailedTraining | None,
        Meta(description="Null once the next head is trained."),
        Metric(
            "training_failures",
            "Failed trainings of the next head.",
            lambda failed: failed.failures if failed else 0,
        ),
    ]
    submissions: Annotated[
        int, Meta(description="Devices whose submission is stored."), Metric("submissions")
    ]
    lost_submissions: Annotated[
        tuple[LostSubmission, ...],
        Meta(description="Not in any further head until the device uploads again."),
        Metric("submissions_lost", "Submissions that the disk has lost.", len),
    ]
    lost_files: Annotated[
        tuple[str, ...],
        Meta(description="sha256 of lost files that devices or trainings need."),
        Metric("lost_files", "Files that devices or trainings need and that are lost.", len),
    ]
    waiting: Annotated[
        int, Meta(description="Submissions that are in no head yet."), Metric("submissions_waiting")
    ]
    closes_at_s: Annotated[
        UnixSeconds | None,
        Meta(description="When the open collection or round closes at the latest."),
        Metric("collection_closes_timestamp_seconds"),
    ]
    rate_limited_until_s: Annotated[
        UnixSeconds | None, Meta(description="No training starts before, by `limits.heads_per_hour`.")
    ]
    collection_problem: Annotated[
        str,
        Meta(description="Why the enrolled devices are too few for the open collection or round; or empty."),
    ]
    quotas: Annotated[
        Quotas,
        Metric(
            "quota_used",
            "What the fleet uses of what its task file can limit.",
            _of_quotas(lambda quota: quota.used),
            label="quota",
        ),
        Metric(
            "quota_limit", "Quotas of the task file.", _of_quotas(lambda quota: quota.limit), label="quota"
        ),
        Line("quotas"),
    ]
    privacy: Annotated[
        Privacy | None, Meta(description="Null without differential privacy."), Line("privacy")
    ]
    sums: Annotated[
        Sums | None,
        Meta(description="Null for a task without a second operator."),
        Metric(
            "sum_requested_timestamp_seconds",
            "When the sum that the second operator has neither opened nor refused was requested.",
            lambda sums: sums.requested_s if sums and not sums.problem else None,
        ),
        Metric(
            "sum_refused",
            "1 if the second operator has refused the requested sum.",
            lambda sums: bool(sums and sums.problem),
        ),
        Line("sums"),
    ]
    round: Annotated[Round | None, Meta(description="Null for a task without rounds.")]
    rollout: Annotated[
        Rollout,
        Metric(
            "head_version",
            "Versions of heads; 0 if there is none.",
            lambda rollout: {
                "newest": rollout.newest,
                "current": rollout.current,
                "candidate": rollout.candidate.version if rollout.candidate else 0,
            },
            label="head",
        ),
    ]
    devices: tuple[Device, ...]
    coverage: Annotated[
        dict[str, Coverage],
        Meta(description="By class."),
        Metric(
            "classes_covered",
            "Classes of which a device has submitted prototypes.",
            lambda coverage: number([each.devices for each in coverage.values()]),
        ),
    ]
    quarantine: Annotated[
        tuple[QuarantinedDevice, ...],
        Metric(
            "devices_quarantined",
            "Devices whose prototypes are not trained on.",
            lambda quarantine: number([each.released_s is None for each in quarantine]),
        ),
    ]
    forgotten: Annotated[
        tuple[ForgottenDevice, ...], Meta(description="Devices whose submissions an operator has deleted.")
    ]
    heads: Annotated[
        tuple[Head, ...],
        Meta(description="Oldest first."),
        Metric(
            "head_trained_timestamp_seconds",
            "When the newest head was trained.",
            of_newest(lambda head: head.trained_s),
        ),
        Metric(
            "head_images",
            "Images that the newest head's devices state.",
            of_newest(lambda head: head.metrics.get("images")),
        ),
        Metric(
            "head_counted_images",
            "Images that count in the newest head.",
            of_newest(lambda head: head.metrics.get("counted_images")),
        ),
        Metric(
            "heads_rejected",
            "Stored heads that were rejected.",
            lambda heads: number([head.state == "rejected" for head in heads]),
        ),
        Metric(
            "head_accuracy_ratio",
            "Accuracy of the current head on all held-out images.",
            of_current(lambda held_out: held_out.accuracy),
        ),
        Metric(
            "head_balanced_accuracy_ratio",
            "Accuracy of the current head, each class alike.",
            of_current(lambda held_out: held_out.balanced),
        ),
        Metric(
            "head_evaluations",
            "Devices that have evaluated the current head.",
            lambda heads: of_current(lambda held_out: held_out.devices)(heads) or 0,
        ),
    ]
    forecast: Annotated[
        tuple[Forecast, ...],
        Meta(description="For the current head: all classes together, then each with held-out images."),
    ]
    refusals: Annotated[
        tuple[Refusal, ...],
        _refused(lambda refusals: total([{each.reason: each.count} for each in refusals])),
        Metric(
            "devices_refused",
            "Devices of which a message was refused in the last ten minutes, by reason.",
            lambda refusals: Counter(
                each.reason for each in refusals if time.time() - each.last_s < LATELY_S
            ),
            label="reason",
        ),
    ]
    earlier_refusals: Annotated[
        dict[str, int],
        Meta(description="Messages refused before their devices got other keys, by reason."),
        _refused(dict),
    ]
    head_path: Annotated[
        str | None, Meta(description="File of the current head; null until that is written.")
    ]
    model_path: Annotated[str | None, Meta(description="Head and backbones in one ONNX file.")]
