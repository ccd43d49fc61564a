"""The messages of devices: presence, reports, uploads and blob requests."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import msgspec

from aggregator.coordination import round_state, rounds
from aggregator.ingest.frame_authentication import FrameAuthenticator
from aggregator.ingest.quotas import Quotas
from aggregator.ingest.reassembly import Complete
from aggregator.ingest.receiver import Receiver
from aggregator.ingest.validation import Expectation, Refused, check_evaluation, count_rows, read_message
from aggregator.messaging.blob_sender import BlobSender
from aggregator.service.coordinator import Coordinator
from aggregator.storage.devices import UNKNOWN_DEVICE
from aggregator.storage.store import Store
from aggregator.storage.stored_values import IntakeTask
from aggregator.storage.submissions import SubmissionRecord
from protocol.errors import MalformedMessage, VersionMismatch
from protocol.log import DeviceEvents
from protocol.rates.token_buckets import TokenBuckets
from protocol.wire.codec import FrameView, decode
from protocol.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_MANIFEST_BYTES,
    BlobRequest,
    DeviceInfo,
    Evaluation,
    Presence,
    Reason,
    Receipt,
    Submission,
    TaskManifest,
)
from protocol.wire.topics import parse_device_topic

log = logging.getLogger(__name__)

RECEIPTS_AT_ONCE = 256
"""Receipts of one kind for a device, beyond which it gets RECEIPTS_PER_S: a device asks again for one that is lost."""

RECEIPTS_PER_S = 4.0

MAX_REFUSED = 1_000_000
"""Refused messages of a reason that a device can report: a device can claim any number, and metrics add them."""


@dataclass(kw_only=True)
class DeviceMessages:
    """Handles what devices publish, each message by its topic."""

    task: IntakeTask
    expectation: Expectation
    store: Store
    receiver: Receiver
    coordinator: Coordinator
    blob_sender: BlobSender
    receipts: list[tuple[str, Receipt]] = field(default_factory=list, init=False)
    """Device and receipt, to be published once the messages are durable."""
    _answered: TokenBuckets[tuple[str, Reason | None]] = field(init=False)
    """Answers by device and reason of refusal: a flood of refused messages does not delay its other receipts."""
    _refused: dict[str, tuple[bytes, Reason, str]] = field(default_factory=dict, init=False)
    """Digest of each device's last refused submission, and why: a query for it causes no second upload."""
    _reported: dict[str, tuple[str, str]] = field(default_factory=dict, init=False)
    _is_deferring: bool = field(default=False, init=False)
    _deferred: list[Callable[[], None]] = field(default_factory=list, init=False)
    _complete: set[tuple[str, bytes]] = field(default_factory=set, init=False)
    """Uploads whose verdict is deferred."""

    def __post_init__(self) -> None:
        self._log = DeviceEvents(log)
        self._answered = TokenBuckets(capacity=RECEIPTS_AT_ONCE, per_s=RECEIPTS_PER_S)
        self._authenticator = FrameAuthenticator(self.store, fleet=self.task.fleet)
        self._quotas = Quotas(self.store, self.task.limits, task=self.task.digest)

    def handle(self, topic: str, payload: bytes) -> None:
        """Handle a message; one that is refused is counted. Raises StateError if it cannot be stored."""
        with self._counting(UNKNOWN_DEVICE):
            where = parse_device_topic(topic)
            device, channel = where.device, where.channel
            if not payload and channel in {"up", "get"}:
                return  # `edge-client doctor`, which finds out what the broker allows
            with self._counting(device, f"{channel}: "):
                match channel:
                    case "up":
                        self._take_frame(device, decode(payload, FrameView, max_bytes=MAX_FRAME_BYTES))
                    case "get":
                        self._take_request(device, decode(payload, BlobRequest, max_bytes=1024))
                    case _:
                        self._store(device, channel, partial(self._take_report, device, channel, payload))

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Let the body's messages store nothing in the database, which is left to `store_deferred`.

        Messages of devices without a key are handled then as a whole. Submissions are already in the batch of blobs.
        """
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False

    def has_deferred(self) -> bool:
        """Return True if something is to be stored."""
        return bool(self._deferred)

    def store_deferred(self) -> None:
        """Store what was deferred, in a transaction of the caller; raises StateError."""
        for store in self._deferred:
            store()
        self._deferred.clear()
        self._complete.clear()

    def clear(self) -> None:
        """Forget the receipts, and what was deferred, of messages that could not be stored."""
        self.receipts.clear()
        self._deferred.clear()
        self._complete.clear()

    def _store(self, device: str, channel: str, store: Callable[[], None]) -> None:
        """Call a function that may refuse, now or with what is deferred."""

        def counted() -> None:
            with self._counting(device, f"{channel}: "):
                store()

        if self._is_deferring:
            self._deferred.append(counted)
        else:
            counted()

    @contextlib.contextmanager
    def _counting(self, device: str, prefix: str = "") -> Iterator[None]:
        """Count what is refused."""
        try:
            yield
        except VersionMismatch as error:
            refused = Refused("version", str(error))
        except MalformedMessage as error:
            refused = Refused("malformed", f"{prefix}{error}")
        except Refused as error:
            refused = error
        else:
            return
        count = partial(self.receiver.count_refusal, device, refused)
        if self._is_deferring:
            self._deferred.append(count)
        else:
            count()

    def _take_report(self, device: str, channel: str, payload: bytes) -> None:
        self._check_known(device)
        if not self.store.devices.has_room_for(device):
            raise Refused("unknown_device", f"{device} is one device too many for an open fleet")
        if not payload:  # an empty retained message is how an operator makes a broker forget a device
            return
        now_s = time.time()
        if channel == "state":
            presence = decode(payload, Presence, max_bytes=1024)
            self._authenticator.check_presence(device, presence)
            self.store.devices.put_presence(device, presence.state, now_s=now_s)
            return
        info = decode(payload, DeviceInfo, max_bytes=MAX_MANIFEST_BYTES)
        self.store.devices.put_info(device, bounded_info(info, self.expectation.manifest), now_s=now_s)
        before, self._reported[device] = self._reported.get(device, ("", "")), (info.problem, info.warning)
        if info.problem and info.problem != before[0]:
            self._log.event(logging.WARNING, "device cannot take part", device=device, reason=info.problem)
        if info.warning and info.warning != before[1]:
            self._log.event(logging.WARNING, "device warns its operator", device=device, warning=info.warning)

    def _check_known(self, device: str) -> None:
        allowed = self.task.devices
        if allowed is not None and device not in allowed:
            raise Refused("unknown_device", f"{device} is not among the task file's devices")
        if self._authenticator.check_name(device) is None:
            self._quotas.check_new_device(device)

    @contextlib.contextmanager
    def _answering(self, device: str, digest: bytes) -> Iterator[None]:
        """Send a receipt for what is refused, so that the device does not ask again."""
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
            self._answer(device, receipt)
            raise

    def _answer(self, device: str, receipt: Receipt) -> None:
        """Send a receipt, unless the device has caused too many."""
        # A client can make up any number of names.
        is_unknown = receipt.reason == "unknown_device" or (
            receipt.reason == "quota" and self.store.keys.get(device) is None
        )
        bucket = (UNKNOWN_DEVICE if is_unknown else device, receipt.reason)
        if self._answered.take(bucket, now_s=time.monotonic()):
            self.receipts.append((device, receipt))

    def _take_request(self, device: str, request: BlobRequest) -> None:
        with self._answering(device, request.digest):
            if request.digest not in self.coordinator.served:
                raise Refused(
                    "unknown_blob",
                    f"no blob {request.digest.hex()[:12]}: request what task, round and head name",
                )
            if wait_s := self.blob_sender.request(device, request):
                limit = f"downloaded {self.task.limits.downloads_per_hour} times (limits.downloads_per_hour)"
                raise Refused("rate_limited", f"{limit}: request it again in {wait_s:.0f} s")

    def _take_frame(self, device: str, frame: FrameView) -> None:
        if self._is_deferring and self.store.keys.get(device) is None:
            self._store(device, "up", partial(self._take_frame, device, frame))
            return
        with self._answering(device, frame.digest):
            self._authenticator.check(device, frame, may_pin=not self.receiver.is_stopped)
            if (refused := self._refused.get(device)) is not None and refused[0] == frame.digest:
                if frame.offset + len(frame.data) < frame.size_bytes:
                    return
                raise Refused(*refused[1:])
            if not self.receiver.is_stopped and frame.offset + len(frame.data) >= frame.size_bytes:
                self._quotas.check_transfer(device, frame.digest, frame.size_bytes)
            if (device, frame.digest) in self._complete:
                return
            outcome = self.receiver.take(device, frame)
            if isinstance(outcome, Complete):
                self._take_message(device, outcome)
            elif outcome is not None:
                self._answer(device, outcome)

    def _take_message(self, device: str, upload: Complete) -> None:
        """Read and validate an upload, then judge, store and answer it; raises Refused."""
        with self._remembering(device, upload.digest):
            message = read_message(upload.payload)
            if isinstance(message, Submission):
                record = self._record(device, message, upload)
                take = partial(self._take_submission, message, record, upload.payload)
            else:
                take = partial(self._take_evaluation, device, message, upload.digest)
        if self._is_deferring:
            self._complete.add((device, upload.digest))
            if isinstance(message, Submission):
                self.coordinator.prepare(upload.digest, upload.payload)

        def judge() -> None:
            is_submission = isinstance(message, Submission)
            remembering = self._remembering(device, upload.digest) if is_submission else nullcontext()
            with self._answering(device, upload.digest), remembering:
                self._answer(device, take())

        self._store(device, "up", judge)

    @contextlib.contextmanager
    def _remembering(self, device: str, digest: bytes) -> Iterator[None]:
        """Remember a refused upload, so that it is not uploaded again, unless it may be accepted later."""
        try:
            yield
        except Refused as refused:
            if refused.reason not in {"superseded", "unknown_round", "quota"}:
                self._refused[device] = (digest, refused.reason, refused.detail)
            raise

    def _record(self, device: str, submission: Submission, upload: Complete) -> SubmissionRecord:
        """Return what is stored of a submission, once it is valid."""
        per_class = count_rows(submission, self.expectation)
        return SubmissionRecord(
            device=device,
            entry=round_state.Entry(
                submission.sequence, upload.digest, self.store.clock.now_s(), submission.round
            ),
            size_bytes=len(upload.payload),
            images=submission.images,
            prototypes=sum(per_class.values()),
            per_class=per_class,
        )

    def _take_submission(self, submission: Submission, record: SubmissionRecord, payload: bytes) -> Receipt:
        device = record.device
        self._quotas.check_submission(device, record.size_bytes)
        verdict = self.coordinator.submit(record, payload)
        self._check_verdict(verdict, submission.round)
        self._quotas.count_upload()
        if submission.privacy is not None:
            self.store.devices.raise_epsilon(device, submission.privacy.total_epsilon)
        return Receipt(digest=record.entry.digest, status="received")

    def _check_verdict(self, verdict: rounds.SubmissionVerdict, number: int) -> None:
        """Raise Refused for a submission that does not count, with what counts instead."""
        match verdict.verdict:
            case "superseded":
                sequence = verdict.counted_entry.sequence if verdict.counted_entry is not None else 0
                detail = f"the submission with sequence {sequence} counts"
                raise Refused("superseded", detail, sequence=sequence)
            case "late" | "unknown_round" as reason:
                newest, settings = self.coordinator.newest_head, self.task.settings
                now = f"round {newest} is open"
                if round_state.is_over(newest, settings):
                    now = f"all {settings.rounds} rounds are over"
                if reason == "unknown_round":
                    self.coordinator.repeat_round()  # the device has seen a round that is not this aggregator's
                raise Refused(reason, f"the submission is for round {number}, but {now}")

    def _take_evaluation(self, device: str, evaluation: Evaluation, digest: bytes) -> Receipt:
        check_evaluation(evaluation, self.expectation, newest_head=self.coordinator.newest_head)
        if evaluation.head_version not in self.coordinator.retained_heads:
            return Receipt(digest=digest, status="received")  # nothing depends on it any more
        version, correct = evaluation.head_version, sum(evaluation.correct)
        images = correct + sum(evaluation.incorrect)
        if evaluation.problem:
            self._log.event(
                logging.WARNING, "head not used", device=device, head=version, reason=evaluation.problem
            )
        elif images:
            accuracy = f"{correct / images:.1%} ({correct}/{images})"
            self._log.event(logging.INFO, "head evaluated", device=device, head=version, accuracy=accuracy)
        else:
            self._log.event(logging.INFO, "head in use", device=device, head=version)
        # What follows from it first: once stored, the same evaluation is not looked at again.
        self.coordinator.evaluate(device, evaluation)
        self.store.evaluations.put(device, evaluation, digest=digest, now_s=time.time())
        return Receipt(digest=digest, status="received")


def bounded_info(info: DeviceInfo, task: TaskManifest) -> DeviceInfo:
    """Return what is stored of a device's report: only the task's classes and backbones, known reasons, bounded."""
    return msgspec.structs.replace(
        info,
        backbones=tuple(blob.digest for blob in task.backbones if blob.digest in info.backbones),
        images={name: count for name, count in info.images.items() if name in task.classes},
        refused_messages={
            name: min(count, MAX_REFUSED)
            for name, count in info.refused_messages.items()
            if name in get_args(Reason)
        },
    )
