"""A simulated device: the agent's state machine, with its outbox and blobs in memory, and made-up prototypes."""

import functools
import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.fleet.load.sessions import Loop, PolledSession
from edge_client.core import events, state_machine
from edge_client.core.state import Kind, Mode, State, UploadItem, head_key
from protocol.errors import ProtofleetError
from protocol.mqtt import events as mqtt
from protocol.mqtt.client import ConnectionOptions
from protocol.mqtt.own_presence import OwnPresence
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAddress
from protocol.wire.arrays import to_unsigned
from protocol.wire.codec import decode, digest_of, encode, message_kind
from protocol.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_MANIFEST_BYTES,
    BlobRequest,
    DeviceInfo,
    Evaluation,
    Frame,
    HeadManifest,
    Message,
    Presence,
    PrivacyRecord,
    Receipt,
    Submission,
    TaskManifest,
)
from protocol.wire.presence import Reaction
from protocol.wire.quantization import prototype_fields
from protocol.wire.signing import open_manifest, sign_frame, sign_record
from protocol.wire.topics import RETAINED, DeviceChannel, device_topic, fleet_topic
from protocol.wire.transfer import frames_of

TICK_S = 1.0
FEATURES = 256
PER_CLASS = 4
"""Prototypes of each class."""
BATCH = 5
"""Images of a prototype."""


