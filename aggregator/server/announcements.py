"""Announcements to the fleet: the aggregator's presence, and the signed manifests of task, round and head."""

import contextlib
import logging
import time
from dataclasses import dataclass, field

from msgspec.structs import replace

from aggregator.heads.rollout import Rollout
from aggregator.heads.schedule import Schedule
from aggregator.intake.uploads import Uploads
from aggregator.intake.validation import Refused
from aggregator.messaging.blob_sender import reading
from aggregator.messaging.manifest_signer import ManifestSigner
from aggregator.messaging.publisher import Publisher
from aggregator.storage.refusals import UNKNOWN_DEVICE
from aggregator.storage.store import Store
from aggregator.storage.stored_values import ServedTask
from aggregator.tasks.restoration import VerifiedFiles
from aggregator.tasks.task_preparation import Task
from protocol.errors import ConfigError, MalformedMessage, StateError
from protocol.log import event
from protocol.mqtt.own_presence import Replaced, duplicate_of
from protocol.storage.blobstore import state_errors
from protocol.wire.codec import decode, encode
from protocol.wire.messages import HeadManifest, Message, Presence, Reason, RoundManifest
from protocol.wire.presence import Duplicate, Reaction
from protocol.wire.topics import FleetChannel

REPEAT_S = 10.0
"""Seconds between repetitions of the open round, which reaches all devices whichever has asked."""


@dataclass(kw_only=True)
class Announcements:
    """The retained messages of the fleet's topics."""

    task: Task
    store: Store
    key: bytes
    """The aggregator's private key, 32 bytes."""
    publisher: Publisher
    uploads: Uploads
    """The intake, which is stopped when a release number cannot be stored."""
    training: Schedule
    releases: Rollout
    files: VerifiedFiles
    is_connected: bool = field(default=False, init=False)
    """The broker is connected."""
    _published: dict[FleetChannel, bytes] = field(default_factory=dict, init=False)
    _overwritten: dict[FleetChannel, bytes] = field(default_factory=dict, init=False)
    _head: HeadManifest | None = field(default=None, init=False)
    _round: RoundManifest | None = field(default=None, init=False)
    """The round that is published."""
    _broadcast_round: int | None = field(default=None, init=False)
    _repeat_s: float = field(default=0.0, init=False)
    """When the open round may be repeated, by `time.monotonic`."""

    def __post_init__(self) -> None:
        self._signer = ManifestSigner(self.store, key=self.key, fleet=self.task.file.fleet)
        self._own_topic = OwnTopic(
            store=self.store, publisher=self.publisher, uploads=self.uploads, fleet=self.task.file.fleet
        )

    def connected(self) -> None:
        """Publish everything to a broker that was just connected."""
        self.is_connected = True
        self._publish("task")
        self.publish_round()
        self._publish("head")
        self.publisher.publish_presence()

    def repeat_round(self) -> None:
        """Publish the open round again, as a device asks for it by an upload, but not for each one."""
        if (now_s := time.monotonic()) >= self._repeat_s:
            self._repeat_s = now_s + REPEAT_S
            self._publish("round")

    def publish_new_round(self) -> None:
        if self.training.round != self._round:
            self.publish_round()
        else:
            self._broadcast_tensors()

    def publish_round(self) -> None:
        """Publish the open round; without rounds, clear the topic."""
        self._publish("round")
        self._broadcast_tensors()

    def _broadcast_tensors(self) -> None:
        """Broadcast the tensors of the open round once, as soon as their file is verified."""
        manifest = self._round
        if manifest is None or not self.is_connected or manifest.number == self._broadcast_round:
            return
        if self.files.is_verified(digest := manifest.tensors.digest):
            self._broadcast_round = manifest.number
            path = self.store.blobs.path(digest)
            with reading(), state_errors(path):
                self.publisher.broadcast(path.read_bytes())

    def publish_new_head(self) -> None:
        if self.releases.manifest != self._head:
            self._publish("head")

    def refresh(self) -> None:
        """Sign and publish again what would expire."""
        if self.is_connected:
            for channel in filter(self._published.get, self._signer.due()):
                self._publish(channel)

    def _publish(self, channel: FleetChannel) -> None:
        """Publish a signed manifest, or clear its topic if there is none."""
        if channel == "head":
            self._head = self.releases.manifest
        if channel == "round":
            self._round = self.training.round
        manifests: dict[FleetChannel, Message | None] = {
            "task": self.task.manifest,
            "round": self._round,
            "head": self._head,
        }
        manifest = manifests[channel]
        payload = b"" if manifest is None else self._signer.sign(channel, encode(manifest))
        self._signer.keep()
        self._published[channel] = payload
        self.publisher.publish_to_fleet(channel, payload)

    def observe(self, channel: FleetChannel, payload: bytes) -> None:
        """Take note of a message on a fleet topic, which may be another client's.

        Raises ConfigError if another aggregator with this key, or for this open fleet, has started later.
        """
        if channel == "state":
            self._own_topic.observe(payload)
        elif self._published.get(channel) != payload:
            self._overwritten[channel] = payload

    def restore(self) -> None:
        """Publish again what another client, or an earlier start, has overwritten."""
        self._own_topic.publish()
        overwritten, self._overwritten = self._overwritten, {}
        for channel, payload in overwritten.items():
            if payload and not self._signer.has_signed(channel, payload):
                text = f"a {channel} that this aggregator has not signed was on the broker"
                self.uploads.count_refusal(UNKNOWN_DEVICE, Refused("signature", text))
            self._publish(channel)


