"""A device and an aggregator on a network that loses, duplicates and reorders messages, in simulated time.

The power may fail between any two of the device's actions; it restarts from its disk.
"""

import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from aggregator.intake.open_uploads import OpenUploads
from aggregator.intake.validation import Refused
from edge_client.core import events
from edge_client.core.state import Kind, State, UploadItem, head_key
from edge_client.core.state_machine import step
from edge_client.core.uploads import WINDOW_FRAMES
from protocol.mqtt import events as mqtt
from protocol.wire.codec import digest_of
from protocol.wire.messages import (
    MAX_CHUNK_BYTES,
    PROTOCOL_VERSION,
    BlobRef,
    Frame,
    HeadManifest,
    HeadRef,
    Program,
    Reason,
    Receipt,
    RoundManifest,
    TaskManifest,
)
from protocol.wire.transfer import Ranges, chunk_bytes, frames_of


def reference(data: bytes, name: str) -> BlobRef:
    return BlobRef(digest=digest_of(data), size_bytes=len(data), name=name)


def item_of(
    payload: bytes, *, kind: Kind = "submission", task: bytes = b"t" * 32, about: str = ""
) -> UploadItem:
    return UploadItem(digest_of(payload), len(payload), kind, task, about)


@dataclass
class World:
    """Performs the actions of `state_machine.step`, and returns events.

    Args:
        loss: fraction of messages lost; the same fraction is duplicated.
        served: the aggregator's blobs, by digest.
        packets: the broker's packet limit is one of these for each connection; None for no limit.
        chunks: frame sizes of an answer.
        full_until_s: time until which the aggregator has no space.
        crashes: numbers of actions from one power failure to the next.
        greets: what the broker delivers after every connect.
        pending: events that follow before time passes.
        disk: the device's blobs and unfinished downloads.
        box: the device's outbox: of each kind, the pending item and the one received last.
    """

    state: State
    random: random.Random
    loss: float
    submission: bytes = b"submission"
    evaluation: bytes = b"evaluation"
    served: dict[bytes, bytes] = field(default_factory=dict)
    packets: Sequence[int | None] = (None,)
    chunks: Sequence[int] = (MAX_CHUNK_BYTES,)
    full_until_s: float = 0.0
    crashes: list[int] = field(default_factory=list)
    greets: list[events.Event] = field(default_factory=list)
    now_s: float = 0.0
    exit: events.Exit | None = None
    disk: dict[bytes, bytes] = field(default_factory=dict)
    box: dict[tuple[Kind, bool], UploadItem] = field(default_factory=dict)
    in_use: bytes | None = None
    evaluated: bytes | None = None
    pending: list[events.Event] = field(default_factory=list)
    payloads: dict[bytes, bytes] = field(default_factory=dict)
    taken: list[bytes] = field(default_factory=list)
    done: list[events.Action] = field(default_factory=list)
    packet_bytes: int | None = None

    @functools.cached_property
    def uploads(self) -> OpenUploads:
        in_memory = Path("/dev/null")
        return OpenUploads(
            folder=in_memory,
            max_bytes=10**6,
            holds=lambda _, digest: digest in self.taken,
            room=lambda: math.inf,
        )

    def arrives(self) -> bool:
        return self.random.random() >= self.loss

    def copies(self) -> int:
        """Return how often the network delivers the next message."""
        return self.arrives() + (not self.arrives())

    def run(self, *, steps: int = 40_000) -> None:
        """Run until the program exits, one second per step if nothing else happens."""
        for _ in range(steps):
            if self.pending:
                self.take(self.pending.pop(0))
            else:
                self.now_s += 1.0
                self.tick()
                self.take(events.Ticked())
            if self.exit is not None:
                return

    def tick(self) -> None:
        """Hook: do what happens beside the device as time passes."""

    def take(self, event: events.Event) -> None:
        """Handle an event, and perform its actions until the power fails."""
        before = self.state
        self.state, actions = step(self.state, event, now_s=self.now_s)
        if self.state.task != before.task:
            self.pending.insert(0, self.outbox_seen())
        for action in actions:
            self.perform(action)
            if self.crashes:
                self.crashes[0] -= 1
                if self.crashes[0] <= 0:
                    self.crashes.pop(0)
                    self.restart()
                    return

    def connect(self) -> list[events.Event]:
        """Return what the device sees when it connects."""
        self.packet_bytes = self.random.choice(self.packets)
        return [mqtt.Connected(self.packet_bytes), *self.greets]

    def cut(self) -> None:
        """Lose the connection and the messages on it, and connect again."""
        own = (
            events.AggregatorStarted | events.OutboxSeen | events.DownloadOpened | events.DownloadFinished
            | events.SubmissionBuilt | events.HeadInstalled
        )  # fmt: skip
        self.pending = [event for event in self.pending if isinstance(event, own)]
        self.pending += [mqtt.Disconnected("lost", 1.0), *self.connect()]

    def restart(self) -> None:
        """Kill the device program and start it from its disk."""
        stored = {digest for digest, data in self.disk.items() if digest_of(data) == digest}
        reported = {self.evaluated, *(item.head for item in self.box.values())}
        self.state = State(
            mode=self.state.mode,
            stored=frozenset(stored),
            installed=self.in_use if self.in_use in reported else None,
            evaluated=self.evaluated,
        )
        recalled = [
            events.TaskSeen(event.digest, event.manifest, recalled=True)
            for event in self.greets
            if isinstance(event, events.TaskSeen)
        ]
        # A program that has just started knows of no start of the aggregator.
        self.pending = [*recalled, *self.connect(), events.AggregatorStarted()]

    def restart_aggregator(self) -> None:
        self.__dict__.pop("uploads", None)
        self.pending.append(events.AggregatorStarted())

    def perform(self, action: events.Action) -> None:  # noqa: C901 - one case per action
        self.done.append(action)
        match action:
            case events.OpenDownload(blob=blob):
                self.open_download(blob)
            case events.RequestBlob(digest=digest, offset=offset, length=length):
                self.answer(digest, ((offset, offset + length),))
            case events.AppendBlob():
                self.append(action)
            case events.BuildSubmission():
                self.build(action)
            case events.InstallHead():
                self.install(action)
            case events.SendFrames(item=item, ranges=ranges):
                self.upload(item, ranges)
            case events.SendRecord():
                if self.arrives():
                    self.pending.extend([events.RecordAdopted(is_complete=True)] * self.copies())
            case events.StoreReceipt(item=item):
                self.keep_receipt(item)
            case events.Exit() as end:
                self.exit = end

    # The device's disk.

    def keep(self, kind: Kind, payload: bytes, *, task: bytes = b"t" * 32, about: str = "") -> UploadItem:
        item = item_of(payload, kind=kind, task=task, about=about)
        self.payloads[item.digest] = payload
        self.box[kind, False] = item
        return item

    def keep_receipt(self, item: UploadItem) -> None:
        waiting = self.box.get((item.kind, False))
        if waiting is None or waiting.digest != item.digest:
            return
        del self.box[item.kind, False]
        if item.kind == "submission":
            self.box[item.kind, True] = replace(item, received=True)
        elif item.head == self.in_use:
            self.evaluated = item.head

    def newest_submission(self) -> UploadItem | None:
        return self.box.get(("submission", False), self.box.get(("submission", True)))

    def outbox_seen(self) -> events.OutboxSeen:
        return events.OutboxSeen(tuple(self.box.values()))

    def open_download(self, blob: BlobRef) -> None:
        """Resume at the bytes on disk, before anything else happens."""
        offset = len(self.disk.get(blob.digest, b""))
        if offset >= blob.size_bytes:
            self.pending.append(events.DownloadFinished(blob.digest, valid=True))
        else:
            self.pending.insert(0, events.DownloadOpened(blob.digest, offset))

    def append(self, append: events.AppendBlob) -> None:
        """Write the next bytes of a blob; one that is damaged is deleted."""
        digest = append.blob.digest
        self.disk[digest] = self.disk.get(digest, b"") + append.data
        if append.done == append.blob.size_bytes:
            good = digest_of(self.disk[digest]) == digest
            if not good:
                del self.disk[digest]
            self.pending.append(events.DownloadFinished(digest, valid=good))

    def build(self, build: events.BuildSubmission) -> None:
        """Build a submission, or find it built."""
        newest = self.newest_submission()
        if newest is None or newest.digest != digest_of(self.submission):
            newest = self.keep("submission", self.submission, task=build.task)
        self.pending.append(events.SubmissionBuilt(build.task, newest))

    def install(self, install: events.InstallHead) -> None:
        self.in_use = head_key(install.head)
        report = self.keep("evaluation", self.evaluation, task=install.task, about=self.in_use.hex())
        self.pending.append(events.HeadInstalled(self.in_use, report))

    # The network, and the aggregator.

    def answer(self, digest: bytes, ranges: Ranges) -> None:
        """Deliver a request, and the frames that answer it."""
        if not self.arrives():
            return
        if digest not in self.served:
            refusal = Receipt(digest=digest, status="refused", reason="unknown_blob")
            self.pending.extend([refusal] if self.arrives() else [])
            return
        size = self.random.choice(self.chunks)
        frames = frames_of(self.served[digest], digest=digest, ranges=ranges, chunk_bytes=size)
        self.pending.extend(frame for frame in frames for _ in range(self.copies()))

    def upload(self, item: UploadItem, ranges: Ranges) -> None:
        """Deliver frames, and the receipts that answer them."""
        assert len(ranges) <= WINDOW_FRAMES
        if item.digest not in {kept.digest for kept in self.box.values()}:
            self.pending.append(self.outbox_seen())
            return
        for start, stop in ranges:
            data = self.payloads[item.digest][start:stop]
            assert 0 < len(data) <= chunk_bytes(self.packet_bytes), "no larger than the broker takes"
            frame = Frame(
                v=PROTOCOL_VERSION, digest=item.digest, size_bytes=item.size_bytes, offset=start, data=data
            )
            for _ in range(self.copies()):
                answer = self.hear(frame)
                if answer is not None:
                    self.pending.extend([answer] * self.copies())
        self.pending.append(mqtt.Drained())

    def hear(self, frame: Frame) -> Receipt | None:
        if self.now_s < self.full_until_s:
            return Receipt(digest=frame.digest, status="refused", reason="no_space")
        try:
            outcome = self.uploads.take("device", frame)
        except Refused as refused:
            return Receipt(digest=frame.digest, status="refused", reason=refused.reason)
        return self.receive(frame.digest, outcome) if isinstance(outcome, bytes) else outcome

    def receive(self, digest: bytes, payload: bytes) -> Receipt:  # noqa: ARG002 - a fleet's rounds read it
        self.taken.append(digest)
        return Receipt(digest=digest, status="received")


