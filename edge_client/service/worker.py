"""The worker thread: builds submissions and installs heads, one job after the other."""

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

from edge_client.agent import events
from edge_client.agent.state import MAX_DAMAGED, Job
from edge_client.config import Settings
from edge_client.runtime.watchdog import cancelled_by
from edge_client.storage.device_state import DeviceState
from edge_client.storage.disk_space import DiskAlmostFull
from protocol.errors import BlobLost, Interrupted, ProtofleetError, StateError
from protocol.log import event
from protocol.threads import start_thread

if TYPE_CHECKING:
    from edge_client.submission.builder import ShowDryRun, SubmissionBuilder
    from edge_client.submission.head_installer import HeadInstaller
    from edge_client.submission.image_features import Workspace
    from edge_client.submission.round_submission import RoundTraining
    from protocol.wire.messages import TaskManifest

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    """A job, which returns the event to emit, if there is one."""

    name: Job | Literal["scan"]
    run: Callable[[Callable[[], bool]], events.Event | None]
    cancelled: threading.Event = field(default_factory=threading.Event)
    has_begun: bool = False


class Worker:
    """Runs jobs on a thread of its own, from which `emit` takes the results and, in a dry run, `show` submissions.

    A cancelled job has no result. A job that fails for a reason other than its task or head, such as a full disk or a
    bug, emits the exception.
    """

    def __init__(
        self,
        settings: Settings,
        state: DeviceState,
        *,
        emit: Callable[[events.Event | BaseException], None],
        show: "ShowDryRun | None",
    ) -> None:
        self._emit = emit
        self._settings = settings
        self._store = state
        self._show = show
        self._lost: Counter[bytes] = Counter()
        self._manifest: TaskManifest | None = None
        self._images: tuple[str, ...] | None = None
        self._missing_since_s: dict[str, float] = {}
        """When scans began to miss images of the last build (monotonic)."""
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._unfinished: list[_Job] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; raises ThreadFailed if it cannot be started."""
        self._thread = start_thread(self._run, name="worker", on_failure=self._emit)

    def stop(self) -> None:
        """Cancel all jobs and wait up to 5 s for the running one, whose end is no fault of what it runs."""
        self.cancel("build", "install", "scan")
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout=5)
        with contextlib.suppress(StateError):
            self._store.crash_counter.stop()

    def build(self, build: events.BuildSubmission) -> None:
        """Build a submission in place of one that is being built; emits SubmissionBuilt."""
        self.cancel("build")
        self._put("build", partial(self._build, build))

    def install(self, install: events.InstallHead) -> None:
        """Install or refuse a head, and no older one that waits; emits HeadInstalled.

        An older one that is being installed is finished: heads may come faster than a device installs them.
        """
        self.cancel("install", running=False)
        self._put("install", lambda should_stop: self._installer.install(install, should_stop))

    def check_images(self) -> None:
        """Emit ImagesChanged if there are new images, or if scans miss one of the last submission.

        Two scans in a row must miss it, at least half of `rescan_s` apart: scans that waited for another job run one
        right after the other.
        """
        self._put("scan", lambda _: self._check_images())

    def cancel(self, *names: Job | Literal["scan"], running: bool = True) -> None:
        """Cancel jobs that wait or run: their results are no longer needed, and their blobs may be deleted."""
        for job in tuple(self._unfinished):
            if job.name in names and (running or not job.has_begun):
                job.cancelled.set()

    # Made at the first job, which loads their modules: a device without a task needs none of them.

    @cached_property
    def _workspace(self) -> "Workspace":
        from edge_client.storage.feature_cache import FeatureCache
        from edge_client.submission.image_features import Workspace

        cache = FeatureCache(self._store.folder / "features.sqlite")
        return Workspace(self._settings, self._store, cache, dry_run=self._show is not None)

    @cached_property
    def _rounds(self) -> "RoundTraining":
        from edge_client.submission.round_submission import RoundTraining

        return RoundTraining(self._workspace)

    @cached_property
    def _builder(self) -> "SubmissionBuilder":
        from edge_client.submission.builder import SubmissionBuilder

        return SubmissionBuilder(self._workspace, self._rounds, self._show)

    @cached_property
    def _installer(self) -> "HeadInstaller":
        from edge_client.submission.head_installer import HeadInstaller

        return HeadInstaller(self._workspace, self._rounds)

    def _put(
        self, name: Job | Literal["scan"], run: Callable[[Callable[[], bool]], events.Event | None]
    ) -> None:
        job = _Job(name, run)
        self._unfinished.append(job)
        self._queue.put(job)

    def _run(self) -> None:
        try:
            while (job := self._queue.get()) is not None:
                try:
                    self._run_job(job)
                except BaseException as error:
                    self._emit(error)
        finally:
            if "_workspace" in vars(self):
                self._workspace.cache.close()

    def _run_job(self, job: _Job) -> None:
        job.has_begun, is_cancelled = True, job.cancelled.is_set
        try:
            with cancelled_by(job.cancelled), contextlib.suppress(Interrupted):
                result = None if is_cancelled() else job.run(is_cancelled)
                if result is not None and not is_cancelled():
                    self._emit(result)
        except StateError as error:
            if not is_cancelled():
                self._emit(self._missing(error, job.name))
        finally:
            self._unfinished.remove(job)

    def _build(self, build: events.BuildSubmission, should_stop: Callable[[], bool]) -> events.Event:
        self._manifest = build.manifest
        built = self._builder.build(build, should_stop)
        self._images = self._workspace.scanned
        return built

    def _missing(
        self, error: StateError, name: Job | Literal["scan"]
    ) -> events.BlobsMissing | events.SpaceMissing:
        """Return the event that a job is repeated with a blob or with space; raises the error if neither helps."""
        if name == "scan":
            raise error
        if isinstance(error, DiskAlmostFull):
            return events.SpaceMissing(error.missing, name)
        if not isinstance(error, BlobLost):
            raise error
        self._lost[error.digest] += 1
        if self._lost[error.digest] > MAX_DAMAGED:
            raise error
        text = "blob missing or damaged on disk, downloaded or made again: check the disk"
        event(log, logging.ERROR, text, error=error)
        return events.BlobsMissing(frozenset({error.digest}), name)

    def _check_images(self) -> events.ImagesChanged | None:
        if self._manifest is None:
            return None
        with contextlib.suppress(ProtofleetError):  # an error is reported by the next build
            self._workspace.find_images(self._manifest)
        images = self._workspace.scanned or ()
        if self._images is None:  # the last build needed no image
            self._images = images
        now_s, missing = time.monotonic(), self._workspace.missing(self._images)
        self._missing_since_s = {each: self._missing_since_s.get(each, now_s) for each in missing}
        # A file that a program replaces is missing for a moment. Each of two submissions would cost privacy.
        is_gone = any(
            now_s - since_s >= self._settings.rescan_s / 2 for since_s in self._missing_since_s.values()
        )
        if not is_gone and frozenset(images) <= frozenset(self._images):
            return None
        self._images = images
        event(log, logging.INFO, "images changed", folder=self._settings.data)
        return events.ImagesChanged()
