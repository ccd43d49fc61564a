"""The device program at work: carries out what `agent.step` decides, and turns what happens into its events."""

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version

from edge_client.agent import events, machine, manifest_trust, selectors
from edge_client.agent.manifest_trust import ManifestTrust
from edge_client.agent.state import Mode, State
from edge_client.agent.upload_item import UploadItem
from edge_client.config import Settings
from edge_client.privacy import policy
from edge_client.service.progress import Progress
from edge_client.service.worker import Crashed, Worker
from edge_client.storage.device_state import DeviceState
from edge_client.storage.facts import (
    BackboneProvider,
    BuildProblem,
    CurrentRound,
    CurrentTask,
    Epoch,
    EvaluatedHead,
    Heads,
    StoredInitialModel,
    StoredLocalModel,
    SubmissionReport,
    UploadProblem,
)
from edge_client.submission.builder import PreparedSubmission
from protocol.errors import (
    BackboneMismatch,
    BadSignature,
    ConfigError,
    MalformedMessage,
    ProtofleetError,
    TransferError,
)
from protocol.mqtt import session as mqtt
from protocol.storage.blobstore import file_digest
from protocol.storage.keyfile import read_or_make_key
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_MANIFEST_BYTES,
    PROTOCOL_VERSION,
    BlobRef,
    BlobRequest,
    DeviceInfo,
    Frame,
    HeadManifest,
    Message,
    Presence,
    PresenceState,
    Reason,
    Receipt,
    RoundManifest,
    TaskManifest,
)
from protocol.wire.presence import is_newer
from protocol.wire.signing import open_manifest, sign_frame
from protocol.wire.topics import RETAINED, DeviceChannel, FleetChannel, device_topic, fleet_topic
from protocol.wire.transfer import Ranges

log = logging.getLogger(__name__)

TICK_S = 0.5


