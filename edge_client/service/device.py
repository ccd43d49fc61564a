"""The device program: performs the actions of the agent, and passes events to it."""

import contextlib
import logging
import math
import queue
import time
from dataclasses import replace

from edge_client.agent import events, state_machine
from edge_client.agent.state import Mode, State, UploadItem
from edge_client.config import Settings
from edge_client.service.blob_downloads import BlobDownloads
from edge_client.service.duplicates import OwnTopic, require_not_copied
from edge_client.service.outbox_check import drop_damaged, drop_forbidden
from edge_client.service.publisher import Publisher
from edge_client.service.receiver import Received, Receiver
from edge_client.service.worker import Worker
from edge_client.storage.device_state import DeviceState
from edge_client.storage.disk_space import free_bytes
from edge_client.storage.stored_values import (
    BuildProblem,
    EvaluatedHead,
    Heads,
    ManifestProblem,
    SpaceProblem,
    TaskProblem,
    UploadProblem,
)
from edge_client.storage.trials import MAX_ENDS, task_key
from edge_client.submission.builder import ShowDryRun
from protocol.cli import plain
from protocol.errors import BackboneMismatch, ConfigError, ProtofleetError, StateError
from protocol.log import event as log_event
from protocol.mqtt import reconnecting_session as mqtt
from protocol.wire.messages import DeviceInfo, Presence, RoundManifest, TaskManifest

log = logging.getLogger(__name__)

TICK_S = 0.5

MAX_TICK_S = 10.0
"""Seconds after which the device looks at its images and files although messages arrive all the time."""

EXPIRED = (
    "expired: {}; the broker withholds newer ones, the aggregator has not run for a month, or this device's clock is "
    "ahead: the head in use stays, nothing new is built or installed"
)
"""The problem of a device whose manifests have expired."""

_Event = mqtt.Event | events.Event | BaseException


