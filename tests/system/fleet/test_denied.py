"""A broker that takes less than a fleet wants to say: the fleet says what is wrong, and goes on once it is mended."""

import getpass
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.mqtt.session import BrokerAddress
from tests.support.brokers import mosquitto, mosquitto_program
from tests.support.fleet_processes import PATIENCE_S, Fleet, write_digits
from tests.system.fleet.test_fleet import write_task

pytestmark = pytest.mark.skipif(mosquitto_program() is None, reason="mosquitto is not installed")


@pytest.fixture
def fleet(tmp_path: Path, address: BrokerAddress) -> Iterator[Fleet]:
    """A fleet without a broker so far, that is taken down at the end."""
    fleet = Fleet(tmp_path, address)
    yield fleet
    fleet.stop()


def _until(file: Path, text: str) -> int:
    """Wait until a log has a text; returns how often."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if file.exists() and (count := file.read_text().count(text)):
            return count
        time.sleep(0.1)
    raise AssertionError(f"{text!r} never came:\n{file.read_text()}")


def test_a_submission_that_is_denied_is_uploaded_once_it_is_allowed(fleet: Fleet, tmp_path: Path) -> None:
    """The device says once that the access list is in its way, and tries until it is let through."""
    acl = tmp_path / "acl"
    acl.write_text("topic deny pf/1/default/d/denied/up/#\ntopic readwrite pf/#\n", encoding="utf-8")
    pid_file = tmp_path / "mosquitto.pid"
    options = f"allow_anonymous true\nuser {getpass.getuser()}\nacl_file {acl}\npid_file {pid_file}"
    with mosquitto(fleet.broker, tmp_path, options=options):
        fleet.aggregator(write_task(tmp_path, quorum=1))
        device = fleet.device("denied", write_digits(tmp_path / "data", classes=[0, 1]), "--once")
        line = "the broker will not take what this device uploads: Not authorized: change the broker's access list"
        assert _until(tmp_path / "denied.log", line) == 1
        acl.write_text("topic readwrite pf/#\n", encoding="utf-8")
        os.kill(int(pid_file.read_text()), signal.SIGHUP)
        fleet.wait_exit(device)
        summary = fleet.wait_for("the head", lambda s: bool(s["heads"]))
        assert summary["submissions"] == 1
        log = (tmp_path / "denied.log").read_text()
        assert log.count(line) == 1
        assert "connection lost" not in log
