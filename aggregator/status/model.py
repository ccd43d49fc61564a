"""The output of `aggregator status --json`. `docs/status.schema.json` is generated from these structs."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from aggregator.intake.intake_status import IntakeStatus
from aggregator.storage.devices import ForgottenDevice, QuarantinedDevice, Refusal, UnixSeconds
from aggregator.storage.stored_values import TrainingProgress
from aggregator.storage.submissions import LostSubmission
from protocol.wire.presence import Duplicate

NEARLY = 0.9
"""Share of a quota from which it needs attention."""

HeadState = Literal["current", "candidate", "rejected", ""]


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

    number: int
    rounds: Annotated[int, Meta(description="Rounds of the task.")]
    over: Annotated[bool, Meta(description="All rounds are over.")]
    min_devices: int
    devices: Annotated[tuple[str, ...], Meta(description="Devices that have submitted for this round.")]
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

    current: Annotated[int, Meta(description="Version of the current head; 0 if there is none.")]
    candidate: Candidate | None
    requested: Annotated[int | None, Meta(description="Head that a pending operator command makes current.")]


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Results on held-out images."""

    correct: int = 0
    incorrect: int = 0
    accuracy: Annotated[float | None, Meta(description="On the devices' own mixture of classes.")] = None
    balanced: Annotated[
        float | None,
        Meta(
            description="Mean over all classes that have prototypes; of a device, only if its model is personal. "
            "Classes of which it has no held-out images count as not recognized."
        ),
    ] = None
    with_prior: Annotated[
        float | None,
        Meta(
            description="As `accuracy`, with the prior of `edge-client predict --prior auto`; null if no device "
            "reports it, and a device that does not counts without."
        ),
    ] = None


class Device(Accuracy, frozen=True, kw_only=True):
    """A device, and the results of the head that it uses."""

    device: str
    state: Annotated[
        str, Meta(description="online, stopped or offline; or unknown, enrolled, not enrolled or revoked.")
    ]
    seen_s: UnixSeconds | None
    runtime: str | None
    problem: Annotated[str, Meta(description="Why the device does not take part.")]
    warning: Annotated[str, Meta(description="What its operator should do, although it takes part.")]
    refused_messages: Annotated[
        dict[str, int], Meta(description="Messages that the device has refused, by reason.")
    ]
    drift: Annotated[
        float | None,
        Meta(
            description="How far the last predicted images are from the labeled ones, in standard deviations of "
            "chance; null if no program on the device has predicted enough."
        ),
    ]
    images: int
    round: int | None
    classes: int
    prototypes: int
    bytes: Annotated[int, Meta(description="Size of its submission.")]
    head: Annotated[int, Meta(description="Version of the head that it uses; 0 if it uses none.")]
    head_problem: Annotated[str, Meta(description="Why it does not use the published head.")]
    epsilon: Annotated[
        float | None, Meta(description="Differential privacy: the greatest total that it has reported.")
    ]


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """The prototypes of a class, and the devices that have submitted them."""

    prototypes: int
    devices: int


