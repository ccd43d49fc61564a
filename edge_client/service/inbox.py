"""Received messages: verified, decoded, and translated into events of the state machine."""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator

from edge_client.config import Settings
from edge_client.core import events, manifest_trust
from edge_client.core.manifest_trust import ManifestTrust, TimeEstimate, UntrustedManifest
from edge_client.core.state import Mode, StoredState
from edge_client.store.device_state import DeviceState
from protocol.errors import BadSignature, BlobLost, MalformedMessage
from protocol.log import event
from protocol.wire.codec import decode, digest_of, is_probe, message_kind
from protocol.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_MANIFEST_BYTES,
    Frame,
    HeadManifest,
    Presence,
    PrivacyRecord,
    Receipt,
    RoundManifest,
    TaskManifest,
)
from protocol.wire.signing import is_own_record, open_manifest
from protocol.wire.topics import FleetChannel, device_topic, fleet_topic

log = logging.getLogger(__name__)

Message = (
    events.TaskSeen
    | events.AggregatorStarted
    | events.AggregatorReconnected
    | Frame
    | HeadManifest
    | Presence
    | PrivacyRecord
    | Receipt
    | RoundManifest
)
"""A message that is from the sender it claims; a presence is of the device's own topic."""


class Inbox:
    """Received messages; what a manifest shows of its aggregator is stored, except in a dry run."""

    def __init__(self, settings: Settings, store: DeviceState) -> None:
        self.refused: Counter[str] = Counter()
        """Refused messages by reason."""
        self._settings = settings
        self._store = store
        self._writes = settings.mode is not Mode.DRY_RUN
        self._aggregator_start: bytes | int = b""
        stored = store.get(ManifestTrust)
        self._trust = manifest_trust.with_operator_key(
            stored,
            settings.identity,
        )
        self._time = TimeEstimate(max(self._trust.issued_s, settings.identity.enrolled_s), time.monotonic())
        if self._trust != stored and self._writes:
            store.set(self._trust)
        fleet, device = settings.fleet, settings.device_id
        self._channels = {
            **{fleet_topic(fleet, name): name for name in ("cast", "task", "round", "head", "state")},
            **{device_topic(fleet, device, name): f"own {name}" for name in ("blk", "ack", "state")},
        }

    def receive(self, topic: str, payload: bytes, *, retained: bool) -> Message | None:
        """Return a decoded message; None if it is refused or nothing follows from it."""
        try:
            return self._decoded(topic, payload, retained=retained) if not is_probe(payload) else None
        except (UntrustedManifest, BadSignature, MalformedMessage) as error:
            self.refuse(topic, error)
            return None

    def refuse(self, topic: str, error: UntrustedManifest | BadSignature | MalformedMessage) -> None:
        """Count a refused message, and log the first one for each reason."""
        reason = "signature" if isinstance(error, BadSignature) else "malformed"
        if isinstance(error, UntrustedManifest):
            reason = error.reason
        self.refused[reason] += 1
        level = logging.WARNING if self.refused[reason] == 1 else logging.DEBUG
        event(log, level, "message refused", topic=topic, reason=reason, error=error)

    def expired(self) -> frozenset[str]:
        """Return the channels whose newest manifest has expired."""
        now_s = self._time.now_s(clock_s=time.time(), monotonic_s=time.monotonic())
        return manifest_trust.expired(self._trust, now_s=now_s)

    def recall(self) -> Iterator[events.TaskSeen | RoundManifest]:
        """Yield the stored task and round, so that a start without a broker is not idle.

        Those that are missing or damaged, or stored by another version of the program, come from the broker again.
        """
        stored, blobs = self._store.get(StoredState), self._store.blobs
        with contextlib.suppress(BlobLost, MalformedMessage):
            yield _task_seen(blobs.read(stored.task), recalled=True)
            yield _round_manifest(blobs.read(stored.round))

    def _decoded(  # noqa: PLR0911 - one case per channel
        self, topic: str, payload: bytes, *, retained: bool
    ) -> Message | None:
        channel = self._channels.get(topic)
        if retained and channel in {"cast", "own blk", "own ack"}:
            # Its sender may be gone for long, and the broker would deliver it at every start.
            raise MalformedMessage("a retained message, where the aggregator has none retained")
        match channel:
            case "cast" | "own blk":
                return decode(payload, Frame, max_bytes=MAX_FRAME_BYTES)
            case "own ack":
                return self._answer(topic, payload)
            case "task":
                trust, body = self._trust, self._verified("task", payload)
                return _task_seen(body, is_renewed=self._trust != trust)
            case "round":
                return _round_manifest(self._verified("round", payload))
            case "head":
                return decode(self._verified("head", payload), HeadManifest, max_bytes=MAX_MANIFEST_BYTES)
            case "state":
                return self._aggregator_event(decode(payload, Presence, max_bytes=1024), retained=retained)
            case "own state":
                return decode(payload, Presence, max_bytes=1024)
        return None

    def _answer(self, topic: str, payload: bytes) -> Receipt | PrivacyRecord:
        """Return a receipt, or a record that the aggregator has signed."""
        if message_kind(payload) != "privacy_record":
            return decode(payload, Receipt, max_bytes=MAX_FRAME_BYTES)
        record = decode(payload, PrivacyRecord, max_bytes=MAX_MANIFEST_BYTES)
        if not is_own_record(record, public=self._trust.key or b"", topic=topic):
            raise BadSignature("a record of this device's releases is not signed with the aggregator's key")
        return record

    def _verified(self, channel: FleetChannel, payload: bytes) -> bytes:
        """Return the body of a manifest that was verified, after its release is stored."""
        signed = open_manifest(payload, fleet=self._settings.fleet, channel=channel)
        try:
            self._keep(manifest_trust.verify(self._trust, channel, signed))
        except UntrustedManifest as error:
            self._keep(error.trust)
            raise
        return signed.body

    def _keep(self, trust: ManifestTrust) -> None:
        """Store the trust after a manifest."""
        if trust == self._trust:
            return
        if self._writes:
            self._store.set(trust)
        if self._trust.key is None:
            text = "trusting the first aggregator key received: pass --aggregator-key to require a key"
            event(log, logging.WARNING, text, key=trust.key)
        elif self._trust.key != trust.key:
            text, before = "the aggregator's key was replaced", self._trust.key
            event(log, logging.WARNING, text, key=trust.key, before=before)
        if trust.issued_s != self._trust.issued_s:
            self._time = TimeEstimate(
                max(trust.issued_s, self._settings.identity.enrolled_s), time.monotonic()
            )
        self._trust = trust

    def _aggregator_event(
        self, presence: Presence, *, retained: bool
    ) -> events.AggregatorStarted | events.AggregatorReconnected | None:
        if presence.state != "online":
            event(log, logging.INFO, "aggregator disconnected", state=presence.state)
            return None
        start = presence.instance or presence.epoch
        is_new, self._aggregator_start = start != self._aggregator_start, start
        if is_new:
            return events.AggregatorStarted()
        return None if retained else events.AggregatorReconnected()


def _task_seen(payload: bytes, *, is_renewed: bool = False, recalled: bool = False) -> events.TaskSeen:
    manifest = decode(payload, TaskManifest, max_bytes=MAX_MANIFEST_BYTES)
    return events.TaskSeen(digest_of(payload), manifest, payload, is_renewed, recalled)


def _round_manifest(payload: bytes) -> RoundManifest:
    return decode(payload, RoundManifest, max_bytes=MAX_MANIFEST_BYTES)
