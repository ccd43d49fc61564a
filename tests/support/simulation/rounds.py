"""A fleet with rounds in simulated time, whose aggregator does not wait for the device."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from aggregator.intake.reassembly import Complete
from edge_client.agent import events
from protocol.mqtt import events as mqtt
from protocol.wire.codec import digest_of
from protocol.wire.messages import (
    Frame,
    HeadManifest,
    HeadRef,
    Program,
    Reason,
    Receipt,
    RoundManifest,
    TaskManifest,
)
from protocol.wire.transfer import frames_of
from tests.support.simulation.fleet import World, reference

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

    def receive(self, complete: Complete) -> Receipt:
        kind, *numbers = complete.payload.split()
        number, sequence = map(int, numbers)
        if kind == b"submission":
            reason = self.verdict(number, sequence)
            if reason is not None:
                newest = self.counts.get(number, 0)
                return Receipt(digest=complete.digest, status="refused", reason=reason, sequence=newest)
            self.counts[number] = sequence
            self.counted.append(number)
        return super().receive(complete)

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
