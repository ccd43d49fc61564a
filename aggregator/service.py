"""The daemon: wires session, store, round logic and training, one event at a time on one thread."""

import contextlib
import logging
import queue
import time
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import groupby
from typing import cast, get_args

import msgspec

from aggregator.coordination import rounds
from aggregator.heads.orchestrator import Learning
from aggregator.heads.releases import Releases
from aggregator.ingest.authentication import Gate
from aggregator.ingest.reassembly import Complete
from aggregator.ingest.receiver import Receiver
from aggregator.ingest.validation import Refused, check_evaluation, check_labels, read_message
from aggregator.messaging.blob_sender import Downlink, read_frames
from aggregator.messaging.manifest_signer import Herald, identity_of
from aggregator.messaging.publisher import Wire
from aggregator.storage.facts import ServedTask
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks.task import Task
from aggregator.training.runner import Finished, Progress
from protocol.errors import ConfigError, MalformedMessage, StateError, VersionMismatch
from protocol.mqtt import session as mqtt
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess
from protocol.wire.codec import FrameView, decode, encode
from protocol.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_MANIFEST_BYTES,
    BlobRequest,
    DeviceInfo,
    Evaluation,
    Frame,
    HeadManifest,
    Message,
    Presence,
    Reason,
    Receipt,
    Submission,
)
from protocol.wire.presence import is_newer
from protocol.wire.topics import FleetChannel, parse_device_topic
from protocol.wire.transfer import chunk_bytes

log = logging.getLogger(__name__)

TICK_S = 0.5

BATCH_EVENTS = 256
"""Events that are handled before what they brought is made durable at once."""

BATCH_BYTES = 16 * 1024**2

Event = mqtt.Event | Progress | Finished


