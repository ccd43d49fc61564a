"""Rounds with real processes over a real broker: FedPCL and FPL on devices that know neither."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from protocol.mqtt import reconnecting_session
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_FRAME_BYTES, MAX_MANIFEST_BYTES, BlobRef, Frame, RoundManifest
from protocol.wire.signing import open_manifest
from protocol.wire.topics import fleet_topic
from tests.support import fleet as processes
from tests.support.brokers import mosquitto, mosquitto_program
from tests.support.fleet import Fleet, write_digits

CLASSES = [str(digit) for digit in range(4)]
SHARES = ([0, 1, 2], [1, 2, 3], [0, 2, 3], [0, 1, 3])
ROUNDS = 3
FEATURES = (16, 8)
"""Features of the two backbones."""


@pytest.fixture
def fleet(tmp_path: Path, broker: BrokerAddress) -> Iterator[Fleet]:
    """A fleet over a broker that runs."""
    with Fleet(tmp_path, broker) as fleet:
        yield fleet


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
    lines = ["[rounds]", "grace_s = 1.0", f"[{algorithm}]", f"rounds = {rounds}"]
    lines += [f"{key} = {value!r}" for key, value in more.items()]
    return processes.write_task(
        folder,
        feature_sizes=FEATURES,
        tables="\n".join(lines) + "\n",
        classes=CLASSES,
        algorithm=algorithm,
        quorum=quorum,
        deadline_s=deadline_s,
    )


def start_device(fleet: Fleet, number: int) -> None:
    """Start one of the four devices on its share of the classes; a restarted one keeps its images."""
    data = fleet.root / f"data-{number}"
    if not data.exists():
        write_digits(data, classes=SHARES[number], start=20 * number)
    fleet.start_device(f"device-{number}", data)


def predict(fleet: Fleet, number: int) -> dict[str, Any]:
    """Return what a device predicts for an image, offline."""
    return fleet.predict(f"device-{number}", next((fleet.root / "data-1" / "3").glob("*.png")))


def test_rounds_of_fedpcl_and_then_of_fpl(fleet: Fleet) -> None:
    """Four devices and two backbones: one is killed and comes back, one joins late, and all of them predict.

    Then the operator sets another algorithm, in which the same programs take part.
    """
    fleet.start_aggregator(write_task(fleet.root, "fedpcl"))
    for number in range(3):
        start_device(fleet, number)
    fleet.wait_for("the first round's head", lambda s: len(s["heads"]) >= 1)
    fleet.kill("device-0")
    start_device(fleet, 3)
    start_device(fleet, 0)
    summary = fleet.wait_for("evaluations of the last head", lambda s: _is_over(s, "fedpcl"))
    assert all(3 <= head["devices"] <= 4 for head in summary["heads"])
    assert {refusal["reason"] for refusal in summary["refusals"]} <= {"late"}
    for number in range(len(SHARES)):
        predicted = predict(fleet, number)
        assert (predicted["head_version"], predicted["round"]) == (ROUNDS, ROUNDS - 1)
        assert predicted["label"] in CLASSES
    fleet.stop("aggregator")
    fleet.start_aggregator(write_task(fleet.root, "fpl", epochs=2))
    fleet.wait_for("evaluations of FPL's last head", lambda s: _is_over(s, "fpl"))
    assert [fleet.processes[f"device-{number}"].poll() for number in range(4)] == [None] * 4
    assert {predict(fleet, number)["label"] for number in range(len(SHARES))} <= set(CLASSES)
    _check_shared_head(fleet)


def _is_over(summary: dict[str, Any], algorithm: str) -> bool:
    heads = summary["heads"]
    return bool(
        summary["algorithm"] == algorithm
        and len(heads) == ROUNDS
        and heads[-1]["held_out"]["devices"] == len(SHARES)
    )


def _check_shared_head(fleet: Fleet) -> None:
    """The aggregator's own file is a head that needs nothing but features."""
    reconnecting_session = onnxruntime.InferenceSession(fleet.root / "aggregator" / "head.onnx")
    (entry,) = reconnecting_session.get_inputs()
    features = np.random.default_rng(0).normal(size=(5, sum(FEATURES))).astype(np.float32)
    probabilities = reconnecting_session.run(["probabilities"], {entry.name: features})[0]
    assert probabilities.shape == (5, len(CLASSES))
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)


