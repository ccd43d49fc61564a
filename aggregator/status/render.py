"""Prints a status for a person, with rich."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from aggregator.coordination.canary_comparison import canaries
from aggregator.status.model import (
    Candidate,
    Device,
    Enrollment,
    FailedTraining,
    Head,
    Quotas,
    Round,
    Status,
)
from aggregator.storage.heads import CALIBRATED_FROM
from aggregator.storage.programs import ReceiverRecord
from aggregator.training.jobs import FEW_PROTOTYPES
from protocol.cli import counted, plain

SHOWN_HEADS = 5
SHOWN_NAMES = 10
NEARLY = 0.9
"""Share of a quota from which it is shown as nearly used up."""


def render_status(status: Status, console: Console) -> None:
    """Print a status; control characters in texts of devices are escaped."""
    status = msgspec.convert(_plain(msgspec.to_builtins(status)), Status)
    for line in _above(status):
        _print(console, *line)
    console.print(_device_table(status.devices))
    for line in _below(status):
        _print(console, *line)


def render_page(status: Status, console: Console) -> None:
    """Print a status for a terminal of a limited height: the devices last, those that are online first."""
    status = msgspec.convert(_plain(msgspec.to_builtins(status)), Status)
    for line in (*_above(status), *_below(status)):
        _print(console, *line)
    console.print(_device_table(sorted(status.devices, key=lambda each: each.state != "online")))


def _print(console: Console, label: str, text: str, style: str = "") -> None:
    """Print a label in a style and a text as it is, however long."""
    if label:
        console.print(label, style=style or None, end=" ", highlight=False)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _above(status: Status) -> Iterator[tuple[str, ...]]:
    """Yield label, text and style of each line above the devices."""
    on = status.leader and f" on {status.leader}"
    running = f"running{on}" if status.running else "not running"
    yield "fleet", f"{status.fleet}, {status.algorithm}, task {status.task[:12]}, {running}", "bold"
    if status.preparing:
        yield (
            "preparing",
            f"a task with {status.preparing}: its graphs are exported, and not served yet",
            "yellow",
        )
    yield "key", f"{status.aggregator_key}; {_enrollment(status.enrollment)}"
    if status.root_key:
        yield "root key", status.root_key
    if (other := status.duplicate) is not None:
        yield "duplicate", f"{_clock(other.seen_s)}: {other.summary}", "red"
    yield from _quotas(status.quotas)
    if (failed := status.failed_training) is not None:
        yield "training failed", _failed_training(failed), "red"
    if status.collection_problem:
        yield "collection", status.collection_problem, "yellow"
    if status.receivers:
        yield "receivers", "; ".join(map(_receiver, status.receivers))
    if status.intake.stopped_s is not None:
        yield "intake stopped", f"since {_clock(status.intake.stopped_s)}: {status.intake.reason}", "red"


def _quotas(quotas: Quotas) -> Iterator[tuple[str, ...]]:
    """Yield what is used of the quotas that are set, apart from those that are nearly used up."""
    lines = (
        (quotas.devices, 1, "devices (limits.max_devices)"),
        (quotas.storage_bytes, 1024**2, "MiB of submissions (limits.max_storage_mb)"),
        (quotas.uploads, 1, "uploads an hour (limits.uploads_per_hour)"),
    )
    texts: dict[bool, list[str]] = {False: [], True: []}
    for quota, unit, what in lines:
        if quota.limit is not None:
            is_nearly_full = quota.used >= NEARLY * quota.limit
            texts[is_nearly_full].append(f"{quota.used / unit:.4g} of {quota.limit / unit:.4g} {what}")
    if texts[False]:
        yield "quotas", ", ".join(texts[False])
    if texts[True]:
        advice = "raise it in the task file, or revoke or forget devices"
        yield "quota nearly used up", f"{', '.join(texts[True])}: {advice}", "yellow"


def _receiver(receiver: ReceiverRecord) -> str:
    """Return a receiver's name, shards and last report."""
    return f"{receiver.name} with {counted(len(receiver.shards), 'shard')}, at {_clock(receiver.seen_s)}"


def _failed_training(failed: FailedTraining) -> str:
    what = f"head {failed.version}, {counted(failed.failures, 'time')}, last at {_clock(failed.failed_s)}"
    half = " with half the memory" if failed.half_memory else ""
    return f"{what}: {failed.reason}; repeated{half} by {_clock(failed.retry_at_s)}"


