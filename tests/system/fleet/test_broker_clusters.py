"""Brokers that forward messages to each other: one is killed during the uploads, and the fleet uses the others."""

from collections.abc import Callable
from pathlib import Path

from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Received
from protocol.wire.topics import DeviceChannel, device_topic, fleet_topic
from tests.support.fleets.fleet import Fleet, accepted_submissions, write_digits, write_task
from tests.support.network.brokers import Mosquitto, free_address, needs_mosquitto, rotated
from tests.support.network.nats import NatsCluster, needs_nats
from tests.support.network.sessions import EventLog, running

FLEET = "default"
CLASSES = [0, 1, 2]
DEVICES = ("device-0", "device-1", "device-2")
CHANNELS: tuple[DeviceChannel, ...] = ("ack", "up")
CONNECTED = "connected to the broker broker="


def _wait_for_topics(log: EventLog, topics: set[str]) -> None:
    while topics:
        topics.discard(log.wait(Received).topic)


def _kill_during_uploads(root: Path, brokers: tuple[BrokerAddress, ...], kill: Callable[[], None]) -> None:
    """Kill the first broker, which the aggregator and the first device use, when no upload has been answered.

    The aggregator is paused, so that what the brokers have for it is lost with the first one. Before, it has answered
    the devices' records of private submissions; their images come afterwards, all at once.
    """
    answers, uploads = ([device_topic(FLEET, name, channel) for name in DEVICES] for channel in CHANNELS)
    manifests = [fleet_topic(FLEET, "task"), fleet_topic(FLEET, "round")]
    task = write_task(root, classes=list(map(str, CLASSES)), quorum=3)
    with (
        Fleet(root, brokers[0]) as fleet,
        running(brokers[1], "observer", *answers, *uploads, *manifests) as (_, observed),
    ):
        observed.wait(Connected)
        fleet.start_aggregator(task, "--broker", rotated(brokers, 0))
        _wait_for_topics(observed, set(manifests))
        fleet.wait_for_log("aggregator", f"{CONNECTED}{brokers[0]}")
        for number, name in enumerate(DEVICES):
            (root / f"images-{number}").mkdir()
            options = ("--broker", rotated(brokers, number), "--backbone", root / "backbone-0.onnx")
            fleet.start_device(name, root / f"images-{number}", *options, "--rescan-s", "0.5")
        for number, name in enumerate(DEVICES):
            fleet.wait_for_log(name, f"{CONNECTED}{brokers[number % len(brokers)]}")
        _wait_for_topics(observed, set(answers))
        fleet.pause("aggregator")
        for number in range(len(DEVICES)):
            written = write_digits(root / f"written-{number}", classes=CLASSES, start=20 * number)
            written.rename(root / f"images-{number}")
        _wait_for_topics(observed, set(uploads))
        kill()
        fleet.resume("aggregator")
        fleet.wait_for(
            "the head on each device", lambda s: [row["head"] for row in s["devices"]] == [1, 1, 1]
        )
        for name in ("aggregator", DEVICES[0]):
            fleet.wait_for_log(name, CONNECTED, times=2)
        assert sorted(name for name, _ in accepted_submissions(fleet.log("aggregator"))) == sorted(DEVICES)
        assert fleet.status()["submissions"] == len(DEVICES)


@needs_mosquitto
def test_bridged_mosquitto_is_killed(tmp_path: Path) -> None:
    """The second mosquitto has a bridge to the first one; all programs move to it."""
    brokers = (free_address(), free_address())
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    bridge = (
        f"allow_anonymous true\nconnection first\naddress {brokers[0]}\nrestart_timeout 1\ntopic # both 1"
    )
    with Mosquitto(brokers[0], folders[0]) as first, Mosquitto(brokers[1], folders[1], options=bridge):
        _kill_during_uploads(tmp_path, brokers, first.kill)


@needs_nats
def test_nats_server_is_killed(tmp_path: Path) -> None:
    """Of three NATS servers one is killed; each subscription on another one is repeated until it is accepted."""
    with NatsCluster(tmp_path) as cluster:
        _kill_during_uploads(tmp_path, cluster.brokers, lambda: cluster.kill(0))