class Aggregator:
    """One fleet's aggregator.

    Args:
        task: what to work on.
        store: the state directory.
        broker: where to connect.
        access: how to be let in there.

    Raises:
        StateError: the state directory cannot be written.
        ConfigError: a certificate or key cannot be used.
    """

    def __init__(
        self,
        task: Task,
        store: Store,
        *,
        broker: mqtt.BrokerAddress,
        access: BrokerAccess = NO_AUTHENTICATION,
    ) -> None:
        self._task = task
        self._store = store
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        before = store.facts.get(ServedTask)
        self._epoch = max(before.epoch + 1 if before is not None else 1, int(time.time()))
        file = task.file
        served = ServedTask(
            *(task.digest, self._epoch, file.fleet, file.algorithm, tuple(file.classes)),
            settings=file.settings,
        )
        store.facts.put(served)
        self._receiver = Receiver(
            store,
            max_bytes=int(task.file.max_submission_mb * 1024**2),
            unfinished_s=task.file.unfinished_h * 3600,
        )
        self._downlink = Downlink()
        self._receipts: list[tuple[str, Receipt]] = []
        self._learning = Learning(task, store, on_event=self._events.put)
        self._releases = Releases(task, store)
        self._told: HeadManifest | None = None
        self._contested: dict[str, bytes] = {}
        self._problems: dict[str, str] = {}
        self._connected = False
        self._cast_is_due = True
        fleet = task.manifest.fleet
        self._gate = Gate(store, fleet=fleet)
        self._herald = Herald(store, key=identity_of(store.folder), fleet=fleet)
        self._wire = Wire(broker, access=access, fleet=fleet, epoch=self._epoch, on_event=self._events.put)

    def run(self) -> None:
        """Serve the fleet until interrupted."""
        self._wire.start()
        try:
            while True:
                self._take(self._next_batch())
        finally:
            self._learning.stop()
            self._wire.stop()
            self._receiver.close()

    def _next_batch(self) -> list[Event]:
        """What has come, up to what is made durable at once; nothing after a while in which nothing came."""
        batch: list[Event] = []
        size_bytes = 0
        with contextlib.suppress(queue.Empty):
            batch.append(self._events.get(timeout=TICK_S))
            while len(batch) < BATCH_EVENTS and size_bytes < BATCH_BYTES:
                batch.append(event := self._events.get_nowait())
                size_bytes += len(event.payload) if isinstance(event, mqtt.Received) else 0
        return batch

    def _take(self, batch: list[Event]) -> None:
        """Handle a batch of events; what they brought is durable before anybody is told so."""
        for is_message, group in groupby(batch, key=lambda event: isinstance(event, mqtt.Received)):
            if is_message:
                self._take_messages(list(group))
            else:
                for event in group:
                    with self._storing():
                        self._handle(event)
        for device, request in self._downlink.burst():
            self._send_blob(device, request)
        if self._receiver.tick():
            self._learning.retry()
        with self._storing():
            self._releases.tick(self._learning.state.head_version)
        if self._releases.manifest != self._told:
            self._tell_head()
        with self._storing():
            self._learning.tick()

    def _take_messages(self, messages: list[Event]) -> None:
        """Store all that came in, or nothing; then answer, and let the broker forget it."""
        try:
            with self._store.transaction():
                for message in messages:
                    self._handle(message)
                self._learning.settle()
            self._receiver.commit()
        except StateError as error:
            self._receiver.stop(error)
            self._learning.go_back()
            self._releases.go_back()
            self._receipts.clear()
            for message in messages:  # once more, now that nothing is taken
                with self._storing():
                    self._handle(message)
        self._contest()
        for device, receipt in self._receipts:
            self._wire.tell_device(device, "ack", receipt)
        self._receipts.clear()
        for message in messages:
            if isinstance(message, mqtt.Received):
                self._wire.acknowledge(message)

    @contextlib.contextmanager
    def _storing(self) -> Iterator[None]:
        """Do something that stores; where it cannot, stop the intake."""
        try:
            yield
        except StateError as error:
            self._receiver.stop(error)

    def _handle(self, event: Event) -> None:
        match event:
            case mqtt.Received(topic=topic, payload=payload):
                self._receive(topic, payload)
            case mqtt.Connected(max_packet_bytes=limit):
                self._wire.chunk_bytes = chunk_bytes(limit)
                fleet, task = self._task.manifest.fleet, self._task.digest.hex()
                log.info("connected to the broker; fleet %r, task %s", fleet, task[:12])
                self._connected = True
                self._announce()
            case mqtt.Disconnected() as end:
                self._connected = False
                self._downlink.forget()
                level = logging.DEBUG if end.repeated else logging.WARNING
                log.log(level, "%s; trying until it is there, next in %.0f s", end.reason, end.retry_s)
            case mqtt.Unsendable(topic=topic, reason=reason, repeated=repeated):
                level = logging.DEBUG if repeated else logging.ERROR
                log.log(level, "the broker will not take what goes to %s: %s", topic, reason)
            case mqtt.Drained():
                self._downlink.drained()
            case Progress(figures=figures):
                self._learning.show_progress(figures)
            case Finished() as finished:
                if self._learning.finish(finished):
                    self._cast_is_due = True
                    self._announce_round()

    def _tell_fleet(self, channel: FleetChannel, message: Message | bytes | None) -> None:
        """Tell the fleet, signed, or clear what was said before; also while nothing can be stored."""
        body = message if isinstance(message, bytes) or message is None else encode(message)
        payload = b"" if body is None else self._herald.sign(channel, body)
        with self._storing():
            self._herald.keep()
        self._wire.tell_fleet(channel, payload)

    def _announce(self) -> None:
        self._tell_fleet("task", self._task.manifest_bytes)
        self._announce_round()
        self._tell_head()
        self._wire.say_online()

    def _tell_head(self) -> None:
        """Tell the fleet which head to use, or clear what an earlier task or a lost state has left on the broker."""
        self._told = self._releases.manifest
        self._tell_fleet("head", self._told)

    def _announce_round(self) -> None:
        """Tell the fleet of the open round, and hand out what it needs once for all; where there is none, clear it."""
        open_round = self._learning.round
        self._tell_fleet("round", open_round)
        if self._cast_is_due and self._connected:
            if open_round is not None:
                with _reading():
                    self._wire.cast(self._store.blobs.read(open_round.tensors.digest))
            self._cast_is_due = False

    def _receive(self, topic: str, payload: bytes) -> None:
        if self._wire.is_own_state(topic):
            if payload:
                self._own_presence_seen(payload)
            return
        if self._wire.is_own_manifest(topic):
            if self._wire.is_other(topic, payload):
                self._contested[topic] = payload
            return
        try:
            where = parse_device_topic(topic)
        except MalformedMessage as error:
            self._count_refusal("?", Refused("malformed", str(error)))
            return
        try:
            if where.channel in {"state", "info"}:
                self._check_known(where.device)
                self._check_room(where.device)
            self._dispatch(where.device, where.channel, payload)
        except VersionMismatch as error:
            self._count_refusal(where.device, Refused("version", str(error)))
        except MalformedMessage as error:
            self._count_refusal(where.device, Refused("malformed", f"{where.channel}: {error}"))
        except Refused as refused:
            self._count_refusal(where.device, refused)

    def _contest(self) -> None:
        """Say again what somebody has written over, or a start before has left there: who comes later must find it."""
        for topic, payload in self._contested.items():
            channel = cast("FleetChannel", topic.rsplit("/", 1)[-1])
            if payload and not self._herald.has_said(channel, payload):
                with self._storing():
                    said = f"a {channel} that is not of this aggregator stood on the broker, where its own belongs"
                    self._count_refusal("?", Refused("signature", said))
            match channel:
                case "task":
                    self._tell_fleet(channel, self._task.manifest_bytes)
                case "round":
                    self._tell_fleet(channel, self._learning.round)
                case _:
                    self._tell_head()
        self._contested.clear()

    def _check_known(self, device: str) -> None:
        allowed = self._task.file.devices
        if allowed is not None and device not in allowed:
            raise Refused("unknown_device", f"{device} is not among the task file's devices")
        self._gate.admit(device)

    def _check_room(self, device: str) -> None:
        if not self._store.devices.has_room_for(device):
            raise Refused(
                "unknown_device", f"{device} is one name too many in a fleet that is open to everybody"
            )

    def _own_presence_seen(self, payload: bytes) -> None:
        """Correct what an old Last Will says of us, and give way to an aggregator that started later."""
        try:
            presence = decode(payload, Presence, max_bytes=1024)
        except MalformedMessage as error:
            self._count_refusal("?", Refused("malformed", f"the aggregator's state: {error}"))
            return
        if is_newer(presence.epoch, own=self._epoch, now_s=time.time()):
            raise ConfigError(
                f"another aggregator has started for fleet {self._task.manifest.fleet!r} on this broker: "
                "a fleet has one; stop one of them, or give each task file a fleet of its own"
            )
        if presence.epoch > self._epoch:
            said = f"an aggregator's presence with the epoch {presence.epoch}, of a time that has not come"
            self._count_refusal("?", Refused("implausible", said))
        if presence.state != "online" or presence.epoch > self._epoch:
            self._wire.say_online()

    def _dispatch(self, device: str, channel: str, payload: bytes) -> None:
        now_s = time.time()
        if not payload and channel in {"state", "info"}:
            return  # an empty retained message is how an operator makes a broker forget a device
        if channel == "up":
            self._take_frame(device, decode(payload, FrameView, max_bytes=MAX_FRAME_BYTES))
        elif channel == "get":
            self._serve_blob(device, decode(payload, BlobRequest, max_bytes=1024))
        elif channel == "info":
            info = decode(payload, DeviceInfo, max_bytes=MAX_MANIFEST_BYTES)
            shown = shown_info(info, self._task.manifest.classes)
            self._store.devices.put_info(device, shown, now_s=now_s)
            if info.problem and self._problems.get(device) != info.problem:
                log.warning("%s cannot take part: %s", device, info.problem)
            self._problems[device] = info.problem
        else:
            presence = decode(payload, Presence, max_bytes=1024)
            self._store.devices.put_presence(device, state=presence.state, epoch=presence.epoch, now_s=now_s)

    def _count_refusal(self, device: str, refused: Refused) -> None:
        first = self._store.refusals.count(
            device, reason=refused.reason, detail=refused.detail[:500], now_s=time.time()
        )
        if first:
            log.warning("refused from %s (%s): %s", device, refused.reason, refused.detail)

    @contextlib.contextmanager
    def _telling(self, device: str, digest: bytes) -> Iterator[None]:
        """Tell a device of what is refused, so that it need not ask again."""
        try:
            self._check_known(device)
            yield
        except Refused as refused:
            receipt = Receipt(
                digest=digest,
                status="refused",
                reason=refused.reason,
                detail=refused.detail[:256],
                sequence=refused.sequence,
            )
            self._receipts.append((device, receipt))
            raise

    def _take_frame(self, device: str, frame: Frame) -> None:
        with self._telling(device, frame.digest):
            self._gate.check(device, frame, may_pin=not self._receiver.is_stopped)
            outcome = self._receiver.take(device, frame)
            if isinstance(outcome, Complete):
                outcome = self._take_message(device, outcome)
        if outcome is not None:
            self._receipts.append((device, outcome))

    def _take_message(self, device: str, complete: Complete) -> Receipt:
        message = read_message(complete.payload)
        if isinstance(message, Submission):
            return self._take_submission(device, message, complete)
        return self._take_evaluation(device, message, complete.digest)

    def _take_submission(self, device: str, submission: Submission, complete: Complete) -> Receipt:
        labels = check_labels(submission, self._task.expectation)
        row = SubmissionRecord(
            device=device,
            entry=rounds.Entry(submission.sequence, complete.digest, time.time(), submission.round),
            size_bytes=len(complete.payload),
            images=submission.images,
            prototypes=len(labels),
            per_class=Counter(labels.tolist()),
        )
        answer = self._learning.take(row, complete.payload)
        self._check_verdict(answer, row.entry.round)
        if submission.privacy is not None:
            self._store.devices.raise_epsilon(device, submission.privacy.total_epsilon)
        return Receipt(digest=answer.digest, status="received")

    def _check_verdict(self, answer: rounds.SubmissionVerdict, number: int) -> None:
        """Refuse what does not count, in words that say what does."""
        if answer.verdict == "superseded":
            sequence = answer.counted_entry.sequence if answer.counted_entry is not None else 0
            raise Refused("superseded", f"a submission with sequence {sequence} stands", sequence=sequence)
        if answer.verdict in {"late", "unknown_round"}:
            state, settings = self._learning.state, self._task.file.settings
            now = f"round {state.head_version} is open"
            if rounds.is_over(state, settings):
                now = f"all {settings.rounds} rounds are over"
            reason: Reason = "late" if answer.verdict == "late" else "unknown_round"
            if reason == "unknown_round":
                self._announce_round()  # somebody else has told the fleet of a round
            raise Refused(reason, f"the submission is for round {number}, but {now}")

    def _take_evaluation(self, device: str, evaluation: Evaluation, digest: bytes) -> Receipt:
        check_evaluation(evaluation, self._task.expectation, newest_head=self._learning.state.head_version)
        self._tell_evaluation(device, evaluation)
        # First what follows from it: what is held is not looked at again when it is sent again.
        self._releases.take(device, evaluation)
        self._store.evaluations.put(device, evaluation, digest=digest, now_s=time.time())
        return Receipt(digest=digest, status="received")

    def _tell_evaluation(self, device: str, evaluation: Evaluation) -> None:
        version, right = evaluation.head_version, sum(evaluation.correct)
        if evaluation.problem:
            log.warning("%s does not use head %d: %s", device, version, evaluation.problem)
            return
        total = right + sum(evaluation.incorrect)
        if not total:
            log.info("%s: head %d in use", device, version)
            return
        log.info("%s: head %d gets %d of %d held-out images right", device, version, right, total)

    def _serve_blob(self, device: str, request: BlobRequest) -> None:
        with self._telling(device, request.digest):
            if request.digest not in self._releases.served:
                raise Refused(
                    "unknown_blob",
                    f"no blob {request.digest.hex()[:12]}: take what task, round and head name",
                )
            self._downlink.ask(device, request)

    def _send_blob(self, device: str, request: BlobRequest) -> None:
        path = self._store.blobs.path(request.digest)
        with _reading():
            for frame in read_frames(path, request, chunk_bytes=self._wire.chunk_bytes):
                self._wire.tell_device(device, "blk", frame)
                self._downlink.sent()


def shown_info(info: DeviceInfo, classes: Collection[str]) -> DeviceInfo:
    """Return what is stored of a device's report: its size is bounded by the task's classes and the known reasons."""
    return msgspec.structs.replace(
        info,
        backbones=(),
        images={name: count for name, count in info.images.items() if name in classes},
        refused_messages={
            name: count for name, count in info.refused_messages.items() if name in get_args(Reason)
        },
    )


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Read a blob; one that the disk has lost is told, and everything else goes on."""
    try:
        yield
    except StateError as error:
        log.error("%s; start again: what can be made again will be", error)
