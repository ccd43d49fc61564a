"""Prints a status for a person, with rich."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from aggregator.coordination.canary_comparison import canaries
from aggregator.coordination.minimums import FEW_IMAGES, FEW_PROTOTYPES
from aggregator.status.annotations import lines_of
from aggregator.status.attention import names
from aggregator.status.devices import Device
from aggregator.status.forecast import Forecast
from aggregator.status.heads import Confusion, Head
from aggregator.status.model import Candidate, Enrollment, Round, Status
from aggregator.storage.heads import ADAPTER_MISSING, CALIBRATED_FROM, NO_PYTORCH
from protocol.cli import counted, plain

SHOWN_HEADS = 5
SHOWN_NAMES = 10
SHOWN_CONFUSED = 5
_STYLES = {"error": "red", "warning": "yellow"}
"""By the level of what needs attention."""


def render_status(status: Status, console: Console) -> None:
    """Print a status; control characters in texts of devices are escaped."""
    status = msgspec.convert(_plain(msgspec.to_builtins(status)), Status)
    for line in _above(status):
        _print(console, *line)
    console.print(_device_table(status.devices, status.counted, is_conditional=status.sums is not None))
    for line in _below(status):
        _print(console, *line)


def _print(console: Console, label: str, text: str, style: str = "") -> None:
    """Print a label in a style and a text as it is, however long."""
    if label:
        console.print(label, style=style or None, end=" ", markup=False, highlight=False)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _above(status: Status) -> Iterator[tuple[str, ...]]:
    """Yield label, text and style of each line above the devices."""
    on = status.leader and f" on {status.leader}"
    running = f"running{on}" if status.running else "not running"
    yield "fleet", f"{status.fleet}, {status.algorithm}, task {status.task[:12]}, {running}", "bold"
    for each in status.attention:
        yield each.title, each.text, _STYLES[each.level]
    yield "key", f"{status.aggregator_key}; {_enrollment(status.enrollment)}"
    yield from lines_of(status)


def _below(status: Status) -> Iterator[tuple[str, ...]]:
    """Yield label, text and style of each line below the devices."""
    for device in status.devices:
        for label, text, style in lines_of(device):
            yield label, f"{device.device}: {text}", style
    yield "", _coverage(status)
    yield from _few_prototypes(status)
    if progress := _progress(status):
        yield "", progress
    for head in status.heads[-SHOWN_HEADS:]:
        yield "", _head(head, status.counted)
    yield from _improvements(status)
    if status.rollout.candidate is not None:
        yield "", _candidate(status.rollout.candidate)
    yield from _outliers(status)
    yield from _forgotten(status)
    for refusal in status.refusals:
        text = f"{refusal.count} x {refusal.reason} from {refusal.device}: {refusal.detail}"
        yield "refused", text, "yellow"
    if status.head_path:
        yield "", f"current: {status.head_path}"


def _outliers(status: Status) -> Iterator[tuple[str, ...]]:
    for entry in status.quarantine:
        if entry.released_s is None:
            yield "quarantined", f"{entry.device} since {_clock(entry.since_s)}: {entry.reason}", "yellow"
        else:
            yield "released", f"{entry.device} since {_clock(entry.released_s)}: {entry.reason}"
    for text in status.heads[-1].limited if status.heads else ():
        yield "limited", text, "yellow"


def _forgotten(status: Status) -> Iterator[tuple[str, ...]]:
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


def _device_table(devices: Sequence[Device], unit: str, *, is_conditional: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    is_private = any(device.epsilon is not None for device in devices)
    table.add_column("device", overflow="fold")
    table.add_column("state", no_wrap=True)
    prototypes = "prototypes" if unit == "prototypes" else "images in\nprototypes"
    epsilon = "conditional\nepsilon" if is_conditional else "epsilon"
    for name in ("images", "classes", prototypes, "bytes", *([epsilon] if is_private else []), "head"):
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


def _coverage(status: Status) -> str:
    missing = [name for name, coverage in status.coverage.items() if not coverage.prototypes]
    covered = f"{len(status.classes) - len(missing)} of {len(status.classes)} classes covered"
    without = f", without prototypes: {names(missing, SHOWN_NAMES)}" if missing else ""
    return (
        f"{counted(status.submissions, 'submission')}, {status.waiting} not in a head yet; {covered}{without}"
    )


def _improvements(status: Status) -> Iterator[tuple[str, ...]]:
    """Yield the classes that the current head confuses most often, and what more images should bring."""
    for head in status.heads:
        if head.state == "current" and (missing := head.held_out.missing):
            yield "unknown", f"not answered yet: the devices need {counted(missing, 'held-out image')} more"
        if head.held_out.confused:
            yield "confused", confused_text(head.held_out.confused)
    if status.forecast:
        yield "forecast", forecast_text(status.forecast)


def confused_text(pairs: Sequence[Confusion]) -> str:
    """Return the classes that are confused most often."""
    return ", ".join(
        f"{each.label} as {each.predicted} {each.images} of {each.of}" for each in pairs[:SHOWN_CONFUSED]
    )


def forecast_text(expected: Sequence[Forecast]) -> str:
    """Return what twice as many images should bring, in points, and the classes that should gain most."""
    every, *classes = expected
    most = sorted(classes, key=lambda each: each.most, reverse=True)[:SHOWN_CONFUSED]
    parts = [f"{each.label} {_points(each)}" for each in most]
    return f"twice as many images should bring {_points(every)} points: {', '.join(parts)}"


def _points(each: Forecast) -> str:
    return f"{100 * each.least:.1f} to {100 * each.most:.1f}"


def _few_prototypes(status: Status) -> Iterator[tuple[str, ...]]:
    few = [
        f"{name} {coverage.prototypes}"
        for name, coverage in status.coverage.items()
        if 0 < coverage.prototypes < (FEW_IMAGES if status.counted == "images" else FEW_PROTOTYPES)
    ]
    if few and status.round is None and status.sums is None:  # masked counts are 1
        yield f"few {status.counted}", f"of {names(few, SHOWN_NAMES)}: add images or devices", "yellow"


def _progress(status: Status) -> str:
    """Return what is running, or what the next head waits for."""
    closes = "" if status.closes_at_s is None else _clock(status.closes_at_s)
    if status.round is not None:
        return _round(status.round, closes)
    if status.training is not None:
        training = status.training
        return f"training head {training.version}: epoch {training.epoch} of {training.epochs or '?'}"
    if status.sums is not None and status.sums.requested_s is not None:
        return f"next head: waits for the second operator since {_clock(status.sums.requested_s)}"
    if closes:
        wanted = status.retrain_after if status.heads else status.quorum
        return f"next head: with {counted(wanted, 'submission')}, or at {closes}"
    return ""


def _round(current: Round, closes: str) -> str:
    if current.over:
        return f"all {current.rounds} rounds are over"
    carried = f"; from earlier rounds: {names(current.carried, SHOWN_NAMES)}" if current.carried else ""
    waits = f"; it needs {counted(current.min_devices, 'device')}" if current.devices else ""
    until = f"; it closes at {closes} at the latest" if closes else waits
    devices = names(current.devices, SHOWN_NAMES) or "none"
    return f"round {current.number} of {current.rounds} is open, submitted: {devices}{carried}{until}"


def _head(head: Head, unit: str) -> str:
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
    made_of = f"{counted(head.prototypes, unit.removesuffix('s'))} of {counted(head.devices, 'device')}"
    if "images" in head.metrics:
        made_of += f", {head.metrics['counted_images']:.0f} of {head.metrics['images']:.0f} images count"
    if before := head.metrics.get(CALIBRATED_FROM):
        images = head.metrics["calibration_images"]
        made_of = f"head {before:.0f}, calibrated on {images:.0f} held-out images: {made_of}"
    if ADAPTER_MISSING in head.metrics:
        made_of += f", adapter not tried ({NO_PYTORCH})"
    return f"head {head.version}{state}: {made_of}{accuracy}{reason}"


def _candidate(candidate: Candidate) -> str:
    if not candidate.canaries:
        return f"head {candidate.version} waits for devices to come online and evaluate it"
    evaluated = f"head {candidate.version} is evaluated by {canaries(len(candidate.canaries))}"
    return f"{evaluated}: {candidate.summary}; awaited: {names(candidate.awaited, SHOWN_NAMES)}"


def _clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
