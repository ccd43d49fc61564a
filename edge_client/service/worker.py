"""The worker thread: builds submissions and installs heads, one job after the other."""

import contextlib
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

from edge_client.agent import events
from edge_client.agent.state import MAX_DAMAGED, head_key
from edge_client.config import Settings
from edge_client.runtime.watchdog import allow_runs, interrupt_runs
from edge_client.storage.device_state import DeviceState
from edge_client.storage.disk_space import DiskAlmostFull
from protocol.errors import BlobLost, Interrupted, ProtofleetError, StateError
from protocol.log import event
from protocol.threads import start_thread
from protocol.wire.messages import TaskManifest

if TYPE_CHECKING:
    from edge_client.submission.builder import ShowDryRun, SubmissionBuilder
    from edge_client.submission.head_installer import HeadInstaller
    from edge_client.submission.image_features import Workspace
    from edge_client.submission.round_submission import RoundTraining

log = logging.getLogger(__name__)


class Worker:
    """Runs jobs on a thread of its own, from which `emit` takes the results and, in a dry run, `show` submissions.

    A job that fails for a reason other than its task or head, such as a full disk or a bug, emits the exception.
    """

    def __init__(
        self,
        settings: Settings,
        state: DeviceState,
        *,
        emit: Callable[[events.Event | BaseException], None],
        show: "ShowDryRun | None",
    ) -> None:
        self.task: bytes | None = None
        """The current task; jobs for another one are dropped."""
        self.round: int | None = None
        """The current round, likewise."""
        self._emit = emit
        self._settings = settings
        self._store = state
        self._show = show
        self._newest_head: bytes | None = None
        self._lost: Counter[bytes] = Counter()
        self._manifest: TaskManifest | None = None
        self._images: tuple[str, ...] | None = None
        self._missing_images: frozenset[str] = frozenset()
        """Those of the last build that the last scan has not found."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; raises ThreadFailed if it cannot be started."""
        self._thread = start_thread(self._run, name="worker", on_failure=self._emit)

    def follow(self, task: bytes | None) -> None:
        """Make a task the current one, and end runs of the previous one's graphs."""
        self.task = task
        if self._thread is not None and self._thread.ident is not None and self._thread.is_alive():
            interrupt_runs(self._thread.ident)

    def stop(self) -> None:
        """Drop all jobs and wait up to 5 s for the running one, whose end is no fault of what it runs."""
        self.follow(None)
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(timeout=5)
        with contextlib.suppress(StateError):
            self._store.crash_counter.stop()

    def build(self, build: events.BuildSubmission) -> None:
        """Build a submission; emits SubmissionBuilt, unless another task or round becomes current."""
        self._put(lambda: self._build(build))

    def install(self, install: events.InstallHead) -> None:
        """Install or refuse a head; emits HeadInstalled, unless another task or head becomes current."""
        self._newest_head = head_key(install.head)
        self._put(lambda: self._install(install))

    def check_images(self) -> None:
        """Emit ImagesChanged if there are new images, or if two scans in a row miss one of the last submission."""
        self._put(self._check_images)

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

    def _put(self, job: Callable[[], None]) -> None:
        """Queue a job; one that is interrupted has no result."""

        def run() -> None:
            with contextlib.suppress(Interrupted):
                job()

        self._jobs.put(run)

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                allow_runs(threading.get_ident())  # a job of an earlier task ends at once by itself
                try:
                    job()
                except BaseException as error:
                    self._emit(error)
        finally:
            allow_runs(threading.get_ident())  # a later thread of this process may have the same number
            if "_workspace" in vars(self):
                self._workspace.cache.close()

    def _is_current(self, build: events.BuildSubmission) -> bool:
        return build.task == self.task and (build.round is None or build.round.number == self.round)

    def _build(self, build: events.BuildSubmission) -> None:
        if not self._is_current(build):
            return
        self._manifest = build.manifest
        self._images = self._find_images(build.manifest)
        self._emit_result(partial(self._builder.build, build), "build", lambda: self._is_current(build))

    def _install(self, install: events.InstallHead) -> None:
        if install.task != self.task or head_key(install.head) != self._newest_head:
            return  # an older head's blobs may have been deleted
        self._emit_result(
            partial(self._installer.install, install), "install", lambda: install.task == self.task
        )

    def _emit_result(
        self,
        run: Callable[[Callable[[], bool]], events.Event],
        during: Literal["build", "install"],
        is_current: Callable[[], bool],
    ) -> None:
        """Run a job, and emit its result unless it is out of date: then its blobs may have been deleted."""
        try:
            result = run(lambda: not is_current())
        except StateError as error:
            if not is_current():
                return
            result = self._missing(error, during)
        if is_current():
            self._emit(result)

    def _missing(
        self, error: StateError, during: Literal["build", "install"]
    ) -> events.BlobsMissing | events.SpaceMissing:
        """Return the event that a job is repeated with a blob or with space; raises the error if neither helps."""
        if isinstance(error, DiskAlmostFull):
            return events.SpaceMissing(error.missing, during)
        if not isinstance(error, BlobLost):
            raise error
        self._lost[error.digest] += 1
        if self._lost[error.digest] > MAX_DAMAGED:
            raise error
        text = "blob missing or damaged on disk, downloaded or made again: check the disk"
        event(log, logging.ERROR, text, error=error)
        return events.BlobsMissing(frozenset({error.digest}), during)

    def _check_images(self) -> None:
        if self._manifest is None or self._images is None:
            return
        images = self._find_images(self._manifest)
        before, self._missing_images = self._missing_images, frozenset(self._images).difference(images)
        # A file that a program replaces is missing for a moment. Each of two submissions would cost privacy.
        if self._missing_images & before or not frozenset(images) <= frozenset(self._images):
            self._images = images
            event(log, logging.INFO, "images changed", folder=self._settings.data)
            self._emit(events.ImagesChanged())

    def _find_images(self, manifest: TaskManifest) -> tuple[str, ...]:
        try:
            return tuple(image.identity for image in self._workspace.find_images(manifest))
        except ProtofleetError as error:
            return (str(error),)  # reported by the next build