class Confusion(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out images of a class that a head puts into another one."""

    label: Annotated[str, Meta(description="Their class.")]
    predicted: Annotated[str, Meta(description="The class that the head finds most probable.")]
    images: int
    of: Annotated[int, Meta(description="All held-out images of their class.")]


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The gain in accuracy that twice as many images should bring, from and to, 0 to 1."""

    label: Annotated[str, Meta(description="The class; empty for all.")]
    images: Annotated[int, Meta(description="Held-out images of it.")]
    least: float
    most: float


class HeldOut(Accuracy, frozen=True, kw_only=True):
    """Results of a head on all devices."""

    devices: Annotated[int, Meta(description="Devices that have evaluated it.")]
    missing: Annotated[
        int,
        Meta(
            description="Held-out images that a version with a threshold for unknown images needs more; or 0."
        ),
    ] = 0
    confused: Annotated[
        tuple[Confusion, ...],
        Meta(description="Pairs of classes with the most images first; of the current head only."),
    ] = ()


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """A trained head."""

    version: int
    sha256: str
    devices: int
    prototypes: int
    trained_s: UnixSeconds
    metrics: dict[str, float]
    state: HeadState
    reason: Annotated[str, Meta(description="Why it was rejected.")]
    warning: Annotated[str, Meta(description="Why outlier devices were not quarantined for it; or empty.")]
    limited: Annotated[
        tuple[str, ...], Meta(description="Devices whose images count only in part, with the rule.")
    ] = ()
    held_out: HeldOut


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


class Privacy(msgspec.Struct, frozen=True, kw_only=True):
    """Differential privacy: what the task promises, and what devices have spent."""

    epsilon: Annotated[float, Meta(description="Of one submission.")]
    max_epsilon: Annotated[float, Meta(description="Of all submissions of a device.")]
    delta: float
    spent: Annotated[float | None, Meta(description="The greatest total that a device has reported.")]
    nearly_spent: Annotated[int, Meta(description="Devices that have spent 90 % of `max_epsilon` or more.")]


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """The second operator, and the sums that it opens."""

    min_devices: Annotated[int, Meta(description="Devices in a list, at least.")]
    tolerance: Annotated[float, Meta(description="Share of these that may add no noise.")]
    seal_key: Annotated[str, Meta(description="Public key in hex: `edge-client --second-operator`.")]
    sign_key: Annotated[str, Meta(description="Public key in hex that signs opened sums.")]
    lists: Annotated[int, Meta(description="Lists of devices whose sums are in the newest head.")]
    devices: Annotated[int, Meta(description="Their devices.")]
    left_out: Annotated[int, Meta(description="Devices of opened lists that could not be used.")]
    requested: Annotated[int, Meta(description="Devices of the list that no head has yet; 0 for none.")]
    requested_s: Annotated[UnixSeconds | None, Meta(description="Since when; null once it is opened.")]
    waiting: Annotated[int, Meta(description="Devices that have submitted and are in no list.")]
    problem: Annotated[str, Meta(description="Why the second operator has not opened it; or empty.")]
    left_out_reason: Annotated[
        str, Meta(description="Why the newest list was left out of all heads; or empty.")
    ]


class Attention(msgspec.Struct, frozen=True):
    """A condition that needs an operator."""

    level: Literal["error", "warning"]
    title: Annotated[str, Meta(description="The condition in a few words.")]
    text: Annotated[str, Meta(description="Its reason or place, and what to do.")]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an aggregator and its fleet."""

    attention: Annotated[tuple[Attention, ...], Meta(description="What needs an operator, worst first.")]
    running: bool
    leader: Annotated[
        str, Meta(description="The machine of the aggregator that runs, on PostgreSQL; otherwise empty.")
    ]
    intake: IntakeStatus
    aggregator_key: Annotated[str, Meta(description="Public key in hex: `edge-client --aggregator-key`.")]
    root_key: Annotated[
        str, Meta(description="Public key in hex that signs the later ones; empty if none does.")
    ]
    duplicate: Annotated[
        Duplicate | None, Meta(description="Another aggregator with this key that has run at the same time.")
    ]
    enrollment: Enrollment
    fleet: str
    algorithm: str
    task: Annotated[str, Meta(description="sha256 of the task manifest.")]
    preparing: Annotated[
        str,
        Meta(
            description="Algorithm of a task whose graphs are being exported, before it is served; or empty."
        ),
    ]
    classes: tuple[str, ...]
    counted: Annotated[
        Literal["prototypes", "images"],
        Meta(
            description="What the numbers of prototypes count: where devices may upload principal prototypes, the "
            "images in all of them."
        ),
    ]
    quorum: int
    retrain_after: int
    training: TrainingProgress | None
    failed_training: Annotated[FailedTraining | None, Meta(description="Null once the next head is trained.")]
    submissions: int
    lost_submissions: Annotated[
        tuple[LostSubmission, ...],
        Meta(description="Not in any further head until the device uploads again."),
    ]
    lost_files: Annotated[
        tuple[str, ...], Meta(description="sha256 of lost files that devices or trainings need.")
    ]
    waiting: Annotated[int, Meta(description="Submissions that are in no head yet.")]
    closes_at_s: Annotated[
        UnixSeconds | None, Meta(description="When the round or the collection closes at the latest.")
    ]
    rate_limited_until_s: Annotated[
        UnixSeconds | None, Meta(description="No training starts before, by `limits.heads_per_hour`.")
    ]
    collection_problem: Annotated[
        str,
        Meta(description="Why the enrolled devices are too few for the open collection or round; or empty."),
    ]
    quotas: Quotas
    privacy: Annotated[Privacy | None, Meta(description="Null without differential privacy.")]
    sums: Annotated[Sums | None, Meta(description="Null for a task without a second operator.")]
    round: Annotated[Round | None, Meta(description="Null for a task without rounds.")]
    rollout: Rollout
    devices: tuple[Device, ...]
    coverage: Annotated[dict[str, Coverage], Meta(description="By class.")]
    quarantine: tuple[QuarantinedDevice, ...]
    forgotten: Annotated[
        tuple[ForgottenDevice, ...], Meta(description="Devices whose submissions an operator has deleted.")
    ]
    heads: Annotated[tuple[Head, ...], Meta(description="Oldest first.")]
    forecast: Annotated[
        tuple[Forecast, ...],
        Meta(description="For the current head: all classes together, then each with held-out images."),
    ]
    refusals: tuple[Refusal, ...]
    earlier_refusals: Annotated[
        dict[str, int], Meta(description="Messages refused before their devices got other keys, by reason.")
    ]
    head_path: Annotated[
        str | None, Meta(description="File of the current head; null until that is written.")
    ]
    model_path: Annotated[str | None, Meta(description="Head and backbones in one ONNX file.")]
