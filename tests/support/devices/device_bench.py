"""A device's program without a broker: a test sends it messages, images and time, and reads what is visible.

It runs as it does on a device, with its threads, real ONNX Runtime and a state directory; only the MQTT session is
replaced, and every call returns once the program waits for the next message.
"""

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar
from unittest.mock import patch

import msgspec
import numpy as np
from numpy.typing import NDArray

from edge_client.cli.status import device_status
from edge_client.core.state import Mode, StoredState, UploadItem, head_key
from edge_client.service.device import Device
from edge_client.store.device_state import DeviceState
from edge_client.store.job_folder import Shown
from protocol.mqtt import reconnecting_session as mqtt
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Drained, Outgoing, Received
from protocol.wire.codec import decode, digest_of, encode, message_kind
from protocol.wire.messages import (
    BlobRef,
    BlobRequest,
    DeviceInfo,
    Evaluation,
    Frame,
    HeadManifest,
    HeadRef,
    Presence,
    PrivacyRecord,
    Released,
    RoundManifest,
    TaskManifest,
)
from protocol.wire.privacy_record import kinds_of, record_of
from protocol.wire.signing import sign_record
from protocol.wire.topics import DeviceChannel, FleetChannel, device_topic, fleet_topic
from protocol.wire.transfer import Ranges, frames_of
from tests.support.devices.device_factory import (
    CLASSES,
    linear_head,
    make_manifest,
    make_settings,
    payload_of,
    tiny,
    write_images,
)
from tests.support.devices.round_factory import make_task, open_round
from tests.support.graphs.backbones import tiny_backbone
from tests.support.graphs.step_graphs import FEATURES
from tests.support.messages.manifests import signed_manifest

SETTLE_S = 240.0
"""Seconds that a device may work on one message, on a busy machine."""

_CLOCK = time.monotonic


class Clock:
    """The system's monotonic clock, which a test sets forward; all clocks of a process are one."""

    _ahead_s = 0.0
    _users = 0

    def advance(self, seconds: float) -> None:
        Clock._ahead_s += seconds

    def install(self) -> None:
        Clock._users += 1
        time.monotonic = lambda: _CLOCK() + Clock._ahead_s

    def remove(self) -> None:
        Clock._users -= 1
        if not Clock._users:
            time.monotonic = _CLOCK


