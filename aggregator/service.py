"""The daemon: wires session, store, round logic and training, one event at a time on one thread."""

import contextlib
import json
import logging
import queue
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from aggregator import rounds
from aggregator.config import TaskFile
from aggregator.downlink import read_frames
from aggregator.intake import (
    Expectation,
    Refused,
    check_evaluation,
    check_submission,
    read_message,
)
from aggregator.manifests import head_manifest, task_manifest
from aggregator.store import HeadRow, Store, SubmissionRow
from aggregator.trainer import Finished, Job, Progress, Result, Trainer
from aggregator.uplink import Complete, Uplink
from protocol import session as mqtt
from protocol.blobstore import state_errors, write_atomically
from protocol.codec import decode, encode
from protocol.errors import ConfigError, MalformedMessage, StateError, VersionMismatch
from protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_MANIFEST_BYTES,
    BlobRef,
    BlobRequest,
    DeviceInfo,
    Evaluation,
    Frame,
    HeadManifest,
    Message,
    Presence,
    PresenceState,
    Receipt,
    Submission,
)
from protocol.metadata import BackboneMetadata
from protocol.topics import (
    RETAINED,
    DeviceChannel,
    FleetChannel,
    device_filters,
    device_topic,
    fleet_topic,
    parse_device_topic,
)

log = logging.getLogger(__name__)

TICK_S = 0.5

Event = mqtt.Event | Progress | Finished


