"""Prints a status for a person, with rich: once, or again and again on a terminal."""

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aggregator.coordination.canary_comparison import canaries
from aggregator.status.attention import names, usages
from aggregator.status.collect import collect_status
from aggregator.status.model import (
    Candidate,
    Confusion,
    Device,
    Enrollment,
    Forecast,
    Head,
    Privacy,
    Round,
    Status,
    Sums,
)
from aggregator.storage.heads import ADAPTER_MISSING, CALIBRATED_FROM, NO_PYTORCH
from aggregator.storage.open_store import open_store
from aggregator.training.jobs import FEW_IMAGES, FEW_PROTOTYPES
from protocol.cli import counted, plain
from protocol.errors import ProtofleetError

SHOWN_HEADS = 5
SHOWN_NAMES = 10
SHOWN_CONFUSED = 5
SHOWN_KEY = 16
_STYLES = {"error": "red", "warning": "yellow"}
"""By the level of what needs attention."""


def render_status(status: Status, console: Console) -> None:
    """Print a status; control characters in texts of devices are escaped."""
    status = msgspec.convert(_plain(msgspec.to_builtins(status)), Status)
    for line in _above(status):
        _print(console, *line)
    console.print(_device_table(status.devices, status.counted))
    for line in _below(status):
        _print(console, *line)


def render_page(status: Status, console: Console) -> None:
    """Print a status for a terminal of a limited height: the devices last, those that are online first."""
    status = msgspec.convert(_plain(msgspec.to_builtins(status)), Status)
    for line in (*_above(status), *_below(status)):
        _print(console, *line)
    online_first = sorted(status.devices, key=lambda each: each.state != "online")
    console.print(_device_table(online_first, status.counted))


def show_live(state: Path, console: Console, *, wait: Callable[[], None]) -> None:
    """Show the status of a state directory again after each `wait`, until that raises KeyboardInterrupt.

    A state that cannot be read is shown as such, and read again.

    Raises:
        StateError: there is no state.
    """
    with contextlib.closing(open_store(state, read_only=True)):
        pass
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        while True:
            live.update(_page(state, console), refresh=True)
            wait()


def _page(state: Path, console: Console) -> Text:
    """Return a page in the width and colors of a console, which shows another one meanwhile."""
    output = io.StringIO()
    page = Console(file=output, force_terminal=True, width=console.width)
    page.print(f"aggregator top  {datetime.now().astimezone():%H:%M:%S}  Ctrl-C ends", style="dim")
    try:
        with contextlib.closing(open_store(state, read_only=True)) as store:
            render_page(collect_status(store), page)
    except ProtofleetError as error:
        page.print(plain(str(error)), style="red", markup=False, highlight=False)
    return Text.from_ansi(output.getvalue(), no_wrap=True, overflow="ellipsis")


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
    if status.root_key:
        yield "root key", status.root_key
    if quotas := [text for _, text in usages(status.quotas)]:
        yield "quotas", ", ".join(quotas)
    if (privacy := status.privacy) is not None:
        yield "privacy", _privacy(privacy)
    if status.sums is not None:
        yield "sums", _sums(status.sums)


def _privacy(privacy: Privacy) -> str:
    promised = f"epsilon {privacy.epsilon:g} for a submission, {privacy.max_epsilon:g} for a device"
    spent = "none spent" if privacy.spent is None else f"at most {privacy.spent:.2f} spent"
    return f"{promised} (delta {privacy.delta:g}); {spent}, {counted(privacy.nearly_spent, 'device')} near the limit"


def _sums(sums: Sums) -> str:
    keys = f"second operator {sums.seal_key[:SHOWN_KEY]}, signs with {sums.sign_key[:SHOWN_KEY]}"
    least = f"at least {sums.min_devices} devices in a sum, of which {sums.tolerance:.0%} may add no noise"
    opened = f"{counted(sums.lists, 'list')} of {counted(sums.devices, 'device')} opened"
    left_out = f", {sums.left_out} left out" if sums.left_out else ""
    return f"{keys}; {least}; {opened}{left_out}, {sums.requested} requested, {sums.waiting} waiting"


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
    if status.rollout.requested is not None:
        when = "soon" if status.running else "when the aggregator is started"
        yield "", f"head {status.rollout.requested} will be current {when}, by an operator's command"
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


def _device_table(devices: Sequence[Device], unit: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    is_private = any(device.epsilon is not None for device in devices)
    table.add_column("device", overflow="fold")
    table.add_column("state", no_wrap=True)
    prototypes = "prototypes" if unit == "prototypes" else "images in\nprototypes"
    for name in ("images", "classes", prototypes, "bytes", *(["epsilon"] if is_private else []), "head"):
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
