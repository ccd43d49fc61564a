"""Rounds of FedPCL and FPL with real processes over a real broker."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from protocol.mqtt.reconnecting_session import BrokerAddress
from tests.support.fleets.changed_job import STOPS
from tests.support.fleets.fleet import Fleet, write_digits, write_task
from tests.support.graphs.exported_graphs import provide
from tests.support.network.brokers import mosquitto, needs_mosquitto

CLASSES = [str(digit) for digit in range(4)]
SHARES = ([0, 1, 2], [1, 2, 3], [0, 2, 3], [0, 1, 3])
FEATURES = (8, 4)
"""Features of the two backbones."""

FEDPCL: dict[str, Any] = {"projection_size": 8, "tau": 0.1, "learning_rate": 0.01}
"""As in tests/unit/aggregator/graphs, which export the same graphs."""

HIERARCHICAL: dict[str, Any] = {"directions": 1}
"""As in tests/research/test_rounds.py, which exports the same graphs."""


def start_aggregator(
    fleet: Fleet, algorithm: str, *, quorum: int, deadline_s: float = 600, **settings: Any
) -> None:
    lines = ["[rounds]", "grace_s = 1.0", f"[{algorithm}]"]
    lines += [f"{key} = {value!r}" for key, value in settings.items()]
    task = write_task(
        fleet.root,
        feature_sizes=FEATURES,
        tables="\n".join(lines) + "\n",
        classes=CLASSES,
        algorithm=algorithm,
        quorum=quorum,
        deadline_s=deadline_s,
    )
    if algorithm in ("fedpcl", "hierarchical"):
        provide(task, fleet.aggregator_state)
    fleet.start_aggregator(task)


def start_device(fleet: Fleet, number: int) -> None:
    """Start one of the four devices on its share of the classes; a restarted one keeps its images."""
    data = fleet.root / f"data-{number}"
    if not data.exists():
        write_digits(data, classes=SHARES[number], start=20 * number, each=10)
    fleet.start_device(f"device-{number}", data, program="tests.support.fleets.changed_device")


@needs_mosquitto
@pytest.mark.timeout(600)
def test_rounds_of_fedpcl_and_then_of_other_algorithms(tmp_path: Path, address: BrokerAddress) -> None:
    """Four devices and two backbones: one is killed while it trains, one joins late, and all of them predict.

    Then the operator sets another algorithm, in which the same programs take part. The training of one diverges, which
    does not harm the others. The last one needs one upload. Devices predict when the fleet is gone.
    """
    with Fleet(tmp_path, address) as fleet:
        with mosquitto(address, tmp_path):
            _rounds_of_fedpcl(fleet)
            _predict(fleet, 0, 3, version=2)
            fleet.stop("aggregator")
            _rounds_of_fpl(fleet)
            _predict(fleet, 1, 2, version=3)
            fleet.stop("aggregator")
            _round_of_hierarchical(fleet)
            fleet.stop("aggregator")
        _predict(fleet, 0, 3, version=1)


def _rounds_of_fedpcl(fleet: Fleet) -> None:
    """Kill a device during its training: it resumes the training, and the round waits for it."""
    start_aggregator(fleet, "fedpcl", quorum=3, rounds=2, epochs=50, batch_size=4, **FEDPCL)
    with patch.dict(os.environ, {STOPS: "1"}):
        start_device(fleet, 0)
    for number in (1, 2):
        start_device(fleet, number)
    checkpoints = fleet.device_state("device-0") / "checkpoints"
    fleet.wait_until("a checkpoint", lambda: any(checkpoints.glob("[!.]*")))
    fleet.kill("device-0")
    start_device(fleet, 0)
    fleet.wait_for_log("device-0", "training resumed step=")
    start_device(fleet, 3)
    summary = fleet.wait_for("evaluations of the second head", lambda s: _is_over(s, "fedpcl", rounds=2))
    assert all(3 <= head["devices"] <= 4 for head in summary["heads"])
    assert {refusal["reason"] for refusal in summary["refusals"]} <= {"late"}


def _rounds_of_fpl(fleet: Fleet) -> None:
    """Let a device with many images take so many steps that its weights exceed float16; then delete images.

    The aggregator exports the graphs itself.
    """
    data = write_digits(fleet.root / "data-2", classes=SHARES[2], start=40, each=200)
    diverging: dict[str, Any] = {"learning_rate": 3.5, "weight_decay": 1.0, "momentum": 0.0, "batch_size": 32}
    start_aggregator(fleet, "fpl", quorum=4, deadline_s=30, rounds=3, epochs=1, **diverging)
    # Before that, it may report that it has no image: those that were just written wait until they are complete.
    fleet.wait_for("the diverged device's problem", lambda s: "float16" in _problem(s, "device-2"))
    for folder in data.iterdir():
        # Those of the earlier rounds are groups of their own, which wait for no deleted image.
        for image in sorted(folder.glob("*.png"), key=lambda file: int(file.stem))[10:]:
            image.unlink()
    summary = fleet.wait_for("evaluations of FPL's last head", lambda s: _is_over(s, "fpl", rounds=3))
    assert [head["devices"] for head in summary["heads"]][::2] == [3, 4]
    fleet.wait_for("the end of the problem", lambda s: _problem(s, "device-2") == "")
    assert [fleet.processes[f"device-{number}"].poll() for number in range(4)] == [None] * 4


def _round_of_hierarchical(fleet: Fleet) -> None:
    """Let the devices upload class means and directions once."""
    start_aggregator(fleet, "hierarchical", quorum=4, **HIERARCHICAL)
    summary = fleet.wait_for("evaluations of the head", lambda s: _is_over(s, "hierarchical", rounds=1))
    (head,) = summary["heads"]
    assert (head["devices"], head["prototypes"]) == (4, sum(map(len, SHARES)))
    assert {refusal["reason"] for refusal in summary["refusals"]} <= {"late"}, "in the rounds of FedPCL"


def _is_over(summary: dict[str, Any], algorithm: str, *, rounds: int) -> bool:
    heads = summary["heads"]
    return bool(
        summary["algorithm"] == algorithm
        and len(heads) == rounds
        and heads[-1]["held_out"]["devices"] == len(SHARES)
    )


def _problem(summary: dict[str, Any], name: str) -> str:
    return "".join(device["problem"] for device in summary["devices"] if device["device"] == name)


def _predict(fleet: Fleet, *numbers: int, version: int) -> None:
    """Let devices predict an image offline, with the last round's head."""
    image = next((fleet.root / "data-1" / "3").glob("*.png"))
    for number in numbers:
        predicted = fleet.predict(f"device-{number}", image)
        assert (predicted["head_version"], predicted["round"]) == (version, version - 1)
        assert predicted["label"] in CLASSES
