"""An aggregator that an attacker controls; it signs its manifests with the key that its device trusts."""

import time
from typing import Self

import msgspec
import numpy as np

from aggregator.intake.upload import Upload
from edge_client.graphs.backbone import open_backbone
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import Heads
from protocol.wire.codec import decode, digest_of, encode, message_kind
from protocol.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_MANIFEST_BYTES,
    BlobRef,
    BlobRequest,
    DeviceInfo,
    Evaluation,
    Frame,
    HeadManifest,
    HeadRef,
    Message,
    Presence,
    PrivacyRecord,
    Program,
    Receipt,
    RoundManifest,
    TaskManifest,
    Tensors,
)
from protocol.wire.signing import public_key, sign_record
from protocol.wire.topics import FleetChannel, device_topic, fleet_topic, parse_device_topic
from protocol.wire.transfer import frames_of
from tests.support.devices.device_factory import linear_head
from tests.support.fleets.changed_job import RUN_S
from tests.support.fleets.fleet import write_digits
from tests.support.graphs.backbones import tiny_backbone
from tests.support.messages.manifests import signed_manifest
from tests.system.attacks.attacker_client import AttackerClient, ReceivedMessage
from tests.system.attacks.fleet import AttackedFleet

FLEET = "compromised"
DEVICE = "shed-9"
CLASSES = ("0", "1")
PASSWORD = "xyzzypassword"
KEY = digest_of(b"a key that was stolen")
LONG_RUN_S = 600.0
"""Limit of a graph that ends before, also on a busy machine: by an error, or by a kill of the job."""
MEMORY_KB = 8 * 1024**2
"""Address space of the device's program, as on a small machine."""


