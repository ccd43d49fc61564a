"""The jobs of a device: which of them runs, what its process is answered, and what follows from its end.

The service decides, and is the only writer of the state. At most one job runs at a time. Where messages must not reveal
images, a head is evaluated beside a build, since the build's duration would show otherwise.
"""

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from edge_client.config import Settings
from edge_client.core import events
from edge_client.core.state import Job as Name
from edge_client.images.image_scanner import Scan
from edge_client.privacy.charges import Charges, requires_privacy
from edge_client.privacy.noise_key import subkey
from edge_client.privacy.policy import is_bounded
from edge_client.service.data_folder import DataFolder, Scanned, limited
from edge_client.service.job_inputs import write_job
from edge_client.service.job_processes import FromChild, JobProcesses, Runner, Wanted, log_line
from edge_client.service.job_progress import ProgressReporter
from edge_client.service.job_results import JobResults, ShowDryRun
from edge_client.service.suspects import Suspects
from edge_client.service.upload_times import UploadTimes
from edge_client.store.device_state import DeviceState
from edge_client.store.disk_space import DiskAlmostFull
from edge_client.store.job_folder import (
    At,
    Charge,
    Decoded,
    Denial,
    Doing,
    Finished,
    FromJob,
    Grant,
    Line,
    Problem,
    Ready,
    Worked,
)
from edge_client.store.stored_values import LeftOut
from protocol.children import ending
from protocol.errors import PrivacyFailed, PrivacyRefused, RuntimeMissing, StateError
from protocol.log import event
from protocol.storage.blobstore import state_errors
from protocol.wire.messages import TaskManifest

log = logging.getLogger(__name__)

MAX_LINES = 100
"""Lines of native code that are logged for each job; a library may write hundreds for each image."""


class Due(msgspec.Struct, frozen=True):
    """The time to publish what a process has left."""

    runner: Runner


JobEvent = FromChild | Scanned | Due


