"""The messages of devices: presence, reports, uploads and blob requests."""

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec

from aggregator.coordination import round_state, rounds
from aggregator.intake.accepted_submissions import AcceptedSubmissions
from aggregator.intake.evaluation_validation import check_evaluation
from aggregator.intake.frame_authentication import FrameAuthenticator
from aggregator.intake.masked_values import checked_mask, opened_values
from aggregator.intake.quotas import Quotas
from aggregator.intake.uploads import Uploads
from aggregator.intake.validation import Refused, count_rows, read_message
from aggregator.messaging.blob_sender import BlobSender
from aggregator.rates import DeviceEvents, TokenBuckets
from aggregator.security.seal_key import own_seal_key
from aggregator.server.device_reports import DeviceReports
from aggregator.server.store_view import StoreView
from aggregator.storage.refusals import UNKNOWN_DEVICE
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks.task_preparation import Task
from protocol.errors import MalformedMessage, VersionMismatch
from protocol.wire.codec import FrameView, decode, is_probe, message_kind
from protocol.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_MANIFEST_BYTES,
    BlobRequest,
    Evaluation,
    PrivacyRecord,
    Reason,
    Receipt,
    Released,
    Submission,
)
from protocol.wire.signing import sign_record
from protocol.wire.topics import device_topic, parse_device_topic

log = logging.getLogger(__name__)

RECEIPTS_AT_ONCE = 256
"""Receipts of one kind for a device, beyond which it gets RECEIPTS_PER_S: a device asks again for one that is lost."""

RECEIPTS_PER_S = 4.0

MAX_READ_BYTES = 16 * 1024**2
"""Size of the uploads of a batch in memory at which frames are left to the transaction, which handles one at a time."""


@dataclass(frozen=True)
class _LateFrame:
    """A frame that the transaction handles: of a device without a key, which an open fleet pins, or in a full batch."""

    frame: FrameView


@dataclass(frozen=True)
class _Report:
    """A presence or a report."""

    channel: str
    payload: bytes


@dataclass(frozen=True)
class _Upload:
    """A whole upload that was validated."""

    digest: bytes
    payload: bytes
    message: Submission | Evaluation
    record: SubmissionRecord | None
    """The row of a submission; None for an evaluation."""


_Item = _LateFrame | _Report | _Upload | PrivacyRecord | Refused


