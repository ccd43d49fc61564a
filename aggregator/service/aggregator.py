"""The daemon's event loop: one event at a time, on one thread."""

import contextlib
import logging
import queue
import time
from dataclasses import dataclass
from itertools import groupby

from aggregator.coordination import round_state
from aggregator.heads.published_head import Releases
from aggregator.heads.training_schedule import HeadTraining
from aggregator.ingest.receiver import Receiver
from aggregator.messaging.blob_sender import BlobSender
from aggregator.messaging.manifest_signer import identity_of
from aggregator.messaging.publisher import Publisher
from aggregator.service.announcements import Announcements
from aggregator.service.device_messages import DeviceMessages
from aggregator.service.local_coordinator import LocalCoordinator
from aggregator.service.own_topic import TAKE_OVER
from aggregator.service.traffic_meter import TrafficMeter
from aggregator.storage.store import Store
from aggregator.storage.stored_values import ServedTask
from aggregator.tasks import refinement
from aggregator.tasks.task_preparation import Task
from aggregator.training.runner import Finished, Progress
from protocol.errors import StateError, ThreadFailed
from protocol.log import event as log_event
from protocol.mqtt import reconnecting_session as mqtt
from protocol.mqtt.own_presence import OwnPresence, Replaced, require_not_replaced
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, Brokers
from protocol.service_manager import ServiceManager
from protocol.wire.presence import Duplicate
from protocol.wire.topics import fleet_topic
from protocol.wire.transfer import chunk_bytes

log = logging.getLogger(__name__)

TICK_S = 0.5

BATCH_EVENTS = 256
"""Events handled before their messages are made durable together."""

BATCH_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class Stop:
    """The program that runs the aggregator wants it to end."""


Event = mqtt.Event | Progress | Finished | Stop


