"""Shows the progress of jobs: on the terminal or in the log, and that of an extraction to `edge-client status`."""

import logging
import time
from collections.abc import Callable

from edge_client.progress_bar import Progress, describe_speed
from edge_client.store.device_state import DeviceState
from edge_client.store.job_folder import EXTRACTING, Doing
from edge_client.store.stored_values import ExtractionProgress
from protocol.log import event

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 30.0

STORE_INTERVAL_S = 5.0


class ProgressReporter:
    """Reports what is done, the speed, and the time that is left; stores nothing without a `store`."""

    def __init__(self, store: DeviceState | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._label = ""
        self._bar = Progress("")
        self._logged_s = 0.0
        self._stored_s: float | None = None

    def show(self, doing: Doing) -> None:
        """Show progress in place of the earlier one."""
        is_extraction = doing.label == EXTRACTING
        if doing.label != self._label:
            self._bar.close()
            self._label, self._bar = doing.label, Progress(doing.label, estimates=not is_extraction)
            self._logged_s, self._stored_s = self._clock(), None
        if not doing.total:
            self.close()
            return
        progress = ExtractionProgress(doing.done, doing.total, doing.per_s)
        note = describe_speed(progress.images_per_s, progress.left_s) if is_extraction else None
        self._bar.update(doing.done, doing.total, note)
        if is_extraction:
            self._log(progress)
            self._keep(progress)

    def close(self) -> None:
        """Leave the bar on the terminal, and store that no extraction runs."""
        self._bar.close()
        if self._label == EXTRACTING:
            self._keep(ExtractionProgress())
        self._label = ""

    def _log(self, progress: ExtractionProgress) -> None:
        now_s = self._clock()
        if now_s - self._logged_s < LOG_INTERVAL_S:
            return
        self._logged_s = now_s
        if not self._bar.is_shown:
            event(
                log,
                logging.INFO,
                "features computed",
                images=progress.done,
                total=progress.total,
                images_per_s=round(progress.images_per_s, 1),
                left_s=progress.left_s and round(progress.left_s),
            )

    def _keep(self, progress: ExtractionProgress) -> None:
        """Store the progress now and then, and that the extraction is complete."""
        if self._store is None:
            return
        now_s = self._clock()
        if progress.done == progress.total:
            if self._store.get(ExtractionProgress) != ExtractionProgress():
                self._store.set(ExtractionProgress())
        elif self._stored_s is None or now_s - self._stored_s >= STORE_INTERVAL_S:
            self._stored_s = now_s
            self._store.set(progress)
