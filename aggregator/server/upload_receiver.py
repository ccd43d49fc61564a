"""`aggregator receive`: takes the uploads of some shards, fixed by an operator or divided among the receivers alive."""

import contextlib
import hashlib
import logging
import queue
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from aggregator.intake.intake_status import IntakeStatus
from aggregator.intake.uploads import Uploads
from aggregator.messaging.blob_sender import BlobSender
from aggregator.messaging.publisher import Publisher
from aggregator.server.event_loop import Event, EventLoop, Events, Stop
from aggregator.server.message_intake import MessageIntake, TaskReplaced
from aggregator.storage.programs import ReceiverRecord
from aggregator.storage.store import Store
from aggregator.storage.stored_values import IntakeTask
from protocol.errors import BlobLost, MalformedMessage, StateError
from protocol.log import event
from protocol.mqtt import reconnecting_session as mqtt
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, Brokers
from protocol.storage.blobstore import state_errors
from protocol.storage.folder_lock import FolderLock
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_MANIFEST_BYTES, TaskManifest
from protocol.wire.topics import SHARDS, device_filters, parse_device_topic, shard_of

log = logging.getLogger(__name__)


REPORT_S = 2.0
"""Seconds between two reports of a receiver."""

DEAD_S = 10.0
"""Seconds without a report after which the other receivers divide a receiver's shards."""

FORGET_S = 3600.0
"""Seconds without a report after which another receiver deletes a receiver's row."""


def divided(shards: Collection[int], names: Collection[str]) -> dict[str, frozenset[int]]:
    """Return each receiver's shards, by rendezvous hashing: another receiver changes the owner of few shards."""

    def owner(shard: int) -> str:
        return max(names, key=lambda name: hashlib.sha256(f"{shard}/{name}".encode()).digest())

    owners = {shard: owner(shard) for shard in shards} if names else {}
    return {name: frozenset(shard for shard in owners if owners[shard] == name) for name in names}


class ShardAssignment:
    """The shards of this receiver, which reports itself in the store and watches the other receivers there.

    Each receiver measures by its own clock how long another one has not reported. For some seconds two may have the
    same shard, or none has it: a submission that is received twice counts once, and devices upload again.
    """

    def __init__(self, store: Store, name: str, *, fixed: frozenset[int] | None) -> None:
        self._store = store
        self._name = name
        self._fixed = fixed
        self._seen: dict[str, tuple[int, float]] = {}
        """The number of reports of each receiver, and when it was another one."""
        self._report_s = 0.0
        self._reports: int | None = None
        """The number of reports under this name, after this receiver's last one."""
        self._is_name_shared = False
        self.shards = fixed if fixed is not None else frozenset[int]()

    def resume(self) -> None:
        """Go on after a time without `tick`, in which it has not seen what the other receivers have reported."""
        if time.monotonic() > self._report_s + DEAD_S:
            self._seen.clear()

    def tick(self, intake: IntakeStatus) -> None:
        """Report if it is time, and find out which receivers are alive; raises StateError."""
        now_s = time.monotonic()
        if now_s < self._report_s:
            return
        self._report_s = now_s + REPORT_S
        known, self._reports = self._reports, None  # if a report fails, it may have been stored all the same
        self._store.receivers.report(self._record(intake))
        stored = self._store.receivers.all()
        # One of the same name that ends deletes the row.
        reports, _ = stored.setdefault(self._name, (1, self._record(intake)))
        if known is not None and reports > known + 1:
            self._warn_of_same_name()
        for name, (count, _) in stored.items():
            if self._seen.get(name, (-1, 0.0))[0] != count:
                self._seen[name] = (count, now_s)
            elif now_s > self._seen[name][1] + FORGET_S:
                self._store.receivers.delete(name)
        alive = {
            name: record
            for name, (_, record) in stored.items()
            if name == self._name or now_s < self._seen[name][1] + DEAD_S
        }
        if (shards := self._own(alive)) != self.shards:
            self.shards = shards
            self._store.receivers.report(self._record(intake))
            reports += 1
        self._reports = reports

    def _warn_of_same_name(self) -> None:
        if not self._is_name_shared:
            self._is_name_shared = True
            text = (
                "another receiver has the same name, and receives the same shards: give each its own --name"
            )
            event(log, logging.WARNING, text, receiver=self._name)

    def _own(self, alive: Mapping[str, ReceiverRecord]) -> frozenset[int]:
        if self._fixed is not None:
            return self._fixed
        taken = {shard for record in alive.values() if record.is_fixed for shard in record.shards}
        names = [name for name, record in alive.items() if not record.is_fixed]
        return divided([shard for shard in range(SHARDS) if shard not in taken], names)[self._name]

    def _record(self, intake: IntakeStatus) -> ReceiverRecord:
        return ReceiverRecord(
            name=self._name,
            shards=tuple(sorted(self.shards)),
            is_fixed=self._fixed is not None,
            seen_s=time.time(),
            stopped_s=intake.stopped_s,
            reason=intake.reason,
        )

    def end(self) -> None:
        """Let the other receivers divide this one's shards now; raises StateError."""
        self._store.receivers.delete(self._name)