class Device:
    """One device of one fleet.

    Args:
        settings: what the person chose.
        state: the device's state directory, locked.
        show: takes what is prepared in a dry run, with the bytes that would be sent.
    """

    def __init__(
        self,
        settings: Settings,
        state: DeviceState,
        *,
        show: Callable[[PreparedSubmission, int], None] | None = None,
    ) -> None:
        self._settings = settings
        self._kept = state
        self._blobs = state.blobs
        self._id = settings.local.device_id
        self._inbox: queue.SimpleQueue[mqtt.Event | events.Event | Crashed] = queue.SimpleQueue()
        self._worker = Worker(settings, state, emit=self._inbox.put, show=show)
        self._bar = Progress("fetching")
        self._exit: events.Exit | None = None
        self._aggregator_epoch = 0
        self._rescan_s = 0.0
        self._problem = ""
        self._refusals: Counter[str] = Counter()
        self._trust = self._known_aggregator()
        self._key = self._own_key()
        self._epoch = state.next_number(Epoch) if settings.mode is not Mode.DRY_RUN else 0
        self._state = self._remembered()
        self._session = self._open_session()

    def run(self) -> int:
        """Live until there is a reason to end; returns the exit status.

        Raises:
            ProtofleetError: an expected failure that a person has to look at.
        """
        self._worker.start()
        if self._session is not None:
            self._session.start()
        try:
            self._recall_task()
            while self._exit is None:
                self._handle(self._next_event())
        finally:
            self._worker.stop()
            if self._session is not None:
                dry = self._settings.mode is Mode.DRY_RUN
                self._session.stop([] if dry else [self._presence("stopped")])
        if self._exit.code:
            raise ProtofleetError(self._exit.text)
        return 0

    # What happens, as the agent's events.

    def _next_event(self) -> mqtt.Event | events.Event | Crashed:
        try:
            return self._inbox.get(timeout=TICK_S)
        except queue.Empty:
            if time.monotonic() >= self._rescan_s and not self._state.working:
                self._rescan_s = time.monotonic() + self._settings.rescan_s
                self._worker.look()
            return events.Ticked()

    def _handle(self, event: mqtt.Event | events.Event | Crashed) -> None:  # noqa: C901, PLR0912 - a case an event
        match event:
            case Crashed(error=error):
                raise error
            case mqtt.Received(topic=topic, payload=payload, retained=retained):
                log.debug("received %d bytes on %s", len(payload), topic)
                try:
                    for translated in self._translate(topic, payload, retained=retained):
                        self._step(translated)
                except manifest_trust.UntrustedManifest as error:
                    self._refused(error.reason, topic, error)
                except BadSignature as error:
                    self._refused("signature", topic, error)
                except MalformedMessage as error:
                    self._refused("malformed", topic, error)
            case mqtt.Connected(max_packet_bytes=limit):
                log.info("connected to %s as %s", self._settings.broker, self._id)
                self._step(events.Connected(limit))
                if self._state.task is None:
                    log.info("waiting for the fleet's task")
            case mqtt.Disconnected() as end:
                level = logging.DEBUG if end.repeated else logging.WARNING
                log.log(level, "%s; trying until it is there, next in %.0f s", end.reason, end.retry_s)
                self._step(events.Disconnected())
            case mqtt.Unsendable(topic=topic, reason=reason) if topic == self._topic("up"):
                self._step(events.Unsendable(reason))
            case mqtt.Unsendable(topic=topic, reason=reason, repeated=repeated):
                level = logging.DEBUG if repeated else logging.ERROR
                log.log(level, "the broker will not take what goes to %s: %s", topic, reason)
            case mqtt.Drained():
                self._step(events.Drained())
            case events.SubmissionBuilt(reason=reason):
                self._problem = reason
                if self._settings.mode is not Mode.DRY_RUN:
                    self._kept.set(BuildProblem(self._problem))
                self._step(event)
                self._announce()
            case events.HeadInstalled():
                self._step(event)
                self._tidy()
                self._send("info", self._info())
            case _:
                self._step(event)

    def _translate(  # noqa: PLR0911 - a case a topic
        self, topic: str, payload: bytes, *, retained: bool
    ) -> Sequence[events.Event]:
        fleet = self._settings.fleet
        if not payload:
            return []  # how a retained message is cleared
        if topic == fleet_topic(fleet, "task"):
            return self._task_seen(self._opened("task", payload))
        if topic == fleet_topic(fleet, "round"):
            return [self._round_seen(self._opened("round", payload))]
        if topic == fleet_topic(fleet, "head"):
            body = self._opened("head", payload)
            return [events.HeadSeen(decode(body, HeadManifest, max_bytes=MAX_MANIFEST_BYTES))]
        if topic in {self._topic("blk"), fleet_topic(fleet, "cast")}:
            return [events.BlockSeen(decode(payload, Frame, max_bytes=MAX_FRAME_BYTES))]
        if topic == self._topic("ack"):
            return [events.ReceiptSeen(decode(payload, Receipt, max_bytes=MAX_FRAME_BYTES))]
        if topic == fleet_topic(fleet, "state"):
            return self._aggregator_seen(decode(payload, Presence, max_bytes=1024), retained=retained)
        if topic == self._topic("state"):
            self._own_presence_seen(decode(payload, Presence, max_bytes=1024))
        return []

    def _opened(self, channel: FleetChannel, payload: bytes) -> bytes:
        """What the aggregator has said on a topic, and nobody else; that it was said is kept before it is acted upon.

        Raises:
            BadSignature: it is not signed by whose key it names.
            Disbelieved: it is another aggregator's, or older than what was seen.
            MalformedMessage: it is no signed message.
        """
        signed = open_manifest(payload, fleet=self._settings.fleet, channel=channel)
        known = manifest_trust.believe(self._trust, channel, signed)
        if known != self._trust:
            if self._settings.mode is not Mode.DRY_RUN:
                self._kept.set(known)
            if self._trust.key is None:
                log.warning(
                    "taking the first aggregator that was heard for this fleet's, with the key %s; "
                    "a device that is started with --aggregator-key and its key takes no other",
                    signed.key.hex(),
                )
            self._trust = known
        return signed.body

    def _refused(self, reason: Reason, topic: str, error: ProtofleetError) -> None:
        """Count what was not believed; say each kind once, and the operator at every power of two."""
        self._refusals[reason] += 1
        count = self._refusals[reason]
        log.log(logging.WARNING if count == 1 else logging.DEBUG, "ignored a message on %s: %s", topic, error)
        if count & (count - 1) == 0 and self._settings.mode is not Mode.DRY_RUN:
            self._send("info", self._info())

    def _task_seen(self, payload: bytes, *, recalled: bool = False) -> Sequence[events.Event]:
        manifest = decode(payload, TaskManifest, max_bytes=MAX_MANIFEST_BYTES)
        digest = digest_of(payload)
        seen = events.TaskSeen(digest, manifest, recalled=recalled)
        if digest == self._state.task:
            return [seen]
        log.info(
            "task %s: %s, %d classes, backbone %s",
            *(digest.hex()[:12], manifest.algorithm, len(manifest.classes)),
            ", ".join(blob.name for blob in manifest.backbones),
        )
        self._worker.focus = digest
        if not recalled:
            self._adopt_backbones(manifest.backbones)
        if not recalled and self._settings.mode is not Mode.DRY_RUN:
            self._blobs.put(payload)
            self._kept.set(CurrentTask(digest))
        return [seen, events.OutboxSeen(self._kept.outbox.items())]

    def _round_seen(self, payload: bytes) -> events.RoundSeen:
        manifest = decode(payload, RoundManifest, max_bytes=MAX_MANIFEST_BYTES)
        if manifest != self._state.round:
            self._worker.round = manifest.number
            if self._settings.mode is not Mode.DRY_RUN:
                self._kept.set(CurrentRound(self._blobs.put(payload)))
        return events.RoundSeen(manifest)

    def _adopt_backbones(self, blobs: Sequence[BlobRef]) -> None:
        """Use the backbones that the person gave, if they are the task's."""
        wanted = {blob.digest: blob.name for blob in blobs}
        for path in self._settings.backbones:
            got = file_digest(path)
            if got not in wanted:
                expected = " or ".join(f"{name} (sha256 {digest.hex()})" for digest, name in wanted.items())
                raise BackboneMismatch(
                    f"{path} is not the task's backbone: expected {expected}, got sha256 {got.hex()}; "
                    "leave --backbone out to fetch the right one"
                )
            self._blobs.put(path.read_bytes())
            self._state = replace(self._state, stored=self._state.stored | {got})

    def _aggregator_seen(self, presence: Presence, *, retained: bool) -> Sequence[events.Event]:
        if presence.state != "online":
            log.info("the aggregator is %s; going on when it is back", presence.state)
            return []
        is_new = presence.epoch != self._aggregator_epoch
        self._aggregator_epoch = presence.epoch
        if is_new:
            # Also with what the one before has refused: its task file may say something else now.
            seen = [events.OutboxSeen(self._kept.outbox.items())] if self._state.task is not None else []
            return [*seen, events.AggregatorStarted()]
        return [] if retained else [events.AggregatorBack()]

    def _own_presence_seen(self, presence: Presence) -> None:
        """Correct what an old Last Will says of us, and notice a second program of our name."""
        if is_newer(presence.epoch, own=self._epoch, now_s=time.time()):
            raise ProtofleetError(
                f"another edge-client has come online as {self._id!r}: give each its own --device-id"
            )
        if (presence.state != "online" or presence.epoch > self._epoch) and self._state.connected:
            self._send_outgoing(self._presence("online"))

    # What the agent decides, done.

    def _step(self, event: events.Event) -> None:
        self._state, actions = machine.step(self._state, event, now_s=time.monotonic())
        for action in actions:
            self._perform(action)

    def _perform(self, action: events.Action) -> None:  # noqa: C901, PLR0912 - a case an action
        match action:
            case events.Announce():
                self._announce()
            case events.BuildSubmission() as build:
                self._worker.build(build)
            case events.InstallHead() as install:
                self._worker.install(install)
            case events.RefuseHead() as refuse:
                self._worker.refuse(refuse)
            case events.OpenDownload(blob=blob):
                self._open_download(blob)
            case events.Request(digest=digest, offset=offset, length=length):
                self._send("get", BlobRequest(digest=digest, offset=offset, length=length))
            case events.Append(digest=digest, data=data):
                self._append(digest, data)
            case events.Finish(digest=digest):
                self._finish_download(digest)
            case events.Send(item=item, ranges=ranges):
                self._send_frames(item, ranges)
            case events.KeepReceipt(item=item):
                self._keep_receipt(item)
            case events.ReportBlocked(reason=reason):
                self._kept.set(UploadProblem(reason))
                self._send("info", self._info())
            case events.Log(text=text, error=error):
                log.log(logging.ERROR if error else logging.INFO, "%s", text)
            case events.Exit() as end:
                self._exit = end

    def _announce(self) -> None:
        if self._settings.mode is not Mode.DRY_RUN:
            self._send_outgoing(self._presence("online"))
            self._send("info", self._info())

    def _topic(self, channel: DeviceChannel) -> str:
        return device_topic(self._settings.fleet, self._id, channel)

    def _send(self, channel: DeviceChannel, message: Message | Frame) -> None:
        self._send_outgoing(mqtt.Outgoing(self._topic(channel), encode(message), RETAINED[channel]))

    def _send_outgoing(self, outgoing: mqtt.Outgoing) -> None:
        if self._session is not None:
            self._session.send(outgoing)

    def _send_frames(self, item: UploadItem, ranges: Ranges) -> None:
        pieces = self._kept.outbox.read(item.digest, ranges)
        if pieces is None:  # something newer has taken its place
            self._inbox.put(events.OutboxSeen(self._kept.outbox.items()))
            return
        for (start, _), data in zip(ranges, pieces, strict=True):
            frame = Frame(
                v=PROTOCOL_VERSION, digest=item.digest, size_bytes=item.size_bytes, offset=start, data=data
            )
            signed = sign_frame(frame, key=self._key, fleet=self._settings.fleet, device=self._id)
            self._send("up", signed)

    def _presence(self, state: PresenceState) -> mqtt.Outgoing:
        message = Presence(state=state, epoch=self._epoch)
        return mqtt.Outgoing(self._topic("state"), encode(message), RETAINED["state"])

    def _info(self) -> DeviceInfo:
        report, head, task = (
            self._kept.get(SubmissionReport),
            self._kept.get(Heads).installed,
            self._state.task,
        )
        is_tasks = head is not None and head.task == task
        hindrance, manifest = self._state.hindrance, self._state.manifest
        silent = manifest is None or policy.is_private(manifest)
        return DeviceInfo(
            epoch=self._epoch,
            software=version("protofleet"),
            runtime=self._kept.get(BackboneProvider).name,
            backbones=tuple(sorted(self._state.stored))[:64],
            # Without a task nobody knows yet what may be told.
            images={} if silent else {entry.name: entry.images for entry in report.classes},
            unusable_images=0 if silent else len(report.unusable),
            problem=(
                policy.public_problem(self._problem, manifest)
                or ("" if hindrance == machine.NO_SPACE else hindrance)
            )[:256],
            head_version=head.version if head is not None and is_tasks else 0,
            refused_messages=dict(self._refusals),
        )

    def _open_download(self, blob: BlobRef) -> None:
        offset = self._blobs.partial_bytes(blob.digest)
        log.info("fetching %s, %.0f kB%s", blob.name, blob.size_bytes / 1e3, " (going on)" if offset else "")
        self._bar = Progress(f"fetching {blob.name}")
        if offset >= blob.size_bytes:
            self._finish_download(blob.digest)
        else:
            # At once: what is sent to the whole fleet may be the next thing in the inbox.
            self._step(events.DownloadStarts(blob.digest, offset))

    def _append(self, digest: bytes, data: bytes) -> None:
        self._blobs.append(digest, data)
        if (download := self._state.download) is not None:
            self._bar.update(download.offset, download.blob.size_bytes)

    def _finish_download(self, digest: bytes) -> None:
        self._bar.close()
        try:
            self._blobs.finish(digest)
        except TransferError as error:
            log.warning("%s", error)
            self._inbox.put(events.DownloadEnded(digest, good=False))
        else:
            self._inbox.put(events.DownloadEnded(digest, good=True))

    def _keep_receipt(self, item: UploadItem) -> None:
        installed = self._kept.get(Heads).installed
        facts: tuple[EvaluatedHead, ...] = ()
        if installed is not None and item.head is not None and installed.key == item.head:
            facts = (EvaluatedHead(installed.key),)
        if self._kept.outbox.receive(item.digest, facts=facts) and item.kind == "submission":
            log.info("the aggregator has our submission")

    def _tidy(self) -> None:
        """Delete the blobs of the past, once a head of the current task is in use.

        The head before it stays, so that going back needs no network. What is being taken into use stays as
        well, even where a newer head was seen meanwhile: this comes again once that is over.
        """
        state, kept = self._state, self._kept
        if state.installed is None or state.task is None or state.manifest is None:
            return
        if state.installing is not None:
            return
        wanted = {state.task, *(blob.digest for blob in selectors.needed(state))}
        with kept.keeping:
            models = kept.get(StoredLocalModel).digest, kept.get(StoredInitialModel).digest
            named, heads = [*models, kept.get(CurrentRound).digest], kept.get(Heads)
            for head in filter(None, (heads.installed, heads.previous)):
                # With the backbones: another task's head stays in use until one of this task is.
                named += [head.head, head.tensors, head.local_model, *head.backbones]
            self._blobs.keep_only(wanted | {digest for digest in named if digest})
        self._state = replace(state, stored=frozenset(self._blobs.digests()))

    # How it starts.

    def _known_aggregator(self) -> ManifestTrust:
        """The aggregator that is believed: the one that the person has given, else the one that was."""
        remembered = self._kept.get(ManifestTrust)
        known = manifest_trust.given(remembered, self._settings.aggregator_key)
        if known != remembered and self._settings.mode is not Mode.DRY_RUN:
            self._kept.set(known)
        return known

    def _own_key(self) -> bytes:
        """The device's private key; in a dry run it has nothing to sign."""
        if self._settings.signing_key is not None:
            return self._settings.signing_key
        if self._settings.mode is Mode.DRY_RUN:
            return b""
        return read_or_make_key(self._kept.folder / "signing.key")

    def _remembered(self) -> State:
        kept = self._kept
        if self._settings.mode is not Mode.DRY_RUN:
            kept.set(UploadProblem())
            if damaged := kept.outbox.drop_damaged():
                log.warning("%d of what was to be sent was changed on disk and is deleted", damaged)
        head, evaluated = kept.get(Heads).installed, kept.get(EvaluatedHead).key
        key = head.key if head else None
        reports = {item.head for item in kept.outbox.items()}
        return State(
            mode=self._settings.mode,
            device=self._id,
            stored=frozenset(self._blobs.digests()),
            # A head without an evaluation, received or to be sent, is installed and evaluated once more.
            installed=key if key == evaluated or key in reports else None,
            evaluated=key if key == evaluated else None,
        )

    def _recall_task(self) -> None:
        """Begin with the task that was known, so that a start without a broker is not idle."""
        known = self._kept.get(CurrentTask).digest
        dry = self._settings.mode is Mode.DRY_RUN
        if known in self._blobs and not (dry and self._settings.broker is not None):
            for event in self._task_seen(self._blobs.read(known), recalled=True):
                self._step(event)
            opened = self._kept.get(CurrentRound).digest
            if opened in self._blobs:
                self._step(self._round_seen(self._blobs.read(opened)))
        if self._settings.broker is None and not selectors.can_work(self._state):
            raise ConfigError(
                "not all that the task needs is here yet: say where the broker is with --broker"
            )

    def _open_session(self) -> mqtt.Session | None:
        settings = self._settings
        if settings.broker is None:
            return None
        dry = settings.mode is Mode.DRY_RUN
        shared = [
            fleet_topic(settings.fleet, channel) for channel in ("task", "round", "head", "state", "cast")
        ]
        own = [self._topic(channel) for channel in ("blk", "ack")] + ([] if dry else [self._topic("state")])
        return mqtt.Session(
            settings.broker,
            # A start has an id of its own: brokers differ in what they do to the older of two that share one.
            client_id=f"pf-{settings.fleet}-{self._id}-{self._epoch or 'dry-run'}",
            subscriptions=[*shared, *own],
            on_event=self._inbox.put,
            access=settings.access,
            will=None if dry else self._presence("offline"),
        )
