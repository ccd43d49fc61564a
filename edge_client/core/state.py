"""The state of a device that `state_machine.step` takes from one event to the next, and what follows from it."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from edge_client.core.frame_size import FrameSize
from protocol.wire.canary_rank import canary_rank
from protocol.wire.messages import (
    MAX_CHUNK_BYTES,
    BlobRef,
    HeadManifest,
    HeadRef,
    RoundManifest,
    TaskManifest,
)
from protocol.wire.transfer import Ranges

Kind = Literal["submission", "evaluation"]

Job = Literal["build", "install"]
"""The jobs of child processes."""

Work = Literal["download"] | Job
"""Work that may lack space on the disk."""

MAX_DAMAGED = 3
"""Transfers with a wrong digest, or other refusals that may pass, after which a device delays or reports them."""

SLOW_LINK = (
    "the network is slow or unstable, or the broker drops large packets: what is sent does not arrive; transfers "
    "continue with smaller frames"
)


EXPIRED = (
    "expired: {}; this device keeps its head and builds nothing new: the aggregator has not run for a month, the "
    "broker withholds newer manifests, or one of the two clocks is wrong"
)


class Mode(enum.Enum):
    """When the program exits."""

    SERVICE = "service"
    ONCE = "once"
    DRY_RUN = "dry-run"


@dataclass(frozen=True)
class UploadItem:
    """An item in the outbox that is to be uploaded, or was `received` by the aggregator.

    `about` is a submission's fingerprint or round number, or the key of an evaluation's head in hex.
    """

    digest: bytes
    size_bytes: int
    kind: Kind
    task: bytes
    about: str = ""
    received: bool = False

    @property
    def head(self) -> bytes | None:
        """Return the key of an evaluation's head; None for a submission."""
        return bytes.fromhex(self.about) if self.kind == "evaluation" else None


@dataclass(frozen=True)
class Upload:
    """A transfer to the aggregator.

    Args:
        missing: the ranges that the aggregator reported missing last.
        ranges: the ranges still to be sent before the next query.
        sent: everything missing and the query after it were sent.
        attempts: queries since the last new answer.
        refusals: times that the aggregator refused it.
        problem: what prevents it; empty if nothing does.
        due_s: time of the next query; None while frames are with the MQTT session.
    """

    item: UploadItem
    missing: Ranges = ()
    ranges: Ranges = ()
    sent: bool = False
    attempts: int = 0
    refusals: int = 0
    problem: str = ""
    due_s: float | None = 0.0

    @property
    def digest(self) -> bytes:
        """Identifies the transfer."""
        return self.item.digest


@dataclass(frozen=True)
class Download:
    """A transfer of a blob to this device.

    Args:
        offset: bytes on disk, from the first one on.
        ahead: frames beyond `offset`, sorted by their offset.
        until: offset up to which frames are expected; 0 ignores all frames.
        attempts: requests since the last new frame, the answer to a probe excepted.
        damaged: times in a row that the blob arrived with another digest.
        due_s: time of the next request; infinite until the bytes on disk are known.
    """

    blob: BlobRef
    offset: int
    ahead: tuple[tuple[int, bytes], ...] = field(default=(), repr=False)
    until: int = 0
    attempts: int = 0
    damaged: int = 0
    due_s: float = 0.0


@dataclass(frozen=True)
class MissingSpace:
    """Bytes that something needs on the disk of a folder, and the reason to report."""

    folder: Path
    needed_bytes: int
    reason: str


class StoredState(msgspec.Struct, frozen=True):
    """The half of a State that outlives the program; it is stored after each step that changes it.

    Args:
        task: digest of the manifest of the task that the device follows, which is a blob.
        round: digest of the newest round's manifest, which is a blob.
        evaluated: key of the last head whose evaluation the aggregator has received.
        problems: those of the device by kind, also why the last build has no submission, and why the newest head is not
            in use.
    """

    task: bytes = b""
    round: bytes = b""
    evaluated: bytes = b""
    problems: Mapping[str, str] = {}


PROBLEMS = ("task", "space", "download", "manifest", "build", "head", "upload", "link")
"""The kinds of all problems; of several that the device has, the first is shown."""


