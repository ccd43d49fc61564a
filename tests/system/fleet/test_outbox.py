"""A device whose power goes off, and an aggregator whose disk is full: nothing that was made is lost."""

import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.mqtt.session import BrokerAddress
from tests.support.brokers import mosquitto, mosquitto_program
from tests.support.fleet_processes import PATIENCE_S, Fleet, write_digits
from tests.system.fleet.test_fleet import write_task

KILLS = 6

pytestmark = pytest.mark.skipif(
    mosquitto_program() is None, reason="mosquitto is not installed: apt-get install mosquitto"
)


@pytest.fixture
def fleet(tmp_path: Path, address: BrokerAddress) -> Iterator[Fleet]:
    """A fleet that is taken down at the end."""
    with mosquitto(address, tmp_path):
        fleet = Fleet(tmp_path, address)
        yield fleet
        fleet.stop()


def device_status(fleet: Fleet, name: str) -> dict[str, Any]:
    """What `edge-client status --json` says; nothing before there is a state."""
    command = [sys.executable, "-m", "edge_client.cli", "status", "--json", "--state"]
    done = subprocess.run([*command, str(fleet.root / "devices" / name)], capture_output=True, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def prototypes(report: dict[str, Any]) -> int:
    """How many a device's report tells of."""
    return sum(len(entry["counts"]) for entry in report["classes"])


def test_the_power_goes_off_again_and_again(fleet: Fleet) -> None:
    """Each time there are new images, and the device is killed as it hands them in; the last ones count, once."""
    chance = random.Random(7)
    fleet.aggregator(write_task(fleet.root, quorum=1, feature_size=2048))
    data = write_digits(fleet.root / "data", classes=[0, 1], each=20)
    for number in range(KILLS):
        device = fleet.device("device", data)
        time.sleep(chance.uniform(1.0, 4.0))
        device.kill()
        device.wait()
        write_digits(data, classes=[0, 1], start=20 + 10 * number, each=10)
    fleet.wait_exit(fleet.device("device", data, "--once"))
    said = device_status(fleet, "device")
    assert said["received"]
    assert said["problem"] == ""
    summary = fleet.wait_for("the last submission", lambda s: s["submissions"] == 1)
    assert sum(each["prototypes"] for each in summary["coverage"].values()) == prototypes(said["report"])
    assert summary["refusals"] == []


def test_an_aggregator_without_space_is_waited_for(fleet: Fleet) -> None:
    """Also by a single run: it says so, once, and ends when it was received."""
    aggregator = fleet.aggregator(write_task(fleet.root, quorum=1, feature_size=2048))
    fleet.wait_for("the aggregator", lambda s: s["running"])
    before = resource.prlimit(aggregator.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(aggregator.pid, resource.RLIMIT_FSIZE, (1, before[1]))
    data = write_digits(fleet.root / "data", classes=[0, 1])
    device = fleet.device("device", data, "--once")
    deadline = time.monotonic() + PATIENCE_S
    while "no space" not in device_status(fleet, "device").get("problem", ""):
        assert time.monotonic() < deadline, fleet.logs()
        assert device.poll() is None, fleet.logs()
        time.sleep(0.2)
    assert not device_status(fleet, "device")["received"]
    resource.prlimit(aggregator.pid, resource.RLIMIT_FSIZE, before)
    fleet.wait_exit(device)
    said = device_status(fleet, "device")
    assert (said["received"], said["problem"]) == (True, "")
    log = (fleet.root / "device.log").read_text()
    assert log.count("the aggregator has no space") == 1
    summary = fleet.wait_for("the submission", lambda s: s["submissions"] == 1)
    assert {refusal["reason"] for refusal in summary["refusals"]} <= {"no_space"}
    assert "cannot take part" not in (fleet.root / "aggregator.log").read_text()
