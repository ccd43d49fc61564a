"""Outlier detection, pure: the devices whose prototypes differ from the other devices' more than chance explains.

A device's mean of a class is compared with the other devices'. It varies with the number of images, and from place to
place: an honest device in another place is no outlier among devices in different places.
"""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aggregator.coordination.bounds import COMPARED_DEVICES
from aggregator.coordination.minimums import MEDIAN_DEVICES
from aggregator.training.robust.outlier_statistics import (
    DeviceSummary,
    Floats,
    Test,
    class_means,
    distances,
    lengths,
    scatters,
)
from protocol.wire.codec import digest_of

MAX_REPORTED = 1000
"""Factor beyond which the number is not reported."""

MAX_SHARE = 0.5
"""Share of devices above which none is quarantined: then it is unknown which devices are the outliers."""

SIMILAR = 0.5
"""Squared distance of two devices, over the mean of their squared distances from the median, that makes them alike."""

MAX_MALICIOUS = 1 / 3
"""Share of all devices that may be malicious: where so many agree about a class, they are not all malicious."""

SHOWN_DEVICES = 5

COHORT = 500
"""Devices that are compared with each other, in a larger fleet: that bounds what is kept of them."""

SHOWN_WARNINGS = 3
"""Cohorts whose warnings are shown."""


@dataclass(frozen=True)
class Finding:
    """A device's greatest deviation, relative to the limit, and a description."""

    excess: float
    reason: str
    labels: frozenset[int | None] = frozenset()
    """The classes in which it is far from the median; None for what no other place explains: scatter and length."""
    tested: frozenset[int | None] = frozenset()
    """The classes of all of its deviations; None for the length of all classes."""


@dataclass(frozen=True)
class Judgment:
    """The devices to quarantine, with reasons."""

    quarantined: Mapping[str, str]
    warning: str = ""
    """Why outliers are not quarantined; empty if all of them are."""
    disputed: frozenset[int] = frozenset()
    """Classes of which outliers are not quarantined, since it is unknown which devices are incorrect."""


def cohorts_of(devices: Collection[str], *, version: int) -> list[list[str]]:
    """Return the devices in cohorts of similar size, of at most COHORT; no device chooses its own, which changes."""
    number = max(1, math.ceil(len(devices) / COHORT))
    order = (
        sorted(devices, key=lambda device: digest_of(f"{version} {device}".encode()))
        if number > 1
        else devices
    )
    return [list(itertools.islice(order, start, None, number)) for start in range(number)]


def joined_judgment(judgments: Iterable[Judgment]) -> Judgment:
    """Return the judgment of all cohorts."""
    each = list(judgments)
    return Judgment(
        dict(sorted((device, reason) for one in each for device, reason in one.quarantined.items())),
        "; ".join(list(filter(None, (one.warning for one in each)))[:SHOWN_WARNINGS]),
        frozenset().union(*(one.disputed for one in each)),
    )


def judge(
    parts: Mapping[str, DeviceSummary],
    *,
    classes: Sequence[str],
    false_alarm_rate: float,
    released: Collection[str] = (),
) -> Judgment:
    """Return the devices to quarantine, except released, similar and disputed ones, and all if they would be most."""
    findings = outliers(parts, classes=classes, false_alarm_rate=false_alarm_rate)
    worst = max(findings, key=lambda device: findings[device].excess, default="")
    if len(findings) > MAX_SHARE * len(parts):
        return Judgment(
            {},
            f"{len(findings)} of {len(parts)} devices are far from each other, so none is quarantined; "
            f"{worst}: {findings[worst].reason}",
        )
    group = _similar(parts, findings, classes=len(classes)) - set(released)
    disputed = _disputed(parts, findings) - group - set(released)
    warnings = (
        _warning(
            findings, group, "from the others but resemble each other, as in another place", total=len(parts)
        ),
        _warning(findings, disputed, "only in classes in which few devices agree", total=len(parts)),
    )
    excluded = findings.keys() - group - disputed - set(released)
    return Judgment(
        {device: findings[device].reason for device in sorted(excluded)},
        "; ".join(filter(None, warnings)),
        frozenset(label for device in disputed for label in findings[device].tested if label is not None),
    )


def _warning(findings: Mapping[str, Finding], devices: Collection[str], where: str, *, total: int) -> str:
    if not devices:
        return ""
    worst = max(sorted(devices), key=lambda device: findings[device].excess)
    names = ", ".join(sorted(devices)[:SHOWN_DEVICES]) + (" …" if len(devices) > SHOWN_DEVICES else "")
    return (
        f"{len(devices)} of {total} devices are far {where}, so they are not quarantined: {names}; "
        f"{worst}: {findings[worst].reason}"
    )


