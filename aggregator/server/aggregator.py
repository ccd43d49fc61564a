"""The aggregator: one event at a time, on one thread."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from aggregator.commands.command_socket import CommandSocket, Request
from aggregator.config.schema import TaskFile
from aggregator.heads.rollout import Rollout
from aggregator.heads.schedule import Schedule
from aggregator.intake.uploads import Uploads, missing_room
from aggregator.intake.validation import Refused, count_rows, read_message
from aggregator.job_processes import JobEnded, JobProgress, Jobs
from aggregator.messaging.blob_sender import BlobSender
from aggregator.messaging.manifest_signer import identity_of
from aggregator.messaging.publisher import Publisher
from aggregator.security.identity import aggregator_access, restore_access
from aggregator.server.announcements import TAKE_OVER, Announcements
from aggregator.server.events import Event, Events, Stop, next_batch
from aggregator.server.message_intake import MessageIntake
from aggregator.server.store_view import IntakeHeads
from aggregator.storage.store import Store
from aggregator.storage.stored_values import ServedTask, TaskPreparation
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks.restoration import Verified, VerifiedFiles, heal, note_whole, report_damage
from aggregator.tasks.retention import delete_unneeded_blobs
from aggregator.tasks.task_preparation import Task, prepare_task
from protocol.errors import BlobLost, StateError, ThreadFailed
from protocol.log import event as log_event
from protocol.mqtt import reconnecting_session as mqtt
from protocol.mqtt.own_presence import OwnPresence, require_not_replaced
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, Brokers
from protocol.service_manager import ServiceManager
from protocol.wire.messages import Submission
from protocol.wire.presence import Duplicate
from protocol.wire.topics import device_filters, fleet_topic
from protocol.wire.transfer import chunk_bytes

log = logging.getLogger(__name__)


class Aggregator:
    """A fleet's aggregator; `jobs` and other threads put their events into `events`.

    Raises StateError or ConfigError if the state directory or a key cannot be used.
    """

    def __init__(
        self,
        task: Task,
        store: Store,
        *,
        broker: Brokers,
        access: BrokerAccess = NO_AUTHENTICATION,
        events: Events,
        jobs: Jobs,
    ) -> None:
        self._task = task
        self._store = store
        store.is_served = True
        self._events = events
        self._is_stopped = False
        max_bytes = int(task.file.max_submission_mb * 1024**2)
        if missing_room(store.folder, max_bytes):
            delete_unneeded_blobs(task, store)
        require_not_replaced(store.facts.get(Duplicate) or Duplicate(), command=TAKE_OVER)
        key, fleet = identity_of(store.folder), task.file.fleet
        presence = OwnPresence(epoch=_next_epoch(task, store), topic=fleet_topic(fleet, "state"), key=key)
        self._uploads = Uploads(store, max_bytes=max_bytes, on_failure=events.put)
        self._training = Schedule(task, store, jobs)
        self._releases = Rollout(task, store)
        self._publisher = Publisher(
            broker,
            access=access,
            fleet=fleet,
            presence=presence,
            subscriptions=[*self._training.sums.topics, *device_filters(fleet)],
            on_event=events.put,
            may_connect=store.database.may_connect,
        )
        heal(task, store, self._releases.served)
        self._files = VerifiedFiles(store.blobs, events.put)
        self._blob_sender = BlobSender(
            store.blobs,
            self._publisher,
            downloads_per_hour=task.file.limits.downloads_per_hour,
            is_verified=self._files.is_verified,
        )
        self._announcements = Announcements(
            task=task,
            store=store,
            key=key,
            publisher=self._publisher,
            uploads=self._uploads,
            training=self._training,
            releases=self._releases,
            files=self._files,
        )
        self._intake = MessageIntake(
            store,
            task,
            uploads=self._uploads,
            publisher=self._publisher,
            blob_sender=self._blob_sender,
            key=key,
        )
        self._update_releases()

    def run(self) -> None:
        """Serve the task until `Stop`.

        Raises:
            StateError: something cannot be stored or read; the next start goes on with what is stored.
            ThreadFailed: a thread that the program depends on has ended.
        """
        self._publisher.start()
        commands = None
        try:
            commands = CommandSocket(self._store.folder, self._events.put)
            manager = ServiceManager()
            manager.ready()
            while not self._is_stopped:
                manager.alive()
                self.handle(next_batch(self._events))
            self._training.stop()
        except (KeyboardInterrupt, SystemExit):
            self._training.stop()
            raise
        finally:
            if commands is not None:
                commands.stop()
            self._releases.files.stop()
            self._intake.close()

    def handle(self, batch: list[Event]) -> None:
        """Handle events, the messages among them together, and let time pass; raises StateError as `run` does."""
        for is_message, group in groupby(batch, key=lambda event: isinstance(event, mqtt.Received)):
            events = list(group)
            if is_message:
                messages = [event for event in events if isinstance(event, mqtt.Received)]
                is_missed = self._intake.handle([each for each in messages if self._is_of_device(each)])
                if is_missed and self._task.file.settings.rounds is not None:
                    self._announcements.repeat_round()
                self._publisher.acknowledge(messages)
            else:
                for event in events:
                    self._handle(event)
        self._publisher.acknowledge([])
        self._tick()

    def _is_of_device(self, message: mqtt.Received) -> bool:
        """Return True for a message of a device; take note of one on the aggregator's own topics."""
        if message.topic in self._training.sums.topics:
            self._training.take_sum(message.payload)
            return False
        channel = self._publisher.own_topics.get(message.topic)
        if channel is not None:
            self._announcements.observe(channel, message.payload)
        return channel is None

    def _handle(self, event: Event) -> None:
        match event:
            case JobProgress():
                self._training.store_progress(event)
            case JobEnded():
                if self._training.finish(event):
                    if (opened := self._training.round) is not None:  # broadcast before the head is published
                        self._store.blobs.verified_path(opened.tensors.digest)
                        self._files.take(Verified(opened.tensors.digest))
                    # The round's tensors are served before devices know of them.
                    self._update_releases(at_once=True)
            case Verified():
                self._verified(event)
            case Request():
                self._carry_out(event)
            case ThreadFailed():
                raise event
            case Stop():
                self._is_stopped = True
            case _:
                self._handle_session(event)

    def _handle_session(self, event: mqtt.Event) -> None:
        match event:
            case mqtt.Connected():
                self._connected(event)
            case mqtt.Disconnected(reason=reason, retry_s=retry_s, repeated=repeated, broker=broker):
                self._blob_sender.forget()
                level = logging.DEBUG if repeated else logging.WARNING
                log_event(log, level, reason, broker=broker, retry_s=retry_s)
                self._announcements.is_connected = False
            case mqtt.Unsendable(topic=topic, reason=reason, repeated=repeated):
                level = logging.DEBUG if repeated else logging.ERROR
                log_event(log, level, "publication refused by the broker", topic=topic, reason=reason)
            case mqtt.Drained():
                self._blob_sender.drained()

    def _verified(self, verified: Verified) -> None:
        """Send a file that was read as a whole; raises StateError for one that the next start writes again."""
        self._files.take(verified)
        self._blob_sender.verified(verified.digest, is_readable=verified.problem is None)
        if verified.problem is None:
            note_whole(self._store, verified.digest)
        elif isinstance(verified.problem, BlobLost):
            report_damage(self._task, self._store, verified.problem)
        else:
            text = "cannot read a file that devices need"
            log_event(log, logging.ERROR, text, reason=verified.problem)

    def _carry_out(self, request: Request) -> None:
        """Carry out an operator's command, and answer it once a training that it ends has ended."""
        deletions = self._store.submissions.deletions
        if (done := request.carry_out(self._store)) is None:
            return
        try:
            if self._store.submissions.deletions != deletions:  # of one device
                self._uploads.drop(getattr(request.arguments, "device", ""))
            self._update_releases(at_once=True)
            self._tick()
        finally:
            request.answer(done)

    def _connected(self, event: mqtt.Connected) -> None:
        self._publisher.chunk_bytes = chunk_bytes(event.max_packet_bytes)
        self._publisher.presence.connected(event.address)
        fleet, task = self._task.file.fleet, self._task.digest
        log_event(log, logging.INFO, "connected to the broker", broker=event.broker, fleet=fleet, task=task)
        self._announcements.connected()
        self._training.sums.connected()

    def _tick(self) -> None:
        self._intake.tick()
        self._announcements.restore()
        self._update_releases()
        self._announcements.publish_new_round()
        self._announcements.publish_new_head()
        self._announcements.refresh()
        self._releases.write_files()
        self._store.clock.keep()
        self._training.tick()
        if (due := self._training.sums.request()) is not None:
            self._publisher.request_sum(due)
        for device, request in self._training.lost.requests():
            self._publisher.publish_to_device(device, "ack", request)

    def _update_releases(self, *, at_once: bool = False) -> None:
        """Apply what has happened to the rollout, and to what the intake knows of it."""
        self._releases.tick(at_once=at_once)
        self._intake.view.heads = IntakeHeads(
            newest=self._training.version,
            retained=frozenset(self._releases.retained),
            served=frozenset(self._releases.served),
        )


