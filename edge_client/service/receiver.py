"""Verifies and decodes received messages, and translates them into the agent's events."""

import contextlib
import logging
import time
from collections.abc import Sequence

from edge_client.agent import events, manifest_trust
from edge_client.agent.manifest_trust import ManifestTrust, TimeEstimate, UntrustedManifest
from edge_client.agent.state import Mode
from edge_client.config import Settings
from edge_client.service.blob_downloads import import_backbones
from edge_client.service.report import Report
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import CurrentRound, CurrentTask
from protocol.errors import BadSignature, BlobLost, MalformedMessage
from protocol.log import event
from protocol.wire.codec import decode, digest_of
from protocol.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_MANIFEST_BYTES,
    Frame,
    HeadManifest,
    Presence,
    Receipt,
    RoundManifest,
    TaskManifest,
)
from protocol.wire.signing import open_manifest
from protocol.wire.topics import FleetChannel, device_topic, fleet_topic

log = logging.getLogger(__name__)

Received = events.Event | Presence


class Receiver:
    """Translates received messages, and stores the task and the round before they are acted upon.

    A dry run stores nothing.
    """

    def __init__(self, settings: Settings, store: DeviceState, report: Report) -> None:
        self._settings = settings
        self._store = store
        self._report = report
        self._writes = settings.mode is not Mode.DRY_RUN
        self._aggregator_start: bytes | int = b""
        self._task: bytes | None = None
        self._round: RoundManifest | None = None
        stored = store.get(ManifestTrust)
        self._trust = manifest_trust.with_operator_key(
            stored,
            settings.aggregator_key,
            number=settings.aggregator_key_number,
            root=settings.root_key,
            enrolled_s=settings.enrolled_s,
        )
        self._time = TimeEstimate(max(self._trust.issued_s, settings.enrolled_s), time.monotonic())
        if self._trust != stored and self._writes:
            store.set(self._trust)
        fleet, device = settings.fleet, settings.device_id
        self._channels = {
            **{fleet_topic(fleet, name): name for name in ("cast", "task", "round", "head", "state")},
            **{device_topic(fleet, device, name): f"own {name}" for name in ("blk", "ack", "state")},
        }

    def receive(self, topic: str, payload: bytes, *, retained: bool) -> Sequence[Received]:
        """Return the events of a message, or the presence on the device's own topic; nothing if it is refused.

        Raises:
            BackboneMismatch: the device was started with a file that is not one of a new task's backbones.
        """
        try:
            return self._translate(topic, payload, retained=retained) if payload else ()
        except (UntrustedManifest, BadSignature, MalformedMessage) as error:
            self._report.refuse(topic, error)
            return ()

    def expired(self) -> frozenset[str]:
        """Return the channels whose newest manifest has expired."""
        now_s = self._time.now_s(clock_s=time.time(), monotonic_s=time.monotonic())
        return manifest_trust.expired(self._trust, now_s=now_s)

    def recall(self) -> Sequence[Received]:
        """Return the events of the stored task and round, so that a start without a broker is not idle.

        Those that are missing or damaged, or stored by another version of the program, come from the broker again.
        """
        task, opened, blobs = self._store.get(CurrentTask), self._store.get(CurrentRound), self._store.blobs
        recalled: Sequence[Received] = ()
        with contextlib.suppress(BlobLost, MalformedMessage):
            recalled = self._task_events(blobs.read(task.digest), recalled=True)
            recalled = (*recalled, self._round_manifest(blobs.read(opened.digest)))
        return recalled

    def _translate(  # noqa: PLR0911 - one case per channel
        self, topic: str, payload: bytes, *, retained: bool
    ) -> Sequence[Received]:
        channel = self._channels.get(topic)
        if retained and channel in {"cast", "own blk", "own ack"}:
            # Its sender may be gone for long, and the broker would deliver it at every start.
            raise MalformedMessage("a retained message, where the aggregator has none retained")
        match channel:
            case "cast" | "own blk":
                return (decode(payload, Frame, max_bytes=MAX_FRAME_BYTES),)
            case "own ack":
                return (decode(payload, Receipt, max_bytes=MAX_FRAME_BYTES),)
            case "task":
                trust, body = self._trust, self._verified("task", payload)
                return self._task_events(body, is_newer=self._trust != trust)
            case "round":
                return (self._round_manifest(self._verified("round", payload)),)
            case "head":
                return (decode(self._verified("head", payload), HeadManifest, max_bytes=MAX_MANIFEST_BYTES),)
            case "state":
                return self._presence_events(decode(payload, Presence, max_bytes=1024), retained=retained)
            case "own state":
                return (decode(payload, Presence, max_bytes=1024),)
        return ()

    def _verified(self, channel: FleetChannel, payload: bytes) -> bytes:
        """Return the body of a manifest that was verified, after its release is stored."""
        signed = open_manifest(payload, fleet=self._settings.fleet, channel=channel)
        trust = manifest_trust.verify(self._trust, channel, signed)
        if trust != self._trust:
            if self._writes:
                self._store.set(trust)
            if self._trust.key is None:
                text = "trusting the first aggregator key received: pass --aggregator-key to require a key"
                event(log, logging.WARNING, text, key=signed.key)
            elif self._trust.key != trust.key:
                text, before = "the aggregator's key was replaced", self._trust.key
                event(log, logging.WARNING, text, key=trust.key, before=before)
            self._trust = trust
            self._time = TimeEstimate(max(trust.issued_s, self._settings.enrolled_s), time.monotonic())
        return signed.body

    def _task_events(
        self, payload: bytes, *, is_newer: bool = False, recalled: bool = False
    ) -> Sequence[Received]:
        manifest, digest = decode(payload, TaskManifest, max_bytes=MAX_MANIFEST_BYTES), digest_of(payload)
        seen = events.TaskSeen(digest, manifest, recalled=recalled)
        if digest == self._task:
            # Receipts are not signed. What a forged one prevents is sent when the aggregator has signed the task again.
            return (seen, self._outbox()) if is_newer else (seen,)
        if not recalled:
            import_backbones(self._store.blobs, self._settings.backbones, manifest.backbones)
        self._task = digest
        event(
            log,
            logging.INFO,
            "task received",
            task=digest.hex()[:12],
            algorithm=manifest.algorithm,
            classes=len(manifest.classes),
            backbones=",".join(blob.name for blob in manifest.backbones),
        )
        if self._writes and not recalled:
            self._store.set(CurrentTask(self._store.blobs.put(payload)))
        return (seen, self._outbox())

    def _outbox(self) -> events.OutboxSeen:
        return events.OutboxSeen(self._store.outbox.items())

    def _round_manifest(self, payload: bytes) -> RoundManifest:
        manifest = decode(payload, RoundManifest, max_bytes=MAX_MANIFEST_BYTES)
        if manifest != self._round:
            self._round = manifest
            if self._writes:
                before, digest = self._store.get(CurrentRound).digest, self._store.blobs.put(payload)
                self._store.set(CurrentRound(digest))
                if before not in (b"", digest):
                    self._store.blobs.delete([before])
        return manifest

    def _presence_events(self, presence: Presence, *, retained: bool) -> Sequence[Received]:
        if presence.state != "online":
            event(log, logging.INFO, "aggregator disconnected", state=presence.state)
            return ()
        start = presence.instance or presence.epoch
        is_new, self._aggregator_start = start != self._aggregator_start, start
        if not is_new:
            return () if retained else (events.AggregatorReconnected(),)
        # The outbox again, with refused items: the aggregator's task file may have changed.
        outbox = (self._outbox(),) if self._task is not None else ()
        return (*outbox, events.AggregatorStarted())
