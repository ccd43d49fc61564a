"""Runs jobs as child processes, and commits what they leave: the service decides, and is the only writer of the state.

At most one job runs at a time. Where messages must not reveal images, a head is evaluated beside a build, since the
build's duration would show otherwise; and each job has a process of its own, in which no image has been read.
"""

import logging
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from edge_client.config import Settings
from edge_client.core import events
from edge_client.core.state import MAX_DAMAGED, MissingSpace, UploadItem
from edge_client.core.state import Job as Name
from edge_client.core.submission_kinds import kind_of
from edge_client.images.image_scanner import Scan
from edge_client.privacy.charges import Charges, requires_privacy
from edge_client.privacy.noise_key import subkey
from edge_client.privacy.policy import is_bounded
from edge_client.privacy.upload_slots import INSTALL_S, next_slot_s, publication_s
from edge_client.service.build_report import BuildReporter
from edge_client.service.data_folder import DataFolder, Scanned, ScanOrder, limited, listed
from edge_client.service.job_progress import ProgressReporter
from edge_client.store.device_state import DeviceState
from edge_client.store.disk_space import DiskAlmostFull, require_space
from edge_client.store.job_folder import (
    IMAGES_FILE,
    JOB_FILE,
    LAST_SUBMISSION,
    RESULT_FILE,
    At,
    Built,
    Charge,
    Decoded,
    Denial,
    Doing,
    Finished,
    FromJob,
    Grant,
    Installed,
    Job,
    JobSettings,
    Line,
    Problem,
    Ready,
    Result,
    Run,
    Shown,
    Worked,
)
from edge_client.store.stored_values import LeftOut, SubmissionReport
from protocol import __version__
from protocol.children import Child, ending
from protocol.errors import (
    PrivacyFailed,
    PrivacyRefused,
    RuntimeMissing,
    StateError,
)
from protocol.log import event
from protocol.storage.blobstore import state_errors
from protocol.wire.codec import encode
from protocol.wire.messages import TaskManifest

log = logging.getLogger(__name__)

PROGRAM = "edge_client.job"

IDLE_S = 60.0
"""How long a process waits for the next job, so that rounds do not pay for its start."""

MAX_END_S = 1.0
"""How long the end of the service waits for a killed process, which takes milliseconds."""

MAX_DECODING_S = 3600.0
"""Time after which a job that names no further image is ended: a decoder hangs. A graph has limits of its own."""

MAX_LINES = 100
"""Lines of native code that are logged for each job; a library may write hundreds for each image."""

ShowDryRun = Callable[[Shown], None]
"""Takes what a dry run would upload."""


class FromChild(msgspec.Struct, frozen=True):
    """A message of a job's process, a line of its standard error, or its exit status."""

    runner: "Runner"
    said: FromJob | str | int


class Due(msgspec.Struct, frozen=True):
    """The time to publish what a process has left."""

    runner: "Runner"


JobEvent = FromChild | Scanned | Due


@dataclass(eq=False)
class Wanted:
    """A job that waits or runs."""

    name: Name
    action: events.BuildSubmission | events.InstallHead
    order: ScanOrder | None = None
    is_first: bool = True
    """False if a process has ended before it named anything of this job."""
    begin_s: float = 0.0
    """When it may begin, in unix seconds."""
    end_s: float = 0.0
    """When its result is published, at the earliest; 0 as soon as it is there."""

    @property
    def manifest(self) -> TaskManifest:
        """The task that it is for."""
        return self.action.manifest


