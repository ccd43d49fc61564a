"""Rounds with real processes over a real broker: FedPCL and FPL on devices that know neither."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from protocol.session import Broker
from tests.graphs import tiny_backbone
from tests.integration.fleet import Fleet, write_digits

CLASSES = [str(digit) for digit in range(4)]
SHARES = ([0, 1, 2], [1, 2, 3], [0, 2, 3], [0, 1, 3])
ROUNDS = 3
FEATURES = (16, 8)
"""Of the two backbones."""


@pytest.fixture
def fleet(tmp_path: Path, broker: Broker) -> Iterator[Fleet]:
    """A fleet that is taken down at the end."""
    fleet = Fleet(tmp_path, broker)
    yield fleet
    fleet.stop()


def write_task(folder: Path, algorithm: str, *, rounds: int = ROUNDS, quorum: int = 3, **more: Any) -> Path:
    """Write a task file with rounds, and its backbones."""
    names = [f"backbone-{seed}.onnx" for seed in range(len(FEATURES))]
    for seed, (name, size) in enumerate(zip(names, FEATURES, strict=True)):
        (folder / name).write_bytes(tiny_backbone(feature_size=size, seed=seed))
    values = {"classes": CLASSES, "backbones": names, "algorithm": algorithm, "quorum": quorum}
    lines = [f"{key} = {json.dumps(value)}" for key, value in {**values, "deadline_s": 600}.items()]
    lines += ["[rounds]", "grace_s = 1.0", f"[{algorithm}]", f"rounds = {rounds}"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in more.items()]
    task = folder / f"{algorithm}.toml"
    task.write_text("\n".join(lines) + "\n")
    return task


def start_device(fleet: Fleet, number: int, *more: str) -> subprocess.Popen[bytes]:
    """Start one of the four devices on its share of the classes; one that is there already keeps its pictures."""
    data = fleet.root / f"data-{number}"
    if not data.exists():
        write_digits(data, classes=SHARES[number], start=20 * number)
    return fleet.device(f"device-{number}", data, *more)


def predict(fleet: Fleet, number: int) -> dict[str, Any]:
    """What a device says of a picture, offline."""
    picture = next((fleet.root / "data-1" / "3").glob("*.png"))
    state = fleet.root / "devices" / f"device-{number}"
    command = [
        sys.executable,
        "-m",
        "edge_client.cli",
        "predict",
        "--json",
        "--state",
        str(state),
        str(picture),
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
