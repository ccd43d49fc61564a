"""Runs one job after the other for the service: what each reads is given, and what it leaves is in a folder."""

import contextlib
import logging
import os
import resource
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from edge_client.config import Settings
from edge_client.core.events import BuildSubmission, InstallHead
from edge_client.core.state import MissingSpace, Mode
from edge_client.graphs.backbone import Backbone
from edge_client.graphs.session import require_runtime
from edge_client.heads.head_installer import HeadInstaller
from edge_client.images.extraction import Isolate
from edge_client.images.image_scanner import Scan
from edge_client.images.images import LabeledImage
from edge_client.kinds.builder import build_submission
from edge_client.kinds.image_features import Workspace
from edge_client.privacy.policy import is_bounded
from edge_client.store.culprits import Culprits
from edge_client.store.disk_space import DiskAlmostFull
from edge_client.store.feature_cache import FeatureCache
from edge_client.store.job_folder import (
    IMAGES_FILE,
    JOB_FILE,
    RESULT_FILE,
    Charge,
    Denial,
    Finished,
    FromJob,
    Grant,
    ImageList,
    Job,
    JobSettings,
    JobVersion,
    Line,
    Problem,
    Ready,
    Result,
    Run,
    ToJob,
)
from edge_client.store.job_state import JobState
from protocol import __version__
from protocol.errors import (
    BlobLost,
    PrivacyFailed,
    PrivacyRefused,
    RuntimeMissing,
    StateError,
)
from protocol.log import fields_of
from protocol.storage.blobstore import state_errors
from protocol.storage.folder_lock import FolderLock
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_MANIFEST_BYTES, RoundManifest, TaskManifest

Manifest = TypeVar("Manifest", TaskManifest, RoundManifest)

LOCK_WAIT_S = 600.0
"""How long a job waits for one of an earlier service that is still ending."""


class Service:
    """The service at the other end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()

    def send(self, message: FromJob) -> None:
        """Send a message, from any thread."""
        data = msgspec.msgpack.encode(message)
        with self._sending:  # threads that decode log as well
            self._pipe.send_bytes(data)

    def receive(self) -> ToJob:
        """Return the next message."""
        message: ToJob = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=ToJob)
        return message

    def charge(self, charge: Charge) -> Grant:
        """Ask for a release.

        Raises:
            PrivacyRefused: it is not granted.
            StateError: the service's disk is full or fails.
        """
        self.send(charge)
        match self.receive():
            case Grant() as granted:
                return granted
            case Denial(problem=Problem(space=needed) as problem) if needed:
                folder = Path(os.fsdecode(problem.folder))
                raise DiskAlmostFull(MissingSpace(folder, needed, problem.text))
            case Denial(problem=Problem(text=text)):
                raise StateError(text)
            case Denial(text=text, has_failed=has_failed):
                raise PrivacyFailed(text) if has_failed else PrivacyRefused(text)
        raise StateError("expected the answer to a charge")


class _Forwarder(logging.Handler):
    """Sends log records to the service."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service

    def emit(self, record: logging.LogRecord) -> None:
        message, fields = fields_of(record)
        if record.exc_info:
            message = f"{message}\n{''.join(traceback.format_exception(*record.exc_info)).rstrip()}"
        if fields is not None:
            fields = {
                name: _encodable(value) if isinstance(value, str) else value for name, value in fields.items()
            }
        self._service.send(Line(record.name, record.levelno, _encodable(message), fields))


def _encodable(text: str) -> str:
    """Return a text with what UTF-8 cannot encode escaped: names of files may be any bytes."""
    return text.encode(errors="backslashreplace").decode()


def main(pipe: Connection) -> None:
    """Run jobs until the pipe is closed, and send what they log to the service."""
    service, root = Service(pipe), logging.getLogger()
    root.addHandler(_Forwarder(service))
    root.setLevel(logging.INFO)
    serve(service)


def serve(service: Service, *, isolate: Isolate = Backbone.isolated) -> None:
    """Run jobs until the pipe is closed; `isolate` runs backbones under differential privacy."""
    try:
        require_runtime()
        import PIL.Image  # noqa: F401
    except (RuntimeMissing, ImportError) as error:
        service.send(Ready(str(error)))
        return
    service.send(Ready())
    with contextlib.closing(_Program(service, isolate)) as program, contextlib.suppress(EOFError):
        while True:
            message = service.receive()
            if isinstance(message, Run):
                program.run(message)


