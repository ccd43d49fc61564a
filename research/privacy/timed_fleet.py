"""The fleet of `python -m research timing`: a broker, an aggregator, devices, and an attacker who reads the broker."""

import contextlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import paho.mqtt.client as mqtt
from onnx import helper, numpy_helper, parser
from paho.mqtt.enums import CallbackAPIVersion
from PIL import Image

from aggregator.intake.validation import read_message
from benchmarks.processes import running, wait_for_log
from protocol.errors import ProtofleetError
from protocol.models.onnx_metadata import BackboneMetadata, to_properties
from protocol.models.preprocessing import Preprocessing
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.statistics.public_map import PublicMap
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_FRAME_BYTES, DeviceInfo, Frame, Submission
from protocol.wire.repeated_transfers import Transfers
from protocol.wire.topics import device_filters, parse_device_topic

FLEET = "timing"
EPSILON = 2.0
CLASSES = ("cat", "dog")
IMAGES = 2
"""Of each class, on each device, beside the white one."""

EDGE, FEATURE, SIZE = 8, 16, 12
REPETITIONS = 600
"""Products of matrices for an image that is not white: a fifth of a second, so that the white one may take two."""

MAX_SUBMISSION_BYTES = 2**20
TIMEOUT_S = 300.0
LINGER_S = 1.0
"""What is published so long after a submission counts as well."""

Message = tuple[float, str, bytes]
"""When it came, unix seconds, the channel of its topic, and its payload."""


@dataclass(frozen=True)
class Published:
    """What a device has published until its submission was complete, or it had a problem to report."""

    messages: Sequence[Message]
    submission: Submission | None

    @property
    def channels(self) -> tuple[str, ...]:
        """The order of what it has published."""
        return tuple(channel for _, channel, _ in self.messages)

    def scores(self) -> dict[str, float]:
        """Return what an attacker can compare."""
        times = [at_s for at_s, _, _ in self.messages]
        begin_s = times[0]
        return {
            "first to last message, s": times[-1] - begin_s,
            "longest silence, s": float(np.diff(times).max()),
            "sequence, s": self.submission.sequence - begin_s if self.submission else 0.0,
            "messages": float(len(times)),
        }