class Aggregator:
    """A fleet's aggregator; `events` may have events of other threads.

    Raises StateError or ConfigError if the state directory or a key cannot be used.
    """

    def __init__(
        self,
        task: Task,
        store: Store,
        *,
        broker: Brokers,
        access: BrokerAccess = NO_AUTHENTICATION,
        events: queue.SimpleQueue[Event] | None = None,
        external_training: bool = False,
    ) -> None:
        self._task = task
        self._store = store
        self._is_over = False
        self.is_stopped = False
        """`Stop` was among the events."""
        self._events: queue.SimpleQueue[Event] = events or queue.SimpleQueue()
        require_not_replaced(store.facts.get(Duplicate) or Duplicate(), command=TAKE_OVER)
        key = identity_of(store.folder)
        topic = fleet_topic(task.file.fleet, "state")
        presence = OwnPresence(epoch=_next_epoch(task, store), topic=topic, key=key)
        self._receiver = Receiver(
            store,
            max_bytes=int(task.file.max_submission_mb * 1024**2),
            unfinished_s=task.file.unfinished_h * 3600,
        )
        self._training = HeadTraining(task, store, on_event=self._events.put, external=external_training)
        self._releases = Releases(task, store)
        self._publisher = Publisher(
            broker, access=access, fleet=task.file.fleet, presence=presence, on_event=self._events.put
        )
        self._traffic = TrafficMeter(store)
        restoration = self._training.restoration
        restoration.verify_all(self._releases.served)
        self._blob_sender = BlobSender(
            store.blobs,
            self._publisher,
            downloads_per_hour=task.file.limits.downloads_per_hour,
            verify=restoration.verify,
        )
        self._announcements = Announcements(
            task=task,
            store=store,
            key=key,
            publisher=self._publisher,
            receiver=self._receiver,
            training=self._training,
            releases=self._releases,
            restoration=restoration,
        )
        self._messages = DeviceMessages(
            task=task,
            store=store,
            receiver=self._receiver,
            coordinator=LocalCoordinator(
                training=self._training, releases=self._releases, announcements=self._announcements
            ),
            blob_sender=self._blob_sender,
        )

    def run(self) -> None:
        """Serve the fleet until `Stop`, or until another task follows: `task_to_serve` returns it then.

        Raises ThreadFailed if a thread that it depends on has ended.
        """
        self._publisher.start()
        try:
            manager = ServiceManager()
            manager.ready()
            while not (self._is_over or self.is_stopped):
                manager.alive()
                self.handle(self._next_batch())
        finally:
            self._training.stop()
            self._publisher.stop()
            with self._receiver.guard():
                self._traffic.keep(sent=self._publisher.sent_bytes, at_once=True)
            self._receiver.close()

    def _next_batch(self) -> list[Event]:
        """Return the events that have arrived, at most a batch; none if nothing arrives for `TICK_S`."""
        batch: list[Event] = []
        size_bytes = 0
        with contextlib.suppress(queue.Empty):
            batch.append(self._events.get(timeout=TICK_S))
            while len(batch) < BATCH_EVENTS and size_bytes < BATCH_BYTES:
                batch.append(event := self._events.get_nowait())
                size_bytes += len(event.payload) if isinstance(event, mqtt.Received) else 0
        return batch

    def handle(self, batch: list[Event]) -> None:
        """Handle a batch of events, and let time pass."""
        with self._receiver.guard():
            self._restore_blobs()
        for is_message, group in groupby(batch, key=lambda event: isinstance(event, mqtt.Received)):
            events = list(group)
            if is_message:
                self._handle_messages([event for event in events if isinstance(event, mqtt.Received)])
            else:
                for event in events:
                    with self._receiver.guard():
                        self._handle_event(event)
        self._publisher.acknowledge([])
        self._blob_sender.send()
        if self._receiver.tick():
            self._reload()
            self._training.retry()
        with self._receiver.guard():
            self._releases.tick(self._training.state.head_version)
        self._announcements.publish_new_head()
        self._announcements.refresh()
        with self._receiver.guard():
            self._store.clock.keep()
            self._traffic.keep(sent=self._publisher.sent_bytes)
            self._training.tick()
            if self._training.deleted:
                self._receiver.drop(self._training.deleted)
                self._releases.delete_unused()
                self._training.deleted.clear()
            for device, request in self._training.lost.requests():
                self._publisher.publish_to_device(device, "ack", request)
            self._is_over = self._is_replaced()

    def _is_replaced(self) -> bool:
        """Return True if another task is to be served: FedTC's head is refined from now on, or no more.

        Raises StateError if there is no room for its files; while the intake is stopped, this task is served.
        """
        refined, file = self._task.refined, self._task.file
        head = refined or self._releases.refinable
        if head is None or not file.training.refine or self._receiver.is_stopped:
            return False
        if refined is not None:
            is_replaced = refinement.is_over(self._store, refined)
        else:
            is_replaced = refinement.begin_if_due(self._store, head, deadline_s=file.deadline_s)
        if is_replaced:
            self._receiver.check_writable(refinement.room_bytes(head, self._task.manifest))
        return is_replaced

    def _restore_blobs(self) -> None:
        """Create the folder of blobs again if it was deleted, with those that have a copy; request submissions."""
        if self._store.blobs.is_missing():
            self._training.lost.remove(round_state.counting(self._training.state, self._task.file.settings))
            self._training.reload()
            self._store.blobs.create()
            self._training.restoration.verify_all(self._releases.served)
            text = "folder was deleted and has been created again: check who deletes it"
            log_event(log, logging.ERROR, text, folder=self._store.blobs.location)

    def _handle_messages(self, messages: list[mqtt.Received]) -> None:
        """Store all messages durably, or none; then answer them, and acknowledge them to the broker."""
        self._traffic.received += sum(len(message.payload) for message in messages)
        try:
            with self._store.transaction():
                for message in messages:
                    self._handle_message(message)
                self._training.accepted.flush()
            self._training.accepted.log()
            self._receiver.commit()
        except Replaced as replaced:
            with self._receiver.guard():
                self._store.facts.put(replaced.duplicate)
            raise
        except StateError as error:
            self._receiver.stop(error)
            self._reload()
            self._messages.receipts.clear()
            for message in messages:  # again, now that the intake is stopped
                with self._receiver.guard():
                    self._handle_message(message)
        self._announcements.restore()
        for device, receipt in self._messages.receipts:
            self._publisher.publish_to_device(device, "ack", receipt)
        self._messages.receipts.clear()
        self._publisher.acknowledge(messages)

    def _reload(self) -> None:
        """Return to the stored state; while it cannot be read, the intake stays stopped."""
        with self._receiver.guard():
            self._training.reload()
            self._releases.reload()

    def _handle_message(self, message: mqtt.Received) -> None:
        channel = self._publisher.own_topics.get(message.topic)
        if channel is None:
            self._messages.handle(message.topic, message.payload)
        else:
            self._announcements.observe(channel, message.payload)

    def _handle_event(self, event: Event) -> None:
        match event:
            case mqtt.Connected(max_packet_bytes=limit, address=ip, broker=broker):
                self._publisher.presence.connected(ip)
                self._publisher.chunk_bytes = chunk_bytes(limit)
                fleet, task = self._task.file.fleet, self._task.digest
                log_event(log, logging.INFO, "connected to the broker", broker=broker, fleet=fleet, task=task)
                self._announcements.connected()
            case mqtt.Disconnected(reason=reason, retry_s=retry_s, repeated=repeated, broker=broker):
                self._announcements.is_connected = False
                self._blob_sender.forget()
                level = logging.DEBUG if repeated else logging.WARNING
                log_event(log, level, reason, broker=broker, retry_s=retry_s)
            case mqtt.Unsendable(topic=topic, reason=reason, repeated=repeated):
                level = logging.DEBUG if repeated else logging.ERROR
                log_event(log, level, "publication refused by the broker", topic=topic, reason=reason)
            case mqtt.Drained():
                self._blob_sender.drained()
            case ThreadFailed():
                raise event
            case Stop():
                self.is_stopped = True
            case Progress(figures=figures):
                self._training.store_progress(figures)
            case Finished() as finished:
                if self._training.finish(finished):
                    self._announcements.open_round()


def _next_epoch(task: Task, store: Store) -> int:
    """Store the task as served; returns this start's epoch, greater than that of any earlier start."""
    before = store.facts.get(ServedTask)
    epoch = max(before.epoch + 1 if before is not None else 1, int(time.time()))
    file = task.file
    store.facts.put(
        ServedTask(
            task.digest,
            epoch,
            file.fleet,
            file.algorithm,
            tuple(file.classes),
            settings=file.settings,
            rollout=file.rollout,
            limits=file.limits,
        )
    )
    return epoch
