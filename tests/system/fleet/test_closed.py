"""Authentication and access in a closed fleet, over mosquitto with what `aggregator enroll-broker` writes."""

import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import Epoch
from protocol.mqtt.reconnecting_session import (
    BrokerAddress,
    Connected,
    Drained,
    Outgoing,
    Received,
    Unsendable,
)
from protocol.mqtt.tls import BrokerAccess
from protocol.wire.codec import decode
from protocol.wire.messages import Presence
from protocol.wire.topics import DeviceChannel, FleetChannel, device_topic, fleet_topic
from tests.support.fleets.closed_fleet import FLEET, ClosedFleet
from tests.support.fleets.fleet import Fleet, write_digits, write_task
from tests.support.network.brokers import needs_mosquitto
from tests.support.network.sessions import refusal, running

pytestmark = [needs_mosquitto, pytest.mark.usefixtures("short_pauses")]


@pytest.fixture
def closed(tmp_path: Path, address: BrokerAddress) -> ClosedFleet:
    made = ClosedFleet(tmp_path, address)
    for device in ("shed-1", "shed-2"):
        made.enroll(device)
    return made


@pytest.fixture
def fleet(tmp_path: Path, closed: ClosedFleet) -> Iterator[Fleet]:
    with Fleet(tmp_path, closed.broker, enrolled=True) as made:
        yield made


def test_revoked_device_is_refused_at_once(closed: ClosedFleet, fleet: Fleet, tmp_path: Path) -> None:
    """Two commands and two folders make a fleet; aggregator and broker refuse a device once it is revoked."""
    task = write_task(tmp_path, quorum=1, fleet=FLEET)
    data = write_digits(tmp_path / "data", classes=[0, 1])
    with closed.mosquitto() as broker:
        fleet.start_aggregator(task)
        fleet.start_device("shed-1", data, "--once")
        fleet.wait_exit("shed-1")
        summary = fleet.wait_for("the head", lambda s: s["heads"])
        assert summary["submissions"] == 1
        assert summary["enrollment"]["closed"]
        # A device that restarts has the same client id again, its certificate's name.
        fleet.start_device("shed-1", data, "--rescan-s", "0.5")
        fleet.wait_for("the device", lambda s: s["devices"][0]["state"] == "online")
        closed.revoke("shed-1")
        write_digits(data, classes=[2])
        fleet.wait_exit("shed-1", code=1)
        assert "was revoked" in fleet.log("shed-1")
        closed.publish_revocations(broker)
        fleet.start_device("shed-1", data)
        fleet.wait_for_log("shed-1", "refused by the broker: the certificate")
        states = {device["device"]: device["state"] for device in fleet.status()["devices"]}
        assert states.pop("shed-1") == "revoked"
        assert set(states.values()) == {"enrolled"}  # and never online


def test_second_program_with_one_enrollment_ends_the_first(
    closed: ClosedFleet, fleet: Fleet, tmp_path: Path
) -> None:
    """Two programs with one enrollment do not take the connection from each other in turns, whatever their clocks.

    The first, whose clock is a day ahead, stays out, also when it is started again, until an operator runs
    `take-over`; then the second does.
    """
    data = write_digits(tmp_path / "data", classes=[0, 1])
    access = closed.aggregator_access()
    with (
        closed.mosquitto(),
        running(closed.broker, "a", f"pf/1/{FLEET}/d/+/state", access=access) as (_, log),
    ):
        DeviceState(fleet.device_state("shed-1")).set(Epoch(int(time.time()) + 86400))
        fleet.start_device("shed-1", data)
        fleet.wait_for_log("shed-1", "connected to")
        options = ("--enrollment", closed.root / "shed-1", "--data", data, "--state", tmp_path / "elsewhere")
        second = fleet.start("second", "edge_client.cli", *options)
        fleet.wait_exit("shed-1", code=1)
        fleet.wait_for_log("second", "a copy of this device was started earlier")
        for expected in ("replaced", "online"):
            while decode(log.wait(Received).payload, Presence, max_bytes=1024).state != expected:
                pass
        fleet.start_device("shed-1", data)
        fleet.wait_exit("shed-1", code=1)
        assert fleet.log("shed-1").count("this one stays out") == 2
        assert second.poll() is None
        DeviceState(fleet.device_state("shed-1")).take_over()
        fleet.start_device("shed-1", data)
        fleet.wait_exit("second", code=1)
        assert "this one stays out" in fleet.log("second")


def test_renewed_certificate_replaces_the_old_one(closed: ClosedFleet) -> None:
    old = closed.access("shed-2")
    closed.enroll("shed-2", renew=True, folder="shed-2-again")
    closed.publish_revocations()
    with closed.mosquitto():
        assert "refuse" in refusal(closed.broker, old)
        with running(closed.broker, "a", access=closed.access("shed-2-again")) as (_, log):
            log.wait(Connected)