class Listener:
    """A subscriber to what brings blobs to devices, which counts their bytes.

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
        self.session = reconnecting_session.Session(
            broker, client_id="listener", subscriptions=topics, on_event=self._take, will=None
        )

    def _take(self, event: reconnecting_session.Event) -> None:
        if not isinstance(event, reconnecting_session.Received) or not event.payload:
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
    """Return what keeps a device from taking part, as status shows it."""
    return "".join(device["problem"] for device in summary["devices"] if device["device"] == name)


@pytest.mark.skipif(
    mosquitto_program() is None, reason="mosquitto is not installed: apt-get install mosquitto"
)
def test_failures_of_one_device_do_not_harm_the_fleet(tmp_path: Path, address: BrokerAddress) -> None:
    """One device's training diverges, later one is killed; every device predicts when the fleet is gone."""
    with Fleet(tmp_path, address) as fleet:
        with mosquitto(address, tmp_path):
            listener = Listener(address)
            listener.session.start()
            _diverge(fleet)
            _check_traffic(listener)
            listener.session.stop()
            fleet.stop("aggregator")
            _kill_while_it_trains(fleet)
            fleet.stop("aggregator")
        for number in range(3):
            predicted = predict(fleet, number)
            assert (predicted["head_version"], predicted["round"]) == (2, 1)
            assert predicted["label"] in CLASSES


def _diverge(fleet: Fleet) -> None:
    """The more steps a device takes, the larger its weights: one with many images exceeds float16."""
    settings: dict[str, Any] = {"learning_rate": 3.5, "weight_decay": 1.0, "momentum": 0.0}
    fleet.start_aggregator(write_task(fleet.root, "fpl", deadline_s=8, epochs=1, batch_size=32, **settings))
    for number, each in enumerate((10, 10, 200)):
        data = write_digits(
            fleet.root / f"data-{number}", classes=SHARES[number], start=20 * number, each=each
        )
        fleet.start_device(f"device-{number}", data, program="tests.support.fast_device")
    summary = fleet.wait_for("the diverged device's problem", lambda s: problem_of(s, "device-2"))
    assert "float16" in problem_of(summary, "device-2")
    for folder in (fleet.root / "data-2").iterdir():
        for image in sorted(folder.glob("*.png"))[10:]:
            image.unlink()
    summary = fleet.wait_for("the end of the rounds", lambda s: len(s["heads"]) == ROUNDS)
    assert [head["devices"] for head in summary["heads"]][:: ROUNDS - 1] == [2, 3]
    fleet.wait_for("the end of the problem", lambda s: problem_of(s, "device-2") == "")


def _check_traffic(listener: Listener) -> None:
    """A round's tensors cross the aggregator's link once, however many devices there are."""
    for number in range(1, ROUNDS + 1):
        tensors = listener.rounds[number]
        assert listener.cast[tensors.digest] == tensors.size_bytes
        assert listener.alone[tensors.digest] == 0


def _kill_while_it_trains(fleet: Fleet) -> None:
    """A device killed in the middle of a long training continues it, and the round waits for it."""
    fleet.start_aggregator(write_task(fleet.root, "fedpcl", rounds=2, epochs=2000, batch_size=4))
    checkpoint = fleet.device_state("device-0") / "training.checkpoint"
    fleet.wait_until("a checkpoint", checkpoint.exists, pause_s=0.02)
    fleet.kill("device-0")
    start_device(fleet, 0)
    summary = fleet.wait_for(
        "evaluations of the second head",
        lambda s: len(s["heads"]) == 2 and s["heads"][-1]["held_out"]["devices"] == 3,
    )
    assert [head["devices"] for head in summary["heads"]] == [3, 3]
    assert "training resumed step=" in fleet.log("device-0")
