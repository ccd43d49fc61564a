"""Devices in the status."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated

from msgspec import UNSET, Meta

from aggregator.status.annotations import Line, Metric, greatest, number, total
from aggregator.status.heads import Accuracy, accuracy_of, totals_of
from aggregator.status.rows import Rows
from aggregator.storage.keys import refusal_reason
from aggregator.storage.stored_values import UnixSeconds
from protocol.statistics.balanced_accuracy import balanced_accuracy
from protocol.wire.messages import DRIFT_LIMIT, Reason

STATES = ("online", "offline", "stopped", "unknown", "enrolled", "not enrolled", "revoked")

_REFUSED: Mapping[Reason | None, str] = {"revoked": "revoked", "unknown_device": "not enrolled"}
"""State of a device whose presence messages are refused."""


class Device(Accuracy, frozen=True, kw_only=True):
    """A device, and the results of the head that it uses."""

    device: str
    state: Annotated[
        str,
        Meta(description="online, stopped or offline; or unknown, enrolled, not enrolled or revoked."),
        Metric(
            "devices",
            "Known devices, by state.",
            lambda states: {**dict.fromkeys(STATES, 0), **Counter(states)},
            label="state",
        ),
    ]
    counts: Annotated[
        bool,
        Meta(description="False for a device that is revoked or not enrolled: its submission is not used."),
    ]
    seen_s: UnixSeconds | None
    runtime: str | None
    backbones: Annotated[tuple[str, ...], Meta(description="sha256 of those that it has downloaded.")]
    problem: Annotated[
        str,
        Meta(description="Why the device does not take part."),
        Metric("devices_with_problem", "Devices that do not take part, with a reason.", number),
        Line("problem of", style="yellow"),
    ]
    warning: Annotated[
        str,
        Meta(description="What its operator should do, although it takes part."),
        Line("warning of", style="yellow"),
    ]
    refused_messages: Annotated[
        dict[str, int],
        Meta(description="Messages that the device has refused, by reason."),
        Metric(
            "device_refused_messages",
            "Messages that devices have refused since their start, by reason; at most a million of each device.",
            total,
            label="reason",
        ),
        Metric(
            "devices_refusing",
            "Devices that have refused messages since their start, by reason.",
            lambda refused: Counter(reason for each in refused for reason in each),
            label="reason",
        ),
        Line(
            "refused by",
            lambda refused: ", ".join(f"{count} x {reason}" for reason, count in sorted(refused.items())),
            style="yellow",
        ),
    ]
    drift: Annotated[
        float | None,
        Meta(
            description="How far the last predicted images are from the labeled ones, in standard deviations of "
            "chance; null if no program on the device has predicted enough."
        ),
        Metric("device_drift_max", "Greatest drift that a device reports.", greatest),
        Metric(
            "devices_with_drift",
            f"Devices that report a drift above {DRIFT_LIMIT}.",
            lambda drifts: number([each is not None and each > DRIFT_LIMIT for each in drifts]),
        ),
    ]
    images: int
    images_by_class: Annotated[dict[str, int], Meta(description="Images of each of the task's classes.")]
    round: int | None
    classes: int
    prototypes: int
    prototypes_by_class: Annotated[
        dict[str, int], Meta(description="Prototypes in its submission, or images in them, by class.")
    ]
    bytes: Annotated[
        int,
        Meta(description="Size of its submission."),
        Metric("submissions_bytes", "Size of the stored submissions.", sum),
    ]
    head: Annotated[int, Meta(description="Version of the head that it uses; 0 if it uses none.")]
    head_problem: Annotated[
        str,
        Meta(description="Why it does not use the published head."),
        Metric("devices_without_head", "Devices that cannot use the published head.", number),
        Line("head not used by", style="yellow"),
    ]
    epsilon: Annotated[
        float | None,
        Meta(description="Differential privacy: the greatest total that it has reported."),
        Metric("device_epsilon_max", "Greatest total epsilon that a device has reported.", greatest),
    ]
    lost_releases: Annotated[
        int,
        Meta(
            description="Differential privacy: submissions that its last record lacks and earlier ones had."
        ),
        Metric("devices_with_lost_privacy_record", "Devices that have lost a record of privacy.", number),
    ]


def devices_of(rows: Rows) -> Iterator[Device]:
    classes, known = rows.served.classes, frozenset(rows.served.classes)
    is_closed, epsilons = rows.store.keys.is_closed(), rows.store.devices.epsilons()
    lost_releases = rows.store.devices.lost_releases()
    enrolled = {device for device, key in rows.keys.items() if key.enrolled and key.revoked_s is None}
    for device in sorted(rows.devices.keys() | rows.submissions.keys() | enrolled):
        record, submission = rows.devices.get(device), rows.submissions.get(device)
        info = record.info if record is not None else None
        state = record.state if record else "enrolled" if device in enrolled else "unknown"
        head = info.head_version if info else 0
        evaluation = rows.evaluations.get(head or rows.rollout.current, {}).get(device)
        evaluations = [evaluation] if evaluation else []
        images, per_class = info.images if info else {}, submission.per_class if submission else {}
        yield Device(
            device=device,
            state=_REFUSED.get(refusal_reason(rows.keys.get(device), is_closed=is_closed), state),
            counts=rows.decisions.counts(device),
            seen_s=record.seen_s if record else None,
            runtime=info.runtime if info else None,
            backbones=tuple(each.hex() for each in info.backbones) if info else (),
            problem=info.problem if info else "",
            warning=info.warning if info else "",
            refused_messages=info.refused_messages if info else {},
            drift=info.drift if info and info.drift is not UNSET else None,
            images=sum(images.values()),
            images_by_class={name: count for name, count in images.items() if name in known},
            round=submission.entry.round if submission else None,
            classes=len(per_class),
            prototypes=submission.prototypes if submission else 0,
            prototypes_by_class={classes[label]: count for label, count in per_class.items()},
            bytes=submission.size_bytes if submission else 0,
            head=head,
            head_problem=_head_problem(rows, device),
            epsilon=epsilons.get(device),
            lost_releases=lost_releases.get(device, 0),
            **accuracy_of(evaluations, totals_of(evaluations)),
            balanced=balanced_accuracy(evaluation.correct, evaluation.incorrect, rows.covered)
            if evaluation and rows.served.is_personal
            else None,
        )


def _head_problem(rows: Rows, device: str) -> str:
    for version in (rows.rollout.trial.version if rows.rollout.trial else 0, rows.rollout.current):
        evaluation = rows.evaluations.get(version, {}).get(device)
        if evaluation is not None and evaluation.problem:
            return evaluation.problem
    return ""
