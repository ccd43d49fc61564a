"""`aggregator receive`: takes the uploads of some shards, stores them, and answers."""

import contextlib
import logging
import queue
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from aggregator.heads.accepted_submissions import AcceptedSubmissions
from aggregator.ingest.intake_status import Intake
from aggregator.ingest.receiver import Receiver
from aggregator.ingest.validation import expectation_of
from aggregator.messaging.blob_sender import BlobSender
from aggregator.messaging.publisher import Publisher
from aggregator.service.device_messages import DeviceMessages
from aggregator.service.event_loop import EventLoop, Events, Parts
from aggregator.service.receiving.shards import ShardAssignment
from aggregator.service.receiving.store_coordinator import StoreCoordinator
from aggregator.storage.store import Store
from aggregator.storage.stored_values import IntakeTask
from protocol.errors import BlobLost, MalformedMessage, ProtofleetError, StateError
from protocol.log import event
from protocol.mqtt import reconnecting_session as mqtt
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, Brokers
from protocol.storage.blobstore import BlobStore, state_errors
from protocol.storage.folder_lock import FolderLock
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_MANIFEST_BYTES, TaskManifest
from protocol.wire.topics import device_filters, parse_device_topic, shard_of

log = logging.getLogger(__name__)

RETRY_S = 1.0


class TaskReplaced(ProtofleetError):
    """Another task is served."""


class UploadReceiver(EventLoop):
    """Receives the shards that `assignment` has now, of the task that is served now.

    Args:
        store: the fleet's.
        task: the served task.
        folder: holds the unfinished uploads, over restarts.
        assignment: the receiver's shards.
        broker: where it connects.
        access: how it connects.

    Raises:
        StateError: the store or the folder cannot be used.
    """

    def __init__(
        self,
        store: Store,
        task: IntakeTask,
        *,
        folder: Path,
        assignment: ShardAssignment,
        broker: Brokers,
        access: BrokerAccess = NO_AUTHENTICATION,
    ) -> None:
        self._task = task
        self._assignment = assignment
        self._shards = assignment.shards
        self._is_connected = False
        manifest = decode(store.blobs.read(task.digest), TaskManifest, max_bytes=MAX_MANIFEST_BYTES)
        self._receiver = Receiver(
            store, folder=folder, max_bytes=task.max_bytes, unfinished_s=task.unfinished_s
        )
        events: Events = queue.SimpleQueue()
        publisher = Publisher(
            broker,
            access=access,
            fleet=task.fleet,
            name=f"receiver-{secrets.token_hex(6)}",
            subscriptions=device_filters(task.fleet, shards=self._shards),
            on_event=events.put,
        )
        accepted = AcceptedSubmissions(task.digest, task.settings, store)
        self._coordinator = StoreCoordinator(store, task, accepted)
        blob_sender = BlobSender(
            store.blobs,
            publisher,
            downloads_per_hour=task.limits.downloads_per_hour,
            verify=self._coordinator.verify,
        )
        messages = DeviceMessages(
            task=task,
            expectation=expectation_of(task, manifest),
            store=store,
            receiver=self._receiver,
            coordinator=self._coordinator,
            blob_sender=blob_sender,
        )
        parts = Parts(
            store=store,
            receiver=self._receiver,
            publisher=publisher,
            blob_sender=blob_sender,
            accepted=accepted,
            messages=messages,
        )
        super().__init__(parts, events=events)

    def _store_messages(self, messages: list[mqtt.Received]) -> None:
        """Store all messages durably, and keep other receivers from writing for as short as possible.

        Most of the work comes before the transaction. The blobs of a folder get their names within it, since the
        coordinator deletes those that it does not know.
        """
        store, device_messages = self._parts.store, self._parts.messages
        self._refresh()
        with device_messages.deferring(), store.snapshot():
            for message in messages:
                self._handle_message(message)
        store.database.check_file()
        if not isinstance(store.blobs, BlobStore):
            self._parts.accepted.flush()
        if device_messages.has_deferred():
            with store.transaction():
                self._refresh()
                device_messages.store_deferred()
                self._parts.accepted.flush()

    def _refresh(self) -> None:
        if not self._coordinator.refresh():
            raise TaskReplaced("another task is served")

    def _handle_message(self, message: mqtt.Received) -> None:
        """Handle a message of the receiver's shards; all receivers get those of topics without a shard."""
        with contextlib.suppress(MalformedMessage):
            where = parse_device_topic(message.topic)
            if where.channel != "up" and shard_of(where.device) not in self._shards:
                return
        super()._handle_message(message)

    def _disconnected(self) -> None:
        self._is_connected = False

    def _connected(self, event_: mqtt.Connected) -> None:
        self._is_connected = True
        self._assignment.resume()
        event(log, logging.INFO, "connected to the broker", broker=event_.broker, shards=len(self._shards))

    def _reload(self) -> None:
        self._parts.accepted.discard()

    def _tick(self) -> None:
        with self._receiver.guard():
            if self._is_connected:  # otherwise the others take its shards
                self._assignment.tick(self._receiver.intake)
            is_served = self._coordinator.refresh()
            self._is_over = not is_served or self._assignment.shards != self._shards
            if self._coordinator.deleted:
                self._receiver.drop(self._coordinator.deleted)
                self._coordinator.deleted.clear()


