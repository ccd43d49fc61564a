"""The agent of this program: its state, and the actions that follow from events."""

import logging
import queue
import time
from dataclasses import dataclass, replace

from edge_client.agent import events, state_machine
from edge_client.agent.state import Mode, State, UploadItem
from edge_client.config import Settings
from edge_client.privacy.policy import may_upload
from edge_client.service.blob_downloads import BlobDownloads
from edge_client.service.publisher import Publisher
from edge_client.service.report import Report
from edge_client.service.worker import Worker
from edge_client.storage.device_state import DeviceState
from edge_client.storage.disk_space import DiskAlmostFull
from edge_client.storage.stored_values import (
    DownloadProblem,
    EvaluatedHead,
    Heads,
    LinkProblem,
    SpaceProblem,
    UploadProblem,
)
from protocol.log import event as log_event
from protocol.mqtt import reconnecting_session as mqtt

log = logging.getLogger(__name__)

SUBMISSION_RECEIVED = "submission received by the aggregator"
"""The event that the aggregator has acknowledged a submission."""


@dataclass(frozen=True)
class Stop:
    """The program that runs the device wants it to end."""


Incoming = mqtt.Event | events.Event | Stop | BaseException
Inbox = queue.SimpleQueue[Incoming]
"""Events of the MQTT session, the worker and the agent's own actions, and errors of threads, in their order."""


class RunningAgent:
    """The agent's state; actions that end with an event put it into `inbox`, unless its order matters."""

    def __init__(
        self,
        store: DeviceState,
        state: State,
        *,
        worker: Worker,
        publisher: Publisher,
        report: Report,
        inbox: Inbox,
    ) -> None:
        self.state = state
        self.exit: events.Exit | None = None
        """Set once there is a reason to exit."""
        self._store = store
        self._worker = worker
        self._publisher = publisher
        self._report = report
        self._inbox = inbox
        self._downloads = BlobDownloads(store)

    def step(self, event: events.Event) -> None:
        """Handle an event, and perform the actions that follow."""
        self.state, actions = state_machine.step(self.state, event, now_s=time.monotonic())
        self._report.set(SpaceProblem(self.state.space_problem))
        self._report.set(DownloadProblem(self.state.download_problem))
        if self._report.set(LinkProblem(self.state.link_problem)):
            log.warning("%s", self.state.link_problem)
        self._report.set(UploadProblem(self.state.upload_problem))
        for action in actions:
            try:
                self._perform(action)
            except DiskAlmostFull as error:
                # At once: the bytes of the next frame would follow the wrong ones.
                self.step(events.SpaceMissing(error.missing))

    def delete_unused(self) -> None:
        """Delete blobs that are not needed any more."""
        if self.state.mode is not Mode.DRY_RUN:
            self.state = replace(self.state, stored=self._downloads.delete_unused(self.state))

    def _perform(self, action: events.Action) -> None:  # noqa: C901, PLR0912 - one case per action
        match action:
            case events.BuildSubmission():
                self._worker.build(action)
            case events.InstallHead():
                self._worker.install(action)
            case events.OpenDownload(blob=blob, missing=missing):
                # Before any head: tasks, rounds and heads that are replaced again and again must not fill the disk.
                self.delete_unused()
                opened = self._downloads.open(blob, missing)
                if isinstance(opened, events.DownloadFinished):
                    self._inbox.put(opened)
                else:
                    self.step(opened)  # at once: the next message may be a broadcast frame
            case events.RequestBlob():
                self._publisher.request_blob(action)
            case events.AppendBlob():
                if finished := self._downloads.append(action):
                    self._inbox.put(finished)
            case events.SendFrames():
                if not self._publisher.send_frames(action):  # replaced by a newer item
                    self._inbox.put(events.OutboxSeen(self._store.outbox.items()))
            case events.CheckOutbox():
                self._check_outbox()
            case events.StoreReceipt(item=item):
                self._store_receipt(item)
            case events.Log(text=text, error=error):
                log.log(logging.ERROR if error else logging.INFO, "%s", text)
            case events.Exit():
                self.exit = action

    def _check_outbox(self) -> None:
        """Build again what was damaged on disk: a submission from the images, an evaluation by another trial."""
        kinds = {item.kind for item in self._store.outbox.drop_damaged()}
        if kinds:
            self._inbox.put(events.OutboxSeen(self._store.outbox.items()))
        if "submission" in kinds:
            self._inbox.put(events.BlobsMissing(frozenset(), "build"))
        if "evaluation" in kinds:
            self._inbox.put(events.HeadReturned(None))

    def _store_receipt(self, item: UploadItem) -> None:
        head = self._store.get(Heads).installed
        facts = (EvaluatedHead(head.key),) if head is not None and head.key == item.head else ()
        if self._store.outbox.receive(item.digest, facts=facts) and item.kind == "submission":
            log_event(log, logging.INFO, SUBMISSION_RECEIVED, digest=item.digest)


def stored_state(settings: Settings, store: DeviceState) -> State:
    """Return the state at the start; a head without an evaluation is installed again."""
    if settings.mode is not Mode.DRY_RUN:
        store.outbox.drop_damaged()
        if settings.max_epsilon is not None:
            _drop_forbidden(store, settings.max_epsilon)
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


def _drop_forbidden(store: DeviceState, max_epsilon: float) -> None:
    """Delete what an earlier start has built, and the owner's limit of this start does not allow."""
    forbidden = [
        item
        for item in store.outbox.items()
        if not may_upload(store.outbox.payload(item) or b"", item.kind, max_epsilon=max_epsilon)
    ]
    text = "deleted items from the outbox that --max-epsilon does not allow to be uploaded"
    store.outbox.drop(forbidden, log_as=text)
