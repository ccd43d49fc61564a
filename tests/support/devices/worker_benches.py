"""The jobs of a device without its agent, with the state folder that they work on."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest

from aggregator.intake.validation import read_message
from edge_client.config import Settings
from edge_client.core import events
from edge_client.core.state import StoredState, UploadItem
from edge_client.images.extraction import Isolate
from edge_client.kinds.image_features import Workspace
from edge_client.privacy.charges import Charges
from edge_client.service.device import Device
from edge_client.service.job_results import ShowDryRun
from edge_client.service.jobs import JobEvent, Jobs
from edge_client.store.device_state import DeviceState
from edge_client.store.feature_cache import FeatureCache
from edge_client.store.job_folder import Shown
from protocol.statistics.public_map import PublicMap
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import (
    BlobRef,
    DeviceInfo,
    DifferentialPrivacy,
    Privacy,
    Statistics,
    Submission,
    TaskManifest,
)
from tests.support.devices.device_factory import (
    CLASSES,
    image_file,
    make_manifest,
    make_settings,
    noise,
    open_workspace,
    payload_of,
    write_images,
)
from tests.support.devices.job_threads import JobThread, die
from tests.support.graphs.backbones import tiny_backbone

WANTED = DifferentialPrivacy(noise_multiplier=2.0, delta=1e-5, max_epsilon=6.0)


SIZE = 12
"""Values of a row of the public map."""

PUBLIC_MAP = PublicMap(np.full(16, 0.5, np.float32), 60 * np.eye(SIZE, 16, dtype=np.float32)).to_bytes()


def private_task() -> dict[str, Any]:
    """Return the fields of a task with differential privacy."""
    public = BlobRef(digest=digest_of(PUBLIC_MAP), size_bytes=len(PUBLIC_MAP), name="public.map")
    statistics = Statistics(map=public, size=SIZE)
    return {"batch_size": 1, "min_images": 1, "statistics": statistics, "differential_privacy": WANTED}


def without_privacy(manifest: TaskManifest) -> TaskManifest:
    """Return the task as one of prototypes without noise."""
    return msgspec.structs.replace(manifest, differential_privacy=None, statistics=None)


class PowerLossError(BaseException):
    """The machine has lost its power."""


class JobsBench:
    """Runs jobs one after the other, each to its end."""

    def __init__(
        self,
        settings: Settings,
        store: DeviceState,
        *,
        show: ShowDryRun | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._happened: queue.SimpleQueue[JobEvent | BaseException] = queue.SimpleQueue()
        self.jobs = Jobs(settings, store, emit=self._happened.put, show=show, clock=clock)
        self.jobs.start()

    def wait_for(self, happens: threading.Event) -> None:
        """Handle what happens until a job has set an event."""
        while not happens.is_set():
            with contextlib.suppress(queue.Empty):
                self._handle(self._happened.get(timeout=0.1))

    def fail(self, error: BaseException) -> None:
        """Let `run` raise an error."""
        self._happened.put(error)

    def run(self, action: events.BuildSubmission | events.InstallHead) -> events.Event | None:
        """Return what becomes of a job."""
        ended = None
        (self.jobs.build if isinstance(action, events.BuildSubmission) else self.jobs.install)(action)  # type: ignore[arg-type]
        while self.jobs.is_busy:
            ended = self._handle(self._happened.get(timeout=60)) or ended
        return ended

    def run_until(
        self, action: events.BuildSubmission | events.InstallHead, wait: Callable[[float], None]
    ) -> events.SubmissionBuilt | events.HeadInstalled:
        """Return what becomes of a job; `wait` is called with the time until which nothing happens."""
        (self.jobs.build if isinstance(action, events.BuildSubmission) else self.jobs.install)(action)  # type: ignore[arg-type]
        while True:
            try:
                ended = self._handle(self._happened.get(timeout=0.05))
            except queue.Empty:
                waiting = [each.times.begin_s for each in self.jobs._wanted]
                held = [job.times.end_s for _, job in self.jobs._held()]
                if times := [*waiting, *held]:
                    wait(min(times))
                self.jobs.tick()
                continue
            if isinstance(ended, events.SubmissionBuilt | events.HeadInstalled):
                return ended

    def _handle(self, happened: JobEvent | BaseException) -> events.Event | None:
        if isinstance(happened, BaseException):
            raise happened
        return self.jobs.handle(happened)


class PrivateBench:
    """A device with images on a task with differential privacy, whose backbones run in this process by default."""

    def __init__(
        self,
        folder: Path,
        *,
        count: int = 40,
        max_epsilon: float | None = None,
        isolate: Isolate = nullcontext,
        **task: Any,
    ) -> None:
        self.folder = folder
        self._isolate = isolate
        self.data = write_images(folder / "data", count=count)
        self.settings = make_settings(folder, holdout=0.2, max_epsilon=max_epsilon)
        is_private = task.get("differential_privacy", WANTED) is not None
        defaults = private_task() if is_private else {"batch_size": 10, "min_images": 3}
        self.manifest = make_manifest(**{**defaults, **task})
        self.restart()
        for blob in (tiny_backbone(), PUBLIC_MAP):
            self.store.blobs.put(blob)

    def stop(self) -> None:
        """End the program and its job."""
        self.worker.jobs.stop()
        JobThread.wait_for_killed()

    def lose_power_in(self, target: object, name: str) -> None:
        """Build, until the job calls a function: the program and its job end there."""

        def end(*_: object, **__: object) -> None:
            self.worker.fail(PowerLossError())
            die()

        with patch.object(target, name, end), pytest.raises(PowerLossError):
            self.build()
        self.stop()

    def restart(self) -> None:
        """Start the program on the state directory."""
        if hasattr(self, "worker"):
            self.stop()
        self.store = DeviceState(self.folder / "state")
        JobThread.isolate = self._isolate
        self.worker = JobsBench(self.settings, self.store)

    @property
    def task(self) -> bytes:
        return self.store.blobs.put(encode(self.manifest))

    def build(self, above: int = 0) -> events.SubmissionBuilt:
        built = self.worker.run(events.BuildSubmission(self.task, self.manifest, above=above))
        assert isinstance(built, events.SubmissionBuilt)
        return built

    def upload(self) -> Submission:
        """Build a submission, which must succeed, and return it decoded."""
        built = self.build()
        assert built.item is not None, built.reason
        return self.read(built.item)

    def read(self, item: UploadItem) -> Submission:
        message = read_message(payload_of(self.store, item))
        assert isinstance(message, Submission)
        return message

    def cost(self) -> Privacy:
        """Return the cost that the next submission states."""
        privacy = self.upload().privacy
        assert privacy is not None
        return privacy

    def refused(self) -> str:
        """Return why no submission is built; the outbox stays as it is."""
        before = self.store.outbox.items()
        built = self.build()
        assert built.item is None
        assert built.may_pass, "the program continues, and installs heads"
        assert self.store.outbox.items() == before
        return built.reason

    def dry_run(self, manifest: TaskManifest) -> Shown:
        """Return what a dry run shows."""
        self.stop()
        shown: list[Shown] = []
        worker = JobsBench(self.settings, self.store, show=shown.append)
        worker.run(events.BuildSubmission(self.task, manifest))
        worker.jobs.stop()
        self.restart()
        return shown[0]

    def workspace(self, **values: Any) -> Workspace:
        """Return the workspace that a job has, on the state directory itself."""
        if self.manifest.differential_privacy is not None:
            charges = Charges(
                self.store, self.settings, task=self.task, manifest=self.manifest, dry_run=False
            )
            values = {"charge": charges.answer, **values}
        cache = FeatureCache(self.folder / "state/features.sqlite")
        return open_workspace(self.settings, self.store, cache, isolate=self._isolate, **values)

    def add_images(self, *, seed: int) -> None:
        for name in CLASSES:
            for number in range(3):
                image_file(self.data / name / f"{seed}-{number}.png", noise(seed=10 * seed + number))

    def info(self) -> DeviceInfo:
        device = Device(self.settings, self.store)
        problem = self.store.get(StoredState).problems.get("build", "")
        device._state = replace(
            device._state, task=self.task, manifest=self.manifest, build_problem=problem, has_record=True
        )
        return device.info()
