"""Rounds with real processes over a real broker: FedPCL and FPL on devices that know neither."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from protocol.mqtt import session
from protocol.mqtt.session import BrokerAddress
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_FRAME_BYTES, MAX_MANIFEST_BYTES, BlobRef, Frame, RoundManifest
from protocol.wire.signing import open_manifest
from protocol.wire.topics import fleet_topic
from tests.support.brokers import mosquitto, mosquitto_program
from tests.support.fleet_processes import PATIENCE_S, Fleet, write_digits
from tests.support.graphs import tiny_backbone

CLASSES = [str(digit) for digit in range(4)]
SHARES = ([0, 1, 2], [1, 2, 3], [0, 2, 3], [0, 1, 3])
ROUNDS = 3
FEATURES = (16, 8)
"""Of the two backbones."""


@pytest.fixture
def fleet(tmp_path: Path, broker: BrokerAddress) -> Iterator[Fleet]:
    """A fleet that is taken down at the end."""
    fleet = Fleet(tmp_path, broker)
    yield fleet
    fleet.stop()


def write_task(
    folder: Path,
    algorithm: str,
    *,
    rounds: int = ROUNDS,
    quorum: int = 3,
    deadline_s: float = 600,
    **more: Any,
) -> Path:
    """Write a task file with rounds, and its backbones."""
    names = [f"backbone-{seed}.onnx" for seed in range(len(FEATURES))]
    for seed, (name, size) in enumerate(zip(names, FEATURES, strict=True)):
        (folder / name).write_bytes(tiny_backbone(feature_size=size, seed=seed))
    values = {"classes": CLASSES, "backbones": names, "algorithm": algorithm, "quorum": quorum}
    lines = [f"{key} = {json.dumps(value)}" for key, value in {**values, "deadline_s": deadline_s}.items()]
    lines += ["[rounds]", "grace_s = 1.0", f"[{algorithm}]", f"rounds = {rounds}"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in more.items()]
    task = folder / f"{algorithm}.toml"
    task.write_text("\n".join(lines) + "\n")
    return task


def start_device(fleet: Fleet, number: int, *more: str) -> subprocess.Popen[bytes]:
    """Start one of the four devices on its share of the classes; one that is there already keeps its images."""
    data = fleet.root / f"data-{number}"
    if not data.exists():
        write_digits(data, classes=SHARES[number], start=20 * number)
    return fleet.device(f"device-{number}", data, *more)


def predict(fleet: Fleet, number: int) -> dict[str, Any]:
    """What a device says of an image, offline."""
    image = next((fleet.root / "data-1" / "3").glob("*.png"))
    state = fleet.root / "devices" / f"device-{number}"
    command = [
        sys.executable,
        "-m",
        "edge_client.cli",
        "predict",
        "--json",
        "--state",
        str(state),
        str(image),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def device_status(fleet: Fleet, number: int) -> dict[str, Any]:
    """What `edge-client status --json` says."""
    state = fleet.root / "devices" / f"device-{number}"
    command = [sys.executable, "-m", "edge_client.cli", "status", "--json", "--state", str(state)]
    said: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return said


def test_a_fleet_learns_by_fedpcl_and_then_by_fpl(fleet: Fleet) -> None:
    """Four devices and two backbones: one is killed and comes back, one joins late, and all of them predict.

    Then the operator sets another algorithm, and the same programs take part in that.
    """
    aggregator = fleet.aggregator(write_task(fleet.root, "fedpcl", rounds=ROUNDS))
    devices = [start_device(fleet, number) for number in range(3)]
    fleet.wait_for("the first round's head", lambda s: len(s["heads"]) >= 1)
    devices[0].kill()
    devices[0].wait()
    late = start_device(fleet, 3)
    devices[0] = start_device(fleet, 0)
    summary = fleet.wait_for("the end of the rounds", lambda s: len(s["heads"]) == ROUNDS)
    summary = fleet.wait_for(
        "evaluations of the last head", lambda s: s["heads"][-1]["held_out"]["devices"] == len(SHARES)
    )
    assert all(3 <= head["devices"] <= 4 for head in summary["heads"])
    assert summary["refusals"] == [] or {r["reason"] for r in summary["refusals"]} <= {"late"}
    for number in range(len(SHARES)):
        said = predict(fleet, number)
        assert (said["head_version"], said["round"]) == (ROUNDS, ROUNDS - 1)
        assert said["label"] in CLASSES
    aggregator.send_signal(signal.SIGTERM)
    fleet.wait_exit(aggregator)
    fleet.aggregator(write_task(fleet.root, "fpl", rounds=ROUNDS, epochs=2))
    fleet.wait_for(
        "FPL's last head, evaluated",
        lambda s: (
            s["algorithm"] == "fpl"
            and len(s["heads"]) == ROUNDS
            and s["heads"][-1]["held_out"]["devices"] == len(SHARES)
        ),
    )
    assert [device.poll() for device in (*devices, late)] == [None] * 4
    labels = {predict(fleet, number)["label"] for number in range(len(SHARES))}
    assert labels <= set(CLASSES)
    _check_shared_head(fleet)


def _check_shared_head(fleet: Fleet) -> None:
    """The aggregator's own file is a head that needs nothing but features."""
    session = onnxruntime.InferenceSession(fleet.root / "aggregator" / "head.onnx")
    (entry,) = session.get_inputs()
    features = np.random.default_rng(0).normal(size=(5, sum(FEATURES))).astype(np.float32)
    probabilities = session.run(["probabilities"], {entry.name: features})[0]
    assert probabilities.shape == (5, len(CLASSES))
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)