class QuietQueues:
    """The queues that a program makes in `installed`; their timeouts pass in `expire` only."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: list[_Queue] = []
        self.is_busy: Callable[[], bool] = lambda: False
        self.is_over = False
        """Set once the program has ended: no thread waits at its queues any more."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace `queue.SimpleQueue` for this thread."""
        own, real = threading.current_thread(), queue.SimpleQueue

        def make() -> "_Queue | queue.SimpleQueue[Any]":
            if threading.current_thread() is not own:  # a pool of a job that was killed
                return real()
            self._queues.append(_Queue(self._changed))
            return self._queues[-1]

        with patch.object(queue, "SimpleQueue", make):
            yield

    def settle(self) -> None:
        """Wait until every queue is empty, and a thread waits at it."""
        with self._changed:
            if not self._changed.wait_for(self._is_quiet, SETTLE_S):
                raise TimeoutError(f"the device still works after {SETTLE_S:g} s")

    def expire(self) -> None:
        """End the waiting of every `get` that has a timeout, and settle."""
        self.settle()
        with self._changed:
            for each in self._queues:
                each.is_expired = each.has_timeout
            self._changed.notify_all()
        self.settle()

    def end(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def _is_quiet(self) -> bool:
        return self.is_over or (all(each.is_quiet for each in self._queues) and not self.is_busy())


class _Queue:
    """Like `queue.SimpleQueue`."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._items: deque[Any] = deque()
        self._waiting = 0
        self.has_timeout = False
        self.is_expired = False

    @property
    def is_quiet(self) -> bool:
        return bool(self._waiting) and not self._items and not self.is_expired

    def put(self, item: Any) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def get(self, timeout: float | None = None) -> Any:
        with self._changed:
            self._waiting += 1
            self.has_timeout = timeout is not None
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._items or self.is_expired)
                if not self._items:
                    raise queue.Empty
                return self._items.popleft()
            finally:
                self._waiting -= 1
                self.has_timeout = self.is_expired = False

    def empty(self) -> bool:
        return not self._items


KEY = b"k" * 32
"""The aggregator's."""

_CHANNELS: dict[type[Any], FleetChannel] = {
    TaskManifest: "task",
    RoundManifest: "round",
    HeadManifest: "head",
}
CONSTANT = {
    name: np.where(np.arange(2) == label, 1.0, 0.0) * np.ones((16, 1)) for label, name in enumerate(CLASSES)
}
"""Weights of heads that predict one class for every image whose features have a positive sum."""

BROADCAST_S = 600.0
"""Seconds after which a device requests tensors that the aggregator has not broadcast."""

_RELEASES = itertools.count(1)

Message = TypeVar("Message", BlobRequest, DeviceInfo, Frame, Presence, PrivacyRecord)


_STARTED: list["DeviceBench"] = []


def stop_all() -> None:
    """Stop every bench of a test."""
    while _STARTED:
        _STARTED.pop().stop()


class DeviceBench:
    """A running device of the fleet `f` with the name `device`; `settings` change those of `make_settings`."""

    named: tuple[Released, ...] | None = ()
    """The releases that the aggregator names and the device may lack; None for no answer."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.settings = make_settings(folder, broker=BrokerAddress("localhost", 1883), **settings)
        self.state = folder / "state"
        self.clock = Clock()
        self.published: list[Outgoing] = []
        """Everything that the device has sent since the start."""
        self.shown: list[Shown] = []
        """The submissions that dry runs have shown."""
        self.final: list[Outgoing] = []
        """The messages that it sent as it ended."""
        self._sessions: list[_Session] = []
        self._offers: dict[bytes, bytes] = {}
        self._answered = 0
        self._ending: BaseException | int | None = None
        self._thread: threading.Thread | None = None

    @property
    def store(self) -> DeviceState:
        """The state directory, as another program opens it."""
        return self._store

    def start(self, **changes: Any) -> Self:
        """Start the program, with other settings from now on; a running one is stopped first."""
        self.stop()
        self.settings = replace(self.settings, **changes)
        self._store = DeviceState(self.state)
        self.published, self._answered, self._ending, self._queues = [], 0, None, QuietQueues()
        self._recorded = 0
        _STARTED.append(self)
        self.clock.install()
        try:
            show = self._show if self.settings.mode is Mode.DRY_RUN else None
            with self._queues.installed(), patch.object(mqtt, "Session", self._session):
                self._device = Device(self.settings, self._store, show=show)
            jobs = self._device._jobs
            self._queues.is_busy = lambda: jobs.is_busy
        except BaseException:
            self.clock.remove()
            raise
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()
        return self._settle()

    def stop(self) -> int:
        """Stop the program, and return its exit status."""
        if self._thread is not None and self._thread.is_alive():
            self._device.stop()
            self._thread.join(SETTLE_S)
        return self._ending if isinstance(self._ending, int) else 1

    def receive(self, topic: str, payload: bytes, *, retained: bool = False) -> Self:
        """Deliver a message, and wait until all that follows from it is done; raises what ends the program."""
        return self.report(Received(topic, payload, retained=retained))

    def deliver(self, topic: str, payload: bytes) -> None:
        """Deliver a message, and return at once."""
        self._sessions[-1].on_event(Received(topic, payload))

    def report(self, event: mqtt.Event) -> Self:
        """Pass an event of the MQTT session."""
        self._sessions[-1].on_event(event)
        return self._settle()

    def connect(self, address: str = "", max_packet_bytes: int | None = None) -> Self:
        return self.report(Connected(max_packet_bytes, address))

    def announce(
        self, manifest: TaskManifest | RoundManifest | HeadManifest, *, release: int | None = None,
        key: bytes = KEY, **times: Any,
    ) -> Self:  # fmt: skip
        """Deliver a manifest that the aggregator has signed, by default with a release above all earlier ones."""
        return self.receive(*self.signed(manifest, release=release, key=key, **times), retained=True)

    def signed(
        self, manifest: TaskManifest | RoundManifest | HeadManifest, *, release: int | None = None,
        key: bytes = KEY, **times: Any,
    ) -> tuple[str, bytes]:  # fmt: skip
        """Return the topic and payload of a signed manifest."""
        channel = _CHANNELS[type(manifest)]
        number = next(_RELEASES) if release is None else release
        payload = signed_manifest(
            encode(manifest), key=key, fleet=self.settings.fleet, channel=channel, release=number, **times
        )
        return fleet_topic(self.settings.fleet, channel), payload

    def offer(self, data: bytes, name: str = "blob") -> BlobRef:
        """Return a reference to a blob that is sent to the device when it requests it."""
        self._offers[digest_of(data)] = data
        return BlobRef(digest=digest_of(data), size_bytes=len(data), name=name)

    def withdraw(self, blob: BlobRef) -> bytes:
        """Send a blob no longer; returns it."""
        return self._offers.pop(blob.digest)

    def broadcast(self, data: bytes, *, digest: bytes = b"", ranges: Ranges | None = None) -> Self:
        """Deliver frames of a blob, or by `digest` instead of another one."""
        for frame in frames_of(data, digest=digest or digest_of(data), ranges=ranges):
            self.receive(fleet_topic(self.settings.fleet, "cast"), encode(frame))
        return self

    def scan(self) -> Self:
        """Let the time pass until the device looks at its images and files."""
        return self.wait(self.settings.rescan_s)

    def scan_again(self) -> Self:
        """Let the device look at its images at once, as after a scan that had to wait for another job."""
        self._device._jobs.check_images()
        return self._settle()

    def wait(self, seconds: float = 1.0) -> Self:
        """Let time pass, without a message."""
        self.clock.advance(seconds)
        before = self._device._ticked_s
        self._queues.expire()
        while self._device._ticked_s == before and not self._queues.is_over:  # it was not waiting yet
            self._queues.expire()
        return self._settle()

    def topic(self, channel: DeviceChannel) -> str:
        return device_topic(self.settings.fleet, self.settings.device_id, channel)

    def sent(self, channel: DeviceChannel, kind: type[Message]) -> list[Message]:
        """Return what was sent on one of the device's topics since the start."""
        topic, tag = self.topic(channel), kind.__struct_config__.tag
        return [
            decode(each.payload, kind, max_bytes=10**7)
            for each in self.published
            if each.topic == topic and (channel != "get" or message_kind(each.payload) == tag)
        ]

    @property
    def requests(self) -> list[BlobRequest]:
        return self.sent("get", BlobRequest)

    @property
    def records(self) -> list[PrivacyRecord]:
        return self.sent("get", PrivacyRecord)

    def name(self, releases: tuple[Released, ...], *, key: bytes = KEY) -> Self:
        """Deliver what the aggregator has stored of the device's releases."""
        topic = self.topic("ack")
        record = sign_record(PrivacyRecord(releases=releases), key=key, topic=topic)
        return self.receive(topic, encode(record))

    @property
    def info(self) -> DeviceInfo:
        """The info that the device has published last."""
        return self.sent("info", DeviceInfo)[-1]

    @property
    def status(self) -> Mapping[str, Any]:
        """The output of `edge-client status`."""
        return device_status(self.store)

    def _show(self, shown: Shown) -> None:
        self.shown.append(shown)

    def _session(self, *_: object, on_event: Callable[[mqtt.Event], None], **__: object) -> "_Session":
        self._sessions.append(_Session(on_event, self.published, self.final))
        return self._sessions[-1]

    def _run(self) -> None:
        try:
            self._ending = self._device.run()
        except BaseException as error:
            self._ending = error
        finally:
            self.clock.remove()
            self._queues.end()

    def _settle(self) -> Self:
        """Wait until nothing happens any more; requests for blobs on offer are answered."""
        self._queues.settle()
        if isinstance(self._ending, BaseException):
            error, self._ending = self._ending, 1
            raise error
        records, self._recorded = self.records[self._recorded :], len(self.records)
        for record in records:
            if self.named is not None:
                self.name(record_of(kinds_of(record.releases) | kinds_of(self.named)))
        requests, self._answered = self.requests[self._answered :], len(self.requests)
        for request in requests:
            if (data := self._offers.get(request.digest)) is not None:
                ranges = ((request.offset, request.offset + request.length),)
                for frame in frames_of(data, digest=request.digest, ranges=ranges):
                    self.receive(self.topic("blk"), encode(frame))
        return self


class _Session:
    """An MQTT session whose broker has accepted everything at once."""

    def __init__(
        self, on_event: Callable[[mqtt.Event], None], published: list[Outgoing], final: list[Outgoing]
    ) -> None:
        self.on_event = on_event
        self._published = published
        self._final = final

    def start(self) -> None:
        """Nothing runs by itself."""

    def send(self, outgoing: Outgoing) -> None:
        self._published.append(outgoing)
        self.on_event(Drained())

    def stop(self, final: Sequence[Outgoing] = ()) -> None:
        self._final.extend(final)


class Installed(NamedTuple):
    """The result of an announced head."""

    reason: str
    """Why it was refused; empty if it is in use."""
    report: Evaluation | None
    """The report in the outbox."""

    @property
    def evaluation(self) -> Evaluation:
        assert self.report is not None
        return self.report


class _TaskBench(DeviceBench):
    """A device that is connected and has a task."""

    def follow(self, manifest: TaskManifest) -> Self:
        """Announce a task, whose blobs are on offer."""
        self.manifest = manifest
        self.announce(manifest)
        return self

    @property
    def task(self) -> bytes:
        """The digest of the task."""
        return digest_of(encode(self.manifest))

    def submission(self) -> UploadItem | None:
        """The task's submission in the outbox."""
        newest = self.store.outbox.newest_submission()
        return newest if newest is not None and newest.task == self.task else None

    def install(self, head: HeadRef) -> Installed:
        """Announce a head for all devices."""
        self.announce(HeadManifest(task=self.task, current=head))
        if head.tensors is not None:
            self.wait(BROADCAST_S)
        reports = {item.head: item for item in self.store.outbox.items() if item.kind == "evaluation"}
        item = reports.get(head_key(head))
        payload = payload_of(self.store, item) if item is not None else b""
        report = decode(payload, Evaluation, max_bytes=len(payload)) if item is not None else None
        return Installed(self.store.get(StoredState).problems.get("head", ""), report)


class HeadBench(_TaskBench):
    """A device with images and a submission, on a task without rounds."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, holdout=0.5, **settings)
        write_images(folder / "data", count=20)
        self.backbone = tiny(folder)
        self.offer(tiny_backbone())
        self.start().connect()
        self.follow(make_manifest())

    def head(self, version: int, weights: NDArray[np.float64], file: bytes | None = None) -> HeadRef:
        """Return a reference to a linear head, or to a file, on offer."""
        data = linear_head([self.backbone], weights.astype(np.float32)) if file is None else file
        return HeadRef(version=version, head=self.offer(data, "head.onnx"), devices=1, prototypes=1)


class RoundsBench(_TaskBench):
    """A device on a task with rounds, without images unless the folder `data` has some."""

    def __init__(self, folder: Path, **task: Any) -> None:
        super().__init__(folder)
        (folder / "data").mkdir(exist_ok=True)
        backbone = self.offer(tiny_backbone(feature_size=FEATURES), "backbone")
        self.start().connect()
        self.follow(msgspec.structs.replace(make_task(self, **task), backbones=(backbone,)))

    def put(self, data: bytes) -> bytes:
        """Offer a blob; returns its digest."""
        return self.offer(data).digest

    def open(self, number: int = 0, *, rate: float = 0.1) -> RoundManifest:
        """Return a round of the task, whose tensors are on offer."""
        opened = open_round(self, number=number, tensors={"rate": np.array(rate, np.float32)})
        return msgspec.structs.replace(opened, task=self.task)

    def begin(self, opened: RoundManifest) -> Self:
        """Announce a round, and broadcast its tensors."""
        return self.announce(opened).broadcast(self._offers[opened.tensors.digest])

    def head(self, version: int, tensors: BlobRef) -> HeadRef:
        """Return a head that is bound to a round's tensors."""
        assert self.manifest.program is not None
        return HeadRef(
            version=version, head=self.manifest.program.head, devices=1, prototypes=1, tensors=tensors
        )
