"""The device program: passes events to the state machine, performs its actions, and publishes what it reports."""

import contextlib
import logging
import math
import queue
import time
from typing import TYPE_CHECKING, NamedTuple

from edge_client.config import Settings
from edge_client.core import events, state_machine
from edge_client.core.state import Mode, UploadItem
from edge_client.privacy.adoption import adopt, record_in
from edge_client.privacy.charges import requires_privacy
from edge_client.service import notices
from edge_client.service.blob_downloads import BlobDownloads, import_backbones
from edge_client.service.data_folder import Scanned
from edge_client.service.duplicates import TAKE_OVER, OwnTopic
from edge_client.service.inbox import Inbox, Message
from edge_client.service.job_processes import FromChild
from edge_client.service.job_results import ShowDryRun
from edge_client.service.jobs import Due, JobEvent, Jobs
from edge_client.service.publisher import Publisher
from edge_client.service.stored_start import drop_forbidden, stored_state
from edge_client.store.app_files import Drift, read_value
from edge_client.store.culprits import MAX_DEATHS, task_key
from edge_client.store.device_state import DeviceState
from edge_client.store.disk_space import DiskAlmostFull, free_bytes
from edge_client.store.stored_values import (
    DemandedUnit,
    Heads,
    Holdout,
    PrivacySpent,
)
from protocol.cli import plain
from protocol.errors import (
    BackboneMismatch,
    ConfigError,
    MalformedMessage,
    PrivacyRefused,
    ProtofleetError,
    StateError,
)
from protocol.log import event as log_event
from protocol.log import notify
from protocol.mqtt import reconnecting_session as mqtt
from protocol.mqtt.own_presence import require_not_replaced
from protocol.service_manager import ServiceManager
from protocol.wire.codec import encode
from protocol.wire.messages import (
    DeviceInfo,
    Presence,
    PrivacyRecord,
    Receipt,
    RoundManifest,
)
from protocol.wire.presence import Duplicate

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

TICK_S = 0.5

MAX_TICK_S = 10.0
"""Seconds after which the device looks at its images and files although messages arrive all the time."""

_LOGGED = {"task": logging.ERROR, "manifest": logging.ERROR, "link": logging.WARNING}
"""Problems that no action of the state machine logs, with their levels."""


Incoming = mqtt.Event | JobEvent | events.Event | events.Exit | BaseException
"""Events of the MQTT session, of jobs and of the state machine's own actions, and errors of threads."""


class _Reported(NamedTuple):
    """Facts of which a change publishes the info again; refused messages by reason, as a power of two."""

    problems: "Mapping[str, str]"
    refused: "Mapping[str, int]"
    warning: str
    drift: float | None
    has_record: bool


