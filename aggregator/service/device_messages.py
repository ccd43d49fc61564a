"""The messages of devices: presence, reports, uploads and blob requests."""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator
from typing import get_args

import msgspec

from aggregator.coordination import rounds
from aggregator.heads.head_training import HeadTraining
from aggregator.heads.releases import Releases
from aggregator.ingest.frame_authentication import FrameAuthenticator
from aggregator.ingest.reassembly import Complete
from aggregator.ingest.receiver import Receiver
from aggregator.ingest.refusals import count_refusal
from aggregator.ingest.validation import Refused, check_evaluation, check_labels, read_message
from aggregator.messaging.blob_sender import BlobSender
from aggregator.service.announcements import Announcements
from aggregator.storage.devices import UNKNOWN_DEVICE
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks.task import Task
from protocol.errors import MalformedMessage, VersionMismatch
from protocol.log import event
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
)
from protocol.wire.topics import parse_device_topic

log = logging.getLogger(__name__)


class DeviceMessages:
    """Handles what devices publish, each message by its topic.

    Args:
        task: the task to serve.
        store: the state directory.
        receiver: takes frames.
        training: takes submissions.
        releases: takes evaluations.
        blob_sender: takes blob requests.
        announcements: publish the round again for a device that has seen another one.

    Attributes:
        receipts: device and receipt, to be published once the messages are durable.
    """

    def __init__(
        self,
        task: Task,
        store: Store,
        *,
        receiver: Receiver,
        training: HeadTraining,
        releases: Releases,
        blob_sender: BlobSender,
        announcements: Announcements,
    ) -> None:
        self.receipts: list[tuple[str, Receipt]] = []
        self._task = task
        self._store = store
        self._receiver = receiver
        self._training = training
        self._releases = releases
        self._blob_sender = blob_sender
        self._announcements = announcements
        self._authenticator = FrameAuthenticator(store, fleet=task.file.fleet)
        self._problems: dict[str, str] = {}

    def handle(self, topic: str, payload: bytes) -> None:
        """Handle a message; one that is refused is counted.

        Raises:
            StateError: it cannot be stored.
        """
        try:
            where = parse_device_topic(topic)
        except MalformedMessage as error:
            count_refusal(self._store, UNKNOWN_DEVICE, Refused("malformed", str(error)))
            return
        device = where.device
        try:
            match where.channel:
                case "up":
                    self._take_frame(device, decode(payload, FrameView, max_bytes=MAX_FRAME_BYTES))
                case "get":
                    self._take_request(device, decode(payload, BlobRequest, max_bytes=1024))
                case channel:
                    self._check_known(device)
                    self._check_room(device)
                    if payload:  # an empty retained message is how an operator makes a broker forget a device
                        self._take_report(device, channel, payload)
        except VersionMismatch as error:
            count_refusal(self._store, device, Refused("version", str(error)))
        except MalformedMessage as error:
            count_refusal(self._store, device, Refused("malformed", f"{where.channel}: {error}"))
        except Refused as refused:
            count_refusal(self._store, device, refused)

    def _take_report(self, device: str, channel: str, payload: bytes) -> None:
        now_s = time.time()
        if channel == "state":
            presence = decode(payload, Presence, max_bytes=1024)
            self._store.devices.put_presence(device, state=presence.state, epoch=presence.epoch, now_s=now_s)
            return
        info = decode(payload, DeviceInfo, max_bytes=MAX_MANIFEST_BYTES)
        self._store.devices.put_info(device, bounded_info(info, self._task.manifest.classes), now_s=now_s)
        if info.problem and self._problems.get(device) != info.problem:
            event(log, logging.WARNING, "device cannot take part", device=device, reason=info.problem)
        self._problems[device] = info.problem

    def _check_known(self, device: str) -> None:
        allowed = self._task.file.devices
        if allowed is not None and device not in allowed:
            raise Refused("unknown_device", f"{device} is not among the task file's devices")
        self._authenticator.check_name(device)

    def _check_room(self, device: str) -> None:
        if not self._store.devices.has_room_for(device):
            raise Refused("unknown_device", f"{device} is one device too many for an open fleet")

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
            self.receipts.append((device, receipt))
            raise

    def _take_request(self, device: str, request: BlobRequest) -> None:
        with self._answering(device, request.digest):
            if request.digest not in self._releases.served:
                raise Refused(
                    "unknown_blob",
                    f"no blob {request.digest.hex()[:12]}: request what task, round and head name",
                )
            self._blob_sender.request(device, request)

    def _take_frame(self, device: str, frame: FrameView) -> None:
        with self._answering(device, frame.digest):
            self._authenticator.check(device, frame, may_pin=not self._receiver.is_stopped)
            outcome = self._receiver.take(device, frame)
            if isinstance(outcome, Complete):
                outcome = self._take_upload(device, outcome)
        if outcome is not None:
            self.receipts.append((device, outcome))

    def _take_upload(self, device: str, upload: Complete) -> Receipt:
        message = read_message(upload.payload)
        if isinstance(message, Submission):
            return self._take_submission(device, message, upload)
        return self._take_evaluation(device, message, upload.digest)

    def _take_submission(self, device: str, submission: Submission, upload: Complete) -> Receipt:
        labels = check_labels(submission, self._task.expectation)
        record = SubmissionRecord(
            device=device,
            entry=rounds.Entry(submission.sequence, upload.digest, time.time(), submission.round),
            size_bytes=len(upload.payload),
            images=submission.images,
            prototypes=len(labels),
            per_class=Counter(labels.tolist()),
        )
        verdict = self._training.submit(record, upload.payload)
        self._check_verdict(verdict, submission.round)
        if submission.privacy is not None:
            self._store.devices.raise_epsilon(device, submission.privacy.total_epsilon)
        return Receipt(digest=verdict.digest, status="received")

    def _check_verdict(self, verdict: rounds.SubmissionVerdict, number: int) -> None:
        """Raise Refused for a submission that does not count, with what counts instead."""
        if verdict.verdict == "superseded":
            sequence = verdict.counted_entry.sequence if verdict.counted_entry is not None else 0
            raise Refused("superseded", f"the submission with sequence {sequence} counts", sequence=sequence)
        if verdict.verdict in {"late", "unknown_round"}:
            state, settings = self._training.state, self._task.file.settings
            now = f"round {state.head_version} is open"
            if rounds.is_over(state, settings):
                now = f"all {settings.rounds} rounds are over"
            reason: Reason = "late" if verdict.verdict == "late" else "unknown_round"
            if reason == "unknown_round":
                self._announcements.open_round()  # the device has seen a round that is not this aggregator's
            raise Refused(reason, f"the submission is for round {number}, but {now}")

    def _take_evaluation(self, device: str, evaluation: Evaluation, digest: bytes) -> Receipt:
        check_evaluation(evaluation, self._task.expectation, newest_head=self._training.state.head_version)
        version, correct = evaluation.head_version, sum(evaluation.correct)
        images = correct + sum(evaluation.incorrect)
        if evaluation.problem:
            event(
                log, logging.WARNING, "head not used", device=device, head=version, reason=evaluation.problem
            )
        elif images:
            accuracy = f"{correct / images:.1%} ({correct}/{images})"
            event(log, logging.INFO, "head evaluated", device=device, head=version, accuracy=accuracy)
        else:
            event(log, logging.INFO, "head in use", device=device, head=version)
        # What follows from it first: once stored, the same evaluation is not looked at again.
        self._releases.evaluate(device, evaluation)
        self._store.evaluations.put(device, evaluation, digest=digest, now_s=time.time())
        return Receipt(digest=digest, status="received")


def bounded_info(info: DeviceInfo, classes: Collection[str]) -> DeviceInfo:
    """Return what is stored of a device's report: only the task's classes, and only known reasons."""
    return msgspec.structs.replace(
        info,
        backbones=(),
        images={name: count for name, count in info.images.items() if name in classes},
        refused_messages={
            name: count for name, count in info.refused_messages.items() if name in get_args(Reason)
        },
    )
