"""The functions that the device program enters on four ways, for `python -m benchmarks ways --program edge-client`.

It runs `edge-client`, `aggregator run` and mosquitto, and traces `edge-client`. It counts each function of
`edge_client` and `protocol` once for each way:

- images: from new images in the data folder to the first frame of the new submission on the broker;
- head: from a submission that was received to the first frame of the new head's evaluation: the head was downloaded,
  evaluated and installed;
- predict: one image, with the installed head, by `edge-client predict`;
- start: from the start of `edge-client` until it connects to the broker.

Only functions that each of three repetitions enters count, so that periodic work counts as far as it cannot be avoided.
"""

import contextlib
import os
import queue
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from benchmarks.cost.processes import ROOT, mosquitto, running, running_program
from benchmarks.cost.uploads.ingest import listening
from benchmarks.cost.ways.trace import Trace
from protocol.errors import ProtofleetError
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import decode
from protocol.wire.messages import Receipt
from protocol.wire.topics import device_topic

if TYPE_CHECKING:
    from protocol.mqtt.events import Received

FLEET, DEVICE = "ways", "device"
UP, ACK = device_topic(FLEET, DEVICE, "up"), device_topic(FLEET, DEVICE, "ack")
TASK = """\
fleet = "{fleet}"
classes = ["a", "b"]
backbones = ["{backbone}"]
quorum = 1
[training]
device = "cpu"
epochs = 4
"""
IMAGES = 12
"""Images a class at the start, and as many more for each submission."""
TIMEOUT_S = 120.0
WAYS = {"images": (1, 2, 3), "head": (4, 5, 6), "predict": (7, 8, 9), "start": (10, 11, 12)}
"""The windows of each way; a function counts that was entered in all of them."""


def measure(folder: Path) -> dict[str, list[str]]:
    """Return the functions of each way, in the order of their first call.

    Raises:
        ProtofleetError: the device has uploaded nothing, or takes too long.
    """
    backbone, state = ROOT / "examples" / "quickstart" / "backbone.onnx", folder / "device"
    (folder / "task.toml").write_text(TASK.format(fleet=FLEET, backbone=backbone), encoding="utf-8")
    (folder / "trace").mkdir()
    trace = Trace(folder / "trace")
    _add_images(folder / "data")
    for window in WAYS["start"]:
        _start(folder, trace, window)
        shutil.rmtree(state)
    with mosquitto(folder) as broker, listening(broker, UP, ACK) as received:
        task = (
            "--task",
            str(folder / "task.toml"),
            "--state",
            str(folder / "server"),
            "--broker",
            str(broker),
        )
        with running("aggregator.cli", "run", *task, log=folder / "aggregator.log"):
            with _device(folder, trace, broker):
                for _ in ("submission", "evaluation"):
                    _wait_for_receipt(received)
                for images, head in zip(WAYS["images"], WAYS["head"], strict=True):
                    with trace.window(images):
                        _add_images(folder / "data")
                        _next(received, UP)
                    _wait_for_receipt(received)
                    with trace.window(head):
                        _next(received, UP)
                    _wait_for_receipt(received)
            image = next((folder / "data" / "a").iterdir())
            for window in WAYS["predict"]:
                with trace.window(window):
                    command = [
                        sys.executable,
                        "-m",
                        "edge_client.cli",
                        "predict",
                        "--state",
                        str(state),
                        str(image),
                    ]
                    subprocess.run(command, env=trace.environment, check=True, stdout=subprocess.DEVNULL)
    return {way: trace.functions(windows) for way, windows in WAYS.items()}


def _start(folder: Path, trace: Trace, window: int) -> None:
    """Start a device, and end it once it connects to the broker."""
    with socket.create_server(("127.0.0.1", 0)) as broker, contextlib.ExitStack() as stack:
        broker.settimeout(TIMEOUT_S)
        with trace.window(window):
            stack.enter_context(_device(folder, trace, BrokerAddress(*broker.getsockname())))
            broker.accept()[0].close()


def _device(
    folder: Path, trace: Trace, broker: BrokerAddress
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    arguments = ["--fleet", FLEET, "--device-id", DEVICE, "--broker", str(broker), "--rescan-s", "1"]
    arguments += ["--data", str(folder / "data"), "--state", str(folder / "device")]
    program = [sys.executable, "-m", "edge_client.cli", *arguments]
    return running_program(program, log=folder / "device.log", environment=trace.environment)


def _next(received: "queue.SimpleQueue[Received]", topic: str) -> bytes:
    """Return the next message on a topic; others are dropped."""
    with contextlib.suppress(queue.Empty):
        while (message := received.get(timeout=TIMEOUT_S)).topic != topic:
            pass
        return message.payload
    raise ProtofleetError(f"nothing on {topic} within {TIMEOUT_S:.0f} s")


def _wait_for_receipt(received: "queue.SimpleQueue[Received]") -> None:
    """Wait until the aggregator has received an upload whole."""
    status = ""
    while status != "received":
        payload = _next(received, ACK)
        status = decode(payload, Receipt, max_bytes=len(payload)).status


def _add_images(folder: Path) -> None:
    """Add noisy images of two classes, one brighter than the other."""
    random = np.random.default_rng()
    for label, name in enumerate("ab"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for _ in range(IMAGES):
            pixels = random.integers(0, 80, (28, 28, 3)) + 150 * label
            path = folder / name / f"{os.urandom(8).hex()}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(path)