class Device:
    """One device of one fleet, on a locked state directory; in a dry run `show` takes what would be sent."""

    def __init__(self, settings: Settings, store: DeviceState, *, show: ShowDryRun | None = None) -> None:
        self._settings = settings
        self._store = store
        self._is_dry_run = settings.mode is Mode.DRY_RUN
        if not self._is_dry_run:
            require_not_replaced(store.get(Duplicate), command=TAKE_OVER)
            store.set(Holdout(settings.holdout))
            store.set(DemandedUnit(settings.privacy_unit or ""))
        self._events: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self._jobs = Jobs(settings, store, emit=self._events.put, show=show)
        self._inbox = Inbox(settings, store)
        self._publisher = Publisher(settings, store, on_event=self._events.put)
        self._own_topic = OwnTopic(settings, store, self._publisher, refuse=self._inbox.refuse)
        self._downloads = BlobDownloads(store)
        self._state = stored_state(settings, store)
        if not self._is_dry_run:
            store.set(self._state.durable)
        self._exit: events.Exit | None = None
        self._info_is_due = False
        self._drift = read_value(store.folder, Drift).newest(now_s=time.time())
        self._reported = _Reported({}, {}, "", None, has_record=False)
        self._sent_info: DeviceInfo | None = None
        self._next_scan_s = 0.0
        self._ticked_s = math.inf

    def run(self) -> int:
        """Run until there is a reason to exit; returns the exit status.

        Raises:
            ProtofleetError: an expected failure that needs the operator.
        """
        self._ticked_s = time.monotonic()
        try:
            self._jobs.start()
            self._publisher.start()
            self._recall()
            manager = ServiceManager()
            manager.ready()
            while self._exit is None:
                manager.alive()
                self._handle(self._next_event())
        finally:
            self._jobs.stop()
            self._publisher.stop()
        if self._exit.code:
            raise ProtofleetError(self._exit.text)
        return 0

    def stop(self) -> None:
        """Make `run` return 0 soon, from any thread."""
        self._events.put(events.Exit(0))

    def info(self) -> DeviceInfo:
        """Return what the device publishes of itself."""
        return self._publisher.info(
            self._state,
            warning=self._own_topic.warning,
            drift=self._drift,
            refused=dict(self._inbox.refused),
        )

    def _next_event(self) -> Incoming:
        if time.monotonic() < self._ticked_s + MAX_TICK_S:
            with contextlib.suppress(queue.Empty):
                return self._events.get(timeout=min(TICK_S, self._jobs.pause_s()))
        return self._tick()

    def _tick(self) -> events.Event:
        """Look for what no message announces."""
        self._ticked_s = time.monotonic()
        if time.monotonic() >= self._next_scan_s and not self._state.building:
            self._next_scan_s = time.monotonic() + self._settings.rescan_s
            self._check_stored()
            self._jobs.check_images()
        self._jobs.tick()
        self._check_expiry()
        freed = frozenset(
            work
            for work, missing in self._state.missing_space.items()
            if free_bytes(missing.folder) >= missing.needed_bytes
        )
        return events.SpaceFreed(freed) if freed else events.Ticked()

    def _check_stored(self) -> None:
        """Download again what was deleted from disk, and take over what the programs beside the service have stored."""
        state = self._state
        if missing := state.stored.difference(self._store.blobs.digests()):
            self._step(events.BlobsMissing(missing))
        if self._is_dry_run or state.installing is not None or state.installed is None:
            return
        drift = read_value(self._store.folder, Drift).newest(now_s=time.time())
        self._drift = drift
        heads, reason = self._store.leave_failed_heads()
        head = heads.installed
        if (key := head.key if head else None) != state.installed:
            self._step(events.HeadReturned(key, reason))
            self._info_is_due = True
            if reason:
                self._notify_head(reason)
            self._notify_head("")

    def _handle(self, event: Incoming) -> None:
        """Handle an event, then report what has changed."""
        self._react(event)
        self._report()

    def _react(self, event: Incoming) -> None:  # noqa: C901, PLR0912 - one case per event
        match event:
            case BaseException():
                raise event
            case events.Exit():
                self._exit = event
            case FromChild() | Scanned() | Due():
                if (happened := self._jobs.handle(event)) is not None:
                    self._react(happened)
            case mqtt.Received(topic=topic, payload=payload, retained=retained):
                log_event(log, logging.DEBUG, "message received", topic=topic, bytes=len(payload))
                message = self._inbox.receive(topic, payload, retained=retained)
                self._check_expiry()
                self._take(message)
                if message is None and topic == self._publisher.topic("state"):
                    # Another client has cleared or overwritten it.
                    self._publisher.send_presence()
                    self._info_is_due = True
            case mqtt.Connected(address=ip, broker=broker):
                device = self._settings.device_id
                log_event(log, logging.INFO, "connected to the broker", broker=broker, device=device)
                notify(notices.BrokerConnected(broker=str(broker)))
                self._publisher.presence.connected(ip)
                self._publisher.send_presence()
                self._info_is_due = True
                self._step(event)
                if self._state.task is None:
                    log_event(log, logging.INFO, "waiting for the fleet's task", fleet=self._settings.fleet)
            case mqtt.Disconnected(reason=reason, retry_s=retry_s, repeated=repeated, broker=broker):
                level = logging.DEBUG if repeated else logging.WARNING
                log_event(log, level, reason, broker=broker, retry_s=retry_s)
                notify(notices.BrokerDisconnected(broker=str(broker), reason=reason, retry_s=retry_s))
                self._step(event)
            case mqtt.Unsendable(topic=topic, reason=reason, repeated=repeated) if (
                topic != self._publisher.topic("up")
            ):
                level = logging.DEBUG if repeated else logging.ERROR
                log_event(log, level, "publication refused by the broker", topic=topic, reason=reason)
            case events.SubmissionBuilt(reason=reason):
                if reason:
                    notify(notices.ProblemReported(kind="build", text=reason))
                self._info_is_due = True
                self._step(event)
            case events.BlobsMissing() if self._settings.broker is None:
                raise StateError(
                    "a blob was missing or damaged on disk: pass --broker HOST[:PORT] to download it"
                )
            case events.HeadInstalled(reason=reason):
                self._notify_head(reason)
                self._step(event)
                self._delete_unused()
                self._info_is_due = True
            case _:
                self._step(event)

    def _report(self) -> None:
        """Log and publish problems that have changed, and publish the device's info when it is due."""
        # Refused messages are reported when the number for one reason reaches a power of two.
        refused = {reason: count.bit_length() for reason, count in self._inbox.refused.items()}
        state, own_topic = self._state, self._own_topic
        reported = _Reported(state.problems, refused, own_topic.warning, self._drift, state.has_record)
        before, self._reported = self._reported, reported
        for kind, text in state.problems.items():
            if text != before.problems.get(kind):
                notify(notices.ProblemReported(kind=kind, text=text))
            if kind in _LOGGED and text != before.problems.get(kind):
                clock = time.strftime("%Y-%m-%d") if kind == "manifest" else None
                log_event(log, _LOGGED[kind], text, clock=clock)
        if not self._is_dry_run and (self._info_is_due or reported != before):
            info = self.info()
            # When an equal one is sent would tell of what it leaves out under differential privacy.
            if self._info_is_due or info != self._sent_info:
                self._publisher.send_info(info)
            self._info_is_due, self._sent_info = False, info

    def _notify_head(self, problem: str) -> None:
        if problem:
            notify(notices.ProblemReported(kind="head", text=problem))
        elif (head := self._store.get(Heads).installed) is not None:
            notify(
                notices.HeadInstalled(
                    version=head.version, round=head.round, correct=head.correct, images=head.total
                )
            )

    def _check_expiry(self) -> None:
        """Note which manifests have expired, before anything follows from them."""
        if not self._is_dry_run and (expired := self._inbox.expired()) != self._state.expired:
            self._step(events.ManifestsExpired(expired))

    def _take(self, message: Message | None) -> None:
        match message:
            case None:
                return
            case Presence():
                self._own_topic.check(message, is_connected=self._state.connected)
                return
            case events.TaskSeen():
                self._take_task(message)
                return
            case PrivacyRecord():
                self._compare_record(message)
                return
            case RoundManifest() if message != self._state.round and not self._is_dry_run:
                before, digest = self._state.durable.round, self._store.blobs.put(encode(message))
                self._step(message)
                if before not in (b"", digest):
                    self._store.blobs.delete([before])
                return
            case Receipt(status="refused", reason="signature", digest=digest) if any(
                upload.digest == digest for upload in self._state.uploads
            ):
                self._own_topic.check_refused_key()
            case events.AggregatorStarted():
                self._read_outbox()  # with refused items: the aggregator's task file may have changed
        self._step(message)

    def _take_task(self, seen: events.TaskSeen) -> None:
        """Follow a task; with local backbones that are not the task's, keep the current one."""
        is_new = seen.digest != self._state.task
        if is_new:
            try:
                self._store_task(seen)
            except BackboneMismatch as error:
                # A service that ended here would be restarted, and end again, for ever.
                if self._settings.mode is not Mode.SERVICE:
                    raise
                problem = plain(f"{error}; waiting for another task")
                self._step(events.TaskRefused(problem))
                return
            if (stored := frozenset(self._store.blobs.digests())) != self._state.stored:
                self._step(events.BlobsStored(stored))
        self._step(seen)
        if is_new and not seen.recalled:
            self._delete_unused()
        if is_new or seen.is_renewed:
            # Receipts are not signed. What a forged one prevents is sent when the aggregator has signed the task again.
            self._read_outbox()

    def _store_task(self, seen: events.TaskSeen) -> None:
        manifest = seen.manifest
        if not seen.recalled:
            import_backbones(self._store.blobs, self._settings.backbones, manifest.backbones)
        log_event(
            log,
            logging.INFO,
            "task received",
            task=seen.digest.hex()[:12],
            algorithm=manifest.algorithm,
            classes=len(manifest.classes),
            backbones=",".join(blob.name for blob in manifest.backbones),
        )
        notify(
            notices.TaskReceived(
                task=seen.digest.hex(), algorithm=manifest.algorithm, classes=manifest.classes
            )
        )
        if not self._is_dry_run and not seen.recalled:
            self._store.blobs.put(seen.payload)

    def _read_outbox(self) -> None:
        self._step(events.OutboxSeen(self._store.outbox.items()))

    def _recall(self) -> None:
        """Start with the stored task and round; a dry run with a broker waits for the current ones.

        So does a device whose stored task has ended too many jobs: the broker may have another one.
        """
        self._check_expiry()
        if not self._is_dry_run or self._settings.broker is None:
            for recalled in self._inbox.recall():
                if isinstance(recalled, RoundManifest):
                    self._step(recalled)
                elif self._has_failed(recalled):
                    log.error("the stored task ended %d jobs: waiting for the broker", MAX_DEATHS)
                    return
                else:
                    self._take_task(recalled)
        if self._settings.broker is None and not self._state.can_build:
            text = "not every blob of the task is stored: pass --broker HOST[:PORT] to download them"
            raise ConfigError(text)

    def _has_failed(self, seen: events.TaskSeen) -> bool:
        deaths = self._store.culprits.deaths().get(task_key(seen.manifest).hex(), 0)
        return not self._is_dry_run and deaths >= MAX_DEATHS

    def _step(self, event: events.Event) -> None:
        """Let the state machine handle an event, and perform the actions that follow."""
        before = self._state.durable
        self._state, actions = state_machine.step(self._state, event, now_s=time.monotonic())
        if not self._is_dry_run and (durable := self._state.durable) != before:
            self._store.set(durable)
        for action in actions:
            try:
                self._perform(action)
            except DiskAlmostFull as error:
                # At once: the bytes of the next frame would follow the wrong ones.
                self._step(events.SpaceMissing(error.missing))

    def _perform(self, action: events.Action) -> None:  # noqa: C901, PLR0912 - one case per action
        match action:
            case events.BuildSubmission():
                self._jobs.build(action)
            case events.InstallHead():
                self._jobs.install(action)
            case events.CancelJobs(jobs=jobs):
                self._jobs.cancel(*jobs)
            case events.OpenDownload(blob=blob, missing=missing):
                # Before any head: tasks, rounds and heads that are replaced again and again must not fill the disk.
                self._delete_unused()
                opened = self._downloads.open(blob, missing)
                if isinstance(opened, events.DownloadFinished):
                    self._events.put(opened)
                else:
                    self._step(opened)  # at once: the next message may be a broadcast frame
            case events.RequestBlob():
                self._publisher.request_blob(action)
            case events.AppendBlob():
                if finished := self._downloads.append(action):
                    self._events.put(finished)
            case events.SendRecord():
                self._compare_record(None)
            case events.SendFrames():
                if not self._publisher.send_frames(action):  # replaced by a newer item
                    self._events.put(events.OutboxSeen(self._store.outbox.items()))
            case events.CheckOutbox():
                self._check_outbox()
            case events.DropForbidden():
                drop_forbidden(self._store, self._settings)
                self._events.put(events.OutboxSeen(self._store.outbox.items()))
            case events.StoreReceipt(item=item):
                self._store_receipt(item)
            case events.Log(text=text, error=error):
                log.log(logging.ERROR if error else logging.INFO, "%s", text)
            case events.Exit():
                self._exit = action

    def _compare_record(self, named: PrivacyRecord | None) -> None:
        """Send the record of the device's releases, or adopt what the aggregator's answer has of others.

        A damaged ledger has no record: the build says so.
        """
        is_complete, is_known = True, requires_privacy(self._settings, self._store.ledger)
        with contextlib.suppress(PrivacyRefused):
            if named is None:
                self._publisher.send_record(record_in(self._store.ledger))
                return
            try:
                is_complete = adopt(self._store, self._settings, named.releases)
            except MalformedMessage as error:  # nothing is released until another answer
                log_event(log, logging.ERROR, "record of private submissions refused", reason=error)
                return
            self._info_is_due |= self._store.get(PrivacySpent).adopted > 0
        ends_task = not is_known and requires_privacy(self._settings, self._store.ledger)
        self._events.put(events.RecordAdopted(is_complete=is_complete, ends_task=ends_task))

    def _check_outbox(self) -> None:
        """Build again what was damaged on disk: a submission from the images, an evaluation by another trial."""
        kinds = {item.kind for item in self._store.outbox.drop_damaged()}
        if kinds:
            self._events.put(events.OutboxSeen(self._store.outbox.items()))
        if "submission" in kinds:
            self._events.put(events.BlobsMissing(frozenset(), "build"))
        if "evaluation" in kinds:
            self._events.put(events.HeadReturned(None))

    def _store_receipt(self, item: UploadItem) -> None:
        if self._store.outbox.receive(item.digest) and item.kind == "submission":
            log_event(log, logging.INFO, "submission received by the aggregator", digest=item.digest)
            notify(notices.SubmissionReceived(submission=item.digest.hex()))

    def _delete_unused(self) -> None:
        if (
            not self._is_dry_run
            and (left := self._downloads.delete_unused(self._state)) != self._state.stored
        ):
            self._step(events.BlobsStored(left))