@dataclass(frozen=True)
class State:
    """Everything that decisions depend on; `durable` is stored, and the rest starts empty.

    Args:
        stored_task, stored_round: digests of the manifests that an earlier start has stored.
        stored_build_problem: why that start's last build had no submission, until there is another build. It is not
            published: its task may have been another one.
        stored: digests of the blobs on disk.
        has_record: the aggregator has named, since the start, what this device has released under differential privacy:
            it may have lost its own record, and uploads nothing before.
        record_due_s: time at which the device sends its record; infinite once it is answered.
        record_attempts: times that it was sent without an answer.
        packet_bytes: payload of a frame that the broker of the last connection accepts.
        upload_frames: payload of a frame that the link carries to the broker.
        download_frames: payload of a frame that it carries from there.
        task: digest of the current task; None before the first one.
        task_confirmed: the broker has delivered a task, so it is not only the stored one.
        images_changed: images changed since the last build began.
        failures: builds in a row that failed, or lacked images, and are tried again.
        retry_at_s: time of the next one; infinite if there is none.
        no_images: the device had no images at the last build: it uploads nothing, and receives heads.
        received_submission: the task's submission that the aggregator has received.
        round: the newest round of any task, `round_digest` its manifest's.
        joined_round: number of the round of the last build.
        head: the newest head manifest of any task.
        installing: key of the head being installed.
        installed: key of the head in use.
        evaluated: key of the last head whose evaluation the aggregator has received.
        refused: key of the last head that was refused, and why.
        uploads: the uploads, the current one first.
        expired: channels whose newest manifest has expired.
        missing_space: the space that the disk lacks for some work, which does not begin meanwhile.
        task_problem: why the device keeps its previous task; empty if it follows the fleet's.
        build_problem: why the last build since the start had no submission; empty if it had one.
        head_problem: why the newest head is not in use; empty if it is.
    """

    mode: Mode
    device: str = ""
    stored_task: bytes = b""
    stored_round: bytes = b""
    stored_build_problem: str = ""
    stored: frozenset[bytes] = frozenset()
    connected: bool = False
    has_record: bool = False
    record_due_s: float = 0.0
    record_attempts: int = 0
    packet_bytes: int = MAX_CHUNK_BYTES
    upload_frames: FrameSize = field(default_factory=FrameSize)
    download_frames: FrameSize = field(default_factory=FrameSize)
    task: bytes | None = None
    manifest: TaskManifest | None = None
    task_confirmed: bool = False
    building: bool = False
    images_changed: bool = True
    failures: int = 0
    retry_at_s: float = float("inf")
    no_images: bool = False
    received_submission: UploadItem | None = None
    round: RoundManifest | None = None
    round_digest: bytes = b""
    joined_round: int | None = None
    head: HeadManifest | None = None
    installing: bytes | None = None
    installed: bytes | None = None
    evaluated: bytes | None = None
    refused: tuple[bytes, str] | None = None
    download: Download | None = None
    uploads: tuple[Upload, ...] = ()
    expired: frozenset[str] = frozenset()
    missing_space: Mapping[Work, MissingSpace] = field(default_factory=dict)
    task_problem: str = ""
    build_problem: str = ""
    head_problem: str = ""

    @property
    def durable(self) -> StoredState:
        """The half that outlives the program."""
        kept = {"build": self.build_problem or self.stored_build_problem, "head": self.head_problem}
        return StoredState(
            task=self.task or self.stored_task,
            round=self.round_digest or self.stored_round,
            evaluated=self.evaluated or b"",
            problems={**self.problems, **{kind: text for kind, text in kept.items() if text}},
        )

    @property
    def problems(self) -> dict[str, str]:
        """The problems that the device has now, by kind, but for those of builds and heads."""
        stale = ", ".join(sorted(self.stale_manifests))
        problems = {
            "task": self.task_problem,
            "space": self.space_problem,
            "download": self.download_problem,
            "manifest": EXPIRED.format(stale) if stale else "",
            "upload": self.upload_problem,
            "link": self.link_problem,
        }
        return {kind: text for kind, text in problems.items() if text}

    @property
    def space_problem(self) -> str:
        """The reason why some work waits for space on the disk; empty if none does."""
        return next((missing.reason for missing in self.missing_space.values()), "")

    @property
    def chunk_bytes(self) -> int:
        """The payload of a frame of an upload."""
        return min(self.packet_bytes, self.upload_frames.limit_bytes)

    @property
    def link_problem(self) -> str:
        """Why transfers are slow; empty if none is, or frames of full size arrive."""
        is_slow = (self.uploads and self.upload_frames.is_reduced) or (
            self.download is not None and self.download_frames.is_reduced
        )
        return SLOW_LINK if is_slow else ""

    @property
    def upload_problem(self) -> str:
        """The reason why an upload is not received; empty if nothing prevents one."""
        return next((upload.problem for upload in self.uploads if upload.problem), "")

    @property
    def download_problem(self) -> str:
        """The reason why a blob does not arrive; empty if none is damaged again and again."""
        if self.download is None or self.download.damaged < MAX_DAMAGED:
            return ""
        return (
            f"{self.download.blob.name} arrives damaged: its bytes do not match its sha256, because the broker, "
            "another client on it, or the network changes them"
        )

    @property
    def stale_manifests(self) -> frozenset[str]:
        """The expired manifests among those that the device follows: it takes no new work from them."""
        followed = {
            "task": self.task is not None,
            "round": self.current_round is not None,
            "head": self.current_head is not None,
        }
        return frozenset(channel for channel in self.expired if followed[channel])

    @property
    def current_head(self) -> HeadRef | None:
        """The head that this device is to use: the candidate if it is a canary."""
        seen = self.head
        if seen is None or seen.task != self.task:
            return None
        candidate = seen.candidate
        if candidate is not None and canary_rank(self.device, candidate.version) < seen.canary_rank_limit:
            return candidate
        return seen.current

    @property
    def current_round(self) -> RoundManifest | None:
        """The current task's round, also after the last one."""
        if self.round is None or self.manifest is None or self.manifest.program is None:
            return None
        return self.round if self.round.task == self.task else None

    @property
    def are_rounds_over(self) -> bool:
        """True if the current task has rounds and all of them are over."""
        seen = self.current_round
        return seen is not None and seen.number >= seen.rounds

    @property
    def open_round(self) -> RoundManifest | None:
        """The current task's round if its rounds are not over."""
        return None if self.are_rounds_over else self.current_round

    @property
    def submission_blobs(self) -> tuple[BlobRef, ...]:
        """The blobs for building a submission, broadcast ones first.

        They include the program's head, so that a head can be installed as soon as its round is over.
        """
        if self.manifest is None:
            return ()
        program, seen = self.manifest.program, self.current_round
        graphs = (program.init, program.step, program.project, program.head) if program else ()
        if (statistics := self.manifest.statistics) is not None:
            graphs = (*graphs, statistics.map)
        return (*((seen.tensors,) if seen else ()), *self.manifest.backbones, *graphs)

    @property
    def prediction_blobs(self) -> tuple[BlobRef, ...]:
        """The blobs for running the head that is to be used; none if it was refused."""
        head = self.current_head
        if head is None or self.manifest is None or self.mode is Mode.DRY_RUN or self.is_refused(head):
            return ()
        program = self.manifest.program
        graphs = (program.init,) if program else ()
        return (*self.manifest.backbones, *graphs, head.head, *((head.tensors,) if head.tensors else ()))

    @property
    def required_blobs(self) -> tuple[BlobRef, ...]:
        """Every blob that the current task, its round and its newest head need, most urgent first."""
        return (*self.submission_blobs, *self.prediction_blobs)

    @property
    def can_build(self) -> bool:
        """True if every blob for the next submission is stored."""
        if self.manifest is None or (self.manifest.program is not None and self.current_round is None):
            return False
        return all(blob.digest in self.stored for blob in self.submission_blobs)

    def is_refused(self, head: HeadRef) -> bool:
        """Return whether this device has refused a head."""
        return self.refused is not None and self.refused[0] == head_key(head)


def head_key(head: HeadRef) -> bytes:
    """Return what distinguishes a head from the previous one: its file, or in rounds the tensors bound to it."""
    return (head.tensors or head.head).digest