log = logging.getLogger(__name__)

TAKE_OVER = "aggregator take-over"


@dataclass(kw_only=True)
class OwnTopic:
    """Watches the topic of the aggregator's presence."""

    store: Store
    publisher: Publisher
    uploads: Uploads
    fleet: str
    _is_outdated: bool = field(default=False, init=False)

    def observe(self, payload: bytes) -> None:
        """Take note of a presence on the topic, or of what has replaced it.

        Raises:
            Replaced: another aggregator with this key has started later.
            ConfigError: another aggregator has started later for this open fleet.
        """
        try:
            presence = decode(payload, Presence, max_bytes=1024)
        except MalformedMessage as error:
            self._is_outdated = True
            if payload:
                self._refuse("malformed", f"the aggregator's state: {error}")
            return
        own, is_closed = self.publisher.presence, self.store.keys.is_closed()
        reaction = own.react(presence, may_end=not is_closed)
        if reaction is Reaction.END:
            raise ConfigError(
                f"another aggregator has started for fleet {self.fleet!r} on this broker, at "
                f"{presence.address or 'an unknown address'}, with the key {presence.key.hex() or 'unknown'}: a fleet "
                "has one; stop one of them, or give each task file a fleet of its own"
            )
        if not own.has_signed(presence):
            self._refuse_other_key(presence, is_closed=is_closed)
        if reaction is Reaction.STAY_OUT:
            replaced = Replaced(duplicate_of(presence, started_later=True), command=TAKE_OVER)
            with contextlib.suppress(StateError):  # it stays out also if the disk is full
                self.store.facts.put(replaced.duplicate)
            raise replaced
        if reaction is Reaction.REPORT:
            self._report(duplicate_of(presence, started_later=False))
        served = self.store.facts.get(ServedTask)
        if served is not None and own.epoch > served.epoch:
            self.store.facts.put(replace(served, epoch=own.epoch))
        self._is_outdated = self._is_outdated or reaction is not Reaction.NONE

    def publish(self) -> None:
        """Publish the presence again if needed; call it once the epoch is durable."""
        if self._is_outdated:
            self._is_outdated = False
            self.publisher.publish_presence()

    def _refuse_other_key(self, presence: Presence, *, is_closed: bool) -> None:
        if is_closed:
            self._refuse(
                "signature", "an aggregator's presence that is not signed with this aggregator's key"
            )
        elif presence.epoch > self.publisher.presence.epoch:
            self._refuse(
                "implausible", f"an aggregator's presence with epoch {presence.epoch}, in the future"
            )

    def _report(self, found: Duplicate) -> None:
        before = self.store.facts.get(Duplicate)
        if before is not None and before.instance == found.instance:
            return
        self.store.facts.put(found)
        text = (
            "another aggregator with this key was started earlier: it stays out; delete its copy of the state"
        )
        event(log, logging.WARNING, text, address=found.address, instance=found.instance, epoch=found.epoch)

    def _refuse(self, reason: Reason, detail: str) -> None:
        self.uploads.count_refusal(UNKNOWN_DEVICE, Refused(reason, detail))
