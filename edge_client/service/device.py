"""The device program: passes what happens to the agent, and publishes what the device reports."""

import contextlib
import logging
import math
import queue
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_client.agent import events
from edge_client.agent.state import Mode
from edge_client.config import Settings
from edge_client.service.duplicates import TAKE_OVER, OwnTopic
from edge_client.service.publisher import Publisher
from edge_client.service.receiver import Received, Receiver
from edge_client.service.report import Report
from edge_client.service.running_agent import Inbox, Incoming, RunningAgent, Stop, stored_state
from edge_client.service.worker import Worker
from edge_client.storage.crash_counter import MAX_CRASHES, task_key
from edge_client.storage.device_state import DeviceState
from edge_client.storage.disk_space import free_bytes
from edge_client.storage.stored_values import BuildProblem, ManifestProblem, TaskProblem
from protocol.cli import plain
from protocol.errors import BackboneMismatch, ConfigError, ProtofleetError, StateError
from protocol.log import event as log_event
from protocol.mqtt import reconnecting_session as mqtt
from protocol.mqtt.own_presence import require_not_replaced
from protocol.service_manager import ServiceManager
from protocol.wire.messages import Presence, RoundManifest, TaskManifest
from protocol.wire.presence import Duplicate

if TYPE_CHECKING:
    from edge_client.submission.builder import ShowDryRun

log = logging.getLogger(__name__)

TICK_S = 0.5

MAX_TICK_S = 10.0
"""Seconds after which the device looks at its images and files although messages arrive all the time."""

EXPIRED = (
    "expired: {}; the broker withholds newer ones, the aggregator has not run for a month, or this device's clock is "
    "ahead: the head in use stays, nothing new is built or installed"
)
"""The problem of a device whose manifests have expired."""