ROUNDS = 4
STALENESS = 1
TASK = b"t" * 32
GRAPHS = {name: f"the {name} graph ".encode() * 9_000 for name in ("init", "step", "project", "head")}
BACKBONE = b"backbone" * 40_000
TENSORS = tuple(bytes([number]) * 150_000 for number in range(ROUNDS + 1))
"""Of each round; the last are the last head's alone."""

MANIFEST = TaskManifest(
    fleet="default", algorithm="fedpcl", classes=("a", "b"), backbones=(reference(BACKBONE, "backbone"),), alpha=0.99,
    batch_size=5, min_images=2, seed=0,
    program=Program(
        **{name: reference(data, name) for name, data in GRAPHS.items()}, persistent=(), uploaded=(), batch_size=32
    ),
)  # fmt: skip


def round_manifest(number: int) -> RoundManifest:
    tensors = reference(TENSORS[number], f"tensors-{number}")
    return RoundManifest(task=TASK, number=number, rounds=ROUNDS, epochs=1, tensors=tensors)


def head_manifest(number: int) -> HeadManifest:
    """Return the manifest of the head of a round."""
    head = HeadRef(
        version=number + 1,
        head=reference(GRAPHS["head"], "head"),
        devices=1,
        prototypes=1,
        round=number,
        tensors=reference(TENSORS[number + 1], f"tensors-{number + 1}"),
    )
    return HeadManifest(task=TASK, current=head)


