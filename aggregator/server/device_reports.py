"""The reports of devices: their presence, what they run, and their records of privacy."""

import logging
import time
from typing import get_args

import msgspec

from aggregator.intake.frame_authentication import FrameAuthenticator
from aggregator.intake.validation import Refused
from aggregator.rates import DeviceEvents
from aggregator.storage.store import Store
from protocol.wire.codec import decode, is_probe
from protocol.wire.messages import (
    MAX_MANIFEST_BYTES,
    DeviceInfo,
    Presence,
    PrivacyRecord,
    Reason,
    Released,
    TaskManifest,
)

log = logging.getLogger(__name__)

MAX_DRIFT = 1000.0
"""Drift that is stored of a device: more than any images have."""

MAX_REFUSED = 1_000_000
"""Refused messages of a reason that a device can report: a device can claim any number, and metrics add them."""


class DeviceReports:
    """Stores reports, in a transaction of the caller; raises Refused or MalformedMessage for one that is not stored."""

    def __init__(self, store: Store, task: TaskManifest, authenticator: FrameAuthenticator) -> None:
        self._store, self._task, self._authenticator = store, task, authenticator
        self._reported: dict[str, tuple[str, str]] = {}
        """Problem and warning of each device."""
        self._log = DeviceEvents(log)

    def store(self, device: str, channel: str, payload: bytes) -> None:
        """Store a presence, or what a device reports of itself, of a known device or a new one."""
        self._check_room(device)
        if is_probe(payload):  # or an operator makes a broker forget a device
            return
        now_s = time.time()
        if channel == "state":
            presence = decode(payload, Presence, max_bytes=1024)
            self._authenticator.check_presence(device, presence)
            self._store.devices.put_presence(device, presence.state, now_s=now_s)
            return
        info = decode(payload, DeviceInfo, max_bytes=MAX_MANIFEST_BYTES)
        self._store.devices.put_info(device, bounded_info(info, self._task), now_s=now_s)
        before, self._reported[device] = self._reported.get(device, ("", "")), (info.problem, info.warning)
        if info.problem and info.problem != before[0]:
            self._log.event(logging.WARNING, "device cannot take part", device=device, reason=info.problem)
        if info.warning and info.warning != before[1]:
            self._log.event(logging.WARNING, "device warns its operator", device=device, warning=info.warning)

    def merge_record(self, device: str, record: PrivacyRecord) -> tuple[Released, ...]:
        """Store the releases that a device has made, and return all that it has ever reported."""
        self._check_room(device)
        releases, lost = self._store.devices.merge_releases(device, record.releases)
        if lost:
            text = "device has lost its record of private submissions, and gets the stored one"
            self._log.event(logging.WARNING, text, device=device, submissions=lost)
        return releases

    def _check_room(self, device: str) -> None:
        if not self._store.devices.has_room_for(device):
            raise Refused("unknown_device", f"{device} is one device too many for an open fleet")


def bounded_info(info: DeviceInfo, task: TaskManifest) -> DeviceInfo:
    """Return what is stored of a device's report: only the task's classes and backbones, known reasons, bounded."""
    return msgspec.structs.replace(
        info,
        backbones=tuple(blob.digest for blob in task.backbones if blob.digest in info.backbones),
        images={name: count for name, count in info.images.items() if name in task.classes},
        refused_messages={
            name: min(count, MAX_REFUSED)
            for name, count in info.refused_messages.items()
            if name in get_args(Reason)
        },
        drift=msgspec.UNSET if info.drift is msgspec.UNSET else max(-MAX_DRIFT, min(info.drift, MAX_DRIFT)),
    )