class SimulatedDevice:
    """One device of a fleet without rounds; one that is idle only connects and publishes its presence and info."""

    def __init__(
        self, name: str, *, fleet: str, broker: BrokerAddress, backbone: bytes, loop: Loop, is_idle: bool
    ) -> None:
        self.name = name
        self.submission = b""
        """The digest of its submission."""
        self.received_s = 0.0
        """When the aggregator's receipt for it arrived, by `time.monotonic`; 0 before."""
        self.head = b""
        """The digest of the head that was downloaded and verified."""
        self.head_s = 0.0
        """When it was verified; 0 before."""
        self.evaluated_s = 0.0
        """When the aggregator's receipt for its evaluation arrived; 0 before."""
        self.frames = 0
        """Frames of submissions and queries that were sent."""
        self.receipts = 0
        """Receipts of submissions: several, if the aggregator is asked again."""
        self._fleet = fleet
        self._loop = loop
        self._is_idle = is_idle
        self._key = digest_of(name.encode())
        self._topics = {
            **{
                fleet_topic(fleet, channel): channel for channel in ("task", "round", "head", "state", "cast")
            },
            **{self._topic(channel): f"own {channel}" for channel in ("blk", "ack", "state")},
        }
        self._presence = OwnPresence(epoch=int(time.time()), topic=self._topic("state"), key=self._key)
        options = ConnectionOptions(
            broker=broker,
            access=NO_AUTHENTICATION,
            tls=None,
            client_id=f"pf-{fleet}-{name}-{self._presence.client_id}",
            subscriptions=tuple(self._topics),
            will=lambda: self._presence.outgoing("offline"),
            window=8,
            manual_ack=False,
        )
        self.session = PolledSession(options, loop, on_event=self._on_event)
        self._state = State(mode=Mode.SERVICE, device=name, stored=frozenset({backbone}))
        self._outbox: dict[bytes, tuple[UploadItem, bytes]] = {}
        """Items and their bytes by digest."""
        self._hashes: dict[bytes, hashlib._Hash] = {}
        """Of the bytes of each blob so far, which are not kept."""
        self._aggregator = b""

    def start(self) -> None:
        """Connect, and begin to tick."""
        self.session.connect()
        if not self._is_idle:
            self._tick()

    def _tick(self) -> None:
        self._step(events.Ticked())
        self._loop.after(TICK_S, self._tick)

    def _topic(self, channel: DeviceChannel) -> str:
        return device_topic(self._fleet, self.name, channel)

    def _send(self, channel: DeviceChannel, message: Message | Frame) -> None:
        self.session.send(mqtt.Outgoing(self._topic(channel), encode(message), channel in RETAINED))

    def _send_info(self) -> None:
        """Publish what a device reports when it has connected, built a submission or installed a head."""
        manifest, head = self._state.manifest, self._state.head
        info = DeviceInfo(
            epoch=self._presence.epoch,
            software="simulated",
            runtime="none",
            backbones=tuple(blob.digest for blob in manifest.backbones) if manifest is not None else (),
            images={} if manifest is None else dict.fromkeys(manifest.classes, PER_CLASS * BATCH),
            unusable_images=0,
            head_version=head.current.version if self.head and head is not None else 0,
        )
        self._send("info", info)

    def _on_event(self, event: mqtt.Event) -> None:
        match event:
            case mqtt.Connected(address=address):
                self._presence.connected(address)
                self.session.send(self._presence.outgoing("online"))
                self._step(event)
                self._send_info()
            case mqtt.Disconnected() | mqtt.Drained():
                self._step(event)
            case mqtt.Received(topic=topic, payload=payload, retained=retained) if payload:
                for received in self._translated(self._topics[topic], payload, retained=retained):
                    self._step(received)
            case mqtt.Unsendable(reason=reason):
                raise ProtofleetError(f"the broker refuses a publication of {self.name}: {reason}")

    def _translated(  # noqa: C901 - one case per channel
        self, channel: str, payload: bytes, *, retained: bool
    ) -> Iterator[events.Event]:
        """Yield the agent's events of a message, as `edge_client.service.inbox` does."""
        if self._is_idle:
            return
        match channel:
            case "task":
                body = _body(payload, self._fleet, "task")
                manifest = decode(body, TaskManifest, max_bytes=MAX_MANIFEST_BYTES)
                yield events.TaskSeen(digest_of(body), manifest)
                yield self._seen_outbox()
            case "head":
                yield decode(_body(payload, self._fleet, "head"), HeadManifest, max_bytes=MAX_MANIFEST_BYTES)
            case "own ack" if message_kind(payload) == "privacy_record":
                yield events.RecordAdopted(is_complete=True)
            case "own ack":
                yield decode(payload, Receipt, max_bytes=MAX_FRAME_BYTES)
            case "own blk":
                yield decode(payload, Frame, max_bytes=MAX_FRAME_BYTES)
            case "own state":
                presence = decode(payload, Presence, max_bytes=1024)
                if self._presence.react(presence, may_end=False) is Reaction.PUBLISH:
                    self.session.send(self._presence.outgoing("online"))
            case "state":
                presence = decode(payload, Presence, max_bytes=1024)
                if presence.state != "online":
                    return
                is_new, self._aggregator = presence.instance != self._aggregator, presence.instance
                if is_new:
                    yield self._seen_outbox()
                    yield events.AggregatorStarted()
                elif not retained:
                    yield events.AggregatorReconnected()

    def _seen_outbox(self) -> events.OutboxSeen:
        return events.OutboxSeen(tuple(item for item, _ in self._outbox.values()))

    def _step(self, event: events.Event) -> None:
        if self._is_idle:
            return
        self._state, actions = state_machine.step(self._state, event, now_s=time.monotonic())
        for action in actions:
            self._perform(action)

    def _perform(self, action: events.Action) -> None:  # noqa: C901, PLR0912 - one case per action
        match action:
            case events.BuildSubmission(task=task, manifest=manifest, above=above):
                payload = submission_of(self.name, task, len(manifest.classes), sequence=above + 1)
                item = self._kept("submission", payload, task=task)
                self.submission = item.digest
                self._step(events.SubmissionBuilt(task, item))
                self._send_info()
            case events.OpenDownload(blob=blob):
                self._hashes[blob.digest] = hashlib.sha256()
                self._step(events.DownloadOpened(blob.digest, 0))
            case events.RequestBlob(digest=digest, offset=offset, length=length):
                self._send("get", BlobRequest(digest=digest, offset=offset, length=length))
            case events.AppendBlob(blob=blob, data=data, done=done):
                self._hashes[blob.digest].update(data)
                if done == blob.size_bytes:
                    is_valid = self._hashes.pop(blob.digest).digest() == blob.digest
                    self._step(events.DownloadFinished(blob.digest, is_valid))
            case events.SendRecord():
                topic = self._topic("get")
                self._send("get", sign_record(PrivacyRecord(releases=()), key=self._key, topic=topic))
            case events.SendFrames(item=item, ranges=ranges):
                for frame in frames_of(self._outbox[item.digest][1], digest=item.digest, ranges=ranges):
                    self.frames += 1
                    self._send("up", sign_frame(frame, key=self._key, fleet=self._fleet, device=self.name))
            case events.InstallHead(task=task, manifest=manifest, head=head):
                perfect = (1,) * len(manifest.classes)
                made = Evaluation(
                    task=task, head_version=head.version, correct=perfect, incorrect=(0,) * len(perfect)
                )
                item = self._kept("evaluation", encode(made), task=task, about=head_key(head).hex())
                self.head, self.head_s = head.head.digest, time.monotonic()
                self._step(events.HeadInstalled(head_key(head), item))
                self._send_info()
            case events.StoreReceipt(item=item):
                _, payload = self._outbox[item.digest]
                self._outbox[item.digest] = replace(item, received=True), payload
                if item.kind == "submission":
                    self.received_s = time.monotonic()
                    self.receipts += 1
                else:
                    self.evaluated_s = time.monotonic()
            case events.Exit(text=text):
                raise ProtofleetError(f"{self.name}: {text}")

    def _kept(self, kind: Kind, payload: bytes, *, task: bytes, about: str = "") -> UploadItem:
        item = UploadItem(digest_of(payload), len(payload), kind, task, about)
        self._outbox[item.digest] = item, payload
        return item


@functools.lru_cache(maxsize=16)
def _body(payload: bytes, fleet: str, channel: str) -> bytes:
    """Verify a manifest, once for all devices of the process."""
    return open_manifest(payload, fleet=fleet, channel="task" if channel == "task" else "head").body


def submission_of(name: str, task: bytes, classes: int, *, sequence: int) -> bytes:
    """Return a submission whose prototypes are near the same class means as those of all devices."""
    labels = np.repeat(np.arange(classes), PER_CLASS)
    means = np.random.default_rng(0).normal(size=(classes, FEATURES))
    noise = np.random.default_rng(list(name.encode())).normal(0, 0.3, (len(labels), FEATURES))
    values = (means[labels] + noise).astype(np.float16)
    return encode(
        Submission(
            task=task,
            sequence=sequence,
            **prototype_fields(values),
            labels=to_unsigned(labels),
            counts=to_unsigned(np.full(len(labels), BATCH)),
            images=len(labels) * BATCH,
        )
    )