def denied(closed: ClosedFleet, access: BrokerAccess, topics: list[str]) -> set[str]:
    """Publish to topics; return those that the broker refuses."""
    with running(closed.broker, "a", access=access) as (session, log):
        log.wait(Connected)
        for topic in topics:
            session.send(Outgoing(topic, b"x"))
            log.wait(Drained)  # each: the first ones may be answered before the last one is sent
        return {event.topic for event in log.seen if isinstance(event, Unsendable)}


def every_topic(device: str) -> dict[str, str]:
    """Return all topics of a fleet with one device, by channel."""
    shared = {channel: fleet_topic(FLEET, channel) for channel in ("task", "round", "head", "cast", "state")}
    own = {
        f"d/{channel}": device_topic(FLEET, device, channel)
        for channel in ("state", "info", "up", "get", "ack", "blk")
    }
    assert {name.removeprefix("d/") for name in (*shared, *own)} == {
        *get_args(DeviceChannel),
        *get_args(FleetChannel),
    }
    return {**shared, **own}


def test_writing_is_limited_to_own_topics(closed: ClosedFleet) -> None:
    """A device may write its own four topics and no other; the aggregator all but those."""
    own, others = every_topic("shed-1"), every_topic("shed-2")
    from_devices = {"d/state", "d/info", "d/up", "d/get"}
    with closed.mosquitto():
        topics = [*own.values(), *others.values(), "pf/1/vineyard/task", "elsewhere"]
        allowed = {own[name] for name in from_devices}
        assert denied(closed, closed.access("shed-1"), topics) == set(topics) - allowed
        refused = denied(closed, closed.aggregator_access(), [*own.values(), "elsewhere"])
        assert refused == {own[name] for name in from_devices} | {"elsewhere"}


def test_reading_is_limited_to_own_and_shared_topics(closed: ClosedFleet) -> None:
    """A device that subscribes to everything gets the fleet's topics and its own; the aggregator, all devices'."""
    own, others = every_topic("shed-1"), every_topic("shed-2")
    with (
        closed.mosquitto(),
        running(closed.broker, "a", "pf/#", access=closed.access("shed-1")) as (one, log_one),
        running(closed.broker, "b", "pf/#", access=closed.access("shed-2")) as (two, log_two),
        running(closed.broker, "c", "pf/#", access=closed.aggregator_access()) as (aggregator, log_all),
    ):
        for log in (log_one, log_two, log_all):
            log.wait(Connected)
        for name in ("d/info", "d/up", "d/get", "d/state"):
            one.send(Outgoing(own[name], b"one"))
            two.send(Outgoing(others[name], b"two"))
        topics = {log_all.wait(Received).topic for _ in range(8)}
        assert topics == {
            topics[f"d/{name}"] for topics in (own, others) for name in ("info", "up", "get", "state")
        }
        for name in ("task", "round", "head", "cast", "d/ack", "d/blk", "state"):
            aggregator.send(Outgoing(own[name], b"all"))
        got = {log_one.wait(Received).topic for _ in range(8)}
        assert got == {
            own[name] for name in ("d/state", "task", "round", "head", "cast", "d/ack", "d/blk", "state")
        }
        got = {log_two.wait(Received).topic for _ in range(6)}
        assert got == {others["d/state"], *(own[name] for name in ("task", "round", "head", "cast", "state"))}


def test_passwords_work_instead_of_certificates(closed: ClosedFleet, tmp_path: Path) -> None:
    """With the lines of docs/security.md, names and passwords authenticate, with the same access list."""
    passwords = tmp_path / "broker" / "passwords"
    for number, (name, password) in enumerate((("shed-1", "one"), ("aggregator@orchard", "all"))):
        create = ["-c"] if number == 0 else []
        command = ["mosquitto_passwd", *create, "-b", str(passwords), name, password]
        subprocess.run(command, check=True, capture_output=True)
    configuration = closed.configuration()
    for line in (
        "require_certificate true",
        "use_identity_as_username true",
        f"crlfile {'/etc/mosquitto/protofleet'}/revoked.crl",
    ):
        assert line in configuration
        configuration = configuration.replace(line, "")
    configuration += "password_file /etc/mosquitto/protofleet/passwords\n"
    valid = BrokerAccess(tls=True, ca=tmp_path / "broker" / "ca.crt", username="shed-1", password="one")
    own, others = every_topic("shed-1"), every_topic("shed-2")
    with closed.mosquitto(configuration):
        topics = [own["d/up"], others["d/up"], own["task"]]
        assert denied(closed, valid, topics) == {others["d/up"], own["task"]}
        aggregator = replace(valid, username="aggregator@orchard", password="all")
        assert denied(closed, aggregator, [own["task"], own["d/ack"]]) == set()
        reason = refusal(closed.broker, replace(valid, password="all"))
        assert reason.startswith("refused by the broker: Not authorized: check --username and the password")
        without = replace(valid, username=None, password=None)
        assert "give --username and a password" in refusal(closed.broker, without)
