"""When private builds begin and are published, where the device's owner has set a period; otherwise at once."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from edge_client.config import Settings
from edge_client.privacy.upload_slots import INSTALL_S, next_slot_s, publication_s
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import NextUpload
from protocol.log import event

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Times:
    """When a job may begin, and when its result is published at the earliest, in unix seconds; 0 for at once."""

    begin_s: float = 0.0
    end_s: float = 0.0


class UploadTimes:
    """The times of a device's jobs, none of which depends on an image; a dry run has no period, and no `store`."""

    def __init__(
        self, settings: Settings, store: DeviceState | None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._device_id, self._store, self._clock = settings.device_id, store, clock
        self._period_s = None if store is None else settings.upload_period_s
        self._built_task = b""
        """The task of the newest build: what comes after it for the same task was caused by images."""

    def of_build(self, task: bytes, *, is_bounded: bool) -> Times:
        """Return the times of a build; `is_bounded` if they must not reveal images."""
        is_first, self._built_task = task != self._built_task, task
        if self._period_s is None or not is_bounded:
            return self._stored(Times())
        begin_s = self._clock()
        if not is_first:
            begin_s = next_slot_s(begin_s, self._period_s, device=self._device_id, task=task)
        times = self._stored(Times(begin_s, begin_s + self._period_s))
        in_s = round(times.end_s - self._clock())
        event(log, logging.INFO, "private submission ordered, it is uploaded at a fixed time", in_s=in_s)
        return times

    def of_install(self, *, is_bounded: bool) -> Times:
        """Return the times of an installation, which a build beside it would make late."""
        if self._period_s is None or not is_bounded:
            return Times()
        return Times(end_s=self._clock() + min(INSTALL_S, self._period_s))

    def after_build(self, times: Times) -> Times:
        """Return the times of a build that has ended: one that outlasts its period is published after the next one."""
        now_s = self._clock()
        if self._period_s is None or not 0 < times.end_s < now_s:
            return times
        text = "a build took longer than --upload-period-s, which time reveals: lengthen it, or limit --max-images"
        event(log, logging.WARNING, text, seconds=round(now_s - times.begin_s))
        return self._stored(replace(times, end_s=publication_s(times.end_s, now_s, self._period_s)))

    def _stored(self, times: Times) -> Times:
        """Return the times of a build, after `edge-client status` can show them."""
        if self._store is not None and self._store.get(NextUpload).at_s != times.end_s:
            self._store.set(NextUpload(times.end_s))
        return times

    def is_due(self, at_s: float) -> bool:
        """Return whether a time has come, or is out of reach, as the clock was put back."""
        now_s, period_s = self._clock(), self._period_s or 0.0
        return now_s >= at_s or at_s - now_s > 2 * period_s + INSTALL_S

    def left_s(self, at_s: float) -> float:
        """Return the seconds until a time; 0 if it has come."""
        return max(0.0, at_s - self._clock())
