"""Announcements to the fleet: the aggregator's presence, and the signed manifests of task, round and head."""

import time
from dataclasses import dataclass, field

from aggregator.heads.published_head import Releases
from aggregator.heads.training_schedule import HeadTraining
from aggregator.ingest.receiver import Receiver
from aggregator.ingest.validation import Refused
from aggregator.messaging.blob_sender import reading
from aggregator.messaging.manifest_signer import ManifestSigner
from aggregator.messaging.publisher import FleetPublisher
from aggregator.service.own_topic import OwnTopic
from aggregator.storage.devices import UNKNOWN_DEVICE
from aggregator.storage.store import Store
from aggregator.tasks.restoration import Restoration
from aggregator.tasks.task_preparation import Task
from protocol.storage.blobstore import state_errors
from protocol.wire.codec import encode
from protocol.wire.messages import HeadManifest, Message
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
    publisher: FleetPublisher
    receiver: Receiver
    """The intake, which is stopped when a release number cannot be stored."""
    training: HeadTraining
    releases: Releases
    restoration: Restoration
    is_connected: bool = field(default=False, init=False)
    """The broker is connected."""
    _published: dict[FleetChannel, bytes] = field(default_factory=dict, init=False)
    _overwritten: dict[FleetChannel, bytes] = field(default_factory=dict, init=False)
    _head: HeadManifest | None = field(default=None, init=False)
    _broadcast_round: int | None = field(default=None, init=False)
    _repeat_s: float = field(default=0.0, init=False)
    """When the open round may be repeated, by `time.monotonic`."""

    def __post_init__(self) -> None:
        self._signer = ManifestSigner(self.store, key=self.key, fleet=self.task.file.fleet)
        self._own_topic = OwnTopic(
            store=self.store, publisher=self.publisher, receiver=self.receiver, fleet=self.task.file.fleet
        )

    def connected(self) -> None:
        """Publish everything to a broker that was just connected."""
        self.is_connected = True
        self._publish("task")
        self.open_round()
        self._publish("head")
        self.publisher.publish_presence("online")

    def open_round(self) -> None:
        """Publish the open round, and broadcast its tensors once; without rounds, clear the topic."""
        self._publish("round")
        manifest = self.training.round
        if manifest is not None and self.is_connected and manifest.number != self._broadcast_round:
            with reading():
                self.restoration.verify([manifest.tensors.digest])
                path = self.store.blobs.path(manifest.tensors.digest)
                with state_errors(path):
                    self.publisher.broadcast(path.read_bytes())
            self._broadcast_round = manifest.number

    def repeat_round(self) -> None:
        """Publish the open round again, as a device asks for it by an upload, but not for each one."""
        if (now_s := time.monotonic()) >= self._repeat_s:
            self._repeat_s = now_s + REPEAT_S
            self._publish("round")

    def publish_new_head(self) -> None:
        """Publish the head manifest if it has changed."""
        if self.releases.manifest != self._head:
            self._publish("head")

    def refresh(self) -> None:
        """Sign and publish again what would expire."""
        if self.is_connected:
            for channel in filter(self._published.get, self._signer.due()):
                self._publish(channel)

    def restore_dropped(self) -> None:
        """Publish everything again after publications that were dropped because another aggregator might have led."""
        if self.publisher.has_dropped and self.is_connected and self.store.leads():
            self.publisher.has_dropped = False
            self.connected()

    def _publish(self, channel: FleetChannel) -> None:
        """Publish a signed manifest, or clear its topic if there is none; also while nothing can be stored."""
        if channel == "head":
            self._head = self.releases.manifest
        manifests: dict[FleetChannel, Message | None] = {
            "task": self.task.manifest,
            "round": self.training.round,
            "head": self._head,
        }
        manifest = manifests[channel]
        payload = b"" if manifest is None else self._signer.sign(channel, encode(manifest))
        with self.receiver.guard():
            self._signer.keep()
        self._published[channel] = payload
        self.publisher.publish_to_fleet(channel, payload)

    def observe(self, channel: FleetChannel, payload: bytes) -> None:
        """Take note of a message on a fleet topic, which may be another client's.

        Raises ConfigError if another aggregator with this key, or for this open fleet, has started later.
        """
        if channel == "state":
            if payload:
                self._own_topic.observe(payload)
        elif self._published.get(channel) != payload:
            self._overwritten[channel] = payload

    def restore(self) -> None:
        """Publish again what another client, or an earlier start, has overwritten."""
        self._own_topic.publish()
        overwritten, self._overwritten = self._overwritten, {}
        for channel, payload in overwritten.items():
            if payload and not self._signer.has_signed(channel, payload):
                with self.receiver.guard():
                    text = f"a {channel} that this aggregator has not signed was on the broker"
                    self.receiver.count_refusal(UNKNOWN_DEVICE, Refused("signature", text))
            self._publish(channel)
