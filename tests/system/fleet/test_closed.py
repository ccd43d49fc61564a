"""A closed fleet over a real mosquitto with what `aggregator enroll-broker` writes: who gets in, and as whom."""

import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aggregator.security.enrollment import revoke
from aggregator.security.mosquitto_config import access_list
from protocol.mqtt import backoff
from protocol.mqtt.session import (
    BrokerAddress,
    Connected,
    Disconnected,
    Drained,
    Outgoing,
    Received,
    Unsendable,
)
from protocol.mqtt.tls import BrokerAccess
from protocol.wire.topics import RETAINED, device_topic, fleet_topic
from tests.support.brokers import mosquitto_program
from tests.support.closed_fleet import FLEET, Closed
from tests.support.fleet_processes import PATIENCE_S, Fleet, write_digits
from tests.support.sessions import running
from tests.system.fleet.test_fleet import write_task

pytestmark = pytest.mark.skipif(mosquitto_program() is None, reason="mosquitto is not installed")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a session try again within half a second, however often it has failed."""
    monkeypatch.setattr(backoff, "MAX_RETRY_DELAY_S", 0.5)


@pytest.fixture
def closed(tmp_path: Path, address: BrokerAddress) -> Closed:
    """A fleet with two devices."""
    made = Closed(tmp_path, address)
    for device in ("shed-1", "shed-2"):
        made.enrol(device)
    return made


@pytest.fixture
def fleet(tmp_path: Path, closed: Closed) -> Iterator[Fleet]:
    """Its processes, taken down at the end."""
    made = Fleet(tmp_path, closed.broker)
    yield made
    made.stop()


def start_device(fleet: Fleet, name: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
    """Start edge-client with a folder of that name as its enrollment, and a state of its own."""
    state = fleet.root / "devices" / name
    options = ("--enrollment", fleet.root / name, "--state", state, "--rescan-s", "0.5")
    return fleet.start(name, "edge_client.cli", *options, *arguments)


def wait_for(file: Path, text: str) -> None:
    """Wait until a log has a text."""
    deadline = time.monotonic() + PATIENCE_S
    while text not in file.read_text():
        assert time.monotonic() < deadline, file.read_text()
        time.sleep(0.1)


def test_a_closed_fleet_gets_its_head_and_a_revoked_device_nothing(
    closed: Closed, fleet: Fleet, tmp_path: Path
) -> None:
    """Two commands and two folders make a fleet; who is revoked is refused at once, by aggregator and broker."""
    task = write_task(tmp_path, quorum=1, fleet=FLEET)
    task.write_text(task.read_text() + "[training]\nepochs = 1\n")
    data = write_digits(tmp_path / "data", classes=[0, 1])
    with closed.serving():
        run = ("run", "--task", task, "--state", closed.state, "--broker", str(closed.broker), "--tls")
        fleet.start("aggregator", "aggregator.cli", *run)
        fleet.wait_exit(start_device(fleet, "shed-1", "--data", data, "--once"))
        summary = fleet.wait_for("the head", lambda s: bool(s["heads"]))
        assert summary["submissions"] == 1
        assert summary["keys"]["closed"]
        # A device that restarts has the same client id again, its certificate's name.
        device = start_device(fleet, "shed-1", "--data", data)
        fleet.wait_for("the device", lambda s: s["devices"][0]["state"] == "online")
        revoke(closed.store, "shed-1")
        write_digits(data, classes=[2])
        fleet.wait_exit(device, code=1)
        assert "was revoked" in (tmp_path / "shed-1.log").read_text()
        closed.hand_over()
        closed.reload()
        start_device(fleet, "shed-1", "--data", data)
        wait_for(tmp_path / "shed-1.log", "refused by the broker: the certificate")
        states = {device["device"]: device["state"] for device in fleet.status()["devices"]}
        assert states.pop("shed-1") == "revoked"
        assert set(states.values()) == {"enrolled"}  # and not heard of


def test_a_program_that_takes_over_anothers_name_ends_it(
    closed: Closed, fleet: Fleet, tmp_path: Path
) -> None:
    """Two programs with one enrollment do not take the connection from each other for ever: the first one ends."""
    data = write_digits(tmp_path / "data", classes=[0, 1])
    with closed.serving():
        first = start_device(fleet, "shed-1", "--data", data)
        wait_for(tmp_path / "shed-1.log", "connected to")
        time.sleep(1.1)  # starts are told apart by the second
        options = ("--enrollment", closed.root / "shed-1", "--data", data, "--state", tmp_path / "elsewhere")
        second = fleet.start("second", "edge_client.cli", *options)
        fleet.wait_exit(first, code=1)
        assert "another edge-client has come online as 'shed-1'" in (tmp_path / "shed-1.log").read_text()
        with running(closed.broker, "a", f"pf/1/{FLEET}/d/+/state", access=closed.aggregators_access()) as (
            _,
            ear,
        ):
            while b"online" not in ear.wait(Received).payload:
                pass
        assert second.poll() is None


def refusal(broker: BrokerAddress, access: BrokerAccess) -> str:
    """Why a session was not let in."""
    with running(broker, "a", access=access) as (_, ear):
        reason = ear.wait(Disconnected).reason
        assert Connected not in map(type, ear.heard)
        return reason


def test_strangers_stay_outside(closed: Closed, tmp_path: Path, address: BrokerAddress) -> None:
    """No encryption, no certificate, another fleet's, one that was renewed since."""
    (tmp_path / "other").mkdir()
    other = Closed(tmp_path / "other", address)
    other.enrol("shed-1")
    stranger = replace(other.access("shed-1"), ca=closed.access("shed-1").ca)
    old = closed.access("shed-2")
    closed.enrol("shed-2", renew=True, folder="shed-2-again")
    closed.hand_over()
    with closed.serving():
        assert refusal(closed.broker, BrokerAccess())
        assert "requires a certificate" in refusal(
            closed.broker, replace(closed.access("shed-1"), certificate=None)
        )
        assert "refuse" in refusal(closed.broker, stranger)
        assert "refuse" in refusal(closed.broker, old)
        with running(closed.broker, "a", access=closed.access("shed-2-again")) as (_, ear):
            ear.wait(Connected)


