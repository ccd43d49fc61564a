"""The conditions that need an operator, from the status."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from aggregator.status.devices import Device
from aggregator.status.model import Attention, Status
from protocol.cli import counted
from protocol.wire.messages import DRIFT_LIMIT

SHOWN = 5
"""Names in a text."""

WAIT_S = 600.0
"""Seconds without an answer of the second operator after which that is reported."""


def attention_of(status: Status) -> tuple[Attention, ...]:
    """Return what needs an operator, errors first; the `attention` of the status itself does not matter."""
    found = [
        *_of_aggregator(status),
        *_of_training(status),
        *_of_privacy(status),
        *_of_devices(status),
        *_of_quotas(status),
    ]
    return tuple(sorted(found, key=lambda each: each.level))


def _of_aggregator(status: Status) -> Iterator[Attention]:
    if not status.running:
        yield Attention("error", "aggregator not running", "start `aggregator run`")
    if status.preparing:
        text = f"a task with {status.preparing}: its graphs are exported, and not served yet"
        yield Attention("warning", "preparing", text)
    if (stopped_s := status.intake.stopped_s) is not None:
        text = f"since {_clock(stopped_s)}, uploads are not stored: {status.intake.reason}"
        yield Attention("error", "intake stopped", text)
    if (other := status.duplicate) is not None:
        yield Attention("error", "duplicate aggregator", f"{_clock(other.seen_s)}: {other.summary}")
    if status.lost_files:
        text = (
            "devices or trainings need them, the log says why; of a head: roll back or wait for the next one"
        )
        yield Attention("error", "file lost", f"{names(status.lost_files)}: {text}")


def _of_training(status: Status) -> Iterator[Attention]:
    if status.collection_problem:
        yield Attention("warning", "too few devices", status.collection_problem)
    if (sums := status.sums) is not None and sums.requested_s is not None:
        text = f"of {counted(sums.requested, 'device')}, requested at {_clock(sums.requested_s)}"
        if sums.problem:
            yield Attention("error", "sum not opened", f"{text}: the second operator: {sums.problem}")
        elif time.time() > sums.requested_s + WAIT_S:
            advice = "see that `protofleet-sums run` runs and reaches the broker"
            yield Attention("warning", "waiting for the second operator", f"{text}: {advice}")
    if sums is not None and sums.left_out:
        text = f"{counted(sums.left_out, 'device')}: {sums.left_out_reason}: start a new task"
        yield Attention("error", "list left out of all heads", text)
    if (failed := status.failed_training) is not None:
        times = f"{counted(failed.failures, 'time')}, last at {_clock(failed.failed_s)}"
        again = f"repeated by {_clock(failed.retry_at_s)}"
        yield Attention(
            "error", "training failed", f"head {failed.version}, {times}: {failed.reason}; {again}"
        )
    for head in status.heads[-1:]:
        if head.warning:
            yield Attention("warning", "outliers", f"of head {head.version}: {head.warning}")
    if (limit_s := status.rate_limited_until_s) is not None:
        text = f"no training before {_clock(limit_s)} (limits.heads_per_hour)"
        yield Attention("warning", "training limited", text)


def _of_privacy(status: Status) -> Iterator[Attention]:
    if (privacy := status.privacy) is not None and privacy.is_poor:
        head = status.heads[-1]
        hidden = f"that of head {head.version} hides {counted(privacy.hidden or 0, 'image')} of a class"
        less = ", or a smaller images_per_person" if privacy.images_per_person else ""
        text = f"{hidden}, of about {head.prototypes} in all: more images or a larger epsilon{less}"
        yield Attention("warning", "too few images for the noise", text)


def _of_devices(status: Status) -> Iterator[Attention]:
    if lost := [each.device for each in status.lost_submissions]:
        text = f"of {names(lost)}: damaged on disk, and in no head until the device uploads again"
        yield Attention("warning", "submission lost", text)
    valid = {device.device for device in status.devices if device.state != "revoked"}
    held = [each.device for each in status.quarantine if each.released_s is None and each.device in valid]
    if held:
        yield Attention("warning", f"{counted(len(held), 'device')} quarantined", names(held))
    yield from _with_text(status.devices, _lost_record, "with a lost record of privacy", level="error")
    yield from _with_text(status.devices, lambda device: device.problem, "cannot take part")
    yield from _with_text(status.devices, lambda device: device.warning, "with a warning")
    yield from _with_text(status.devices, _drift, "with other images than at the upload")


def _lost_record(device: Device) -> str:
    if not device.lost_releases:
        return ""
    return (
        f"its record lacks {counted(device.lost_releases, 'private submission')} that it has reported before: its "
        "state was lost or restored from a copy; it gets the record from here"
    )


def _drift(device: Device) -> str:
    if device.drift is None or device.drift <= DRIFT_LIMIT:
        return ""
    return f"drift {device.drift:.1f}: look at the camera, and label new images if they are to stay"


def _with_text(
    devices: Iterable[Device],
    text_of: Callable[[Device], str],
    what: str,
    *,
    level: Literal["error", "warning"] = "warning",
) -> Iterator[Attention]:
    """Yield one condition of all devices that have a text: with the first one's, and the names of others."""
    if not (found := [device for device in devices if text_of(device)]):
        return
    others = names([device.device for device in found[1:]])
    more = f"; also {others}" if others else ""
    text = f"{found[0].device}: {text_of(found[0])}{more}"
    yield Attention(level, f"{counted(len(found), 'device')} {what}", text)


def _of_quotas(status: Status) -> Iterator[Attention]:
    full = [text for quota, text in status.quotas.usages() if quota.is_nearly_used_up]
    if full:
        advice = "raise it in the task file, or revoke or forget devices"
        yield Attention("warning", "quota nearly used up", f"{', '.join(full)}: {advice}")


def names(found: Sequence[str], most: int = SHOWN) -> str:
    return ", ".join(found[:most]) + (" …" if len(found) > most else "")


def _clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(unix_s))
