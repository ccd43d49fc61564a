"""The inputs of a job: its folder, with all that it reads of the device's state, and the secret on its pipe."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from edge_client.config import Settings
from edge_client.core import events
from edge_client.core.state import UploadItem
from edge_client.core.submission_kinds import kind_of
from edge_client.images.image_scanner import Scan
from edge_client.privacy.charges import requires_privacy
from edge_client.service.data_folder import listed
from edge_client.service.job_processes import Wanted
from edge_client.store.device_state import DeviceState
from edge_client.store.disk_space import require_space
from edge_client.store.job_folder import IMAGES_FILE, JOB_FILE, LAST_SUBMISSION, Job, JobSettings, Run
from protocol import __version__
from protocol.log import event
from protocol.storage.blobstore import state_errors
from protocol.wire.codec import encode

log = logging.getLogger(__name__)


def write_job(
    folder: Path,
    wanted: Wanted,
    scan: Scan,
    *,
    settings: Settings,
    store: DeviceState,
    suspects: Iterable[bytes],
    is_dry_run: bool,
) -> Run:
    """Write the folder of a job, and return the message that starts it.

    Raises:
        StateError: the disk fails; DiskAlmostFull if it has no space for a copy of the last submission.
    """
    last = _last_submission(wanted, store)
    secret = _secret(wanted, store, is_dry_run=is_dry_run)
    job = _job(wanted, settings, store, suspects=suspects, is_dry_run=is_dry_run)
    if last is not None:
        require_space(folder.parent, last.size_bytes, what="a copy of the last submission")
    with state_errors(folder):
        folder.mkdir()
        (folder / JOB_FILE).write_bytes(msgspec.json.encode(job))
        (folder / IMAGES_FILE).write_bytes(msgspec.json.encode(listed(scan)))
    if last is not None:
        store.outbox.write(last, folder / LAST_SUBMISSION)
    return Run(os.fsencode(folder), secret)


def _job(
    wanted: Wanted, settings: Settings, store: DeviceState, *, suspects: Iterable[bytes], is_dry_run: bool
) -> Job:
    action = wanted.action
    above = action.above if isinstance(action, events.BuildSubmission) else 0
    common = Job(
        kind=wanted.name,
        version=__version__,
        settings=JobSettings(
            fleet=settings.fleet,
            device_id=settings.device_id,
            data=os.fsencode(settings.data),
            holdout=settings.holdout,
            provider=settings.provider,
            threads=settings.threads,
            batch_size=settings.batch_size,
            second_operator=settings.second_operator,
            min_devices=settings.min_devices,
            pinned_backbones=settings.pinned_backbones,
            variable_time=settings.variable_time,
            max_images=settings.max_images,
            privacy_unit=settings.privacy_unit,
            upload_period_s=settings.upload_period_s,
        ),
        requires_privacy=requires_privacy(settings, store.ledger),
        task=action.task,
        manifest=encode(action.manifest),
        above=above,
        is_dry_run=is_dry_run,
        state=store.snapshot(above=above, clock_s=wanted.times.begin_s or None),
        deaths=store.culprits.deaths(),
        suspects=tuple(suspects),
        guilty=store.culprits.guilty(),
    )
    if isinstance(action, events.InstallHead):
        return msgspec.structs.replace(common, head=action.head, as_canary=action.as_canary)
    return msgspec.structs.replace(common, round=encode(action.round) if action.round else b"")


def _secret(wanted: Wanted, store: DeviceState, *, is_dry_run: bool) -> bytes:
    """Return the device's secret for a build that groups images; it gets the keys of a release by a charge."""
    if wanted.name != "build" or not kind_of(wanted.manifest).is_grouped:
        return b""
    try:
        return store.secret(keep=not is_dry_run)
    except Exception as error:
        if wanted.manifest.perturbation is None:
            raise
        event(log, logging.ERROR, "no secret for noise", error=error)
        return b""


def _last_submission(wanted: Wanted, store: DeviceState) -> UploadItem | None:
    """Return the newest submission for a build that may need it: to number it anew, or to repeat a release."""
    action, last = wanted.action, store.outbox.newest_submission()
    if last is None or not isinstance(action, events.BuildSubmission) or last.task != action.task:
        return None
    is_needed = kind_of(action.manifest).is_private or (action.round is not None and action.above)
    return last if is_needed else None
