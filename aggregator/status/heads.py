"""Heads in the status, and their results on held-out images."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from statistics import fmean
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta

from aggregator.coordination import rollout_state
from aggregator.coordination.minimums import CALIBRATION_IMAGES
from aggregator.status.rows import Rows
from aggregator.storage.heads import CALIBRATED_FROM, HeadRecord
from aggregator.storage.stored_values import UnixSeconds
from protocol.statistics.balanced_accuracy import balanced_accuracy
from protocol.wire.messages import MAX_CONFUSED, Evaluation

HeadState = Literal["current", "candidate", "rejected", ""]

TAIL = 0.1
"""Share of the devices that `worst` and `best` average."""


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


class ClassResult(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out images of a class that a head has classified."""

    correct: int
    incorrect: int


NO_RESULT = ClassResult(correct=0, incorrect=0)


class DeviceSpread(msgspec.Struct, frozen=True, kw_only=True):
    """A head's accuracy over the devices that have evaluated it, each device alike."""

    mean: float
    worst: Annotated[float, Meta(description="Mean over the 10 % of the devices with the lowest accuracy.")]
    best: Annotated[float, Meta(description="Mean over the 10 % of the devices with the highest accuracy.")]
    devices: int


class Confusion(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out images of a class that a head puts into another one."""

    label: Annotated[str, Meta(description="Their class.")]
    predicted: Annotated[str, Meta(description="The class that the head finds most probable.")]
    images: int
    of: Annotated[int, Meta(description="All held-out images of their class.")]


class HeldOut(Accuracy, frozen=True, kw_only=True):
    """Results of a head on all devices."""

    devices: Annotated[int, Meta(description="Devices that have evaluated it.")]
    spread: Annotated[
        DeviceSpread | None, Meta(description="Null if no device with held-out images has evaluated it.")
    ] = None
    by_class: Annotated[
        dict[str, ClassResult],
        Meta(description="Classes with held-out images, in the order of the task; of the current head only."),
    ] = {}
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
    size_bytes: int
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


def of_newest(figure: Callable[[Head], float | None]) -> Callable[[Sequence[Head]], float | None]:
    """Return a function from heads to a figure of the newest one."""
    return lambda heads: figure(heads[-1]) if heads else None


def of_current(figure: Callable[[HeldOut], float | None]) -> Callable[[Sequence[Head]], float | None]:
    """Return a function from heads to a figure of the current one's results."""
    return lambda heads: next((figure(head.held_out) for head in heads if head.state == "current"), None)


def heads_of(rows: Rows) -> tuple[Head, ...]:
    return tuple(
        Head(
            version=head.version,
            sha256=head.digest.hex(),
            size_bytes=head.size_bytes,
            devices=head.devices,
            prototypes=head.prototypes,
            trained_s=head.trained_s,
            metrics=dict(head.metrics),
            state=_state(head.version, rows.rollout),
            reason=rows.rollout.rejected.get(head.version, ""),
            warning=head.warning,
            limited=head.limited,
            held_out=_held_out(head, rows),
        )
        for head in rows.heads
    )


def _state(version: int, rollout: rollout_state.State) -> HeadState:
    if rollout.trial is not None and version == rollout.trial.version:
        return "candidate"
    if version in rollout.rejected:
        return "rejected"
    return "current" if version == rollout.current else ""


def _held_out(head: HeadRecord, rows: Rows) -> HeldOut:
    usable = [one for one in rows.evaluations_of(head.version).values() if not one.problem]
    classes, is_current = rows.served.classes, head.version == rows.rollout.current
    by_class = {
        label: ClassResult(correct=correct, incorrect=incorrect)
        for label, (correct, incorrect) in enumerate(
            zip(_sums(one.correct for one in usable), _sums(one.incorrect for one in usable), strict=True)
        )
        if correct + incorrect
    }
    totals = totals_of(usable)
    return HeldOut(
        **accuracy_of(usable, totals),
        balanced=_balanced(usable, by_class, rows),
        devices=len(usable),
        spread=_spread(totals),
        by_class={classes[label]: result for label, result in by_class.items()} if is_current else {},
        missing=_missing(usable, totals, head),
        confused=_confused(usable, by_class, classes) if is_current else (),
    )


def _sums(counts: Iterable[Sequence[int]]) -> list[int]:
    """Return the sum of each class."""
    return [sum(column) for column in zip(*counts, strict=True)]


def totals_of(evaluations: Iterable[Evaluation]) -> list[tuple[int, int]]:
    """Return the correct and incorrect held-out images of each evaluation."""
    return [(sum(one.correct), sum(one.incorrect)) for one in evaluations]


def accuracy_of(evaluations: Iterable[Evaluation], totals: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the fields of `Accuracy`, but `balanced`, pooled over evaluations with these totals."""
    correct, incorrect = sum(each for each, _ in totals), sum(each for _, each in totals)
    accuracy = correct / (correct + incorrect) if correct + incorrect else None
    gains = [
        one.correct_with_prior - without
        for one, (without, _) in zip(evaluations, totals, strict=True)
        if one.correct_with_prior is not UNSET
    ]
    with_prior = (correct + sum(gains)) / (correct + incorrect) if gains and accuracy is not None else None
    return {"correct": correct, "incorrect": incorrect, "accuracy": accuracy, "with_prior": with_prior}


def _balanced(
    evaluations: Iterable[Evaluation], by_class: Mapping[int, ClassResult], rows: Rows
) -> float | None:
    """Return the accuracy over all covered classes: of the fleet's model, or the mean over personal models.

    Of the fleet's model, classes without any held-out images do not count.
    """
    if rows.served.is_personal:
        every = (balanced_accuracy(one.correct, one.incorrect, rows.covered) for one in evaluations)
        found = [each for each in every if each is not None]
        return fmean(found) if found else None
    shares = [
        result.correct / (result.correct + result.incorrect)
        for label, result in by_class.items()
        if label in rows.covered
    ]
    return fmean(shares) if shares else None


def _spread(totals: Iterable[tuple[int, int]]) -> DeviceSpread | None:
    """Return the mean accuracy over all devices, and over the worst and best 10 %, at least one device.

    Devices without held-out images do not count; None if none is left.
    """
    accuracies = sorted(
        correct / (correct + incorrect) for correct, incorrect in totals if correct + incorrect
    )
    if not accuracies:
        return None
    tail = ceil(len(accuracies) * TAIL)
    return DeviceSpread(
        mean=fmean(accuracies),
        worst=fmean(accuracies[:tail]),
        best=fmean(accuracies[-tail:]),
        devices=len(accuracies),
    )


def _missing(evaluations: Iterable[Evaluation], totals: Iterable[tuple[int, int]], head: HeadRecord) -> int:
    """Return how many held-out images a head with novelty lacks for its threshold."""
    if CALIBRATED_FROM in head.metrics or all(one.novelty_images is UNSET for one in evaluations):
        return 0
    return max(0, CALIBRATION_IMAGES - sum(correct + incorrect for correct, incorrect in totals))


def _confused(
    evaluations: Iterable[Evaluation], by_class: Mapping[int, ClassResult], classes: Sequence[str]
) -> tuple[Confusion, ...]:
    """Return the pairs of classes that devices have confused, pooled, at most MAX_CONFUSED."""
    pairs: Counter[tuple[int, int]] = Counter()
    for one in evaluations:
        for pair in one.confused or ():
            pairs[pair.label, pair.predicted] += pair.images
    return tuple(
        Confusion(
            label=classes[label],
            predicted=classes[predicted],
            images=images,
            of=by_class[label].correct + by_class[label].incorrect,
        )
        for (label, predicted), images in pairs.most_common(MAX_CONFUSED)
    )
