"""The aggregator: what it does beside the messages of devices."""

import contextlib
import logging
import queue
import time
from collections.abc import Sequence
from pathlib import Path

from aggregator.config.schema import TaskFile
from aggregator.heads.rollout import Rollout
from aggregator.heads.schedule import Schedule
from aggregator.intake.uploads import Uploads
from aggregator.messaging.blob_sender import BlobSender
from aggregator.messaging.embedded_broker import EmbeddedBroker
from aggregator.messaging.manifest_signer import identity_of
from aggregator.messaging.publisher import FleetPublisher
from aggregator.security.identity import aggregator_access, restore_access
from aggregator.security.key_rotation import require_fleet_key
from aggregator.server.announcements import TAKE_OVER, Announcements
from aggregator.server.event_loop import Event, EventLoop, Events
from aggregator.server.message_intake import MessageIntake
from aggregator.storage.store import Store
from aggregator.storage.stored_values import IntakeHeads, RoundRequest, ServedTask, TaskPreparation
from aggregator.tasks.task_preparation import Task, prepare_task
from aggregator.training.runner import Finished, Progress
from protocol.log import event as log_event
from protocol.mqtt import reconnecting_session as mqtt
from protocol.mqtt.own_presence import OwnPresence, Replaced, require_not_replaced
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, Brokers, addresses_of
from protocol.wire.presence import Duplicate
from protocol.wire.topics import FleetChannel, device_filters, fleet_topic

log = logging.getLogger(__name__)