def denied(closed: Closed, access: BrokerAccess, topics: list[str]) -> set[str]:
    """Which of some topics a broker will not take from somebody, who says something to each."""
    with running(closed.broker, "a", access=access) as (says, ear):
        ear.wait(Connected)
        for topic in topics:
            says.send(Outgoing(topic, b"x"))
        ear.wait(Drained)
        return {event.topic for event in ear.heard if isinstance(event, Unsendable)}


def every_topic(device: str) -> dict[str, str]:
    """What a device may write, by channel, of every topic of the fleet, its own and the shared ones."""
    shared = {channel: fleet_topic(FLEET, channel) for channel in ("task", "round", "head", "cast", "state")}
    own = {
        f"d/{channel}": device_topic(FLEET, device, channel)
        for channel in ("state", "info", "up", "get", "ack", "blk")
    }
    assert {name.removeprefix("d/") for name in (*shared, *own)} == set(RETAINED)
    return {**shared, **own}


def test_everybody_speaks_for_himself(closed: Closed) -> None:
    """A device writes what is its own, and nothing of the aggregator's or another's; the aggregator, its answers."""
    own, others = every_topic("shed-1"), every_topic("shed-2")
    from_devices = {"d/state", "d/info", "d/up", "d/get"}
    with closed.serving():
        topics = [*own.values(), *others.values(), "pf/1/vineyard/task", "elsewhere"]
        allowed = {own[name] for name in from_devices}
        assert denied(closed, closed.access("shed-1"), topics) == set(topics) - allowed
        said = denied(closed, closed.aggregators_access(), [*own.values(), "elsewhere"])
        assert said == {own[name] for name in from_devices} | {"elsewhere"}