@dataclass
class RoundsWorld(World):
    """A fleet whose rounds close in their own time, and a device program with one worker thread.

    Args:
        lasts_s: how long each round is open.
        joins_s: when the device connects first.
        works_s: the longest duration of a job.
        failing: rounds whose submission cannot be built, and whether a later one may succeed.
        counts: sequence of the submission that the aggregator has for a round.
        whole: tensors that arrived as a broadcast without a gap.
    """

    lasts_s: tuple[float, ...] = (60.0,) * ROUNDS
    joins_s: float = 0.0
    works_s: float = 5.0
    failing: Mapping[int, bool] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    number: int = 0
    closes_s: float = 0.0
    seen: int | None = None
    jobs: list[tuple[float, events.BuildSubmission | events.InstallHead]] = field(default_factory=list)
    sequence: int = 0
    whole: set[bytes] = field(default_factory=set)
    counted: list[int] = field(default_factory=list)
    begun: list[tuple[int, int | None]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.closes_s = self.lasts_s[0]
        self.served = {digest_of(data): data for data in (*GRAPHS.values(), BACKBONE)}
        self.served[digest_of(TENSORS[0])] = TENSORS[0]

    # The fleet.

    def tick(self) -> None:
        if self.number < ROUNDS and self.now_s >= self.closes_s:
            self.number += 1
            self.closes_s = self.now_s + self.lasts_s[min(self.number, ROUNDS - 1)]
            for data in TENSORS[max(self.number - 1, 0) : self.number + 1]:
                self.served[digest_of(data)] = data
            if self.number >= 2:
                self.served.pop(digest_of(TENSORS[self.number - 2]), None)
            if self.state.connected:
                self.announce()
        if not self.state.connected and self.now_s >= self.joins_s:
            self.packet_bytes = self.random.choice(self.packets)
            self.pending.append(mqtt.Connected(self.packet_bytes))
            self.pending.append(events.TaskSeen(TASK, MANIFEST))
            self.announce(cast=False)
        if self.jobs and self.now_s >= self.jobs[0][0]:
            self.finish(self.jobs.pop(0)[1])

    def announce(self, *, cast: bool = True) -> None:
        self.pending.append(round_manifest(self.number))
        if cast:
            self.cast(TENSORS[self.number])
        if self.number:
            self.pending.append(head_manifest(self.number - 1))

    def cast(self, data: bytes) -> None:
        digest = digest_of(data)
        sent = list(frames_of(data, digest=digest))
        frames = [frame for frame in sent if self.arrives()]
        frames += [frame for frame in frames if not self.arrives()]
        if not self.arrives():
            self.random.shuffle(frames)
        before = {event.digest for event in self.pending if isinstance(event, Frame)}
        self.pending.extend(frames)
        asked = any(
            isinstance(action, events.RequestBlob) and action.digest == digest for action in self.done
        )
        # A gap in frames sent before, which are not processed yet, is still to be requested.
        if frames[: len(sent)] == sent and not asked and digest not in before:
            self.whole.add(digest)

    def receive(self, digest: bytes, payload: bytes) -> Receipt:
        kind, *numbers = payload.split()
        number, sequence = map(int, numbers)
        if kind == b"submission":
            reason = self.verdict(number, sequence)
            if reason is not None:
                newest = self.counts.get(number, 0)
                return Receipt(digest=digest, status="refused", reason=reason, sequence=newest)
            self.counts[number] = sequence
            self.counted.append(number)
        return super().receive(digest, payload)

    def verdict(self, number: int, sequence: int) -> Reason | None:
        if self.number >= ROUNDS or number < self.number - STALENESS:
            return "late"
        if number > self.number:
            return "unknown_round"
        return "superseded" if sequence < self.counts.get(number, 0) else None

    def restart_aggregator(self) -> None:
        super().restart_aggregator()
        started = self.pending.pop()
        if self.state.connected:
            self.pending.append(events.TaskSeen(TASK, MANIFEST))
            self.announce()
            self.pending.append(started)

    # The device program.

    def take(self, event: events.Event) -> None:
        if isinstance(event, RoundManifest):
            self.seen = event.number
        super().take(event)

    def build(self, build: events.BuildSubmission) -> None:
        assert build.round is not None
        assert all(blob.digest in self.state.stored for blob in self.state.submission_blobs)
        self.begun.append((build.round.number, self.seen))
        self.jobs.append((self.now_s + self.random.uniform(0, self.works_s), build))

    def install(self, install: events.InstallHead) -> None:
        self.jobs.append((self.now_s + self.random.uniform(0, self.works_s), install))

    def finish(self, job: events.BuildSubmission | events.InstallHead) -> None:
        if isinstance(job, events.InstallHead):
            self.evaluation = b"evaluation %d 0" % job.head.version
            super().install(job)
            return
        assert job.round is not None
        number = job.round.number
        if number != self.seen:
            return
        if number in self.failing:
            self.failed.append(number)
            may_pass = self.failing[number]
            self.pending.append(events.SubmissionBuilt(job.task, None, number, "no", may_pass=may_pass))
            return
        newest = self.newest_submission()
        if newest is None or newest.about != str(number) or job.above:
            self.sequence = max(self.sequence, job.above) + 1
            payload = b"submission %d %d".ljust(100_000) % (number, self.sequence)
            newest = self.keep("submission", payload, task=job.task, about=str(number))
        self.pending.append(events.SubmissionBuilt(job.task, newest, number))

    def cut(self) -> None:
        kept = (
            events.OutboxSeen | events.DownloadOpened | events.DownloadFinished | events.SubmissionBuilt
            | events.HeadInstalled
        )  # fmt: skip
        self.whole -= {event.digest for event in self.pending if isinstance(event, Frame)}
        self.pending = [event for event in self.pending if isinstance(event, kept)]
        self.joins_s = self.now_s + self.random.uniform(1, 60)
        self.pending.append(mqtt.Disconnected("lost", 1.0))

    def restart(self) -> None:
        self.cut()
        was = self.state
        super().restart()
        self.pending.clear()
        self.jobs.clear()
        self.seen = None
        if was.task is not None:
            self.pending.append(events.TaskSeen(TASK, MANIFEST, recalled=True))
        if was.round is not None:
            self.pending.append(was.round)