def slow_backbone() -> bytes:
    """Return a backbone that works on a white image without end."""
    weights = np.random.default_rng(0).normal(size=(3 * (EDGE // 2) ** 2, FEATURE)).astype(np.float32)
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        slow (uint8[n, {EDGE}, {EDGE}, 3] image) => (float[n, {FEATURE}] feature)
        {{
            pixels = Cast<to = 1>(image)
            scaled = Div(pixels, white)
            planes = Transpose<perm = [0, 3, 1, 2]>(scaled)
            patches = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(planes)
            flat = Flatten(patches)
            plain = MatMul(flat, projection)
            darkest = ReduceMin<keepdims = 0>(flat)
            is_white = Floor(darkest)
            more = Cast<to = 7>(is_white)
            without_end = Mul(more, many)
            times = Add(without_end, few)
            product = Loop<body = repeat (int64 number, bool again, float[256, 256] value)
                => (bool still, float[256, 256] next) {{ still = Identity(again) next = MatMul(value, identity) }}>
                (times, go_on, identity)
            zero = ReduceMin<keepdims = 0>(product)
            feature = Add(plain, zero)
        }}""")
    constants: dict[str, np.ndarray] = {
        "white": np.array(255, np.float32), "projection": weights, "identity": np.eye(256, dtype=np.float32),
        "many": np.array(2**40), "few": np.array(REPETITIONS), "go_on": np.array(True),
    }  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    metadata = BackboneMetadata(
        model="slow",
        feature_size=FEATURE,
        preprocessing=Preprocessing(height=EDGE, width=EDGE),
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        weights_sha256="0" * 64,
    )
    helper.set_model_props(model, to_properties(metadata))
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


class Watcher:
    """The attacker: as a context, it reads what devices publish."""

    def __init__(self, address: BrokerAddress) -> None:
        self.published: defaultdict[str, list[Message]] = defaultdict(list)
        """By the device's name."""
        self._address = address
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        self._client.on_message = self._receive

    def __enter__(self) -> None:
        self._client.connect(self._address.host, self._address.port)
        self._client.subscribe([(each, 1) for each in device_filters(FLEET)])
        self._client.loop_start()

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _receive(self, _client: mqtt.Client, _userdata: object, message: mqtt.MQTTMessage) -> None:
        topic = parse_device_topic(message.topic)
        self.published[topic.device].append((time.time(), topic.channel, bytes(message.payload)))


def ended(messages: Sequence[Message]) -> Published | None:
    """Return what a device has published if that includes a submission or a problem."""
    transfers = Transfers(max_bytes=MAX_SUBMISSION_BYTES)
    for _, channel, payload in messages:
        if channel == "info" and decode(payload, DeviceInfo, max_bytes=len(payload)).problem:
            return Published(messages, None)
        if channel == "up":
            whole = transfers.take(decode(payload, Frame, max_bytes=MAX_FRAME_BYTES))
            if whole is not None and isinstance(submission := read_message(whole), Submission):
                return Published(messages, submission)
    return None


class Fleet:
    """A broker, an aggregator with the slow backbone, which makes no head, and the attacker.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path, broker: BrokerAddress) -> None:
        self._folder, self._broker, self._devices = folder, broker, 0
        self._random, self._watcher = np.random.default_rng(0), Watcher(broker)
        self._images = {has: folder / ("with" if has else "without") for has in (False, True)}
        for at, name, number in itertools.product(self._images.values(), CLASSES, range(IMAGES)):
            (at / name).mkdir(parents=True, exist_ok=True)
            pixels = self._random.integers(0, 256, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(at / name / f"{number}.png")
        Image.new("RGB", (16, 16), "white").save(self._images[True] / CLASSES[0] / "white.png")

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Run the aggregator, and read the broker."""
        public = PublicMap(np.full(FEATURE, 0.5, np.float32), 60 * np.eye(SIZE, FEATURE, dtype=np.float32))
        (self._folder / "public.map").write_bytes(public.to_bytes())
        (self._folder / "slow.onnx").write_bytes(slow_backbone())
        task, log = self._folder / "task.toml", self._folder / "aggregator.log"
        task.write_text(
            f'fleet = "{FLEET}"\nclasses = {json.dumps(CLASSES)}\nbackbones = ["slow.onnx"]\n'
            f'algorithm = "statistics"\nquorum = 1000000\n[privacy.dp]\nepsilon = {EPSILON}\n'
            f'map = "public.map"\nmax_epsilon = {EPSILON}\n'
        )
        where = ("--broker", str(self._broker), "--state", str(self._folder / "aggregator"))
        with running("aggregator.cli", "run", "--task", str(task), *where, log=log), self._watcher:
            wait_for_log(log, "connected to the broker", timeout_s=TIMEOUT_S)
            yield

    def builds(self, options: Sequence[str], *, pairs: int) -> list[tuple[Published, Published]]:
        """Return what so many pairs of devices, which build at once, publish without and with the image."""
        # The first to start may be slower.
        orders = self._random.permuted([[False, True]] * pairs, axis=1)
        with contextlib.ExitStack() as stack:
            names = [
                {bool(has): self._start(stack, options, with_image=has) for has in order} for order in orders
            ]
            for pair, has in itertools.product(names, (False, True)):
                self._published(pair[has])
            time.sleep(LINGER_S)
            return [(self._published(pair[False]), self._published(pair[True])) for pair in names]

    def _start(self, stack: contextlib.ExitStack, options: Sequence[str], *, with_image: bool) -> str:
        self._devices += 1
        name = f"device-{self._devices}"
        where = ("--broker", str(self._broker), "--fleet", FLEET, "--device-id", name)
        folders = ("--state", str(self._folder / name), "--data", str(self._images[with_image]))
        command = ("run", *where, *folders, "--threads", "1", *options)
        stack.enter_context(running("edge_client.cli", *command, log=self._folder / f"{name}.log"))
        return name

    def _published(self, name: str) -> Published:
        """Return what a device has published once it has submitted, or reported a problem."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while (found := ended(tuple(self._watcher.published[name]))) is None:
            if time.monotonic() > deadline_s:
                raise ProtofleetError(f"{name}: no submission and no problem within {TIMEOUT_S:.0f} s")
            time.sleep(0.1)
        return found