class _Program:
    """The feature cache and backbones, which stay open from one job to the next."""

    def __init__(self, service: Service, isolate: Isolate) -> None:
        self._service, self._isolate = service, isolate
        self._workspace: Workspace | None = None
        self._lock: FolderLock | None = None

    def close(self) -> None:
        """Close the feature cache."""
        if self._workspace is not None:
            self._workspace.cache.close()
        if self._lock is not None:
            self._lock.release()

    def run(self, run: Run) -> None:
        """Run a job, and leave its result."""
        folder = Path(os.fsdecode(run.folder))
        problem = None
        try:
            with state_errors(folder):
                self._run(run, folder)
        except StateError as error:
            problem = _problem(error)
        self._service.send(Finished(problem))

    def _run(self, run: Run, folder: Path) -> None:
        data = (folder / JOB_FILE).read_bytes()
        version = msgspec.json.decode(data, type=JobVersion).version
        if version != __version__:
            text = (
                f"protofleet was upgraded from {version} to {__version__} while edge-client runs: restart it"
            )
            result = Result(outcome=Problem(text=text))
        else:
            result = self._result(run, folder, msgspec.json.decode(data, type=Job))
        (folder / RESULT_FILE).write_bytes(msgspec.json.encode(result))

    def _result(self, run: Run, folder: Path, job: Job) -> Result:
        begin_s = time.perf_counter()
        state_folder = folder.parent.parent
        state = JobState(state_folder, folder, job.state, secret=run.secret)
        try:
            manifest = _decoded(job.manifest, TaskManifest)
            workspace = self._open(state, folder, job, manifest)
            if job.head is None:
                opened = _decoded(job.round, RoundManifest) if job.round else None
                build = BuildSubmission(job.task, manifest, opened, above=job.above)
                result = build_submission(workspace, build)
            else:
                install = InstallHead(job.task, manifest, job.head, job.as_canary)
                result = HeadInstaller(workspace).install(install)
        except StateError as error:
            return Result(outcome=_problem(error))
        if (shown := result.shown) is not None:
            passed_s = time.perf_counter() - begin_s
            shown = replace(shown, seconds=passed_s, memory_bytes=_peak_bytes())
        return replace(result, shown=shown, changes=state.changes)

    def _open(self, state: JobState, folder: Path, job: Job, manifest: TaskManifest) -> Workspace:
        """Return the workspace, with the cache and the open backbones of the job before this one."""
        settings = _settings(job.settings, dry_run=job.is_dry_run)
        before = self._workspace
        is_bound = is_bounded(manifest, requires_privacy=job.requires_privacy)
        writes = job.kind == "build" or not is_bound  # where it is, a head is evaluated beside a build
        cache = self._open_cache(state.folder, writes=writes) if before is None else before.cache
        listed = msgspec.json.decode((folder / IMAGES_FILE).read_bytes(), type=ImageList)
        scan = _scan(listed)
        workspace = Workspace(
            settings,
            state,
            cache,
            find=lambda _: scan,
            dry_run=job.is_dry_run,
            requires_privacy=job.requires_privacy,
            culprits=Culprits(
                self._service.send, deaths=job.deaths, suspects=job.suspects, guilty=job.guilty
            ),
            charge=self._service.charge,
            show_progress=self._service.send,
            isolate=self._isolate,
            open_backbones={} if before is None else before.open_backbones,
        )
        self._workspace = workspace
        return workspace

    def _open_cache(self, folder: Path, *, writes: bool) -> FeatureCache:
        """Open the features, which one job at a time writes: one of an earlier service may be ending still."""
        self._lock = FolderLock(folder, "features.lock")
        if writes and not self._lock.take(wait_s=LOCK_WAIT_S):
            raise StateError(f"another job still writes the features in {folder}: try again")
        return FeatureCache(folder / "features.sqlite")


def _peak_bytes() -> int:
    """Return the most memory that this process has taken."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _decoded(data: bytes, kind: type[Manifest]) -> Manifest:
    return decode(data, kind, max_bytes=MAX_MANIFEST_BYTES)


def _problem(error: StateError) -> Problem:
    if isinstance(error, DiskAlmostFull):
        missing = error.missing
        return Problem(text=missing.reason, folder=os.fsencode(missing.folder), space=missing.needed_bytes)
    return Problem(text=str(error), lost=error.digest if isinstance(error, BlobLost) else b"")


def _settings(given: JobSettings, *, dry_run: bool) -> Settings:
    fields = msgspec.structs.asdict(given) | {"data": Path(os.fsdecode(given.data))}
    return Settings(broker=None, mode=Mode.DRY_RUN if dry_run else Mode.SERVICE, **fields)


def _scan(listed: ImageList) -> Scan:
    folder = Path(os.fsdecode(listed.folder))
    images = tuple(
        LabeledImage(folder, os.fsdecode(each.relative), *msgspec.structs.astuple(each)[1:])
        for each in listed.images
    )
    return Scan(
        images,
        frozenset(map(os.fsdecode, listed.being_written)),
        listed.unknown,
        frozenset(map(os.fsdecode, listed.unknown_names)),
        listed.skipped,
        listed.problem,
    )