def _disputed(parts: Mapping[str, DeviceSummary], findings: Mapping[str, Finding]) -> set[str]:
    """Return the outliers that deviate only in classes whose other devices may all be malicious.

    In other classes, where they agree with enough devices, they do not deviate: at least one such class is needed.
    """
    agreeing = Counter(
        label for device, part in parts.items() if device not in findings for label in part.classes
    )
    sure = {label for label, number in agreeing.items() if number >= MAX_MALICIOUS * len(parts)}
    return {
        device
        for device, one in findings.items()
        if one.tested.isdisjoint({*sure, None}) and not sure.isdisjoint(parts[device].classes)
    }


def outliers(
    parts: Mapping[str, DeviceSummary], *, classes: Sequence[str], false_alarm_rate: float
) -> dict[str, Finding]:
    """Return the devices that deviate more than honest devices do, each with its greatest deviation.

    In at most a share `false_alarm_rate` of all fleets without an outlier, there is one (Bonferroni over all tests).
    The others are compared again without the outliers, which hide others: without a first one, there is no second pass.
    """
    findings: dict[str, Finding] = {}
    while new := _one_pass(
        {device: part for device, part in parts.items() if device not in findings},
        classes=classes,
        false_alarm_rate=false_alarm_rate,
    ):
        findings |= new
    return dict(sorted(findings.items()))


def _one_pass(
    parts: Mapping[str, DeviceSummary], *, classes: Sequence[str], false_alarm_rate: float
) -> dict[str, Finding]:
    tests = list(_tests(parts, classes))
    probability = false_alarm_rate / max(sum(len(test.devices) for *_, test in tests), 1)
    findings: dict[str, Finding] = {}
    for label, is_distance, how, test in tests:
        limits = test.limits(probability)
        for device, ratio, limit in zip(test.devices, test.ratios, limits, strict=True):
            if ratio <= limit:
                continue
            before = findings.get(device, Finding(0.0, ""))
            labels = before.labels | {label if is_distance else None}
            excess, reason = float(ratio / limit), before.reason
            if excess > before.excess:
                factor = float(np.sqrt(ratio))
                times = f"{factor:.1f}" if factor < MAX_REPORTED else f"over {MAX_REPORTED}"
                reason = f"{how.format(times)}, limit {np.sqrt(limit):.1f}"
            findings[device] = Finding(max(excess, before.excess), reason, labels, before.tested | {label})
    return findings


def _tests(
    parts: Mapping[str, DeviceSummary], classes: Sequence[str]
) -> Iterator[tuple[int | None, bool, str, Test]]:
    """Yield each test, with its class, if it is of one, whether it is of distances, and a description."""
    for label, name in enumerate(classes):
        one = class_means(parts, label)
        if len(one.devices) < COMPARED_DEVICES:
            continue
        median = f"the median of {len(one.devices)} devices"
        yield label, True, f"class {name!r}: {{}} times as far as expected from {median}", distances(one)
        yield (
            label,
            False,
            f"class {name!r}: {{}} times as scattered as plausible, by {median}",
            scatters(one),
        )
    length = lengths(parts)
    if len(length.devices) >= COMPARED_DEVICES:
        median = f"the median of {len(length.devices)} devices"
        yield None, False, f"all classes: {{}} times as long as plausible, by {median}", length


def _similar(
    parts: Mapping[str, DeviceSummary], findings: Mapping[str, Finding], *, classes: int
) -> set[str]:
    """Return the outliers that resemble another device, and whose images are not another class of the other devices.

    Two devices resemble each other if, over their common classes, they are much nearer to each other than to the
    median of the devices that are no outliers. A class counts by the images of both: chance alone separates few.
    """
    distant = [device for device, one in findings.items() if None not in one.labels]
    if not distant:
        return set()
    typical = {device: part for device, part in parts.items() if device not in findings}
    medians = {
        label: one.median
        for label in range(classes)
        if len((one := class_means(typical, label)).devices) >= MEDIAN_DEVICES
    }
    columns = {device: column for column, device in enumerate(sorted(parts))}
    apart, away = np.zeros((2, len(distant), len(columns)))
    mislabeled = set()
    for label, median in medians.items():
        one = class_means(parts, label)
        deviations = one.means - median
        squares = (deviations**2).sum(axis=1)
        at = [columns[device] for device in one.devices]
        for row, device in enumerate(distant):
            if device not in one.devices:
                continue
            mine = one.devices.index(device)
            weights = 1 / (1 / one.images + 1 / one.images[mine])
            apart[row, at] += weights * ((deviations - deviations[mine]) ** 2).sum(axis=1)
            away[row, at] += weights * (squares + squares[mine]) / 2
            if label in findings[device].labels and is_mislabeled(one.means[mine], label, medians):
                mislabeled.add(device)
    for row, device in enumerate(distant):
        away[row, columns[device]] = 0.0
    alike = apart < SIMILAR * away
    return {device for device, row in zip(distant, alike, strict=True) if row.any()} - mislabeled


def is_mislabeled(mean: Floats, label: int, medians: Mapping[int, Floats]) -> bool:
    """Return True if a device's mean of a class is much nearer to the median of another class."""
    squares = {other: float(((mean - median) ** 2).sum()) for other, median in medians.items()}
    return min(squares.values()) < SIMILAR * squares[label]