class Device:
    """One device of one fleet, on a locked state directory; in a dry run `show` takes what would be sent."""

    def __init__(self, settings: Settings, store: DeviceState, *, show: "ShowDryRun | None" = None) -> None:
        self._settings = settings
        self._store = store
        self._is_dry_run = settings.mode is Mode.DRY_RUN
        if not self._is_dry_run:
            require_not_replaced(store.get(Duplicate), command=TAKE_OVER)
        self._inbox: Inbox = queue.SimpleQueue()
        self._worker = Worker(settings, store, emit=self._inbox.put, show=show)
        self._report = Report(settings, store)
        self._receiver = Receiver(settings, store, self._report)
        self._publisher = Publisher(settings, store, on_event=self._inbox.put)
        self._own_topic = OwnTopic(settings, store, self._publisher, self._report)
        self._agent = RunningAgent(
            store,
            stored_state(settings, store),
            worker=self._worker,
            publisher=self._publisher,
            report=self._report,
            inbox=self._inbox,
        )
        self._next_scan_s = 0.0
        self._ticked_s = math.inf

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
            manager = ServiceManager()
            manager.ready()
            while self._agent.exit is None:
                manager.alive()
                self._handle(self._next_event())
        finally:
            self._worker.stop()
            self._publisher.stop()
        if self._agent.exit.code:
            raise ProtofleetError(self._agent.exit.text)
        return 0

    def stop(self) -> None:
        """Make `run` return 0 soon, from any thread."""
        self._inbox.put(Stop())

    def _next_event(self) -> Incoming:
        if time.monotonic() < self._ticked_s + MAX_TICK_S:
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=TICK_S)
        return self._tick()

    def _tick(self) -> events.Event:
        """Look for what no message announces."""
        self._ticked_s = time.monotonic()
        if time.monotonic() >= self._next_scan_s and not self._agent.state.building:
            self._next_scan_s = time.monotonic() + self._settings.rescan_s
            self._check_stored()
            self._worker.check_images()
        self._check_expiry()
        freed = frozenset(
            work
            for work, missing in self._agent.state.missing_space.items()
            if free_bytes(missing.folder) >= missing.needed_bytes
        )
        return events.SpaceFreed(freed) if freed else events.Ticked()

    def _check_stored(self) -> None:
        """Download again what was deleted from disk, and leave a head that fails in `edge-client predict`."""
        state = self._agent.state
        if missing := state.stored.difference(self._store.blobs.digests()):
            self._agent.step(events.BlobsMissing(missing))
        if self._is_dry_run or state.installing is not None or state.installed is None:
            return
        head = self._store.heads_in_use().installed
        if (key := head.key if head else None) != state.installed:
            self._agent.step(events.HeadReturned(key))
            self._report.is_due = True

    def _handle(self, event: Incoming) -> None:
        """Handle an event, then publish what the device reports if that has changed."""
        self._react(event)
        self._report_expiry()
        if self._report.is_due:
            self._publisher.send_info(self._agent.state, self._report)

    def _react(self, event: Incoming) -> None:  # noqa: C901, PLR0912 - one case per event
        match event:
            case BaseException():
                raise event
            case Stop():
                self._agent.exit = events.Exit(0)
            case mqtt.Received(topic=topic, payload=payload, retained=retained):
                log_event(log, logging.DEBUG, "message received", topic=topic, bytes=len(payload))
                try:
                    found = self._receiver.receive(topic, payload, retained=retained)
                    self._check_expiry()
                    for received in found:
                        self._take(received)
                except BackboneMismatch as error:
                    self._wait_for_another_task(error)
            case mqtt.Connected(address=ip, broker=broker):
                device = self._settings.device_id
                log_event(log, logging.INFO, "connected to the broker", broker=broker, device=device)
                self._publisher.presence.connected(ip)
                self._publisher.send_presence()
                self._report.is_due = True
                self._agent.step(event)
                if self._agent.state.task is None:
                    log_event(log, logging.INFO, "waiting for the fleet's task", fleet=self._settings.fleet)
            case mqtt.Disconnected(reason=reason, retry_s=retry_s, repeated=repeated, broker=broker):
                level = logging.DEBUG if repeated else logging.WARNING
                log_event(log, level, reason, broker=broker, retry_s=retry_s)
                self._agent.step(event)
            case mqtt.Unsendable(topic=topic, reason=reason, repeated=repeated) if (
                topic != self._publisher.topic("up")
            ):
                level = logging.DEBUG if repeated else logging.ERROR
                log_event(log, level, "publication refused by the broker", topic=topic, reason=reason)
            case events.SubmissionBuilt(reason=reason):
                self._report.set(BuildProblem(reason))
                self._report.is_due = True
                self._agent.step(event)
            case events.BlobsMissing() if self._settings.broker is None:
                raise StateError(
                    "a blob was missing or damaged on disk: pass --broker HOST[:PORT] to download it"
                )
            case events.HeadInstalled():
                self._agent.step(event)
                self._agent.delete_unused()
                self._report.is_due = True
            case _:
                self._agent.step(event)

    def _check_expiry(self) -> None:
        """Note which manifests have expired, before anything follows from them."""
        if not self._is_dry_run:
            self._agent.state = replace(self._agent.state, expired=self._receiver.expired())

    def _report_expiry(self) -> None:
        stale = ", ".join(sorted(self._agent.state.stale_manifests))
        problem = EXPIRED.format(stale) if stale else ""
        if self._report.set(ManifestProblem(problem)):
            log_event(log, logging.ERROR, problem, manifests=stale, clock=time.strftime("%Y-%m-%d"))

    def _wait_for_another_task(self, error: BackboneMismatch) -> None:
        """Keep the current task; a program that ends here would be restarted, and end again, for ever."""
        if self._settings.mode is not Mode.SERVICE:
            raise error
        problem = plain(f"{error}; waiting for another task")
        if self._report.set(TaskProblem(problem)):
            log.error("%s", problem)

    def _take(self, received: Received) -> None:
        """Handle what was received or recalled; the worker first, which drops jobs that are out of date."""
        if isinstance(received, Presence):
            self._own_topic.check(received, is_connected=self._agent.state.connected)
            return
        if isinstance(received, events.TaskSeen):
            self._report.set(TaskProblem())
        if isinstance(received, events.TaskSeen) and received.digest != self._agent.state.task:
            self._worker.follow(received.digest)
            self._agent.state = replace(self._agent.state, stored=frozenset(self._store.blobs.digests()))
            self._agent.step(received)
            if not received.recalled:
                self._agent.delete_unused()
            return
        if isinstance(received, RoundManifest) and received != self._agent.state.round:
            self._worker.round = received.number
        self._agent.step(received)

    def _recall(self) -> None:
        """Start with the stored task and round; a dry run with a broker waits for the current ones.

        So does a device whose stored task has ended the program too often: the broker may have another one.
        """
        self._check_expiry()
        if not self._is_dry_run or self._settings.broker is None:
            for recalled in self._receiver.recall():
                if isinstance(recalled, events.TaskSeen) and self._has_failed(recalled.manifest):
                    log.error(
                        "the stored task ended the program %d times: waiting for the broker", MAX_CRASHES
                    )
                    return
                self._take(recalled)
        if self._settings.broker is None and not self._agent.state.can_build:
            text = "not every blob of the task is stored: pass --broker HOST[:PORT] to download them"
            raise ConfigError(text)

    def _has_failed(self, manifest: TaskManifest) -> bool:
        return not self._is_dry_run and self._store.crash_counter.crashes(task_key(manifest)) >= MAX_CRASHES