class Device:
    """One device of one fleet, on a locked state directory; in a dry run `show` takes what would be sent."""

    def __init__(self, settings: Settings, store: DeviceState, *, show: ShowDryRun | None = None) -> None:
        self._settings = settings
        self._store = store
        self._is_dry_run = settings.mode is Mode.DRY_RUN
        self._inbox: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._worker = Worker(settings, store, emit=self._inbox.put, show=show)
        self._receiver = Receiver(settings, store, on_refused=self._send_info)
        self._downloads = BlobDownloads(store)
        require_not_copied(settings, store)
        self._publisher = Publisher(settings, store, on_event=self._inbox.put)
        self._own_topic = OwnTopic(settings, store, self._publisher, self._receiver)
        self._exit: events.Exit | None = None
        self._next_scan_s = 0.0
        self._ticked_s = math.inf
        self._problem = ""
        self._task_problem = ""
        self._expiry_problem = ""
        self._state = _stored_state(settings, store)

    def run(self) -> int:
        """Run until there is a reason to exit; returns the exit status.

        Raises:
            ProtofleetError: an expected failure that needs the operator.
        """
        self._ticked_s = time.monotonic()
        self._worker.start()
        self._publisher.start()
        try:
            self._recall()
            while self._exit is None:
                self._handle(self._next_event())
        finally:
            self._worker.stop()
            self._publisher.stop()
        if self._exit.code:
            raise ProtofleetError(self._exit.text)
        return 0

    def _next_event(self) -> _Event:
        if time.monotonic() < self._ticked_s + MAX_TICK_S:
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=TICK_S)
        return self._tick()

    def _tick(self) -> events.Event:
        """Look for what no message announces."""
        self._ticked_s = time.monotonic()
        if time.monotonic() >= self._next_scan_s and not self._state.building:
            self._next_scan_s = time.monotonic() + self._settings.rescan_s
            self._check_stored()
            self._worker.check_images()
        self._check_expiry()
        self._report_expiry()
        freed = frozenset(
            work
            for work, missing in self._state.missing_space.items()
            if free_bytes(missing.folder) >= missing.needed_bytes
        )
        return events.SpaceFreed(freed) if freed else events.Ticked()

    def _check_stored(self) -> None:
        """Download again what was deleted from disk, and leave a head that fails in `edge-client predict`."""
        state = self._state
        if missing := state.stored.difference(self._store.blobs.digests()):
            self._step(events.BlobsMissing(missing))
        if self._is_dry_run or state.installing is not None or state.installed is None:
            return
        head = self._store.heads_in_use().installed
        if (key := head.key if head else None) != state.installed:
            self._step(events.HeadReturned(key))
            self._send_info()

    def _handle(self, event: _Event) -> None:  # noqa: C901, PLR0912 - one case per event
        match event:
            case BaseException():
                raise event
            case mqtt.Received(topic=topic, payload=payload, retained=retained):
                log_event(log, logging.DEBUG, "message received", topic=topic, bytes=len(payload))
                try:
                    found = self._receiver.receive(topic, payload, retained=retained)
                    self._check_expiry()
                    for received in found:
                        self._take(received)
                except BackboneMismatch as error:
                    self._wait_for_another_task(error)
                self._report_expiry()
            case mqtt.Connected(max_packet_bytes=limit, address=ip):
                broker, device = self._settings.broker, self._settings.device_id
                log_event(log, logging.INFO, "connected to the broker", broker=broker, device=device)
                self._publisher.presence.connected(ip)
                self._announce()
                self._step(events.Connected(limit))
                if self._state.task is None:
                    log_event(log, logging.INFO, "waiting for the fleet's task", fleet=self._settings.fleet)
            case mqtt.Disconnected(reason=reason, retry_s=retry_s, repeated=repeated):
                level = logging.DEBUG if repeated else logging.WARNING
                log_event(log, level, reason, retry_s=retry_s)
                self._step(events.Disconnected())
            case mqtt.Unsendable(topic=topic, reason=reason) if topic == self._publisher.topic("up"):
                self._step(events.Unsendable(reason))
            case mqtt.Unsendable(topic=topic, reason=reason, repeated=repeated):
                level = logging.DEBUG if repeated else logging.ERROR
                log_event(log, level, "publication refused by the broker", topic=topic, reason=reason)
            case mqtt.Drained():
                self._step(events.Drained())
            case events.SubmissionBuilt(reason=reason):
                self._problem = reason
                if not self._is_dry_run:
                    self._store.set(BuildProblem(reason))
                self._step(event)
                self._announce()
            case events.BlobsMissing() if self._settings.broker is None:
                raise StateError(
                    "a blob was missing or damaged on disk: pass --broker HOST[:PORT] to download it"
                )
            case events.HeadInstalled():
                self._step(event)
                self._delete_unused()
                self._send_info()
            case _:
                self._step(event)

    def _check_expiry(self) -> None:
        """Note which manifests have expired, before anything follows from them."""
        if not self._is_dry_run:
            self._state = replace(self._state, expired=self._receiver.expired())

    def _report_expiry(self) -> None:
        stale = sorted(self._state.stale_manifests)
        problem = EXPIRED.format(", ".join(stale)) if stale else ""
        if bool(problem) == bool(self._expiry_problem):
            return
        if problem:
            log_event(log, logging.ERROR, problem, manifests=",".join(stale), clock=time.strftime("%Y-%m-%d"))
        self._expiry_problem = problem
        self._store.set(ManifestProblem(problem))
        self._send_info()

    def _wait_for_another_task(self, error: BackboneMismatch) -> None:
        """Keep the current task; a program that ends here would be restarted, and end again, for ever."""
        if self._settings.mode is not Mode.SERVICE:
            raise error
        self._set_task_problem(plain(f"{error}; waiting for another task"))

    def _set_task_problem(self, problem: str) -> None:
        if problem == self._task_problem:
            return
        if problem:
            log.error("%s", problem)
        self._task_problem = problem
        self._store.set(TaskProblem(problem))
        self._send_info()

    def _take(self, received: Received) -> None:
        """Handle what was received or recalled; the worker first, which drops jobs that are out of date."""
        if isinstance(received, Presence):
            warning = self._own_topic.warning
            self._own_topic.check(received, is_connected=self._state.connected)
            if self._own_topic.warning != warning:
                self._send_info()
            return
        if isinstance(received, events.TaskSeen):
            self._set_task_problem("")
        if isinstance(received, events.TaskSeen) and received.digest != self._state.task:
            self._worker.follow(received.digest)
            self._state = replace(self._state, stored=frozenset(self._store.blobs.digests()))
            self._step(received)
            if not received.recalled:
                self._delete_unused()
            return
        if isinstance(received, RoundManifest) and received != self._state.round:
            self._worker.round = received.number
        self._step(received)

    def _recall(self) -> None:
        """Start with the stored task and round; a dry run with a broker waits for the current ones.

        So does a device whose stored task has ended the program too often: the broker may have another one.
        """
        self._check_expiry()
        if not self._is_dry_run or self._settings.broker is None:
            for recalled in self._receiver.recall():
                if isinstance(recalled, events.TaskSeen) and self._has_failed(recalled.manifest):
                    log.error("the stored task ended the program %d times: waiting for the broker", MAX_ENDS)
                    return
                self._take(recalled)
        if self._settings.broker is None and not self._state.can_build:
            text = "not every blob of the task is stored: pass --broker HOST[:PORT] to download them"
            raise ConfigError(text)

    def _has_failed(self, manifest: TaskManifest) -> bool:
        return not self._is_dry_run and self._store.trials.ends(task_key(manifest)) >= MAX_ENDS

    def _step(self, event: events.Event) -> None:
        before = self._state.space_problem
        self._state, actions = state_machine.step(self._state, event, now_s=time.monotonic())
        if (problem := self._state.space_problem) != before:
            if not self._is_dry_run:
                self._store.set(SpaceProblem(problem))
            self._send_info()
        for action in actions:
            self._perform(action)

    def _perform(self, action: events.Action) -> None:  # noqa: C901, PLR0912 - one case per action
        match action:
            case events.BuildSubmission():
                self._worker.build(action)
            case events.InstallHead():
                self._worker.install(action)
            case events.OpenDownload(blob=blob, missing=missing):
                # Before any head: tasks, rounds and heads that are replaced again and again must not fill the disk.
                self._delete_unused()
                opened = self._downloads.open(blob, missing)
                if isinstance(opened, events.DownloadFinished):
                    self._inbox.put(opened)
                else:
                    self._step(opened)  # at once: the next message may be a broadcast frame
            case events.RequestBlob():
                self._publisher.request_blob(action)
            case events.AppendBlob():
                appended = self._downloads.append(action)
                if isinstance(appended, events.SpaceMissing):
                    self._step(appended)  # at once: the next frame's bytes would follow the wrong ones
                elif appended:
                    self._inbox.put(appended)
            case events.SendFrames():
                if not self._publisher.send_frames(action):  # replaced by a newer item
                    self._inbox.put(events.OutboxSeen(self._store.outbox.items()))
            case events.CheckOutbox():
                self._check_outbox()
            case events.StoreReceipt(item=item):
                self._store_receipt(item)
            case events.ReportBlocked(reason=reason):
                self._store.set(UploadProblem(reason))
                self._send_info()
            case events.Log(text=text, error=error):
                log.log(logging.ERROR if error else logging.INFO, "%s", text)
            case events.Exit():
                self._exit = action

    def _delete_unused(self) -> None:
        if not self._is_dry_run:
            self._state = replace(self._state, stored=self._downloads.delete_unused(self._state))

    def _check_outbox(self) -> None:
        """Build again what was damaged on disk: a submission from the images, an evaluation by another trial."""
        kinds = drop_damaged(self._store)
        if kinds:
            self._inbox.put(events.OutboxSeen(self._store.outbox.items()))
        if "submission" in kinds:
            self._inbox.put(events.BlobsMissing(frozenset(), "build"))
        if "evaluation" in kinds:
            self._inbox.put(events.HeadReturned(None))

    def _announce(self) -> None:
        self._publisher.send_presence()
        self._send_info()

    def _send_info(self) -> None:
        self._publisher.send_info(self._info())

    def _info(self) -> DeviceInfo:
        refused = self._receiver.refused
        problem = self._task_problem or self._state.space_problem or self._problem
        return self._publisher.info(
            self._state,
            problem=problem,
            refused_messages=refused,
            expiry=self._expiry_problem,
            warning=self._own_topic.warning,
        )

    def _store_receipt(self, item: UploadItem) -> None:
        head = self._store.get(Heads).installed
        facts = (EvaluatedHead(head.key),) if head is not None and head.key == item.head else ()
        if self._store.outbox.receive(item.digest, facts=facts) and item.kind == "submission":
            log_event(log, logging.INFO, "submission received by the aggregator", digest=item.digest)


def _stored_state(settings: Settings, store: DeviceState) -> State:
    """Return the state at the start; a head without an evaluation is installed again."""
    if settings.mode is not Mode.DRY_RUN:
        store.set(UploadProblem(), TaskProblem(), ManifestProblem(), SpaceProblem())
        drop_damaged(store)
        drop_forbidden(store, settings.max_epsilon)
    head, evaluated = store.heads_in_use().installed, store.get(EvaluatedHead).key
    key = head.key if head else None
    reported = {evaluated, *(item.head for item in store.outbox.items())}
    return State(
        mode=settings.mode,
        device=settings.device_id,
        stored=frozenset(store.blobs.digests()),
        installed=key if key in reported else None,
        evaluated=key if key == evaluated else None,
    )
