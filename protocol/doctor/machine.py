"""Checks of the machine: its disk and its clock."""

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from shutil import disk_usage

from protocol.doctor.findings import Finding
from protocol.storage.state_folder import network_file_system

EARLIEST_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
"""No clock that is right shows an earlier time."""

LOW_BYTES = 256 * 1024**2
"""Free space below which there is a warning."""


def check_disk(folder: Path, *, reserve_bytes: int = 0) -> list[Finding]:
    """Check that a state directory can be written, and how much space its disk has beside a reserve."""
    place = next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))
    try:
        disk = disk_usage(place)
    except OSError as error:
        text = f"cannot read {place}: {error.strerror}"
        return [Finding("disk", "failed", text, "mount the disk, or give --state")]
    findings = []
    if not os.access(place, os.W_OK | os.X_OK):
        action = "give the folder to this user, or run the program as the folder's"
        findings.append(Finding("disk", "failed", f"{place} cannot be written by this user", action))
    if kind := network_file_system(place):
        text = f"{folder} is on a network file system ({kind}), where SQLite's locks and log are not reliable"
        findings.append(Finding("disk", "warning", text, "give a --state on a local disk"))
    free, action = disk.free - reserve_bytes, "free space: what needs more waits until there is some"
    text = f"{max(0, free) / 1e9:,.2f} GB free for {folder}"
    if disk.total and free <= 0:
        findings.append(Finding("disk", "failed", f"the disk of {folder} is almost full", action))
    elif disk.total and free < LOW_BYTES:
        findings.append(Finding("disk", "warning", text, action))
    elif not findings:
        findings.append(Finding("disk", "ok", text))
    return findings


def check_clock(*, known_s: float = 0.0, source: str = "") -> Finding:
    """Check that the clock is not behind a time, in unix seconds, that is known to be over."""
    now_s = time.time()
    shown = f"{datetime.fromtimestamp(now_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    action = "set the clock, for instance with `timedatectl set-ntp true`"
    if now_s < max(EARLIEST_S, known_s):
        than = f"the date of {source}" if known_s > EARLIEST_S else "this program's release"
        return Finding("clock", "failed", f"{shown} is earlier than {than}", action)
    return Finding("clock", "ok", shown)