class Aggregator:
    """One fleet's aggregator.

    Args:
        task: what to work on.
        backbone: the ONNX file that the task names.
        metadata: what that file says of itself.
        store: the state directory.
        broker: where to connect.

    Raises:
        ConfigError: the task cannot be told to a fleet.
        StateError: the state directory cannot be written.
    """

    def __init__(
        self, *, task: TaskFile, backbone: Path, metadata: BackboneMetadata, store: Store, broker: mqtt.Broker
    ) -> None:
        self._task_file = task
        self._store = store
        data = backbone.read_bytes()
        reference = BlobRef(digest=store.blobs.put(data), size_bytes=len(data), name=backbone.name)
        self._manifest = task_manifest(task, reference)
        self._manifest_bytes = encode(self._manifest)
        self._task = store.blobs.put(self._manifest_bytes)
        self._expectation = Expectation(self._task, self._manifest, metadata.feature_size)
        self._state = store.round_state(self._task)
        self._blobs_served = {reference.digest}
        self._uplink = Uplink(max_bytes=int(task.max_submission_mb * 1024**2))
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._trainer = Trainer(store.folder / "training", on_event=self._events.put)
        self._epoch = max(int(store.fact("epoch", "0")) + 1, int(time.time()))
        store.set_fact("epoch", str(self._epoch))
        store.set_fact("task", self._task.hex())
        store.set_fact("task_file", msgspec.json.encode(task).decode())
        store.set_fact("training", "")
        heads = store.heads(self._task)
        self._head = self._serve_head(heads[-1]) if heads else None
        self._session = mqtt.Session(
            broker,
            client_id=f"pf-{task.fleet}-aggregator-{self._epoch}",
            subscriptions=[*device_filters(task.fleet), fleet_topic(task.fleet, "state")],
            on_event=self._events.put,
            will=self._presence("offline"),
        )

    def run(self) -> None:
        """Serve the fleet until interrupted."""
        self._session.start()
        try:
            while True:
                try:
                    event: Event | None = self._events.get(timeout=TICK_S)
                except queue.Empty:
                    event = None
                try:
                    self._handle(event)
                except StateError as error:
                    # Nothing was acknowledged, so the device will send it again.
                    log.error("%s; free space or fix the permissions, devices will try again", error)
        finally:
            self._trainer.stop()
            self._session.stop([self._presence("stopped")])
            self._store.set_fact("training", "")

    def _handle(self, event: Event | None) -> None:
        match event:
            case mqtt.Received(topic=topic, payload=payload):
                self._receive(topic, payload)
            case mqtt.Connected():
                log.info(
                    "connected to the broker; fleet %r, task %s", self._manifest.fleet, self._task.hex()[:12]
                )
                self._announce()
            case mqtt.Disconnected() as end:
                level = logging.DEBUG if end.repeated else logging.WARNING
                log.log(level, "%s; trying until it is there, next in %.0f s", end.reason, end.retry_s)
            case Progress(figures=figures):
                self._store.set_fact(
                    "training", json.dumps({"version": self._state.head_version + 1, **figures})
                )
            case Finished() as finished:
                self._finish_training(finished)
            case _:
                pass
        self._advance(rounds.Ticked(time.time()))

    def _presence(self, state: PresenceState) -> mqtt.Outgoing:
        return self._to_fleet("state", encode(Presence(state=state, epoch=self._epoch)))

    def _to_fleet(self, channel: FleetChannel, payload: bytes) -> mqtt.Outgoing:
        return mqtt.Outgoing(fleet_topic(self._manifest.fleet, channel), payload, RETAINED[channel])

    def _announce(self) -> None:
        self._session.send(self._to_fleet("task", self._manifest_bytes))
        # Without a head, the one that an earlier task or a lost state has left on the broker is forgotten.
        self._session.send(self._to_fleet("head", encode(self._head) if self._head is not None else b""))
        self._session.send(self._presence("online"))

    def _send(self, device: str, channel: DeviceChannel, message: Message | Frame) -> None:
        topic = device_topic(self._manifest.fleet, device, channel)
        self._session.send(mqtt.Outgoing(topic, encode(message), RETAINED[channel]))

    def _receive(self, topic: str, payload: bytes) -> None:
        if topic == fleet_topic(self._manifest.fleet, "state"):
            if payload:
                self._own_presence_seen(payload)
            return
        try:
            where = parse_device_topic(topic)
        except MalformedMessage as error:
            self._count_refusal("?", Refused("malformed", str(error)))
            return
        try:
            if where.channel in {"state", "info"}:
                self._check_known(where.device)
            self._dispatch(where.device, where.channel, payload)
        except VersionMismatch as error:
            self._count_refusal(where.device, Refused("version", str(error)))
        except MalformedMessage as error:
            self._count_refusal(where.device, Refused("malformed", f"{where.channel}: {error}"))
        except Refused as refused:
            self._count_refusal(where.device, refused)

    def _check_known(self, device: str) -> None:
        allowed = self._task_file.devices
        if allowed is not None and device not in allowed:
            raise Refused("unknown_device", f"{device} is not among the task file's devices")

    def _own_presence_seen(self, payload: bytes) -> None:
        """Correct what an old Last Will says of us, and give way to an aggregator that started later."""
        try:
            presence = decode(payload, Presence, max_bytes=1024)
        except MalformedMessage as error:
            self._count_refusal("?", Refused("malformed", f"the aggregator's state: {error}"))
            return
        if presence.epoch > self._epoch:
            raise ConfigError(
                f"another aggregator has started for fleet {self._manifest.fleet!r} on this broker: "
                "a fleet has one; stop one of them, or give each task file a fleet of its own"
            )
        if presence.state != "online":
            self._session.send(self._presence("online"))

    def _dispatch(self, device: str, channel: str, payload: bytes) -> None:
        now_s = time.time()
        if not payload and channel in {"state", "info"}:
            return  # an empty retained message is how an operator makes a broker forget a device
        if channel == "up":
            self._take_frame(device, decode(payload, Frame, max_bytes=MAX_FRAME_BYTES))
        elif channel == "get":
            self._serve_blob(device, decode(payload, BlobRequest, max_bytes=1024))
        elif channel == "info":
            info = decode(payload, DeviceInfo, max_bytes=MAX_MANIFEST_BYTES)
            shown = {"software": info.software, "runtime": info.runtime, "pictures": info.pictures,
                     "refused": info.refused}  # fmt: skip
            self._store.keep_info(device, info=json.dumps(shown), now_s=now_s)
        else:
            presence = decode(payload, Presence, max_bytes=1024)
            self._store.see_device(device, state=presence.state, epoch=presence.epoch, now_s=now_s)

    def _count_refusal(self, device: str, refused: Refused) -> None:
        first = self._store.count_refusal(
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
            detail = refused.detail[:256]
            receipt = Receipt(digest=digest, status="refused", reason=refused.reason, detail=detail)
            self._send(device, "ack", receipt)
            raise

    def _take_frame(self, device: str, frame: Frame) -> None:
        with self._telling(device, frame.digest):
            outcome = self._uplink.take(device, frame, holds=self._store.holds)
            if isinstance(outcome, Complete):
                outcome = self._take_message(device, outcome)
        if outcome is not None:
            self._send(device, "ack", outcome)

    def _take_message(self, device: str, complete: Complete) -> Receipt | None:
        message = read_message(complete.payload)
        if isinstance(message, Submission):
            self._take_submission(device, message, complete)
            return None
        return self._take_evaluation(device, message, complete.digest)

    def _take_submission(self, device: str, submission: Submission, complete: Complete) -> None:
        prototypes = check_submission(submission, self._expectation)
        self._store.blobs.put(complete.payload)
        entry = rounds.Entry(submission.sequence, complete.digest, time.time())
        row = SubmissionRow(
            device=device,
            entry=entry,
            size_bytes=len(complete.payload),
            pictures=submission.pictures,
            prototypes=len(prototypes.labels),
            per_class=Counter(prototypes.labels.tolist()),
        )
        self._advance(rounds.Submitted(device, entry), row)

    def _take_evaluation(self, device: str, evaluation: Evaluation, digest: bytes) -> Receipt:
        check_evaluation(evaluation, self._expectation, newest_head=self._state.head_version)
        self._store.keep_evaluation(device, evaluation, digest=digest, now_s=time.time())
        right, total = sum(evaluation.right), sum(evaluation.right) + sum(evaluation.wrong)
        log.info(
            "%s: head %d gets %d of %d held-out pictures right", device, evaluation.head_version, right, total
        )
        return Receipt(digest=digest, status="received")

    def _advance(self, event: rounds.Event, row: SubmissionRow | None = None) -> None:
        """Let the round logic take an event; what it decides about a submission is stored before it is said."""
        state, actions = rounds.step(self._state, event, settings=self._task_file.settings)
        for action in actions:
            match action:
                case rounds.Answer(verdict="superseded") as answer:
                    self._refuse_superseded(answer)
                case rounds.Answer() as answer:
                    if answer.verdict == "new" and row is not None:
                        self._store.keep_submission(self._task, row)
                        log.info(
                            "%s: %d prototypes of %d pictures, %d bytes; %d of %d devices for the first head"
                            if not state.head_version
                            else "%s: %d prototypes of %d pictures, %d bytes",
                            *(answer.device, row.prototypes, row.pictures, row.size_bytes),
                            *(() if state.head_version else (len(state.submissions), self._task_file.quorum)),
                        )
                    self._send(answer.device, "ack", Receipt(digest=answer.digest, status="received"))
                case rounds.Train() as train:
                    self._start_training(train)
        self._state = state

    def _refuse_superseded(self, answer: rounds.Answer) -> None:
        detail = f"a submission with sequence {answer.standing.sequence} stands"
        self._send(
            answer.device,
            "ack",
            Receipt(
                digest=answer.digest,
                status="refused",
                reason="superseded",
                detail=detail,
                sequence=answer.standing.sequence,
            ),
        )
        self._count_refusal(answer.device, Refused("superseded", detail))

    def _start_training(self, train: rounds.Train) -> None:
        log.info("training head %d on the prototypes of %d devices", train.version, len(train.members))
        job = Job(
            version=train.version,
            task=self._task.hex(),
            members=tuple(entry.digest.hex() for _, entry in train.members),
            blobs=str(self._store.blobs.folder),
            feature_size=self._expectation.feature_size,
            training=self._task_file.training,
            folder=str(self._store.folder / "training" / f"head-{train.version}"),
        )
        try:
            self._trainer.start(job)
        except StateError as error:
            self._events.put(Finished(job, None, str(error)))

    def _finish_training(self, finished: Finished) -> None:
        members, reason = self._state.training, finished.reason
        row = None
        if finished.result is not None and members is not None:
            try:
                row = self._keep_head(finished.job, finished.result, members)
            except StateError as error:
                reason = str(error)
        if row is None:
            log.error(
                "training head %d failed: %s; it will be tried again when a submission changes, or at the next start",
                finished.job.version,
                reason,
            )
            self._advance(rounds.TrainingFailed())
        else:
            self._advance(rounds.Trained(row.version))
            self._head = self._serve_head(row)
            self._session.send(self._to_fleet("head", encode(self._head)))
            log.info(
                "head %d: %d prototypes of %d devices, %.1f s of training, at most %.1e from torch; %s",
                *(row.version, row.prototypes, len(row.members)),
                *(row.metrics["seconds"], row.metrics["onnx_max_abs_diff"]),
                self._store.folder / "head.onnx",
            )
        self._store.set_fact("training", "")

    def _keep_head(self, job: Job, result: Result, members: Mapping[str, rounds.Entry]) -> HeadRow:
        folder = Path(job.folder)
        with state_errors(folder):
            head, model = ((folder / name).read_bytes() for name in ("head.onnx", "model.onnx"))
        row = HeadRow(
            version=job.version,
            task=self._task,
            digest=self._store.blobs.put(head),
            size_bytes=len(head),
            trained_s=time.time(),
            prototypes=result.prototypes,
            members={device: entry.digest.hex() for device, entry in members.items()},
            metrics=result.metrics,
        )
        write_atomically(self._store.folder / "head.onnx", head)
        write_atomically(self._store.folder / "model.onnx", model)
        self._store.keep_head(row)
        return row

    def _serve_blob(self, device: str, request: BlobRequest) -> None:
        with self._telling(device, request.digest):
            if request.digest not in self._blobs_served:
                raise Refused(
                    "unknown_blob", f"no blob {request.digest.hex()[:12]}: take what task and head name"
                )
        for frame in read_frames(self._store.blobs.path(request.digest), request):
            self._send(device, "blk", frame)

    def _serve_head(self, row: HeadRow) -> HeadManifest:
        self._blobs_served.add(row.digest)
        return head_manifest(row)