def _problems(device: Device) -> Iterator[tuple[str, ...]]:
    if device.problem:
        yield "problem", f"of {device.device}: {device.problem}", "yellow"
    if device.warning:
        yield "warning", f"of {device.device}: {device.warning}", "yellow"
    if device.refused_messages:
        counts = ", ".join(f"{count} x {reason}" for reason, count in sorted(device.refused_messages.items()))
        yield "refused", f"by {device.device}: {counts}", "yellow"
    if device.head_problem:
        yield "head not used", f"by {device.device}: {device.head_problem}", "yellow"


def _below(status: Status) -> Iterator[tuple[str, ...]]:
    """Yield label, text and style of each line below the devices."""
    for device in status.devices:
        yield from _problems(device)
    yield from _lost(status)
    yield "", _coverage(status)
    yield from _few_prototypes(status)
    if progress := _progress(status):
        yield "", progress
    for head in status.heads[-SHOWN_HEADS:]:
        yield "", _head(head)
    if status.rollout.candidate is not None:
        yield "", _candidate(status.rollout.candidate)
    yield from _outliers(status)
    yield from _forgotten(status)
    if status.rollout.requested is not None:
        when = "soon" if status.running else "when the aggregator is started"
        yield "", f"head {status.rollout.requested} will be current {when}, by an operator's command"
    for refusal in status.refusals:
        text = f"{refusal.count} x {refusal.reason} from {refusal.device}: {refusal.detail}"
        yield "refused", text, "yellow"
    if status.head_path:
        yield "", f"current: {status.head_path}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"


def _outliers(status: Status) -> Iterator[tuple[str, ...]]:
    for entry in status.quarantine:
        if entry.released_s is None:
            yield "quarantined", f"{entry.device} since {_clock(entry.since_s)}: {entry.reason}", "yellow"
        else:
            yield "released", f"{entry.device} since {_clock(entry.released_s)}: {entry.reason}"
    for text in status.heads[-1].limited if status.heads else ():
        yield "limited", text, "yellow"
    if status.heads and status.heads[-1].warning:
        yield "outliers", f"of head {status.heads[-1].version}: {status.heads[-1].warning}", "yellow"


def _forgotten(status: Status) -> Iterator[tuple[str, ...]]:
    """Yield the devices whose submissions were deleted, and what still contains them."""
    current = status.rollout.current
    again = {device.device for device in status.devices if device.prototypes}
    for entry in status.forgotten:
        is_used = 0 < current <= entry.head
        remains = f"head {current} learned from it, and is used until the next one" if is_used else ""
        if status.round is not None:
            remains = "closed rounds learned from it"
        returned = "it has uploaded again" if entry.device in again else ""
        text = ": ".join(
            filter(
                None,
                [
                    f"{entry.device} since {_clock(entry.since_s)}",
                    "; ".join(filter(None, [remains, returned])),
                ],
            )
        )
        yield "forgotten", text, "yellow" if is_used or returned else ""


def _plain(value: Any) -> Any:
    match value:
        case str():
            return plain(value)
        case list() | tuple():
            return [_plain(each) for each in value]
        case dict():
            return {plain(key): _plain(each) for key, each in value.items()}
    return value


def _enrollment(keys: Enrollment) -> str:
    known = f"closed, {keys.enrolled} enrolled"
    if not keys.closed:
        known = f"open to every device, {counted(keys.first_use, 'key')} stored at first use"
    return known + (f", {keys.revoked} revoked" if keys.revoked else "")