@dataclass(eq=False)
class Runner:
    """A process that runs jobs."""

    child: Child = field(init=False)
    job: Wanted | None = None
    number: int = 0
    """Number and folder of the job."""
    charges: Charges | None = None
    at: At = field(default_factory=At)
    at_since_s: float = 0.0
    lines: int = 0
    held: Finished | None = None
    """The end of a job whose result waits to be published; its process is killed."""
    is_starting: bool = True
    is_new: bool = True
    """True until it has run a job."""
    idle_since_s: float = field(default_factory=time.monotonic)


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
        self._settings, self._store, self._emit, self._show = settings, store, emit, show
        self._clock = clock
        self._built_task = b""
        """The task of the newest build: what comes after it for the same task was caused by images."""
        self._folder = store.folder / "jobs"
        self._number = 0
        self._wanted: list[Wanted] = []
        self._runners: dict[str, Runner] = {}
        self._suspects: set[bytes] = set()
        self._lost: Counter[bytes] = Counter()
        self._data = DataFolder(settings, emit=emit)
        self._reporter = BuildReporter(settings.data)
        self._progress = ProgressReporter(None if show else store)

    @property
    def is_busy(self) -> bool:
        """True while a job waits or runs, a process starts, or the data folder is scanned."""
        starts = any(runner.job is not None or runner.is_starting for runner in self._runners.values())
        return bool(self._wanted) or self._data.is_busy or starts

    def start(self) -> None:
        """Start the first process, which finds out whether the libraries are there, and the thread of scans."""
        with state_errors(self._folder):
            shutil.rmtree(self._folder, ignore_errors=True)  # of a service that has ended: never adopted
            self._folder.mkdir()
        self._data.start()
        self._spawn("")

    def stop(self) -> None:
        """Kill all processes, and wait for their ends, which are no fault of what they run."""
        self._wanted.clear()
        self._data.stop()
        children = [runner.child for runner in self._runners.values()]
        for slot in tuple(self._runners):
            self._kill(slot)
        for child in children:
            child.wait(MAX_END_S)

    def build(self, build: events.BuildSubmission) -> None:
        """Build a submission in place of one that is being built; its end is SubmissionBuilt."""
        self.cancel("build")
        wanted = Wanted("build", build)
        if (period_s := self._period_s(wanted)) is not None:
            begin_s = self._clock()
            if build.task == self._built_task:
                begin_s = next_slot_s(begin_s, period_s, device=self._settings.device_id, task=build.task)
            wanted.begin_s, wanted.end_s = begin_s, begin_s + period_s
            in_s = round(wanted.end_s - self._clock())
            event(log, logging.INFO, "private submission ordered, it is uploaded at a fixed time", in_s=in_s)
        self._built_task = build.task
        self._wanted.append(wanted)
        self._start_next()

    def install(self, install: events.InstallHead) -> None:
        """Install or refuse a head, and no older one that waits; its end is HeadInstalled.

        An older one that is being installed is finished: heads may come faster than a device installs them.
        """
        self._drop("install")
        wanted = Wanted("install", install)
        if self._period_s(wanted) is not None:
            wanted.end_s = self._clock() + INSTALL_S
        self._wanted.append(wanted)
        self._start_next()

    def cancel(self, *names: Name) -> None:
        """Cancel jobs that wait or run: their results are no longer needed, and their blobs may be deleted."""
        self._drop(*names)
        for slot, runner in tuple(self._runners.items()):
            if runner.job is not None and runner.job.name in names:
                self._kill(slot)
        self._start_next()  # another job may have waited for the process

    def check_images(self) -> None:
        """Let ImagesChanged follow if images are new, or images of the last submission are gone."""
        self._data.check()

    def pause_s(self) -> float:
        """Return the seconds until the next publication: when ticks come depends on when its job ended.

        It is infinite if none waits, and 0 if one is due.
        """
        ends = [
            each.job.end_s
            for each in self._runners.values()
            if each.job is not None and each.held is not None
        ]
        return max(0.0, min(ends, default=math.inf) - self._clock())

    def tick(self) -> None:
        """Begin and publish what is due; end processes that have waited long for a job, and one whose decoder hangs."""
        if any(wanted.order is None for wanted in self._wanted):
            self._start_next()
        for runner in self._runners.values():
            if runner.job is not None and runner.held is not None and self._is_due(runner.job.end_s):
                self._emit(Due(runner))
        for slot, runner in tuple(self._runners.items()):
            is_idle = runner.job is None and not runner.is_starting
            if is_idle and time.monotonic() > runner.idle_since_s + IDLE_S:
                self._kill(slot)
            elif (
                runner.held is None
                and runner.at.decoding
                and time.monotonic() > runner.at_since_s + MAX_DECODING_S
            ):
                runner.child.abort(f"it decoded the same images for {MAX_DECODING_S:.0f} s")

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
            return self._ended(runner, said)
        return self._said(runner, said)

    # Starting and ending

    def _scanned(self, scanned: Scanned) -> events.ImagesChanged | events.SpaceMissing | None:
        scan = self._limited(scanned.scan, scanned.order.manifest)
        self._data.take(Scanned(scanned.order, scan))
        if not scan.problem and self._show is None:
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

    def _is_bounded(self, manifest: TaskManifest) -> bool:
        """Return whether messages about a task must not reveal images."""
        return is_bounded(manifest, requires_privacy=requires_privacy(self._settings, self._store.ledger))

    def _limited(self, scan: Scan, manifest: TaskManifest) -> Scan:
        """Return a scan with the files that count, where the owner limits their number."""
        limit = self._settings.max_images
        if limit is None or not self._is_bounded(manifest):
            return scan
        key = subkey(self._store.secret(keep=self._show is None), b"choice of images")
        return limited(scan, limit=limit, key=key)

    def _period_s(self, wanted: Wanted) -> float | None:
        """Return the period of what is published, or None where it is published as soon as it is there."""
        if self._settings.upload_period_s is None or self._show is not None:
            return None
        return self._settings.upload_period_s if self._is_bounded(wanted.manifest) else None

    def _is_due(self, at_s: float) -> bool:
        """Return whether a time has come, or is out of reach, as the clock was put back."""
        now_s, period_s = self._clock(), self._settings.upload_period_s or 0.0
        return now_s >= at_s or at_s - now_s > 2 * period_s + INSTALL_S

    def _slot(self, wanted: Wanted) -> str:
        """Return the process that a job runs in: one for all, or one for each kind where these must not meet."""
        return wanted.name if self._is_bounded(wanted.manifest) else ""

    def _start_next(self) -> None:
        for wanted in tuple(self._wanted):
            runner = self._runners.get(self._slot(wanted))
            if (runner is not None and runner.job is not None) or not self._is_due(wanted.begin_s):
                continue
            if wanted.order is None:
                wanted.order = self._data.order(wanted.manifest)
            if wanted.order.scan is None:
                return
            self._wanted.remove(wanted)
            self._start(wanted, wanted.order.scan)

    def _start(self, wanted: Wanted, scan: Scan) -> None:
        slot = self._slot(wanted)
        if slot and "" in self._runners and slot not in self._runners:
            idle = self._runners[""]
            if idle.job is None and idle.is_new:
                self._runners[slot] = self._runners.pop("")
        for other, each in tuple(self._runners.items()):
            if other != slot and each.job is None and not each.is_new:
                self._kill(other)  # it would keep the lock of the features
        runner = self._runners.get(slot)
        if runner is not None and slot and not runner.is_new:
            self._kill(slot)
            runner = None
        if runner is None:
            runner = self._spawn(slot)
        self._number += 1
        folder = self._folder / str(self._number)
        job, secret, last = self._job(wanted), self._secret(wanted), self._last_submission(wanted)
        if last is not None:
            require_space(self._folder, last.size_bytes, what="a copy of the last submission")
        with state_errors(folder):
            folder.mkdir()
            (folder / JOB_FILE).write_bytes(msgspec.json.encode(job))
            (folder / IMAGES_FILE).write_bytes(msgspec.json.encode(listed(scan)))
        if last is not None:
            self._store.outbox.write(last, folder / LAST_SUBMISSION)
        if wanted.name == "build":
            self._data.begin_build(wanted.manifest, scan)
        runner.job, runner.number, runner.is_new = wanted, self._number, False
        runner.at, runner.lines = At(), 0
        runner.child.send(msgspec.msgpack.encode(Run(os.fsencode(folder), secret)))

    def _job(self, wanted: Wanted) -> Job:
        store, settings, action = self._store, self._settings, wanted.action
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
            ),
            requires_privacy=requires_privacy(settings, store.ledger),
            task=action.task,
            manifest=encode(action.manifest),
            above=above,
            is_dry_run=self._show is not None,
            state=store.snapshot(above=above, clock_s=wanted.begin_s or None),
            deaths=store.culprits.deaths(),
            suspects=tuple(self._suspects),
            guilty=store.culprits.guilty(),
        )
        if isinstance(action, events.InstallHead):
            return msgspec.structs.replace(common, head=action.head, as_canary=action.as_canary)
        return msgspec.structs.replace(common, round=encode(action.round) if action.round else b"")

    def _secret(self, wanted: Wanted) -> bytes:
        """Return the device's secret for a build that groups images; it gets the keys of a release by a charge."""
        if wanted.name != "build" or not kind_of(wanted.manifest).is_grouped:
            return b""
        try:
            return self._store.secret(keep=self._show is None)
        except Exception as error:
            if wanted.manifest.perturbation is None:
                raise
            event(log, logging.ERROR, "no secret for noise", error=error)
            return b""

    def _last_submission(self, wanted: Wanted) -> UploadItem | None:
        """Return the newest submission for a build that may need it: to number it anew, or to repeat a release."""
        action, last = wanted.action, self._store.outbox.newest_submission()
        if last is None or not isinstance(action, events.BuildSubmission) or last.task != action.task:
            return None
        is_needed = kind_of(action.manifest).is_private or (action.round is not None and action.above)
        return last if is_needed else None

    def _spawn(self, slot: str) -> Runner:
        runner = Runner()

        def hear(data: bytes) -> None:
            try:
                said: FromJob = msgspec.msgpack.decode(data, type=FromJob)
            except msgspec.MsgspecError as error:
                runner.child.abort(f"malformed message of a job: {error}")
            else:
                self._emit(FromChild(runner, said))

        runner.child = Child(
            PROGRAM,
            on_message=hear,
            on_line=lambda line: self._emit(FromChild(runner, line)),
            on_end=lambda code: self._emit(FromChild(runner, code)),
            on_failure=self._emit,
        )
        self._runners[slot] = runner
        return runner

    def _kill(self, slot: str) -> None:
        runner = self._runners.pop(slot)
        runner.child.kill()
        self._release(runner)

    def _release(self, runner: Runner) -> None:
        """Let a process wait for the next job; the folder of the last one is deleted."""
        if runner.job is not None:
            shutil.rmtree(self._folder / str(runner.number), ignore_errors=True)
            self._progress.close()
        runner.job, runner.charges, runner.held = None, None, None
        runner.idle_since_s = time.monotonic()

    # Messages

    def _said(self, runner: Runner, said: FromJob) -> events.Event | None:
        match said:
            case Ready(problem=problem):
                if problem:
                    raise RuntimeMissing(problem)
                runner.is_starting = False
            case At():
                runner.at, runner.at_since_s = said, time.monotonic()
            case Worked(what=what):
                self._store.culprits.forget(what)
            case Decoded(image=image):
                self._suspects.discard(image)
            case Doing():
                self._progress.show(said)
            case Line():
                _log(said)
            case Charge() if runner.job is not None:
                runner.child.send(msgspec.msgpack.encode(self._answer(runner, runner.job, said)))
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
                    dry_run=self._show is not None,
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

    # Results

    def _holds(self, runner: Runner, job: Wanted, said: Finished) -> bool:
        """Return whether a result waits for its time, without its process."""
        if not job.end_s:
            return False
        runner.held = said
        runner.child.kill()
        now_s, period_s = self._clock(), self._period_s(job)
        if job.name == "build" and period_s is not None and now_s > job.end_s:
            text = "a build took longer than --upload-period-s, which time reveals: lengthen it, or limit --max-images"
            event(log, logging.WARNING, text, seconds=round(now_s - job.begin_s))
            job.end_s = publication_s(job.end_s, now_s, period_s)
        return True

    def _publish(self, runner: Runner) -> events.Event | None:
        if runner.job is None or runner.held is None:
            return None
        return self._finished(runner, runner.job, runner.held.problem)

    def _finished(self, runner: Runner, job: Wanted, problem: Problem | None) -> events.Event | None:
        folder = self._folder / str(runner.number)
        happened: events.Event
        try:
            if problem is not None:
                happened = self._failed(problem, job.name)
            else:
                with state_errors(folder):
                    data = (folder / RESULT_FILE).read_bytes()
                happened = self._commit(job, folder, msgspec.json.decode(data, type=Result))
        except msgspec.MsgspecError as error:
            runner.child.abort(f"malformed result of a job: {error}")
            return None
        self._release(runner)
        if (slot := self._slot(job)) or len(self._runners) > 1:
            # Who has read an image starts no clean process, and an idle one keeps the features from another one.
            self._kill(slot)
        self._start_next()
        return happened

    def _commit(self, job: Wanted, folder: Path, result: Result) -> events.Event:
        outcome, action = result.outcome, job.action
        if isinstance(outcome, Problem):
            return self._failed(outcome, job.name)
        try:
            if isinstance(outcome, Built) and isinstance(action, events.BuildSubmission):
                self._store_built(action, folder, result, outcome)
                return events.SubmissionBuilt(
                    action.task,
                    outcome.item,
                    None if action.round is None else action.round.number,
                    outcome.reason,
                    may_pass=outcome.may_pass,
                    no_images=outcome.no_images,
                    retries=outcome.retries,
                )
            if isinstance(outcome, Installed) and self._show is None:
                self._store.commit(folder, result)
                _log(result.line)
                return events.HeadInstalled(outcome.head, outcome.report, outcome.reason)
        except DiskAlmostFull as error:
            return events.SpaceMissing(error.missing, job.name)
        raise StateError("a job left the result of another one")

    def _store_built(
        self, action: events.BuildSubmission, folder: Path, result: Result, built: Built
    ) -> None:
        store = self._store
        report = self._reporter.report(
            built,
            task=action.task,
            manifest=action.manifest,
            last=store.outbox.newest_submission(),
            before=store.get(SubmissionReport),
        )
        if self._show is not None:
            if result.shown is not None:
                self._show(result.shown)
            return
        store.commit(folder, result, *filter(None, [report]))
        if report is not None:
            self._suspects.clear()  # those that are left are gone
        _log(result.line)

    def _failed(self, problem: Problem, name: Name) -> events.BlobsMissing | events.SpaceMissing:
        """Return the event that a job is repeated with a blob or with space; raises StateError if neither helps."""
        if problem.space:
            space = MissingSpace(Path(os.fsdecode(problem.folder)), problem.space, problem.text)
            return events.SpaceMissing(space, name)
        if not problem.lost:
            raise StateError(problem.text)
        self._lost[problem.lost] += 1
        if self._lost[problem.lost] > MAX_DAMAGED:
            raise StateError(problem.text)
        text = "blob missing or damaged on disk, downloaded or made again: check the disk"
        event(log, logging.ERROR, text, error=problem.text)
        self._store.blobs.is_whole(problem.lost)  # deletes a damaged one
        return events.BlobsMissing(frozenset({problem.lost}), name)

    # Deaths

    def _ended(self, runner: Runner, code: int) -> events.Event | None:
        """Repeat a job whose process ended by itself, and note what it ran then."""
        slot = next(slot for slot, each in self._runners.items() if each is runner)
        del self._runners[slot]
        job, at, why = runner.job, runner.at, runner.child.reason or ending(code)
        self._release(runner)
        if job is None:
            if runner.is_starting:
                raise StateError(f"the program of jobs ended at its start: {why}")
            self._start_next()
            return None
        event(log, logging.ERROR, f"job ended: {why}", job=job.name, decoding=_named(at.decoding) or None)
        is_named = bool(at.what or at.decoding)
        if self._show is not None or not (
            is_named or job.is_first
        ):  # once, the process may have been killed idle
            raise StateError(f"the process of a job ended: {why}; see the log")
        self._blame(at)
        if all(each.name != job.name for each in self._wanted):  # else a newer head waits
            self._wanted.insert(0, replace(job, order=None, is_first=is_named))
        self._start_next()
        return None

    def _blame(self, at: At) -> None:
        if len(at.decoding) == 1 and at.decoding[0] in self._suspects:
            self._suspects.discard(at.decoding[0])
            self._store.culprits.convict(at.decoding[0], memory_bytes=at.memory_bytes)
            return  # the graphs that are named, too, did not run
        self._suspects.update(at.decoding)
        if at.what:
            self._store.culprits.add_death(at.what)


def _named(decoding: Sequence[bytes]) -> str:
    """Return the paths of images that may be being decoded, of which three are named."""
    text, more = ", ".join(os.fsdecode(each).split("-", 2)[-1] for each in decoding[:3]), len(decoding) - 3
    return f"{text} or {more} more" if more > 0 else text


def _problem(error: StateError) -> Problem:
    if isinstance(error, DiskAlmostFull):
        missing = error.missing
        return Problem(text=missing.reason, folder=os.fsencode(missing.folder), space=missing.needed_bytes)
    return Problem(text=str(error))


def _log(line: Line | None) -> None:
    if line is None:
        return
    logger = logging.getLogger(line.logger)
    if line.fields is None:
        logger.log(line.level, "%s", line.message)
    else:
        event(logger, line.level, line.message, **line.fields)