@dataclass(kw_only=True)
class DeviceMessages:
    """Handles what devices publish, a batch at a time, in three steps: `read` each, `store_items`, send `receipts`.

    `read` leaves all that is to be stored to `store_items`, in one short transaction of the caller.
    """

    task: Task
    store: Store
    uploads: Uploads
    view: StoreView
    accepted: AcceptedSubmissions
    blob_sender: BlobSender
    key: bytes
    """The aggregator's private key, 32 bytes."""
    receipts: list[tuple[str, Receipt | PrivacyRecord]] = field(default_factory=list, init=False)
    """Device and receipt, or the answer to its record, to be published once the messages are durable."""
    _items: list[tuple[str, str, _Item]] = field(default_factory=list, init=False)
    """Messages to be stored: each with its device, and its channel for the detail of a refusal."""
    _complete: set[tuple[str, bytes]] = field(default_factory=set, init=False)
    """Uploads among the items: another frame of one needs no answer."""
    _read_bytes: int = field(default=0, init=False)
    """Their size."""
    _answered: TokenBuckets[tuple[str, Reason | None]] = field(init=False)
    """Answers by device and reason of refusal: a flood of refused messages does not delay its other receipts."""
    _refused: dict[str, tuple[bytes, Reason, str]] = field(default_factory=dict, init=False)
    """Digest of each device's last refused submission, and why: a query for it causes no second upload."""

    def __post_init__(self) -> None:
        self._log = DeviceEvents(log)
        self._answered = TokenBuckets(capacity=RECEIPTS_AT_ONCE, per_s=RECEIPTS_PER_S)
        self._authenticator = FrameAuthenticator(self.store, fleet=self.task.file.fleet)
        self._reports = DeviceReports(self.store, self.task.manifest, self._authenticator)
        allowed = self.task.file.devices
        self._allowed = None if allowed is None else frozenset(allowed)
        self._quotas = Quotas(self.store, self.task.file.limits, task=self.task.digest)

    def read(self, topic: str, payload: bytes) -> None:
        """Decode, authenticate and validate a message; raises StateError if the disk cannot be used."""
        device, channel = UNKNOWN_DEVICE, ""
        try:
            where = parse_device_topic(topic)
            device, channel = where.device, f"{where.channel}: "
            item = self._read(device, where.channel, payload)
        except (MalformedMessage, Refused) as error:
            item = _refusal(error, channel)
        if item is not None:
            self._items.append((device, channel, item))

    def has_items(self) -> bool:
        return bool(self._items)

    def store_items(self) -> None:
        """Store what was read, in a transaction of the caller; raises StateError if it cannot be stored."""
        items, self._items = self._items, []
        try:
            for device, channel, item in items:
                self._store_or_refuse(device, channel, item)
        finally:
            self._complete.clear()
            self._read_bytes = 0

    def _read(self, device: str, channel: str, payload: bytes) -> _Item | None:
        if channel not in {"up", "get"}:
            return _Report(channel, payload)
        if is_probe(payload):
            return None
        if channel == "get" and message_kind(payload) == "privacy_record":
            record = decode(payload, PrivacyRecord, max_bytes=MAX_MANIFEST_BYTES)
            with self._answering_with_stored_record(device):
                self._authenticator.check_record(device, record)
            return record
        if channel == "get":
            self._take_request(device, decode(payload, BlobRequest, max_bytes=1024))
            return None
        frame = decode(payload, FrameView, max_bytes=MAX_FRAME_BYTES)
        if self._read_bytes > MAX_READ_BYTES or self.store.keys.get(device) is None:
            return _LateFrame(frame)
        return self._take_frame(device, frame)

    def _store_or_refuse(self, device: str, channel: str, item: _Item) -> None:
        try:
            self._store(device, item)
        except (MalformedMessage, Refused) as error:
            self.uploads.count_refusal(device, _refusal(error, channel))

    def _store(self, device: str, item: _Item) -> None:
        match item:
            case Refused():
                raise item
            case _Report(channel=channel, payload=payload):
                self._check_known(device)
                self._reports.store(device, channel, payload)
            case _LateFrame(frame=frame):
                if (upload := self._take_frame(device, frame)) is not None:
                    self._store_upload(device, upload)
            case _Upload():
                self._store_upload(device, item)
            case PrivacyRecord():
                with self._answering_with_stored_record(device):
                    self._check_known(device)
                    self._answer_record(device, self._reports.merge_record(device, item))

    def _check_known(self, device: str) -> None:
        if self._allowed is not None and device not in self._allowed:
            raise Refused("unknown_device", f"{device} is not among the task file's devices")
        if self._authenticator.check_name(device) is None:
            self._quotas.check_new_device(device)

    def _may_answer(self, device: str, reason: Reason | None) -> bool:
        """Return whether a device gets an answer; it may have caused too many with this reason of refusal."""
        # A client can make up any number of names.
        is_unknown = reason == "unknown_device" or (reason == "quota" and self.store.keys.get(device) is None)
        bucket = (UNKNOWN_DEVICE if is_unknown else device, reason)
        return self._answered.take(bucket, now_s=time.monotonic())

    def _answer(self, device: str, receipt: Receipt) -> None:
        if self._may_answer(device, receipt.reason):
            self.receipts.append((device, receipt))

    def _answer_record(
        self, device: str, releases: tuple[Released, ...], reason: Reason | None = None
    ) -> None:
        if self._may_answer(device, reason):
            topic = device_topic(self.task.file.fleet, device, "ack")
            record = sign_record(PrivacyRecord(releases=releases), key=self.key, topic=topic)
            self.receipts.append((device, record))

    @contextlib.contextmanager
    def _answering_with_stored_record(self, device: str) -> Iterator[None]:
        """Answer a record that is refused, too: a device may have lost its key with its record."""
        try:
            yield
        except Refused as refused:
            self._answer_record(device, self.store.devices.releases(device), refused.reason)
            raise

    def _answer_refused(self, device: str, digest: bytes, refused: Refused) -> None:
        """Send a receipt for what is refused, so that the device does not ask again."""
        detail, sequence = refused.detail[:256], refused.sequence
        receipt = Receipt(
            digest=digest, status="refused", reason=refused.reason, detail=detail, sequence=sequence
        )
        self._answer(device, receipt)

    def _take_request(self, device: str, request: BlobRequest) -> None:
        try:
            self._check_known(device)
            if request.digest not in self.view.heads.served:
                raise Refused(
                    "unknown_blob",
                    f"no blob {request.digest.hex()[:12]}: request what task, round and head name",
                )
            if wait_s := self.blob_sender.request(device, request):
                limit = (
                    f"downloaded {self.task.file.limits.downloads_per_hour} times (limits.downloads_per_hour)"
                )
                raise Refused("rate_limited", f"{limit}: request it again in {wait_s:.0f} s")
        except Refused as refused:
            self._answer_refused(device, request.digest, refused)
            raise

    def _take_frame(self, device: str, frame: FrameView) -> _Upload | None:
        """Authenticate a frame and add it to its upload; return the upload if it is whole."""
        try:
            self._check_known(device)
            self._authenticator.check(device, frame)
            outcome = self._add_frame(device, frame)
            if isinstance(outcome, bytes):
                return self._read_upload(device, frame.digest, outcome)
        except Refused as refused:
            self._answer_refused(device, frame.digest, refused)
            raise
        if outcome is not None:
            self._answer(device, outcome)
        return None

    def _add_frame(self, device: str, frame: FrameView) -> Receipt | bytes | None:
        is_last = frame.offset + len(frame.data) >= frame.size_bytes
        if (refused := self._refused.get(device)) is not None and refused[0] == frame.digest:
            if is_last:
                raise Refused(*refused[1:])
            return None
        if is_last:
            self._quotas.check_transfer(device, frame.digest, frame.size_bytes)
        if (device, frame.digest) in self._complete:
            return None
        return self.uploads.take(device, frame)

    def _read_upload(self, device: str, digest: bytes, payload: bytes) -> _Upload:
        """Validate an upload; the payload of a submission that counts is written before the transaction."""
        message: Submission | Evaluation | None = None
        try:
            message = read_message(payload)
            if isinstance(message, Evaluation):
                check_evaluation(message, self.task.expectation, newest_head=self.view.heads.newest)
                record = None
            else:
                record = self._record(device, message, digest, len(payload))
        except Refused as refused:
            if not isinstance(message, Evaluation):
                self._remember(device, digest, refused)
            raise
        if record is not None and self.view.judge(record, self.view.submission(device)).verdict == "new":
            self.accepted.prepare(digest, payload)
        self._complete.add((device, digest))
        self._read_bytes += len(payload)
        return _Upload(digest, payload, message, record)

    def _record(
        self, device: str, submission: Submission, digest: bytes, size_bytes: int
    ) -> SubmissionRecord:
        expectation, masked = self.task.expectation, None
        if expectation.manifest.second_operator is None:
            per_class = count_rows(submission, expectation)
        else:
            opened_values(submission, expectation, device=device, private_key=own_seal_key(self.store))
            known = self.store.keys.get(device)
            key = None if known is None else known.public
            masked = checked_mask(submission, expectation, device=device, key=key)
            per_class = dict.fromkeys(range(len(expectation.manifest.classes)), 1)
        return SubmissionRecord(
            device=device,
            entry=round_state.Entry(submission.sequence, digest, self.store.clock.now_s(), submission.round),
            size_bytes=size_bytes,
            images=submission.images,
            prototypes=sum(per_class.values()),
            per_class=per_class,
            min_devices=None if masked is None else masked.mask.min_devices,
            mask=None if masked is None else msgspec.msgpack.encode(masked),
        )

    def _remember(self, device: str, digest: bytes, refused: Refused) -> None:
        """Remember a refused upload, so that it is not uploaded again, unless it may be accepted later."""
        if refused.reason not in {"superseded", "unknown_round", "quota"}:
            self._refused[device] = (digest, refused.reason, refused.detail)

    def _store_upload(self, device: str, upload: _Upload) -> None:
        """Judge, store and answer an upload; raises Refused."""
        digest, message, record = upload.digest, upload.message, upload.record
        try:
            self._check_known(device)
            if isinstance(message, Evaluation):
                self._store_evaluation(device, message, upload)
            elif record is not None:
                self._store_submission(message, record, upload.payload)
        except Refused as refused:
            if record is not None:
                self._remember(device, digest, refused)
            self._answer_refused(device, digest, refused)
            raise
        self._answer(device, Receipt(digest=digest, status="received"))

    def _store_submission(self, submission: Submission, record: SubmissionRecord, payload: bytes) -> None:
        device = record.device
        verdict = self.view.judge(record, self.view.submission(device))
        self._check_verdict(verdict, submission.round)
        if verdict.verdict == "new":
            self._quotas.count_submission(record)
            record = replace(record, entry=verdict.counted_entry or record.entry)
            self.accepted.add(record, payload)
            self.view.put(record)
        if submission.privacy is not None:
            self.store.devices.raise_epsilon(device, submission.privacy.total_epsilon)

    def _check_verdict(self, verdict: rounds.SubmissionVerdict, number: int) -> None:
        """Raise Refused for a submission that does not count, with what counts instead."""
        match verdict.verdict:
            case "superseded":
                sequence = verdict.counted_entry.sequence if verdict.counted_entry is not None else 0
                detail = f"the submission with sequence {sequence} counts"
                raise Refused("superseded", detail, sequence=sequence)
            case "late" | "unknown_round" as reason:
                newest, settings = self.view.heads.newest, self.task.file.settings
                now = f"round {newest} is open"
                if round_state.is_over(newest, settings):
                    now = f"all {settings.rounds} rounds are over"
                raise Refused(reason, f"the submission is for round {number}, but {now}")

    def _store_evaluation(self, device: str, evaluation: Evaluation, upload: _Upload) -> None:
        if evaluation.head_version not in self.view.heads.retained:
            return  # nothing depends on it any more
        self._quotas.count_evaluation(device, len(upload.payload))
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
        self.store.evaluations.put(device, evaluation, digest=upload.digest, now_s=time.time())


def _refusal(error: MalformedMessage | Refused, channel: str) -> Refused:
    match error:
        case Refused():
            return error
        case VersionMismatch():
            return Refused("version", str(error))
    return Refused("malformed", f"{channel}{error}")
