"""An aggregator in an attacker's hands, with the key that its device trusts: all its manifests are signed correctly."""

import time
from pathlib import Path
from typing import Self

import msgspec

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
    Program,
    Receipt,
    RoundManifest,
    TaskManifest,
    Tensors,
)
from protocol.wire.signing import public_key, sign_manifest
from protocol.wire.topics import FleetChannel, device_topic, fleet_topic, parse_device_topic
from protocol.wire.transfer import Assembly, frames_of
from tests.system.attacks.fleet import AttackedFleet
from tests.system.attacks.hostile import Client, Heard

FLEET = "captured"
DEVICE = "guinea"
CLASSES = ("0", "1")
PASSWORD = "xyzzypassword"
KEY = digest_of(b"a key that was stolen")
MEMORY_KB = 8 * 1024**2
"""Of addresses that the device's program gets, as on a small machine: what wants more fails."""


class Captured:
    """The attacker's aggregator and its device, at the broker's open listener.

    Args:
        fleet: has the broker.
        data: the device's images.
        life: names the device's state, which begins anew with each.
    """

    def __init__(self, fleet: AttackedFleet, data: Path, life: str) -> None:
        self.fleet = fleet
        self.state = fleet.root / "devices" / f"{DEVICE}-{life}"
        self.reports: dict[int, str] = {}
        """The problem that the device reports for each version of a head; empty if it uses it."""
        self.problem = ""
        """The problem that the device reports in its info."""
        self.uploaded = 0
        self._data = data
        self._blobs: dict[bytes, bytes] = {}
        self._coming: dict[bytes, Assembly] = {}
        self._release = int(time.time())
        self._client = Client(fleet.open, on_heard=self._hear)

    def __enter__(self) -> Self:
        self._client.__enter__()
        self._client.subscribe(f"pf/1/{FLEET}/d/#")
        self._client.publish(
            fleet_topic(FLEET, "state"), encode(Presence(state="online", epoch=1)), retain=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        if DEVICE in self.fleet.processes:
            self.fleet.kill(DEVICE)
        self._client.__exit__()

    def start(self) -> None:
        """Run the device program, which trusts the stolen key."""
        self.fleet.start(
            *(DEVICE, "tests.support.impatient_device", "--broker", str(self.fleet.open), "--fleet", FLEET),
            *("--device-id", DEVICE, "--data", self._data, "--state", self.state, "--username", DEVICE),
            *("--aggregator-key", public_key(KEY).hex(), "--threads", "1", "--workers", "1"),
            *("--rescan-s", "0.5", "--verbose"),
            limits=("-v", str(MEMORY_KB)),
            environment={"PROTOFLEET_PASSWORD": PASSWORD},
        )

    def publish(self, channel: FleetChannel, message: Message) -> bytes:
        """Publish a manifest; returns the digest of its body."""
        body = encode(message)
        self._release += 1
        signed = sign_manifest(body, key=KEY, fleet=FLEET, channel=channel, release=self._release)
        assert self._client.publish(fleet_topic(FLEET, channel), signed, retain=True)
        return digest_of(body)

    def blob(self, data: bytes) -> BlobRef:
        """Serve a blob."""
        self._blobs[digest_of(data)] = data
        return BlobRef(digest=digest_of(data), size_bytes=len(data), name="blob")

    def task(self, backbone: bytes, program: bytes | None = None) -> bytes:
        """Publish a task on a backbone, with a program all of whose graphs are the given one; returns its identity."""
        graph = None if program is None else self.blob(program)
        manifest = TaskManifest(
            fleet=FLEET,
            algorithm="captured",
            classes=CLASSES,
            backbones=(self.blob(backbone),),
            alpha=1.0,
            batch_size=4,
            min_images=1,
            seed=0,
            program=None
            if graph is None
            else Program(
                init=graph, step=graph, project=graph, head=graph, persistent=(), uploaded=(), batch_size=4
            ),
        )
        task = self.publish("task", manifest)
        if program is not None:
            tensors = self.blob(encode(Tensors(values={})))
            self.publish("round", RoundManifest(task=task, number=0, rounds=2, epochs=1, tensors=tensors))
        return task

    def head(self, task: bytes, version: int, file: bytes) -> None:
        """Publish a head."""
        reference = HeadRef(version=version, head=self.blob(file), devices=1, prototypes=1)
        self.publish("head", HeadManifest(task=task, current=reference))

    def report_of(self, version: int) -> str:
        """Wait for the device's report on a head; returns its problem."""
        self.fleet.wait_until(f"a report on head {version}", lambda: version in self.reports)
        return self.reports[version]

    def until_problem(self, words: str) -> None:
        """Wait until the device reports a problem with these words, or without words, that it has none."""
        self.fleet.wait_until(
            f"the problem {words!r}", lambda: words in self.problem if words else not self.problem
        )

    def _hear(self, heard: Heard) -> None:
        if heard.retained or not heard.payload:
            return
        where = parse_device_topic(heard.topic)
        if where.channel == "get":
            self._serve(decode(heard.payload, BlobRequest, max_bytes=1024))
        elif where.channel == "up":
            self._take(decode(heard.payload, Frame, max_bytes=MAX_FRAME_BYTES))
        elif where.channel == "info":
            self.problem = decode(heard.payload, DeviceInfo, max_bytes=MAX_MANIFEST_BYTES).problem

    def _serve(self, wanted: BlobRequest) -> None:
        ranges = ((wanted.offset, wanted.offset + wanted.length),)
        for frame in frames_of(self._blobs[wanted.digest], digest=wanted.digest, ranges=ranges):
            self._client.say(device_topic(FLEET, DEVICE, "blk"), encode(frame))

    def _take(self, frame: Frame) -> None:
        assembly = self._coming.setdefault(frame.digest, Assembly(frame.digest, frame.size_bytes))
        if assembly.missing():
            assembly.add(frame)
        missing = assembly.missing()
        receipt = Receipt(digest=frame.digest, status="missing" if missing else "received", missing=missing)
        self._client.say(device_topic(FLEET, DEVICE, "ack"), encode(receipt))
        if missing:
            return
        payload = assembly.payload()
        if message_kind(payload) == "evaluation":
            report = msgspec.msgpack.decode(payload, type=Evaluation)
            self.reports[report.head_version] = report.problem
        else:
            self.uploaded += 1
