"""Publishes the device's messages over its MQTT session."""

from collections.abc import Callable, Mapping

from msgspec import UNSET

from edge_client.config import Settings
from edge_client.core.events import RequestBlob, SendFrames
from edge_client.core.state import Mode, State
from edge_client.core.uploads import NO_SPACE
from edge_client.privacy import policy
from edge_client.privacy.adoption import ADOPTED
from edge_client.privacy.charges import requires_privacy
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import (
    BackboneProvider,
    Epoch,
    Heads,
    PrivacySpent,
    SubmissionReport,
)
from protocol import __version__
from protocol.mqtt import reconnecting_session as mqtt
from protocol.mqtt.own_presence import OwnPresence
from protocol.wire.codec import encode
from protocol.wire.messages import (
    PROTOCOL_VERSION,
    BlobRequest,
    DeviceInfo,
    Frame,
    Message,
    PrivacyRecord,
    Released,
)
from protocol.wire.signing import sign_frame, sign_record
from protocol.wire.topics import RETAINED, DeviceChannel, device_topic, fleet_topic


class Publisher:
    """A device's MQTT session and the messages that it sends.

    Without a broker nothing is sent, and in a dry run neither presence nor info. `on_event` takes the session's events
    from its thread.
    """

    def __init__(
        self, settings: Settings, store: DeviceState, *, on_event: Callable[[mqtt.Event], None]
    ) -> None:
        self._settings = settings
        self._store = store
        self._is_dry_run = settings.mode is Mode.DRY_RUN
        self._key = store.signing_key(settings.identity.signing_key, keep=not self._is_dry_run)
        epoch = 0 if self._is_dry_run else store.free_number(Epoch)
        if epoch:
            store.set(Epoch(epoch))
        self.presence = OwnPresence(epoch=epoch, topic=self.topic("state"), key=self._key)
        self._session = self._open_session(on_event)

    def start(self) -> None:
        """Start the session."""
        if self._session is not None:
            self._session.start()

    def stop(self) -> None:
        """Publish that the device has stopped or was replaced, and end the session."""
        if self._session is not None:
            self._session.stop(
                [] if self._is_dry_run else [self.presence.outgoing(self.presence.final_state)]
            )

    def topic(self, channel: DeviceChannel) -> str:
        """Return the device's topic for a channel."""
        return device_topic(self._settings.fleet, self._settings.device_id, channel)

    def send(self, outgoing: mqtt.Outgoing) -> None:
        """Send a message, if there is a broker."""
        if self._session is not None:
            self._session.send(outgoing)

    def send_presence(self) -> None:
        """Publish that the device is online."""
        if not self._is_dry_run:
            self.send(self.presence.outgoing("online"))

    def request_blob(self, request: RequestBlob) -> None:
        """Request bytes of a blob."""
        message = BlobRequest(digest=request.digest, offset=request.offset, length=request.length)
        self.send(self._outgoing("get", message))

    def send_record(self, releases: tuple[Released, ...]) -> None:
        """Send the record of the device's releases under differential privacy."""
        record = PrivacyRecord(releases=releases)
        self.send(self._outgoing("get", sign_record(record, key=self._key, topic=self.topic("get"))))

    def send_frames(self, send: SendFrames) -> bool:
        """Send signed frames of an item; returns False if it is not in the outbox any more."""
        item, settings = send.item, self._settings
        pieces = self._store.outbox.read(item.digest, send.ranges)
        if pieces is None:
            return False
        for (start, _), data in zip(send.ranges, pieces, strict=True):
            frame = Frame(
                v=PROTOCOL_VERSION, digest=item.digest, size_bytes=item.size_bytes, offset=start, data=data
            )
            signed = sign_frame(frame, key=self._key, fleet=settings.fleet, device=settings.device_id)
            self.send(self._outgoing("up", signed))
        return True

    def send_info(self, info: DeviceInfo) -> None:
        """Publish what the device runs and has, and what it reports."""
        self.send(self._outgoing("info", info))

    def info(
        self, state: State, *, warning: str, drift: float | None, refused: Mapping[str, int]
    ) -> DeviceInfo:
        """Return the device's info; what it says of images depends on the task's privacy."""
        submission, head = self._store.get(SubmissionReport), self._store.get(Heads).installed
        required = requires_privacy(self._settings, self._store.ledger)
        bounded = policy.is_bounded(state.manifest, requires_privacy=required)
        bounded |= submission.is_private  # report and problems are still those of an earlier, private task
        bounded |= not state.has_record  # or of one that this device's state has lost
        # Before there is a task, its privacy is unknown.
        is_silent = state.manifest is None or bounded
        problems = {**state.problems, "build": state.build_problem}
        problem = policy.public_problem(_first(problems, "task", "space", "build"), bounded=bounded)
        # These reveal nothing about images.
        others = _first(problems, "download", "manifest", "upload")
        adopted = ADOPTED if self._store.get(PrivacySpent).adopted else ""
        backbones = state.manifest.backbones if state.manifest is not None else ()
        return DeviceInfo(
            epoch=self.presence.epoch,
            software=__version__,
            runtime=self._store.get(BackboneProvider).name,
            # Not of other files: a local model's digest is a function of images.
            backbones=tuple(blob.digest for blob in backbones if blob.digest in state.stored),
            images={} if is_silent else {entry.name: entry.images for entry in submission.classes},
            unusable_images=0 if is_silent else len(submission.unusable),
            problem=(problem or ("" if others == NO_SPACE else others))[:256],
            warning=(warning or adopted or ("" if is_silent else submission.lost_images))[:256],
            head_version=head.version if head is not None and head.task == state.task else 0,
            refused_messages=dict(refused),
            drift=UNSET if is_silent or drift is None else drift,
        )

    def _outgoing(self, channel: DeviceChannel, message: Message | Frame) -> mqtt.Outgoing:
        return mqtt.Outgoing(self.topic(channel), encode(message), channel in RETAINED)

    def _open_session(self, on_event: Callable[[mqtt.Event], None]) -> mqtt.Session | None:
        settings = self._settings
        if settings.broker is None:
            return None
        own: list[DeviceChannel] = ["blk", "ack"] if self._is_dry_run else ["blk", "ack", "state"]
        return mqtt.Session(
            settings.broker,
            client_id=f"pf-{settings.fleet}-{settings.device_id}-{self.presence.client_id}",
            subscriptions=[
                *(fleet_topic(settings.fleet, name) for name in ("task", "round", "head", "state", "cast")),
                *map(self.topic, own),
            ],
            on_event=on_event,
            access=settings.access,
            will=None if self._is_dry_run else lambda: self.presence.outgoing("offline"),
        )


def _first(problems: Mapping[str, str], *kinds: str) -> str:
    return next(filter(None, (problems.get(kind) for kind in kinds)), "")
