"""The device's work, one piece after the other on a thread of its own."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from edge_client import events
from edge_client.backbone import Backbone, Provider, open_backbone
from edge_client.feature_cache import FeatureCache
from edge_client.images import find_pictures
from edge_client.life import Mode
from edge_client.predictor import open_head
from edge_client.progress import Progress
from edge_client.state import DeviceState
from edge_client.work import Local, Prepared, evaluate_head, prepare, submission_of
from protocol.codec import digest_of, encode
from protocol.errors import ProtofleetError, StateError
from protocol.messages import TaskManifest
from protocol.session import Broker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What the person chose."""

    broker: Broker | None
    fleet: str
    local: Local
    mode: Mode
    provider: Provider
    threads: int | None
    backbone: Path | None
    rescan_s: float


@dataclass(frozen=True)
class Crashed:
    """Work ended in an error that is not about this task or head: a full disk, or a fault of ours."""

    error: BaseException


class Worker:
    """Makes submissions and takes heads into use.

    Args:
        settings: what the person chose.
        state: the device's state directory.
        emit: takes the outcomes, from the work's thread.
        show: in a dry run, takes what is prepared and the bytes that would be sent.
    """

    def __init__(
        self,
        settings: Settings,
        state: DeviceState,
        *,
        emit: Callable[[events.Event | Crashed], None],
        show: Callable[[Prepared, int], None] | None,
    ) -> None:
        self.focus: bytes | None = None
        """The task that work is for; work for another one is dropped."""
        self._settings = settings
        self._kept = state
        self._emit = emit
        self._show = show
        self._cache = FeatureCache(state.folder / "features.sqlite")
        self._backbone: Backbone | None = None
        self._seen: tuple[str, ...] | None = None
        self._warned: set[str] = set()
        self._manifest: TaskManifest | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="work", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self) -> None:
        """End after what cannot be interrupted."""
        self.focus = None
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def build(self, build: events.Build) -> None:
        """Make a submission; the outcome is a Built, unless another task comes in between."""
        self._jobs.put(lambda: self._build(build))

    def install(self, install: events.Install) -> None:
        """Take a head into use and evaluate it; the outcome is an Installed, unless another task comes."""
        self._jobs.put(lambda: self._install(install))

    def look(self) -> None:
        """See whether there are other pictures than in the last submission; if so, emit PicturesChanged."""
        self._jobs.put(self._look)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._emit(Crashed(error))

    def _look(self) -> None:
        if self._manifest is None or self._seen is None:
            return
        seen = self._identities(self._manifest)
        if seen != self._seen:
            self._seen = seen
            log.info("the pictures in %s have changed", self._settings.local.data)
            self._emit(events.PicturesChanged())

    def _identities(self, manifest: TaskManifest) -> tuple[str, ...]:
        try:
            pictures = find_pictures(self._settings.local.data, manifest.classes)
        except ProtofleetError as error:
            return (str(error),)  # telling it is the next build's part
        return tuple(picture.identity for picture in pictures)

    def _open_backbone(self, manifest: TaskManifest) -> Backbone:
        blob = manifest.backbones[0]
        if self._backbone is None or self._backbone.sha256 != blob.digest.hex():
            self._backbone = open_backbone(
                self._kept.blobs.path(blob.digest),
                provider=self._settings.provider,
                threads=self._settings.threads,
            )
            log.info("running %s on %s", blob.name, self._backbone.provider)
            if self._backbone.note:
                log.warning("%s", self._backbone.note)
            self._kept.set(runtime=self._backbone.provider)
        return self._backbone

    def _build(self, build: events.Build) -> None:
        if build.task != self.focus:
            return
        self._manifest = build.manifest
        self._seen = self._identities(build.manifest)
        try:
            built = self._prepare(build)
        except StateError:
            raise
        except ProtofleetError as error:
            built = events.Built(build.task, None, reason=str(error))
        if build.task == self.focus:
            self._emit(built)

    def _prepare(self, build: events.Build) -> events.Built:
        backbone = self._open_backbone(build.manifest)
        with contextlib.closing(Progress("extracting features")) as progress:
            prepared = prepare(
                task=build.manifest,
                local=self._settings.local,
                backbone=backbone,
                cache=self._cache,
                on_progress=progress.update,
                should_stop=lambda: build.task != self.focus,
            )
        self._warn(build.manifest, prepared)
        if self._show is None:
            return self._keep(build, prepared)
        # A sequence number of today has as many bytes as the one that would be sent.
        payload = submission_of(prepared, task=build.task, manifest=build.manifest, sequence=int(time.time()))
        self._show(prepared, len(payload))
        return events.Built(build.task, digest_of(payload))

    def _warn(self, manifest: TaskManifest, prepared: Prepared) -> None:
        """Say what is left out and why, each thing once."""
        data, used = self._settings.local.data, {entry.name for entry in prepared.classes}
        lines = [f"left out {path}: {reason}" for path, reason in prepared.refused]
        lines += [
            f"left out class {entry.name!r}: {entry.pictures} pictures are too few"
            for entry in prepared.classes
            if entry.left_out
        ]
        empty = [name for name in manifest.classes if name not in used and (data / name).is_dir()]
        lines += [f"no picture that can be used in {data / name}" for name in empty]
        for line in lines:
            if line not in self._warned:
                log.warning("%s", line)
        self._warned = set(lines)

    def _keep(self, build: events.Build, prepared: Prepared) -> events.Built:
        """Put a submission on the disk; the one that is there stands if it says the same."""
        kept = self._kept
        fingerprint = [build.task.hex(), prepared.fingerprint]
        standing = bytes.fromhex(kept.get("submission", ""))
        if kept.get("fingerprint") == fingerprint and standing in kept.blobs and not build.above:
            return events.Built(build.task, standing, receipted=kept.get("received") == standing.hex())
        sequence = kept.next_number("sequence", above=build.above)
        payload = submission_of(prepared, task=build.task, manifest=build.manifest, sequence=sequence)
        digest = kept.blobs.put(payload)
        report = {
            "classes": [asdict(entry) for entry in prepared.classes],
            "refused": [[str(path), reason] for path, reason in prepared.refused],
            "bytes": len(payload),
        }
        kept.set(submission=digest.hex(), fingerprint=fingerprint, report=report)
        prototypes, pictures = len(prepared.counts), sum(entry.pictures for entry in prepared.classes)
        log.info("%d prototypes of %d pictures, %d bytes", prototypes, pictures, len(payload))
        return events.Built(build.task, digest)

    def _install(self, install: events.Install) -> None:
        if install.task != self.focus:
            return
        digest = install.head.head.digest
        try:
            outcome = events.Installed(digest, self._evaluate(install))
        except StateError:
            raise
        except ProtofleetError as error:
            reason = f"head {install.head.version} refused, the old one stays: {error}"
            outcome = events.Installed(digest, None, reason=reason)
        self._emit(outcome)

    def _evaluate(self, install: events.Install) -> bytes:
        """Check a head, evaluate it, and only then take it into use; returns the evaluation's digest."""
        kept, reference = self._kept, install.head
        backbone = self._open_backbone(install.manifest)
        head = open_head(
            kept.blobs.read(reference.head.digest), backbones=[backbone], classes=install.manifest.classes
        )
        evaluation = evaluate_head(
            head,
            task=install.task,
            manifest=install.manifest,
            version=reference.version,
            local=self._settings.local,
            backbone=backbone,
            cache=self._cache,
        )
        report = kept.blobs.put(encode(evaluation))
        right, total = sum(evaluation.right), sum(evaluation.right) + sum(evaluation.wrong)
        installed = {
            "head": reference.head.digest.hex(),
            "version": reference.version,
            "backbone": backbone.sha256,
        }
        kept.set(installed={**installed, "right": right, "total": total})
        log.info("head %d in use: %d of %d held-out pictures right", reference.version, right, total)
        return report