@contextlib.contextmanager
def receiver_folder(state: Path, name: str) -> Iterator[Path]:
    """Lock the folder of a receiver's unfinished uploads inside `state`, which stay there.

    Raises:
        StateError: it cannot be written, or another receiver has the same name.
    """
    parent = state / "receivers"
    folder, lock = parent / name, FolderLock(parent, f"{name}.lock")
    with state_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not lock.take():
        raise StateError(f"a receiver of the name {name} runs already on {state}: give another --name")
    try:
        yield folder
    finally:
        lock.release()


def receive(
    store: Store,
    *,
    folder: Path,
    name: str,
    fixed: frozenset[int] | None,
    broker: Brokers,
    access: BrokerAccess = NO_AUTHENTICATION,
) -> None:
    """Receive uploads until an exception, such as that of a signal, ends it.

    Args:
        store: the fleet's.
        folder: holds the unfinished uploads, over restarts.
        name: of this receiver, unique in the fleet.
        fixed: the shards; None to divide them with the other receivers.
        broker: where it connects.
        access: how it connects.

    Raises:
        StateError: the store or the folder cannot be used at the start.
        ThreadFailed: a thread that it depends on has ended.
    """
    assignment = ShardAssignment(store, name, fixed=fixed)
    problem = ""
    is_started = False
    try:
        while True:
            try:
                program = _program(store, folder, assignment, broker=broker, access=access)
                reason = "" if program is not None else "no task yet: start `aggregator coordinate`"
            except BlobLost as error:
                with contextlib.suppress(StateError):
                    store.report_lost(error.digest)
                program, reason = None, str(error)
            except StateError as error:
                if not is_started:
                    raise
                program, reason = None, str(error)
            if program is not None:
                is_started = True
                with contextlib.suppress(TaskReplaced):
                    program.run()
                continue
            if reason != problem:
                event(log, logging.WARNING, "cannot receive: retrying", reason=reason)
            problem = reason
            time.sleep(RETRY_S)
    finally:
        with contextlib.suppress(StateError):  # otherwise the others notice it after DEAD_S
            assignment.end()


def _program(
    store: Store, folder: Path, assignment: ShardAssignment, *, broker: Brokers, access: BrokerAccess
) -> UploadReceiver | None:
    """Return a receiver of the task that is served now; None if there is none."""
    assignment.tick(Intake())
    task = store.facts.get(IntakeTask)
    if task is None:
        return None
    return UploadReceiver(store, task, folder=folder, assignment=assignment, broker=broker, access=access)