def _device_table(devices: Sequence[Device]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    is_private = any(device.epsilon is not None for device in devices)
    table.add_column("device", overflow="fold")
    table.add_column("state", no_wrap=True)
    for name in ("images", "classes", "prototypes", "bytes", *(["epsilon"] if is_private else []), "head"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("held-out\naccuracy", no_wrap=True)
    for device in devices:
        # With differential privacy the number of images stays on the device.
        images = "" if device.epsilon is not None else device.images
        cells = [images, device.classes, device.prototypes, device.bytes]
        if is_private:
            cells.append("" if device.epsilon is None else f"{device.epsilon:.2f}")
        count = device.correct + device.incorrect
        accuracy = "" if device.accuracy is None else f"{device.accuracy:.1%} ({device.correct}/{count})"
        if device.balanced is not None:
            accuracy += f"\nover all {device.balanced:.1%}"
        table.add_row(device.device, device.state, *map(str, cells), str(device.head or ""), accuracy)
    return table


def _lost(status: Status) -> Iterator[tuple[str, ...]]:
    for lost in status.lost_submissions:
        text = f"of {lost.device} since {_clock(lost.since_s)}: damaged on disk, the device is asked for it again"
        yield "submission lost", text, "red"
    for digest in status.lost_files:
        text = f"{digest}: the log says why; if it is a head, roll back or wait for the next one"
        yield "file lost", text, "red"


def _coverage(status: Status) -> str:
    missing = [name for name, coverage in status.coverage.items() if not coverage.prototypes]
    covered = f"{len(status.classes) - len(missing)} of {len(status.classes)} classes covered"
    without = f", without prototypes: {_names(missing)}" if missing else ""
    return (
        f"{counted(status.submissions, 'submission')}, {status.waiting} not in a head yet; {covered}{without}"
    )


def _few_prototypes(status: Status) -> Iterator[tuple[str, ...]]:
    few = [
        f"{name} {coverage.prototypes}"
        for name, coverage in status.coverage.items()
        if 0 < coverage.prototypes < FEW_PROTOTYPES
    ]
    if few and status.round is None:
        yield "few prototypes", f"of {_names(few)}: add images or devices", "yellow"


def _progress(status: Status) -> str:
    """Return what is running, or what the next head waits for."""
    closes = "" if status.closes_at_s is None else _clock(status.closes_at_s)
    if status.round is not None:
        return _round(status.round, closes)
    if status.training is not None:
        training = status.training
        return f"training head {training.version}: epoch {training.epoch} of {training.epochs or '?'}"
    if closes:
        wanted = status.retrain_after if status.heads else status.quorum
        limit_s = status.rate_limited_until_s
        limit = f", but not before {_clock(limit_s)} (limits.heads_per_hour)" if limit_s is not None else ""
        return f"next head: with {counted(wanted, 'submission')}, or at {closes}{limit}"
    return ""


def _round(current: Round, closes: str) -> str:
    if current.over:
        return f"all {current.rounds} rounds are over"
    carried = f"; from earlier rounds: {_names(current.carried)}" if current.carried else ""
    waits = f"; it needs {counted(current.min_devices, 'device')}" if current.devices else ""
    until = f"; it closes at {closes} at the latest" if closes else waits
    devices = _names(current.devices) or "none"
    return f"round {current.number} of {current.rounds} is open, submitted: {devices}{carried}{until}"


def _head(head: Head) -> str:
    held_out = head.held_out
    count = held_out.correct + held_out.incorrect
    accuracy = ""
    if held_out.accuracy is not None:
        accuracy = f", accuracy {held_out.accuracy:.1%} ({held_out.correct}/{count}) on held-out images"
    if held_out.balanced is not None:
        accuracy += f", {held_out.balanced:.1%} over all classes"
    if held_out.with_prior is not None:
        accuracy += f", {held_out.with_prior:.1%} with each place's prior"
    state = f" ({head.state})" if head.state else ""
    reason = f"\n  {head.reason}" if head.reason else ""
    made_of = f"{counted(head.prototypes, 'prototype')} of {counted(head.devices, 'device')}"
    if "images" in head.metrics:
        made_of += f", {head.metrics['counted_images']:.0f} of {head.metrics['images']:.0f} images count"
    if before := head.metrics.get(CALIBRATED_FROM):
        images = head.metrics["calibration_images"]
        made_of = f"head {before:.0f}, calibrated on {images:.0f} held-out images: {made_of}"
    return f"head {head.version}{state}: {made_of}{accuracy}{reason}"


def _candidate(candidate: Candidate) -> str:
    if not candidate.canaries:
        return f"head {candidate.version} waits for devices to come online and evaluate it"
    evaluated = f"head {candidate.version} is evaluated by {canaries(len(candidate.canaries))}"
    return f"{evaluated}: {candidate.summary}; awaited: {_names(candidate.awaited)}"


def _clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN_NAMES]) + (" …" if len(names) > SHOWN_NAMES else "")
