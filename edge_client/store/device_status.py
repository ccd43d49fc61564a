"""Reads a device's status from its state directory, also while it runs."""

import time
from collections.abc import Mapping

import msgspec

from edge_client.core.state import PROBLEMS, StoredState
from edge_client.store import stored_values as stored
from edge_client.store.app_files import Drift, read_value
from edge_client.store.device_state import KEY_FILE, DeviceState
from protocol.storage.keyfile import read_key
from protocol.wire.presence import Duplicate
from protocol.wire.signing import public_key


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A device's status, as `edge-client status --json` shows it."""

    device_id: str | None
    running: bool
    task: str | None
    """Digest of the task manifest, in hex."""
    key: str | None
    """Public key, in hex, of a device without an enrollment."""
    runtime: str | None
    """Execution provider of the newest features."""
    upload_in_s: float | None
    """Seconds until the result of the newest private build is published; None if none waits."""
    report: stored.SubmissionReport | None
    """Contents of the newest submission."""
    extraction: stored.ExtractionProgress | None
    """Progress of the features that are being computed."""
    unknown_classes: tuple[str, ...]
    """Folders or labels that are no class of the task."""
    skipped_files: Mapping[str, int]
    """Number of files that are no images, by reason."""
    unusable_images: tuple[tuple[str, str], ...]
    """Paths and reasons."""
    privacy: stored.PrivacySpent | None
    demanded_unit: str
    """The weakest unit of privacy that the owner accepts, `image` or `person`; empty for any task."""
    drift: Drift | None
    duplicate: str
    """Another program with the device's key; empty if there is none."""
    warning: str
    problem: str
    """The most severe problem; empty if there is none."""
    submission: str | None
    """Digest of the newest submission, in hex."""
    received: bool
    """The aggregator has received it."""
    outdated: bool
    """It still counts, although the device can build no newer one."""
    head: stored.InstalledHead | None


def read_status(store: DeviceState) -> DeviceStatus:
    """Return the status of the device with this state."""
    key, kept = store.folder / KEY_FILE, store.get(StoredState)
    submission, task = store.outbox.newest_submission(), kept.task
    report, spent = store.get(stored.SubmissionReport), store.get(stored.PrivacySpent)
    left_out, extraction = store.get(stored.LeftOut), store.get(stored.ExtractionProgress)
    drift = read_value(store.folder, Drift)
    upload_in_s, running = store.get(stored.NextUpload).at_s - time.time(), store.is_locked()
    received = submission is not None and submission.received
    return DeviceStatus(
        device_id=store.get(stored.DeviceName).value or None,
        running=running,
        task=task.hex() or None,
        key=public_key(read_key(key)).hex() if key.exists() else None,
        runtime=store.get(stored.BackboneProvider).name or None,
        upload_in_s=upload_in_s if running and upload_in_s > 0 else None,
        report=report if report.size_bytes else None,
        extraction=extraction if extraction.total else None,
        unknown_classes=tuple(left_out.unknown),
        skipped_files=left_out.skipped,
        unusable_images=tuple(left_out.unusable),
        privacy=spent if spent.releases else None,
        demanded_unit=store.get(stored.DemandedUnit).value,
        drift=drift if drift.newest(now_s=time.time()) is not None else None,
        duplicate=store.get(Duplicate).summary,
        warning="; ".join(filter(None, [report.lost_images, report.warning])),
        problem=next(filter(None, map(kept.problems.get, PROBLEMS)), ""),
        submission=submission.digest.hex() if submission else None,
        received=received,
        outdated=received and submission is not None and submission.task == task and "build" in kept.problems,
        head=store.heads_in_use().installed,
    )