def test_everybody_hears_what_concerns_him(closed: Closed) -> None:
    """A device that listens to everything hears the fleet's topics and its own; the aggregator, all devices."""
    own, others = every_topic("shed-1"), every_topic("shed-2")
    with (
        closed.serving(),
        running(closed.broker, "a", "pf/#", access=closed.access("shed-1")) as (one, hears_one),
        running(closed.broker, "b", "pf/#", access=closed.access("shed-2")) as (two, hears_two),
        running(closed.broker, "c", "pf/#", access=closed.aggregators_access()) as (aggregator, hears_all),
    ):
        for ear in (hears_one, hears_two, hears_all):
            ear.wait(Connected)
        for name in ("d/info", "d/up", "d/get", "d/state"):
            one.send(Outgoing(own[name], b"one"))
            two.send(Outgoing(others[name], b"two"))
        heard = {hears_all.wait(Received).topic for _ in range(8)}
        assert heard == {
            topics[f"d/{name}"] for topics in (own, others) for name in ("info", "up", "get", "state")
        }
        for name in ("task", "round", "head", "cast", "d/ack", "d/blk", "state"):
            aggregator.send(Outgoing(own[name], b"all"))
        got = {hears_one.wait(Received).topic for _ in range(8)}
        assert got == {
            own[name] for name in ("d/state", "task", "round", "head", "cast", "d/ack", "d/blk", "state")
        }
        got = {hears_two.wait(Received).topic for _ in range(6)}
        assert got == {others["d/state"], *(own[name] for name in ("task", "round", "head", "cast", "state"))}


def test_nobody_has_the_last_word_of_another(closed: Closed) -> None:
    """The will that a device leaves for another one's presence is not said; its own is."""
    own, others = every_topic("shed-1"), every_topic("shed-2")
    aggregator = closed.aggregators_access()
    with closed.serving(), running(closed.broker, "c", "pf/#", access=aggregator) as (_, hears):
        hears.wait(Connected)
        for topic in (others["d/state"], own["d/state"]):
            will = Outgoing(topic, b"offline")
            with running(closed.broker, "a", access=closed.access("shed-1"), will=will) as (_, ear):
                ear.wait(Connected)
                # Somebody with the same certificate takes the connection over: for the broker, the first has vanished.
                with running(closed.broker, "b", access=closed.access("shed-1")) as (_, taker):
                    taker.wait(Connected)
        assert hears.wait(Received).topic == own["d/state"]


def test_passwords_in_the_place_of_certificates(closed: Closed, tmp_path: Path) -> None:
    """With the lines of docs/security.md, a device's name and password let it in, with the same access list."""
    passwords = tmp_path / "broker" / "passwords"
    for number, (name, password) in enumerate((("shed-1", "one"), ("aggregator@orchard", "all"))):
        create = ["-c"] if number == 0 else []
        command = ["mosquitto_passwd", *create, "-b", str(passwords), name, password]
        subprocess.run(command, check=True, capture_output=True)
    configuration = (tmp_path / "broker" / "mosquitto.conf").read_text()
    for line in (
        "require_certificate true",
        "use_identity_as_username true",
        f"crlfile {'/etc/mosquitto/protofleet'}/revoked.crl",
    ):
        assert line in configuration
        configuration = configuration.replace(line, "")
    configuration += "password_file /etc/mosquitto/protofleet/passwords\n"
    right = BrokerAccess(tls=True, ca=tmp_path / "broker" / "ca.crt", username="shed-1", password="one")
    own, others = every_topic("shed-1"), every_topic("shed-2")
    with closed.serving(configuration):
        topics = [own["d/up"], others["d/up"], own["task"]]
        assert denied(closed, right, topics) == {others["d/up"], own["task"]}
        aggregator = replace(right, username="aggregator@orchard", password="all")
        assert denied(closed, aggregator, [own["task"], own["d/ack"]]) == set()
        said = refusal(closed.broker, replace(right, password="all"))
        assert said == "refused by the broker: Not authorized: check --username and the password"
        assert "it wants --username" in refusal(closed.broker, replace(right, username=None, password=None))


def test_the_access_list_is_the_fleets() -> None:
    """Another fleet's has its name in every line."""
    assert access_list("vineyard") == access_list("orchard").replace("orchard", "vineyard")
