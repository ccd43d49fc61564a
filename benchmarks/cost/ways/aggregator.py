"""The functions that the aggregator enters on four ways, for `python -m benchmarks ways`.

It runs `aggregator run` and mosquitto, uploads submissions of three devices, and traces the aggregator with its
subprocesses. It counts each function of `aggregator` and `protocol` once for each way:

- upload: from a submission's last frame until its receipt, and the acknowledgement of the frame to the broker; only
  functions that each of three uploads enters, so that periodic work does not count;
- head: from three stored submissions until the head's manifest, with the training's process and periodic work;
- rollback: from an operator's command over HTTP until its answer and the manifest, with the server's process; only
  functions that each of three rollbacks enters;
- start: from the start of `aggregator run` until it connects to the broker.
"""

import contextlib
import http.client
import json
import queue
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paho.mqtt import publish

from benchmarks.cost.fleet_load.device import submission_of
from benchmarks.cost.processes import ROOT, free_address, mosquitto, running_program
from benchmarks.cost.uploads.ingest import listening
from benchmarks.cost.ways.trace import Trace
from protocol.errors import ProtofleetError
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import HeadManifest, Receipt
from protocol.wire.signing import open_manifest, sign_frame
from protocol.wire.topics import device_topic, fleet_topic
from protocol.wire.transfer import frames_of

if TYPE_CHECKING:
    from protocol.mqtt.events import Received

FLEET = "ways"
DEVICES = ("a", "b", "c")
TASK = """\
fleet = "{fleet}"
classes = ["a", "b", "c"]
backbones = ["{backbone}"]
quorum = 4
deadline_s = 15  # all submissions must be stored by then
[training]
device = "cpu"
epochs = 4
"""
TIMEOUT_S = 120.0
WAYS = {"upload": (1, 2, 3), "head": (4,), "rollback": (5, 6, 7), "start": (8,)}
"""The windows of each way; a function counts that was entered in all of them."""


class Devices:
    """The devices of the fleet: what they publish, and the messages that they receive."""

    def __init__(self, broker: BrokerAddress, received: "queue.SimpleQueue[Received]") -> None:
        self._broker = broker
        self._received = received

    def _next(self, topic: str) -> bytes:
        """Return the next message on a topic; others are dropped."""
        with contextlib.suppress(queue.Empty):
            while (message := self._received.get(timeout=TIMEOUT_S)).topic != topic:
                pass
            return message.payload
        raise ProtofleetError(f"nothing on {topic} within {TIMEOUT_S:.0f} s")

    def task(self) -> bytes:
        """Wait for the task; returns its digest."""
        payload = self._next(fleet_topic(FLEET, "task"))
        return digest_of(open_manifest(payload, fleet=FLEET, channel="task").body)

    def wait_for_head(self, version: int) -> None:
        """Wait until a head is current."""
        current = 0
        while current != version:
            body = open_manifest(self._next(fleet_topic(FLEET, "head")), fleet=FLEET, channel="head").body
            current = decode(body, HeadManifest, max_bytes=len(body)).current.version

    def upload(
        self, device: str, payload: bytes, last: contextlib.AbstractContextManager[None] | None = None
    ) -> None:
        """Upload a submission in two frames, and wait for its receipt; the context `last` is from the second frame."""
        half, key = len(payload) // 2, digest_of(device.encode())
        ranges = ((0, half), (half, len(payload)))
        for frame in frames_of(payload, digest=digest_of(payload), ranges=ranges):
            signed = encode(sign_frame(frame, key=key, fleet=FLEET, device=device))
            with (last if frame.offset else None) or contextlib.nullcontext():
                publish.single(
                    device_topic(FLEET, device, "up"),
                    signed,
                    1,
                    hostname=self._broker.host,
                    port=self._broker.port,
                )
                answer = self._next(device_topic(FLEET, device, "ack")) if frame.offset else b""
                time.sleep(0.1)  # the aggregator acknowledges the message to the broker
            time.sleep(1.0)  # it has nothing else to do during the second frame
        if (receipt := decode(answer, Receipt, max_bytes=len(answer))).status != "received":
            raise ProtofleetError(f"the aggregator has not stored a submission: {receipt}")


def measure(folder: Path) -> dict[str, list[str]]:
    """Return the functions of each way, in the order of their first call.

    Raises:
        ProtofleetError: the aggregator has refused something, or takes too long.
    """
    backbone = ROOT / "examples" / "quickstart" / "backbone.onnx"
    (folder / "task.toml").write_text(TASK.format(fleet=FLEET, backbone=backbone), encoding="utf-8")
    (folder / "trace").mkdir()
    trace, server = Trace(folder / "trace"), free_address()
    _start(folder, trace)
    topics = [fleet_topic(FLEET, "task"), fleet_topic(FLEET, "head")]
    topics += [device_topic(FLEET, name, "ack") for name in DEVICES]
    with (
        mosquitto(folder) as broker,
        _aggregator(folder, trace, broker, server),
        listening(broker, *topics) as received,
    ):
        devices = Devices(broker, received)
        task = devices.task()
        for window, name in zip(WAYS["upload"], DEVICES, strict=True):
            devices.upload(name, submission_of(name, task, 3, sequence=1), trace.window(window))
        with trace.window(*WAYS["head"]):
            devices.wait_for_head(1)
        devices.upload(DEVICES[0], submission_of(DEVICES[0], task, 3, sequence=2))
        devices.wait_for_head(2)
        for window, version in zip(WAYS["rollback"], (1, 2, 1), strict=True):
            with trace.window(window):
                _roll_back(folder / "state", server, version)
                devices.wait_for_head(version)
    return {way: trace.functions(windows) for way, windows in WAYS.items()}


def _start(folder: Path, trace: Trace) -> None:
    """Start an aggregator, and end it once it connects to the broker."""
    with socket.create_server(("127.0.0.1", 0)) as broker, contextlib.ExitStack() as stack:
        broker.settimeout(TIMEOUT_S)
        with trace.window(*WAYS["start"]):
            address = BrokerAddress(*broker.getsockname())
            stack.enter_context(_aggregator(folder, trace, address, free_address()))
            broker.accept()[0].close()
    shutil.rmtree(folder / "state")


def _aggregator(
    folder: Path, trace: Trace, broker: BrokerAddress, server: BrokerAddress
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    arguments = ["--task", str(folder / "task.toml"), "--state", str(folder / "state")]
    arguments += ["--broker", str(broker), "--http", str(server)]
    program = [sys.executable, "-m", "aggregator.cli", "run", *arguments]
    return running_program(program, log=folder / "aggregator.log", environment=trace.environment)


def _roll_back(state: Path, server: BrokerAddress, version: int) -> None:
    token = (state / "http-token").read_text(encoding="utf-8").strip()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    with contextlib.closing(http.client.HTTPConnection(str(server), timeout=TIMEOUT_S)) as connection:
        body = json.dumps({"version": version})
        connection.request("POST", "/api/v1/commands/rollback", body, headers)
        connection.getresponse().read()