class Listener:
    """Hears what brings blobs to devices, and counts their bytes.

    Attributes:
        cast: bytes of each blob that were sent to the whole fleet, by digest.
        alone: bytes of each blob that were sent to single devices.
        rounds: each round's tensors, by its number.
    """

    def __init__(self, broker: BrokerAddress) -> None:
        self.cast: Counter[bytes] = Counter()
        self.alone: Counter[bytes] = Counter()
        self.rounds: dict[int, BlobRef] = {}
        topics = [fleet_topic("default", "round"), fleet_topic("default", "cast"), "pf/1/default/d/+/blk"]
        self.session = session.Session(
            broker, client_id="listener", subscriptions=topics, on_event=self._take, will=None
        )

    def _take(self, event: session.Event) -> None:
        if not isinstance(event, session.Received) or not event.payload:
            return
        if event.topic == fleet_topic("default", "round"):
            body = open_manifest(event.payload, fleet="default", channel="round").body
            opened = decode(body, RoundManifest, max_bytes=MAX_MANIFEST_BYTES)
            self.rounds[opened.number] = opened.tensors
            return
        frame = decode(event.payload, Frame, max_bytes=MAX_FRAME_BYTES)
        heard = self.cast if event.topic == fleet_topic("default", "cast") else self.alone
        heard[frame.digest] += len(frame.data)


def problem_of(summary: dict[str, Any], name: str) -> str:
    """What keeps a device from taking part, as the operator sees it."""
    return "".join(device["problem"] for device in summary["devices"] if device["device"] == name)


@pytest.mark.skipif(
    mosquitto_program() is None, reason="mosquitto is not installed: apt-get install mosquitto"
)
def test_what_happens_to_one_device_is_no_harm_to_the_fleet(tmp_path: Path, address: BrokerAddress) -> None:
    """A training that diverges, and one that is killed; in the end there is nobody but the device, which predicts."""
    fleet = Fleet(tmp_path, address)
    try:
        with mosquitto(address, tmp_path):
            listener = Listener(address)
            listener.session.start()
            aggregator = _diverge(fleet)
            _check_traffic(listener)
            listener.session.stop()
            aggregator.send_signal(signal.SIGTERM)
            fleet.wait_exit(aggregator)
            aggregator = _kill_while_it_trains(fleet)
            aggregator.send_signal(signal.SIGTERM)
            fleet.wait_exit(aggregator)
        for number in range(3):
            said = predict(fleet, number)
            assert (said["head_version"], said["round"]) == (2, 1)
            assert said["label"] in CLASSES
    finally:
        fleet.stop()


def _diverge(fleet: Fleet) -> subprocess.Popen[bytes]:
    """The more steps a device takes, the greater its weights: one with many images grows past float16."""
    settings: dict[str, Any] = {"learning_rate": 3.5, "weight_decay": 1.0, "momentum": 0.0}
    task = write_task(fleet.root, "fpl", deadline_s=8, epochs=1, batch_size=32, **settings)
    aggregator = fleet.aggregator(task)
    for number, each in enumerate((10, 10, 200)):
        data = write_digits(
            fleet.root / f"data-{number}", classes=SHARES[number], start=20 * number, each=each
        )
        fleet.device(f"device-{number}", data, program="tests.system.fleet.hasty_device")
    summary = fleet.wait_for("the diverged device's word", lambda s: problem_of(s, "device-2") != "")
    assert "float16" in problem_of(summary, "device-2")
    for folder in (fleet.root / "data-2").iterdir():
        for image in sorted(folder.glob("*.png"))[10:]:
            image.unlink()
    summary = fleet.wait_for("the end of the rounds", lambda s: len(s["heads"]) == ROUNDS)
    assert [head["devices"] for head in summary["heads"]][:: ROUNDS - 1] == [2, 3]
    fleet.wait_for("the end of the problem", lambda s: problem_of(s, "device-2") == "")
    return aggregator


def _check_traffic(listener: Listener) -> None:
    """What a round brings crosses the aggregator's link once, however many devices there are."""
    for number in range(1, ROUNDS + 1):
        tensors = listener.rounds[number]
        assert listener.cast[tensors.digest] == tensors.size_bytes
        assert listener.alone[tensors.digest] == 0


def _kill_while_it_trains(fleet: Fleet) -> subprocess.Popen[bytes]:
    """A device that loses its power in the middle of a long training goes on with it, and the round waits."""
    aggregator = fleet.aggregator(write_task(fleet.root, "fedpcl", rounds=2, epochs=2000, batch_size=4))
    checkpoint = fleet.root / "devices" / "device-0" / "training.checkpoint"
    device = next(process for process in fleet.processes if "device-0" in process.args)  # type: ignore[operator]
    deadline = time.monotonic() + PATIENCE_S
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    device.kill()
    device.wait()
    start_device(fleet, 0)
    summary = fleet.wait_for("the second round's head", lambda s: len(s["heads"]) == 2)
    assert [head["devices"] for head in summary["heads"]] == [3, 3]
    assert "going on with the training from step" in (fleet.root / "device-0.log").read_text()
    fleet.wait_for("its evaluations", lambda s: s["heads"][-1]["held_out"]["devices"] == 3)
    return aggregator