class Jobs:
    """The jobs of a device; `emit` takes events of its threads, which `handle` turns into events for the state machine.

    A cancelled job has no result. A job that fails for a reason other than its task or head, such as a full disk or a
    bug, raises an error in `handle`.
    """

    def __init__(
        self,
        settings: Settings,
        store: DeviceState,
        *,
        emit: Callable[[JobEvent | BaseException], None],
        show: ShowDryRun | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self._store, self._emit, self._is_dry_run = settings, store, emit, show is not None
        self._folder = store.folder / "jobs"
        self._number = 0
        self._wanted: list[Wanted] = []
        self._processes = JobProcesses(emit)
        self._times = UploadTimes(settings, None if show else store, clock=clock)
        self._suspects = Suspects(store.culprits)
        self._data = DataFolder(settings, emit=emit)
        self._results = JobResults(settings.data, store, self._suspects, show=show)
        self._progress = ProgressReporter(None if show else store)

    @property
    def is_busy(self) -> bool:
        """True while a job waits or runs, a process starts, or the data folder is scanned."""
        starts = any(each.job is not None or each.is_starting for each in self._processes.all())
        return bool(self._wanted) or self._data.is_busy or starts

    def start(self) -> None:
        """Start the first process, which finds out whether the libraries are there, and the thread of scans."""
        with state_errors(self._folder):
            shutil.rmtree(self._folder, ignore_errors=True)  # of a service that has ended: never adopted
            self._folder.mkdir()
        self._data.start()
        self._processes.start()

    def stop(self) -> None:
        """Kill all processes, and wait for their ends."""
        self._wanted.clear()
        self._data.stop()
        runners = self._processes.all()
        self._processes.stop()
        for runner in runners:
            self._release(runner)

    def build(self, build: events.BuildSubmission) -> None:
        """Build a submission in place of one that is being built; its end is SubmissionBuilt."""
        self.cancel("build")
        times = self._times.of_build(build.task, is_bounded=self._is_bounded(build.manifest))
        self._wanted.append(Wanted("build", build, times))
        self._start_next()

    def install(self, install: events.InstallHead) -> None:
        """Install or refuse a head, and no older one that waits; its end is HeadInstalled.

        An older one that is being installed is finished: heads may come faster than a device installs them.
        """
        self._drop("install")
        times = self._times.of_install(is_bounded=self._is_bounded(install.manifest))
        self._wanted.append(Wanted("install", install, times))
        self._start_next()

    def cancel(self, *names: Name) -> None:
        """Cancel jobs that wait or run: their results are no longer needed, and their blobs may be deleted."""
        self._drop(*names)
        for runner in self._processes.all():
            if runner.job is not None and runner.job.name in names:
                self._processes.end(runner)
                self._release(runner)
        self._start_next()  # another job may have waited for the process

    def check_images(self) -> None:
        """Let ImagesChanged follow if images are new, or images of the last submission are gone."""
        self._data.check()

    def pause_s(self) -> float:
        """Return the seconds until the next publication: when ticks come depends on when its job ended.

        It is infinite if none waits, and 0 if one is due.
        """
        ends = [job.times.end_s for _, job in self._held()]
        return self._times.left_s(min(ends, default=math.inf))

    def tick(self) -> None:
        """Begin and publish what is due; end processes that have waited long for a job, and one whose decoder hangs."""
        if any(wanted.order is None for wanted in self._wanted):
            self._start_next()
        for runner, job in self._held():
            if self._times.is_due(job.times.end_s):
                self._emit(Due(runner))
        self._processes.end_idle()

    def handle(self, happened: JobEvent) -> events.Event | None:
        """Return what a message of a process, its end, or a scan means for the state machine.

        Raises:
            ProtofleetError: a job failed for a reason that the state machine cannot decide about.
        """
        if isinstance(happened, Scanned):
            return self._scanned(happened)
        if isinstance(happened, Due):
            return self._publish(happened.runner)
        runner, said = happened.runner, happened.said
        is_aborted = bool(runner.child.reason) and not isinstance(said, int)
        if runner.child.is_killed or is_aborted:
            return None
        if isinstance(said, str):
            self._log_line(runner, said)
            return None
        if isinstance(said, int):
            self._ended(runner, said)
            return None
        return self._said(runner, said)

    # Starting and ending

    def _scanned(self, scanned: Scanned) -> events.ImagesChanged | events.SpaceMissing | None:
        scan = self._limited(scanned.scan, scanned.order.manifest)
        self._data.take(Scanned(scanned.order, scan))
        if not scan.problem and not self._is_dry_run:
            before = self._store.get(LeftOut)
            if (now := LeftOut(scan.unknown, scan.skipped, before.unusable)) != before:
                self._store.set(now)
        if not scanned.order.is_for_job:
            return events.ImagesChanged() if self._data.has_changed(scan) else None
        try:
            self._start_next()
        except DiskAlmostFull as error:  # only a build has a copy to write
            return events.SpaceMissing(error.missing, "build")
        return None

    def _drop(self, *names: Name) -> None:
        self._wanted = [each for each in self._wanted if each.name not in names]

    def _held(self) -> list[tuple[Runner, Wanted]]:
        """Return the processes whose results wait to be published."""
        return [
            (each, each.job)
            for each in self._processes.all()
            if each.job is not None and each.held is not None
        ]

    def _is_bounded(self, manifest: TaskManifest) -> bool:
        """Return whether messages about a task must not reveal images."""
        return is_bounded(manifest, requires_privacy=requires_privacy(self._settings, self._store.ledger))

    def _limited(self, scan: Scan, manifest: TaskManifest) -> Scan:
        """Return a scan with the files that count, where the owner limits their number."""
        limit = self._settings.max_images
        if limit is None or not self._is_bounded(manifest):
            return scan
        key = subkey(self._store.secret(keep=not self._is_dry_run), b"choice of images")
        return limited(scan, limit=limit, key=key)

    def _slot(self, wanted: Wanted) -> str:
        """Return the process that a job runs in: one for all, or one for each kind where these must not meet."""
        return wanted.name if self._is_bounded(wanted.manifest) else ""

    def _start_next(self) -> None:
        for wanted in tuple(self._wanted):
            runner = self._processes.get(self._slot(wanted))
            is_busy = runner is not None and runner.job is not None
            if is_busy or not self._times.is_due(wanted.times.begin_s):
                continue
            if wanted.order is None:
                wanted.order = self._data.order(wanted.manifest)
            if wanted.order.scan is None:
                return
            self._wanted.remove(wanted)
            self._start(wanted, wanted.order.scan)

    def _start(self, wanted: Wanted, scan: Scan) -> None:
        runner = self._processes.for_job(self._slot(wanted))
        self._number += 1
        run = write_job(
            self._folder / str(self._number),
            wanted,
            scan,
            settings=self._settings,
            store=self._store,
            suspects=self._suspects.images,
            is_dry_run=self._is_dry_run,
        )
        if wanted.name == "build":
            self._data.begin_build(wanted.manifest, scan)
        runner.begin(wanted, self._number)
        runner.send(run)

    def _release(self, runner: Runner) -> None:
        """Let a process wait for the next job; the folder of the last one is deleted."""
        if runner.job is not None:
            shutil.rmtree(self._folder / str(runner.number), ignore_errors=True)
            self._progress.close()
        runner.release()

    # Messages

    def _said(self, runner: Runner, said: FromJob) -> events.Event | None:
        match said:
            case Ready(problem=problem):
                if problem:
                    raise RuntimeMissing(problem)
                runner.is_starting = False
            case At():
                runner.note(said)
            case Worked(what=what):
                self._store.culprits.forget(what)
            case Decoded(image=image):
                self._suspects.clear_image(image)
            case Doing():
                self._progress.show(said)
            case Line():
                log_line(said)
            case Charge() if runner.job is not None:
                runner.send(self._answer(runner, runner.job, said))
            case Finished() if runner.job is not None and not self._holds(runner, runner.job, said):
                return self._finished(runner, runner.job, said.problem)
        return None

    def _answer(self, runner: Runner, job: Wanted, charge: Charge) -> Grant | Denial:
        """Charge a release, durably, before the job gets its key."""
        try:
            if runner.charges is None:
                runner.charges = Charges(
                    self._store,
                    self._settings,
                    task=job.action.task,
                    manifest=job.manifest,
                    dry_run=self._is_dry_run,
                )
            return runner.charges.answer(charge)
        except PrivacyRefused as error:
            return Denial(str(error), has_failed=isinstance(error, PrivacyFailed))
        except StateError as error:
            return Denial(str(error), problem=_problem(error))

    def _log_line(self, runner: Runner, line: str) -> None:
        """Log what a library writes, with the images that it may be about."""
        runner.lines += 1
        if runner.lines == MAX_LINES:
            line = "further messages of libraries are omitted"
        if runner.lines <= MAX_LINES:
            images = _named(runner.at.decoding)
            event(log, logging.WARNING, "message of a library", text=line, images=images or None)

    # Results and deaths

    def _holds(self, runner: Runner, job: Wanted, said: Finished) -> bool:
        """Return whether a result waits for its time, without its process."""
        if not job.times.end_s:
            return False
        runner.held = said
        runner.child.kill()
        if job.name == "build":
            job.times = self._times.after_build(job.times)
        return True

    def _publish(self, runner: Runner) -> events.Event | None:
        if runner.job is None or runner.held is None:
            return None
        return self._finished(runner, runner.job, runner.held.problem)

    def _finished(self, runner: Runner, job: Wanted, problem: Problem | None) -> events.Event | None:
        try:
            if problem is not None:
                happened: events.Event = self._results.failed(problem, job.name)
            else:
                happened = self._results.take(job, self._folder / str(runner.number))
        except msgspec.MsgspecError as error:
            runner.child.abort(f"malformed result of a job: {error}")
            return None
        self._release(runner)
        if self._slot(job) or len(self._processes.all()) > 1:
            # Who has read an image starts no clean process, and an idle one keeps the features from another one.
            self._processes.end(runner)
        self._start_next()
        return happened

    def _ended(self, runner: Runner, code: int) -> None:
        """Repeat a job whose process ended by itself, and note what it ran then."""
        self._processes.forget(runner)
        job, at, why = runner.job, runner.at, runner.child.reason or ending(code)
        self._release(runner)
        if job is None:
            if runner.is_starting:
                raise StateError(f"the program of jobs ended at its start: {why}")
            self._start_next()
            return
        event(log, logging.ERROR, f"job ended: {why}", job=job.name, decoding=_named(at.decoding) or None)
        is_named = bool(at.what or at.decoding)
        if self._is_dry_run or not (is_named or job.is_first):  # once, the process may have been killed idle
            raise StateError(f"the process of a job ended: {why}; see the log")
        self._suspects.blame(at)
        if all(each.name != job.name for each in self._wanted):  # else a newer head waits
            self._wanted.insert(0, replace(job, order=None, is_first=is_named))
        self._start_next()


def _named(decoding: Sequence[bytes]) -> str:
    """Return the paths of images that may be being decoded, of which three are named."""
    text, more = ", ".join(os.fsdecode(each).split("-", 2)[-1] for each in decoding[:3]), len(decoding) - 3
    return f"{text} or {more} more" if more > 0 else text


def _problem(error: StateError) -> Problem:
    if isinstance(error, DiskAlmostFull):
        missing = error.missing
        return Problem(text=missing.reason, folder=os.fsencode(missing.folder), space=missing.needed_bytes)
    return Problem(text=str(error))
