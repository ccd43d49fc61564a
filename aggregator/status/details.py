"""Figures of the dashboard that `aggregator status` has not: by device and class, and by head and class."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from statistics import fmean
from typing import Annotated

import msgspec
from msgspec import Meta

from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from protocol.wire.messages import DeviceInfo, Evaluation

PerClass = Annotated[tuple[int, ...], Meta(description="In the order of the task's classes.")]

TAIL = 0.1
"""Share of the devices that `worst` and `best` average."""


class DeviceDetails(msgspec.Struct, frozen=True, kw_only=True):
    """A device's images, prototypes and results by class; a tuple is empty if nothing is known."""

    device: str
    counts: Annotated[
        bool,
        Meta(description="False for a device that is revoked or not enrolled: its submission is not used."),
    ]
    software: str
    backbones: Annotated[tuple[str, ...], Meta(description="sha256 of those that it has downloaded.")]
    unusable_images: int
    images: PerClass
    prototypes: PerClass
    correct: Annotated[PerClass, Meta(description="Held-out images, with the head that it uses.")]
    incorrect: PerClass


class DeviceSpread(msgspec.Struct, frozen=True, kw_only=True):
    """A head's accuracy over the devices that have evaluated it, each device alike."""

    mean: float
    worst: Annotated[float, Meta(description="Mean over the 10 % of the devices with the lowest accuracy.")]
    best: Annotated[float, Meta(description="Mean over the 10 % of the devices with the highest accuracy.")]
    devices: int


class HeadDetails(msgspec.Struct, frozen=True, kw_only=True):
    """A head's results on held-out images by class, pooled over devices, and over devices."""

    version: int
    size_bytes: int
    correct: PerClass
    incorrect: PerClass
    spread: Annotated[DeviceSpread | None, Meta(description="Null if no device has evaluated it.")]


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """Figures by class of all devices and heads."""

    devices: tuple[DeviceDetails, ...]
    heads: tuple[HeadDetails, ...]


def collect_details(store: Store) -> Details:
    """Return the details of a fleet; raises StateError if no aggregator has run on this state yet."""
    with store.database.snapshot():
        served = store.served_task()
        task, classes = served.digest, served.classes
        used, submissions = store.heads.rollout(task), store.submissions.all(task)
        heads = store.heads.all(task)
        evaluations = {head.version: store.evaluations.of_head(task, head.version) for head in heads}
        decisions = store.decisions(task)
        known = {record.device: record.info for record in store.devices.all()}
    newest: Mapping[str, Evaluation] = evaluations.get(used.current, {})
    return Details(
        devices=tuple(
            _device(
                device,
                known.get(device),
                submissions.get(device),
                _evaluation(device, known.get(device), evaluations) or newest.get(device),
                classes,
                counts=decisions.counts(device),
            )
            for device in sorted(known.keys() | submissions.keys())
        ),
        heads=tuple(
            _head(head.version, head.size_bytes, evaluations[head.version], classes) for head in heads
        ),
    )


def _evaluation(
    device: str, info: DeviceInfo | None, evaluations: Mapping[int, Mapping[str, Evaluation]]
) -> Evaluation | None:
    return evaluations.get(info.head_version, {}).get(device) if info is not None else None


def _device(
    device: str,
    info: DeviceInfo | None,
    submission: SubmissionRecord | None,
    evaluation: Evaluation | None,
    classes: Sequence[str],
    *,
    counts: bool,
) -> DeviceDetails:
    return DeviceDetails(
        device=device,
        counts=counts,
        software=info.software if info else "",
        backbones=tuple(each.hex() for each in info.backbones) if info else (),
        unusable_images=info.unusable_images if info else 0,
        images=tuple(info.images.get(name, 0) for name in classes) if info else (),
        prototypes=tuple(submission.per_class.get(label, 0) for label in range(len(classes)))
        if submission
        else (),
        correct=evaluation.correct if evaluation else (),
        incorrect=evaluation.incorrect if evaluation else (),
    )


def _head(
    version: int, size_bytes: int, evaluations: Mapping[str, Evaluation], classes: Sequence[str]
) -> HeadDetails:
    usable = [each for each in evaluations.values() if not each.problem]
    return HeadDetails(
        version=version,
        size_bytes=size_bytes,
        correct=_sums((each.correct for each in usable), len(classes)),
        incorrect=_sums((each.incorrect for each in usable), len(classes)),
        spread=spread_of(usable),
    )


def _sums(rows: Iterable[Sequence[int]], size: int) -> tuple[int, ...]:
    totals = [0] * size
    for row in rows:
        for label, count in enumerate(row[:size]):
            totals[label] += count
    return tuple(totals)


def spread_of(evaluations: Iterable[Evaluation]) -> DeviceSpread | None:
    """Return the mean accuracy over all devices, and over the worst and best 10 %, at least one device.

    Devices without held-out images do not count; None if none is left.
    """
    pairs = ((sum(each.correct), sum(each.correct) + sum(each.incorrect)) for each in evaluations)
    accuracies = sorted(correct / total for correct, total in pairs if total)
    if not accuracies:
        return None
    tail = ceil(len(accuracies) * TAIL)
    return DeviceSpread(
        mean=fmean(accuracies),
        worst=fmean(accuracies[:tail]),
        best=fmean(accuracies[-tail:]),
        devices=len(accuracies),
    )