RETRY_S = 1.0

VERIFY_S = 60.0
"""Seconds for which a verified blob is used without being read as a whole again."""


class UploadReceiver:
    """Receives the shards that `assignment` has now, of the task that is served now.

    `folder` holds the unfinished uploads, over restarts. Raises StateError if it or the store cannot be used.
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
        self._store = store
        self._assignment = assignment
        self._shards = assignment.shards
        self._is_connected = False
        self._verified_s: dict[bytes, float] = {}
        self._uploads = Uploads(
            store, folder=folder, max_bytes=task.max_bytes, unfinished_s=task.unfinished_s
        )
        self._events: Events = queue.SimpleQueue()
        publisher = Publisher(
            broker,
            access=access,
            fleet=task.fleet,
            name=f"receiver-{secrets.token_hex(6)}",
            subscriptions=device_filters(task.fleet, shards=self._shards),
            on_event=self._events.put,
        )
        blob_sender = BlobSender(
            store.blobs, publisher, downloads_per_hour=task.limits.downloads_per_hour, verify=self._verify
        )
        self._intake = MessageIntake(
            store,
            task,
            decode(store.blobs.read(task.digest), TaskManifest, max_bytes=MAX_MANIFEST_BYTES),
            uploads=self._uploads,
            publisher=publisher,
            blob_sender=blob_sender,
        )

    def run(self) -> None:
        """Receive uploads until the shards are others; raises like `EventLoop.run`."""
        EventLoop(self._intake, self, self._events).run()

    def accepts(self, message: mqtt.Received) -> bool:
        with contextlib.suppress(MalformedMessage):
            where = parse_device_topic(message.topic)
            return where.channel == "up" or shard_of(where.device) in self._shards
        return True

    def handle(self, happened: Event) -> None:
        match happened:
            case mqtt.Connected(broker=broker):
                self._is_connected = True
                self._assignment.resume()
                event(log, logging.INFO, "connected to the broker", broker=broker, shards=len(self._shards))
            case mqtt.Disconnected():
                self._is_connected = False

    def tick(self, *, is_resumed: bool) -> None:  # noqa: ARG002 - nothing depends on it
        with self._uploads.guard():
            if self._is_connected:  # otherwise the others take its shards
                self._assignment.tick(self._uploads.status)
        if self._assignment.shards != self._shards:
            self._events.put(Stop())

    def _verify(self, digests: Iterable[bytes]) -> None:
        """Verify blobs that are sent, and report one that is missing or damaged; raises StateError for it."""
        for digest in digests:
            if (now_s := time.monotonic()) >= self._verified_s.get(digest, 0.0):
                try:
                    self._store.blobs.verified_path(digest)
                except BlobLost:
                    self._store.report_lost(digest)
                    raise
                self._verified_s[digest] = now_s + VERIFY_S


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

    `folder` holds the unfinished uploads, over restarts; `name` is unique in the fleet; `fixed` are the shards, None to
    divide them with the other receivers.

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
    assignment.tick(IntakeStatus())
    task = store.facts.get(IntakeTask)
    if task is None:
        return None
    return UploadReceiver(store, task, folder=folder, assignment=assignment, broker=broker, access=access)
