"""Rounds of FedPCL and FPL with real processes over a real broker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.mqtt.reconnecting_session import BrokerAddress
from tests.support import fleet as processes
from tests.support.brokers import mosquitto, mosquitto_program
from tests.support.fleet import Fleet, write_digits

CLASSES = [str(digit) for digit in range(4)]
SHARES = ([0, 1, 2], [1, 2, 3], [0, 2, 3], [0, 1, 3])
ROUNDS = 3
FEATURES = (16, 8)
"""Features of the two backbones."""


pytestmark = pytest.mark.skipif(
    mosquitto_program() is None, reason="mosquitto is not installed: apt-get install mosquitto"
)


@pytest.fixture
def fleet(tmp_path: Path, address: BrokerAddress) -> Iterator[Fleet]:
    with mosquitto(address, tmp_path), Fleet(tmp_path, address) as fleet:
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


def _is_over(summary: dict[str, Any], algorithm: str) -> bool:
    heads = summary["heads"]
    return bool(
        summary["algorithm"] == algorithm
        and len(heads) == ROUNDS
        and heads[-1]["held_out"]["devices"] == len(SHARES)
    )


def problem_of(summary: dict[str, Any], name: str) -> str:
    return "".join(device["problem"] for device in summary["devices"] if device["device"] == name)


def test_failures_of_one_device_do_not_harm_the_fleet(tmp_path: Path, address: BrokerAddress) -> None:
    """One device's training diverges, later one is killed; every device predicts when the fleet is gone."""
    with Fleet(tmp_path, address) as fleet:
        with mosquitto(address, tmp_path):
            _diverge(fleet)
            fleet.stop("aggregator")
            _kill_while_it_trains(fleet)
            fleet.stop("aggregator")
        for number in range(3):
            predicted = predict(fleet, number)
            assert (predicted["head_version"], predicted["round"]) == (2, 1)
            assert predicted["label"] in CLASSES


def _diverge(fleet: Fleet) -> None:
    """Let a device with many images take so many steps that its weights exceed float16; then delete images."""
    settings: dict[str, Any] = {"learning_rate": 3.5, "weight_decay": 1.0, "momentum": 0.0}
    fleet.start_aggregator(write_task(fleet.root, "fpl", deadline_s=30, epochs=1, batch_size=32, **settings))
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


def _kill_while_it_trains(fleet: Fleet) -> None:
    """Kill a device during a long training: it resumes the training, and the round waits for it."""
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
