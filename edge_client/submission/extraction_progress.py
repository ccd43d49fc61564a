"""Reports the progress of feature extraction: to the terminal or the log, and to `edge-client status`."""

import logging
import time
from collections.abc import Callable

from edge_client.progress_bar import Progress, describe_speed
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import ExtractionProgress
from protocol.log import event

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 30.0

STORE_INTERVAL_S = 5.0


class ProgressReporter:
    """Reports how many images are done, the speed, and the time that is left; stores nothing without a `store`."""

    def __init__(
        self,
        store: DeviceState | None,
        *,
        images: int,
        backbones: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._images = images
        self._backbones = backbones
        self._clock = clock
        self._bar = Progress("extracting features", estimates=False)
        self._started_s = self._logged_s = clock()
        self._stored_s: float | None = None
        self._done = self._computed = 0

    def advance(self, cached: int, computed: int) -> None:
        """Count images for one of the backbones: in the cache before, which took no time, or computed."""
        self._done += cached + computed
        self._computed += computed
        now_s = self._clock()
        elapsed_s = now_s - self._started_s
        speed = self._computed / elapsed_s / self._backbones if elapsed_s > 0 else 0.0
        progress = ExtractionProgress(self._done // self._backbones, self._images, speed)
        note = describe_speed(progress.images_per_s, progress.left_s)
        self._bar.update(progress.done, progress.total, note)
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            self._log(progress)
        self._keep(progress, now_s)

    def close(self) -> None:
        """Leave the bar on the terminal."""
        self._bar.close()

    def _log(self, progress: ExtractionProgress) -> None:
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

    def _keep(self, progress: ExtractionProgress, now_s: float) -> None:
        """Store the progress now and then, and that the extraction is complete."""
        if self._store is None:
            return
        if progress.done == progress.total:
            if self._store.get(ExtractionProgress) != ExtractionProgress():
                self._store.set(ExtractionProgress())
        elif self._stored_s is None or now_s - self._stored_s >= STORE_INTERVAL_S:
            self._stored_s = now_s
            self._store.set(progress)