class CompromisedAggregator:
    """The attacker's aggregator at the broker's open listener, and its device, which uses a valid head.

    Args:
        fleet: has the broker.
        name: of the device's state folder.
    """

    def __init__(self, fleet: AttackedFleet, name: str) -> None:
        self.fleet = fleet
        self.backbone = tiny_backbone()
        self._state = fleet.root / "devices" / f"{DEVICE}-{name}"
        self._reports: dict[int, str] = {}
        """Problem that the device reports for each version of a head; empty if it uses it."""
        self._problem = ""
        """Problem that the device reports in its info."""
        self._blobs: dict[bytes, bytes] = {}
        self._uploads: dict[bytes, Upload] = {}
        self._version = 0
        self._release = int(time.time())
        self._client = AttackerClient(fleet.open, on_message=self._receive)

    def __enter__(self) -> Self:
        self._client.__enter__()
        self._client.subscribe(f"pf/1/{FLEET}/d/#")
        online = encode(Presence(state="online", epoch=1))
        self._client.publish(fleet_topic(FLEET, "state"), online, retain=True)
        self._task = self.publish_task(self.backbone)
        self.publish_valid_head()
        self.start_device()
        assert self.wait_for_report() == ""
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.kill(DEVICE)
        self._client.__exit__()

    def start_device(self, *, run_s: float = LONG_RUN_S) -> None:
        """Run the device program, which trusts the stolen key, and gives a graph so many seconds."""
        data = self.fleet.root / f"images-{DEVICE}"
        if not data.exists():
            write_digits(data, classes=[0, 1])
        self.fleet.start(
            *(
                DEVICE,
                "tests.support.fleets.changed_device",
                "--broker",
                str(self.fleet.open),
                "--fleet",
                FLEET,
            ),
            *("--device-id", DEVICE, "--data", data, "--state", self._state, "--username", DEVICE),
            *("--aggregator-key", public_key(KEY).hex(), "--threads", "1"),
            *("--rescan-s", "0.5", "--verbose"),
            limits=("-v", str(MEMORY_KB)),
            environment={"PROTOFLEET_PASSWORD": PASSWORD, RUN_S: str(run_s)},
        )

    def restart_device(self, *, run_s: float) -> None:
        """Kill the device, and start it with another limit of a graph."""
        self.fleet.kill(DEVICE)
        self.start_device(run_s=run_s)

    def publish_task(self, backbone: bytes, graph: bytes | None = None) -> bytes:
        """Publish a task; `graph` becomes all graphs of its program. Returns the task's identity."""
        program = None
        if graph is not None:
            blob = self._serve(graph)
            program = Program(
                init=blob, step=blob, project=blob, head=blob, persistent=(), uploaded=(), batch_size=4
            )
        manifest = TaskManifest(
            fleet=FLEET,
            algorithm="compromised",
            classes=CLASSES,
            backbones=(self._serve(backbone),),
            alpha=1.0,
            batch_size=4,
            min_images=1,
            seed=0,
            program=program,
        )
        task = self._publish("task", manifest)
        if graph is not None:
            tensors = self._serve(encode(Tensors(values={})))
            self._publish("round", RoundManifest(task=task, number=0, rounds=2, epochs=1, tensors=tensors))
        return task

    def publish_valid_head(self) -> None:
        """Publish another valid head of the first task."""
        path = self.fleet.root / "tiny.onnx"
        path.write_bytes(self.backbone)
        weights = np.random.default_rng(self._version).normal(size=(16, len(CLASSES))).astype(np.float32)
        self.valid_head = linear_head(
            [open_backbone(path, provider="cpu", threads=1)], weights, classes=CLASSES
        )
        self.publish_head(self.valid_head)

    def publish_head(self, file: bytes) -> None:
        """Publish a head of the first task."""
        self._version += 1
        current = HeadRef(version=self._version, head=self._serve(file), devices=1, prototypes=1)
        self._publish("head", HeadManifest(task=self._task, current=current))

    def wait_for_report(self) -> str:
        """Wait for the device's report on the newest head; returns its problem."""
        version = self._version
        self.fleet.wait_until(f"a report on head {version}", lambda: version in self._reports)
        return self._reports[version]

    def wait_for_problem(self, words: str) -> None:
        """Wait until the device reports a problem with these words, or none if there are no words."""
        self.fleet.wait_until(
            f"the problem {words!r}", lambda: words in self._problem if words else not self._problem
        )

    def device_uses_valid_head(self) -> bool:
        installed = DeviceState(self._state, read_only=True).get(Heads).installed
        return installed is not None and installed.head == digest_of(self.valid_head)

    def _publish(self, channel: FleetChannel, message: Message) -> bytes:
        """Publish a manifest; returns the digest of its body."""
        body = encode(message)
        self._release += 1
        signed = signed_manifest(body, key=KEY, fleet=FLEET, channel=channel, release=self._release)
        assert self._client.publish(fleet_topic(FLEET, channel), signed, retain=True)
        return digest_of(body)

    def _serve(self, data: bytes) -> BlobRef:
        self._blobs[digest_of(data)] = data
        return BlobRef(digest=digest_of(data), size_bytes=len(data), name="blob")

    def _receive(self, message: ReceivedMessage) -> None:
        if message.retained or not message.payload:
            return
        channel = parse_device_topic(message.topic).channel
        if channel == "get" and message_kind(message.payload) == "privacy_record":
            topic = device_topic(FLEET, DEVICE, "ack")
            record = sign_record(PrivacyRecord(), key=KEY, topic=topic)
            self._client.publish_without_waiting(topic, encode(record))
        elif channel == "get":
            self._send_blob(decode(message.payload, BlobRequest, max_bytes=1024))
        elif channel == "up":
            self._add_frame(decode(message.payload, Frame, max_bytes=MAX_FRAME_BYTES))
        elif channel == "info":
            self._problem = decode(message.payload, DeviceInfo, max_bytes=MAX_MANIFEST_BYTES).problem

    def _send_blob(self, wanted: BlobRequest) -> None:
        ranges = ((wanted.offset, wanted.offset + wanted.length),)
        for frame in frames_of(self._blobs[wanted.digest], digest=wanted.digest, ranges=ranges):
            self._client.publish_without_waiting(device_topic(FLEET, DEVICE, "blk"), encode(frame))

    def _add_frame(self, frame: Frame) -> None:
        assembly = self._uploads.setdefault(frame.digest, Upload(frame.digest, frame.size_bytes))
        if assembly.missing():
            assembly.add(frame)
        missing = assembly.missing()
        receipt = Receipt(digest=frame.digest, status="missing" if missing else "received", missing=missing)
        self._client.publish_without_waiting(device_topic(FLEET, DEVICE, "ack"), encode(receipt))
        if not missing and message_kind(payload := assembly.payload()) == "evaluation":
            report = msgspec.msgpack.decode(payload, type=Evaluation)
            self._reports[report.head_version] = report.problem
