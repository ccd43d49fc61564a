"""Processes killed or paused at random moments."""

import random
from concurrent.futures import ThreadPoolExecutor

import psutil

from tests.support.network_proxy import Faults
from tests.system.faults.catalogue import fault
from tests.system.faults.fleet import DEVICES, FaultyFleet

SLOW = Faults(bytes_per_s=250_000)
"""A submission takes three seconds: there are moments within it."""

SLOWER = Faults(bytes_per_s=100_000)
"""It takes seven: what gets through between two faults is little."""


@fault("SIGKILL of a device within its transfer", least=7)
def device_killed(fleet: FaultyFleet) -> int:
    """Each device is killed three times; every time a little more has been transferred."""
    fleet.net.up = SLOW
    fleet.run()
    with ThreadPoolExecutor() as pool:
        return sum(pool.map(lambda name: _kill_repeatedly(fleet, name), DEVICES))


def _kill_repeatedly(fleet: FaultyFleet, name: str) -> int:
    chance, killed = random.Random(f"{fleet.seed}/{name}"), 0
    for _ in range(3):
        fleet.wait_for_frames(fleet.watch, name)
        fleet.sleep_up_to(0.25, chance)
        fleet.kill(name)
        killed += fleet.uploads(name)
        fleet.run(name)
    fleet.log_progress(f"killed {name} {killed} times within its transfer")
    return killed


@fault("SIGKILL of the aggregator while it receives submissions", least=3)
def aggregator_killed_while_it_receives(fleet: FaultyFleet) -> int:
    """Acknowledged data is there after the restart; the rest is uploaded again."""
    fleet.net.up = SLOWER
    fleet.run()
    killed = 0
    for _ in range(4):
        fleet.wait_for_frames(fleet.delivered, "aggregator")
        fleet.sleep_up_to(0.8)
        fleet.kill("aggregator")
        killed += fleet.uploads()
        fleet.log_progress(f"killed the aggregator within transfers, {killed}")
        fleet.run("aggregator")
    return killed


def _trains(fleet: FaultyFleet) -> bool:
    """Return whether the aggregator's training runs."""
    try:
        children = psutil.Process(fleet.processes["aggregator"].pid).children()
        return any("aggregator.training.train_head" in child.cmdline() for child in children)
    except psutil.Error:
        return False  # a child that ends this very moment


@fault("SIGKILL of the aggregator during a training", least=2)
def aggregator_killed_while_it_trains(fleet: FaultyFleet) -> int:
    """With the training process, as by a power cut, and without it."""
    fleet.run()
    killed = 0
    for with_training in (True, False, True):
        fleet.wait_until("a training", lambda: _trains(fleet))
        fleet.sleep_up_to(1.0)
        fleet.kill("aggregator", with_children=with_training)
        killed += fleet.head() is None
        fleet.log_progress(f"killed the aggregator within a training, {killed}")
        fleet.run("aggregator")
    return killed


@fault("SIGKILL of the aggregator while the head is fetched", least=2)
def aggregator_killed_while_it_publishes(fleet: FaultyFleet) -> int:
    """Devices fetch the rest of the head after its restart."""
    fleet.net.down = Faults(bytes_per_s=1_000_000)
    fleet.run()
    killed = 0
    for _ in range(3):
        fleet.wait_for_frames(fleet.delivered, "aggregator", head=fleet.reference.head)
        fleet.sleep_up_to(0.3)
        fleet.kill("aggregator")
        killed += not fleet.is_settled()
        fleet.log_progress(f"killed the aggregator while the head was fetched, {killed}")
        fleet.run("aggregator")
    return killed


@fault("SIGKILL of the broker, its memory kept", least=2)
def broker_killed(fleet: FaultyFleet) -> int:
    """All clients reconnect."""
    return _kill_broker(fleet, delete_database=False)


@fault("SIGKILL of the broker, its memory lost", least=2)
def broker_killed_and_wiped(fleet: FaultyFleet) -> int:
    """All clients reconnect, and publish again what it has forgotten."""
    return _kill_broker(fleet, delete_database=True)


def _kill_broker(fleet: FaultyFleet, *, delete_database: bool) -> int:
    fleet.net.up = SLOWER
    fleet.run()
    killed = 0
    for _ in range(3):
        fleet.wait_for_frames(fleet.delivered)
        fleet.sleep_up_to(0.8)
        fleet.mosquitto.kill(delete_database=delete_database)
        killed += fleet.uploads()
        fleet.log_progress(f"killed the broker within transfers, {killed}")
        fleet.mosquitto.start()
    return killed


@fault("a subscriber that is paused for seconds", least=4)
def slow_subscribers(fleet: FaultyFleet) -> int:
    """The aggregator while devices send, then each device while it fetches the head."""
    fleet.net.up = fleet.net.down = Faults(bytes_per_s=1_000_000)
    fleet.run()
    stopped = 0
    for _ in range(3):
        fleet.wait_for_frames(fleet.delivered)
        stopped += fleet.uploads()
        fleet.freeze("aggregator", fleet.random.uniform(0.5, 2.0))
    for name in DEVICES:
        fleet.wait_for_frames(fleet.watch, head=fleet.reference.head)
        stopped += not fleet.is_settled()
        fleet.freeze(name, fleet.random.uniform(0.5, 2.0))
    return stopped