def prepare(
    file: TaskFile, backbones: Sequence[Path], store: Store, access: BrokerAccess
) -> tuple[Task, BrokerAccess]:
    """Prepare a task for `serve`, and return the aggregator's access to the broker, by default with its certificate.

    Raises:
        ConfigError: the task cannot be prepared, or the fleet's certificates are lost.
        StateError: the state directory cannot be used.
    """
    access = aggregator_access(store.folder, access, fleet=file.fleet, is_closed=store.keys.is_closed())
    restore_access(store)
    return prepare_task(file, backbones, store=store), access


def serve(
    task: Task,
    store: Store,
    *,
    broker: Brokers,
    access: BrokerAccess = NO_AUTHENTICATION,
    events: Events,
    jobs: Jobs,
) -> None:
    """Serve a fleet until `Stop` is put into `events`, into which `jobs` puts what becomes of them.

    A failure leaves a training to the next call; otherwise it ends.

    Raises:
        ConfigError: a key or another aggregator of the fleet keeps it from serving.
        StateError: the state directory cannot be used.
        ThreadFailed: a thread that it depends on has ended.
    """
    Aggregator(task, store, broker=broker, access=access, events=events, jobs=jobs).run()


def _next_epoch(task: Task, store: Store) -> int:
    """Store the task as served; returns this start's epoch, greater than that of any earlier start."""
    store.facts.delete(TaskPreparation)  # of a program that was killed
    before = store.facts.get(ServedTask)
    epoch = max(before.epoch + 1 if before is not None else 1, int(time.time()))
    file = task.file
    served = ServedTask(
        task.digest,
        epoch,
        file.fleet,
        file.algorithm,
        tuple(file.classes),
        settings=file.settings,
        rollout=file.rollout,
        limits=file.limits,
        privacy=file.privacy,
        second_operator=task.manifest.second_operator,
        counts_images=task.manifest.accepts_blocks,
        is_personal=file.is_personal,
    )
    with store.transaction():
        if task.manifest.continues and (before is None or before.digest != task.digest):
            earlier = task.manifest.continues[0]
            has_images = before is not None and before.digest == earlier and before.counts_images
            adopted = store.submissions.adopt(
                task.digest,
                earlier,
                recounted=lambda record: record if has_images else _recounted(record, task, store),
            )
            log_event(log, logging.INFO, "submissions of the continued task count", submissions=adopted)
        store.facts.put(served)
    return epoch


def _recounted(record: SubmissionRecord, task: Task, store: Store) -> SubmissionRecord:
    """Return an adopted submission's record, with images for prototypes where the task accepts blocks.

    The earlier task may have had batches alone. A submission that cannot be read or used keeps its numbers.
    """
    if not task.manifest.accepts_blocks:
        return record
    try:
        submission = read_message(store.blobs.read(record.entry.digest))
        per_class = count_rows(submission, task.expectation) if isinstance(submission, Submission) else {}
    except (StateError, Refused):
        return record
    return replace(record, prototypes=sum(per_class.values()), per_class=per_class)
