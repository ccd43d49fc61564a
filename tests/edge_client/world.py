"""A device, an aggregator, and a network between them that loses a share of the messages; time is simulated."""

import random
from dataclasses import dataclass, field

from aggregator.uplink import Complete, Uplink
from edge_client import events
from edge_client.agent import step
from edge_client.life import State, head_key
from protocol.codec import digest_of
from protocol.messages import MAX_CHUNK_BYTES, BlobRef, Receipt
from protocol.transfer import Ranges, frames_of


def reference(data: bytes, name: str) -> BlobRef:
    """How a manifest names a blob."""
    return BlobRef(digest=digest_of(data), size_bytes=len(data), name=name)


@dataclass
class World:
    """What is around `agent.step`, and does what it decides.

    Args:
        state: the device's.
        random: decides what gets lost.
        loss: share of the messages.
        submission: what a build makes.
        evaluation: what an installed head leads to.
        served: the blobs that the aggregator has, by digest.
        pending: what happens next, before any time passes.
    """

    state: State
    random: random.Random
    loss: float
    submission: bytes = b"submission"
    evaluation: bytes = b"evaluation"
    served: dict[bytes, bytes] = field(default_factory=dict)
    now_s: float = 0.0
    exit: events.Exit | None = None
    disk: dict[bytes, bytes] = field(default_factory=dict)
    pending: list[events.Event] = field(default_factory=list)
    payloads: dict[bytes, bytes] = field(default_factory=dict)
    taken: list[bytes] = field(default_factory=list)
    done: list[events.Action] = field(default_factory=list)
    uplink: Uplink = field(default_factory=lambda: Uplink(max_bytes=10**7))

    def arrives(self) -> bool:
        """Whether the network delivers the next message."""
        return self.random.random() >= self.loss

    def run(self, *, steps: int = 40_000) -> None:
        """Live until the program exits, one second a step where nothing else happens."""
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
        """What happens beside the device as time passes."""

    def take(self, event: events.Event) -> None:
        """Let the device take an event, and do what it decides."""
        self.state, actions = step(self.state, event, now_s=self.now_s)
        for action in actions:
            self.perform(action)

    def perform(self, action: events.Action) -> None:
        """Do what the device program and the aggregator would do."""
        self.done.append(action)
        match action:
            case events.OpenDownload(blob=blob):
                self.open_download(blob)
            case events.Request(digest=digest, offset=offset, length=length):
                self.answer(digest, ((offset, offset + length),))
            case events.Append(digest=digest, data=data):
                self.disk[digest] = self.disk.get(digest, b"") + data
            case events.Finish(digest=digest):
                good = digest_of(self.disk[digest]) == digest
                self.pending.append(events.DownloadEnded(digest, good=good))
            case events.Build():
                self.build(action)
            case events.Install():
                self.install(action)
            case events.SendTail(digest=digest):
                size = len(self.payloads[digest])
                self.upload(digest, (((size - 1) // MAX_CHUNK_BYTES * MAX_CHUNK_BYTES, size),))
            case events.SendRanges(digest=digest, ranges=ranges):
                self.upload(digest, ranges)
            case events.Exit() as end:
                self.exit = end

    def open_download(self, blob: BlobRef) -> None:
        """Go on from what is on the disk, before anything else happens."""
        offset = len(self.disk.get(blob.digest, b""))
        if offset >= blob.size_bytes:
            self.pending.append(events.DownloadEnded(blob.digest, good=True))
        else:
            self.pending.insert(0, events.DownloadStarts(blob.digest, offset))

    def answer(self, digest: bytes, ranges: Ranges) -> None:
        """Let a request travel up, and what was asked for down."""
        if not self.arrives():
            return
        if digest not in self.served:
            refusal = Receipt(digest=digest, status="refused", reason="unknown_blob")
            self.pending.extend([events.ReceiptSeen(refusal)] if self.arrives() else [])
            return
        self.pending.extend(
            events.BlockSeen(frame)
            for frame in frames_of(self.served[digest], digest=digest, ranges=ranges)
            if self.arrives()
        )

    def build(self, build: events.Build) -> None:
        """Make a submission."""
        self.pending.append(events.Built(build.task, self.put(self.submission)))

    def install(self, install: events.Install) -> None:
        """Take a head into use."""
        self.pending.append(events.Installed(head_key(install.head), self.put(self.evaluation)))

    def put(self, payload: bytes) -> bytes:
        """Have something to send; returns its digest."""
        digest = digest_of(payload)
        self.payloads[digest] = payload
        return digest

    def upload(self, digest: bytes, ranges: Ranges) -> None:
        """Let frames travel up, and the answers down."""
        for frame in frames_of(self.payloads[digest], digest=digest, ranges=ranges):
            if not self.arrives():
                continue
            outcome = self.uplink.take("device", frame, holds=lambda _, digest: digest in self.taken)
            answer = self.receive(outcome) if isinstance(outcome, Complete) else outcome
            if answer is not None and self.arrives():
                self.pending.append(events.ReceiptSeen(answer))
        self.pending.append(events.Drained())

    def receive(self, complete: Complete) -> Receipt:
        """The aggregator's word on a payload that is whole."""
        self.taken.append(complete.digest)
        return Receipt(digest=complete.digest, status="received")