class Aggregator:
    """A fleet's aggregator; `events` may have events of other threads.

    With `is_coordinator`, uploads and requests of devices are left to `aggregator receive`.

    Raises StateError or ConfigError if the state directory or a key cannot be used.
    """

    def __init__(
        self,
        task: Task,
        store: Store,
        *,
        broker: Brokers,
        access: BrokerAccess = NO_AUTHENTICATION,
        events: Events | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._task = task
        self._store = store
        events = events or queue.SimpleQueue()
        require_not_replaced(store.facts.get(Duplicate) or Duplicate(), command=TAKE_OVER)
        require_fleet_key(store)
        key, fleet = identity_of(store.folder), task.file.fleet
        presence = OwnPresence(epoch=_next_epoch(task, store), topic=fleet_topic(fleet, "state"), key=key)
        store.facts.put(task.intake)
        self._uploads = Uploads(store, max_bytes=task.intake.max_bytes, unfinished_s=task.intake.unfinished_s)
        self._training = Schedule(task, store, on_event=events.put)
        self._releases = Rollout(task, store)
        self._sum_reply = fleet_topic(fleet, "sums/reply")
        replies = [] if self._training.sum_lists is None else [self._sum_reply]
        self._publisher = FleetPublisher(
            broker,
            access=access,
            fleet=fleet,
            presence=presence,
            subscriptions=[*replies, *(() if is_coordinator else device_filters(fleet))],
            on_event=events.put,
            leads=store.database.leads,
            is_shared=store.database.is_shared,
        )
        restoration = self._training.restoration
        restoration.verify_all(self._releases.served)
        blob_sender = BlobSender(
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
            uploads=self._uploads,
            training=self._training,
            releases=self._releases,
            restoration=restoration,
        )
        self._intake = MessageIntake(
            store,
            task.intake,
            task.manifest,
            uploads=self._uploads,
            publisher=self._publisher,
            blob_sender=blob_sender,
        )
        self._intake_heads: IntakeHeads | None = None
        self._round_request = store.facts.get(RoundRequest)
        self._update_releases()
        self._loop = EventLoop(self._intake, self, events)

    def run(self) -> None:
        """Serve the task until `Stop`; raises like `EventLoop.run`."""
        self._loop.run(self._training.stop)

    def accepts(self, message: mqtt.Received) -> bool:
        """Return True for a message of a device; take note of one on the aggregator's own topics."""
        if message.topic == self._sum_reply:
            with self._uploads.guard():
                self._training.take_sum(message.payload)
            return False
        channel = self._publisher.own_topics.get(message.topic)
        if channel is not None:
            with self._uploads.guard():
                self._observe(channel, message.payload)
        return channel is None

    def _observe(self, channel: FleetChannel, payload: bytes) -> None:
        try:
            self._announcements.observe(channel, payload)
        except Replaced as replaced:
            if (
                not self._store.database.is_shared
            ):  # there, it would keep the fleet's other aggregators from starting
                with self._uploads.guard():
                    self._store.facts.put(replaced.duplicate)
            raise

    def handle(self, event: Event) -> None:
        match event:
            case mqtt.Connected(broker=broker, address=address):
                self._publisher.presence.connected(address)
                fleet, task = self._task.file.fleet, self._task.digest
                log_event(log, logging.INFO, "connected to the broker", broker=broker, fleet=fleet, task=task)
                self._announcements.connected()
                if self._training.sum_lists is not None:
                    self._training.sum_lists.connected()
            case mqtt.Disconnected():
                self._announcements.is_connected = False
            case Progress(figures=figures):
                self._training.store_progress(figures)
            case Finished():
                if self._training.finish(event):
                    self._update_releases()  # the round's tensors are served before devices know of them
                    self._announcements.open_round()

    def tick(self, *, is_resumed: bool) -> None:
        if is_resumed:
            self._reload()
        self._announcements.restore()
        self._update_releases()
        self._announcements.publish_new_head()
        self._announcements.refresh()
        self._announcements.restore_dropped()
        with self._uploads.guard():
            self._store.clock.keep()
            self._training.tick()
            self._training.restoration.tick()
            if (lists := self._training.sum_lists) is not None and (due := lists.request()) is not None:
                self._publisher.request_sum(due)
            self._read_round_request()
            for device, request in self._training.lost.requests():
                self._publisher.publish_to_device(device, "ack", request)

    def _reload(self) -> None:
        """Return to the stored state after a stop; while it cannot be read, the intake stays stopped."""
        with self._uploads.guard():
            self._training.reload()
            self._releases.reload()
        self._training.retry()

    def _update_releases(self) -> None:
        """Apply the newest head and the passing of time to the rollout, and store what receivers need of it."""
        with self._uploads.guard():
            self._releases.tick(self._training.state.head_version)
            heads = IntakeHeads(
                self._task.digest,
                newest=self._training.state.head_version,
                retained=frozenset(self._releases.retained),
                served=frozenset(self._releases.served),
            )
            if heads != self._intake_heads:
                self._intake.view.heads = heads
                self._store.facts.put(heads)
                self._intake_heads = heads

    def _read_round_request(self) -> None:
        """Publish the open round again if a receiver asks for it."""
        if self._task.file.settings.rounds is None:
            return
        if (request := self._store.facts.get(RoundRequest)) != self._round_request:
            self._round_request = request
            self._announcements.repeat_round()


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
    embedded_broker: bool = False,
    events: Events | None = None,
    is_coordinator: bool = False,
) -> None:
    """Serve a fleet, with a broker in this process if asked for, until `Stop` is put into `events`.

    With `is_coordinator`, programs of their own take the uploads, `aggregator receive`.

    Raises:
        ConfigError: the embedded broker cannot listen.
        StateError: the state directory cannot be used.
        ThreadFailed: a thread that it depends on has ended.
    """
    events = queue.SimpleQueue() if events is None else events
    with contextlib.ExitStack() as cleanup:
        if embedded_broker:
            embedded = EmbeddedBroker(addresses_of(broker)[0], on_failure=events.put)
            embedded.start()
            cleanup.callback(embedded.stop)
        aggregator = Aggregator(
            task,
            store,
            broker=broker,
            access=access,
            events=events,
            is_coordinator=is_coordinator,
        )
        aggregator.run()


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
    )
    with store.transaction():
        if task.manifest.continues and (before is None or before.digest != task.digest):
            adopted = store.submissions.adopt(task.digest, task.manifest.continues[0])
            log_event(log, logging.INFO, "submissions of the continued task count", submissions=adopted)
        store.facts.put(served)
    return epoch
