"""Processes killed or paused at random moments."""

import random
from concurrent.futures import ThreadPoolExecutor

import psutil

from tests.support.network_proxy import Faults
from tests.system.faults.catalogue import fault
from tests.system.faults.fleet import DEVICES, SEED, FaultyFleet

SLOW = Faults(bytes_per_s=250_000)
"""A submission takes three seconds, so that there are moments within it."""

SLOWER = Faults(bytes_per_s=100_000)
"""It takes seven, so that little crosses between two faults."""


@fault("SIGKILL of a device during its upload", least=7)
def device_killed(fleet: FaultyFleet) -> int:
    """Each device is killed three times; every time a little more has been transferred."""
    fleet.net.up = SLOW
    fleet.run()

    def kill_repeatedly(name: str) -> int:
        chance, killed = random.Random(f"{SEED}/{name}"), 0
        for _ in range(3):
            fleet.wait_for_frames(fleet.device_log, name)
            fleet.sleep_up_to(0.25, chance)
            fleet.kill(name)
            killed += fleet.uploads(name)
            fleet.run(name)
        return killed

    with ThreadPoolExecutor() as pool:
        return sum(pool.map(kill_repeatedly, DEVICES))


@fault("SIGKILL of the aggregator while it receives submissions", least=3)
def aggregator_killed_during_uploads(fleet: FaultyFleet) -> int:
    """Acknowledged data is there after the restart; the rest is uploaded again."""
    fleet.net.up = SLOWER
    fleet.run()
    killed = 0
    for _ in range(4):
        fleet.wait_for_frames(fleet.aggregator_log, "aggregator")
        fleet.sleep_up_to(0.8)
        fleet.kill("aggregator")
        killed += fleet.uploads()
        fleet.run("aggregator")
    return killed


def _is_training(fleet: FaultyFleet) -> bool:
    try:
        children = psutil.Process(fleet.processes["aggregator"].pid).children()
        return any("aggregator.training.head_job" in child.cmdline() for child in children)
    except psutil.Error:
        return False  # a child that ends this very moment


@fault("SIGKILL of the aggregator during training", least=2)
def aggregator_killed_during_training(fleet: FaultyFleet) -> int:
    """With the training process, as by a power cut, and without it."""
    fleet.run()
    killed = 0
    for with_training in (True, False, True):
        fleet.wait_until("a training", lambda: _is_training(fleet))
        fleet.sleep_up_to(1.0)
        fleet.kill("aggregator", with_children=with_training)
        killed += not fleet.status()["heads"]
        fleet.run("aggregator")
    return killed


@fault("SIGKILL of the aggregator while devices download the head", least=2)
def aggregator_killed_during_downloads(fleet: FaultyFleet) -> int:
    """Devices download the rest of the head after its restart."""
    fleet.net.down = Faults(bytes_per_s=1_000_000)
    fleet.run()
    killed = 0
    for _ in range(3):
        fleet.wait_for_frames(fleet.aggregator_log, "aggregator", head=fleet.reference.head)
        fleet.sleep_up_to(0.3)
        fleet.kill("aggregator")
        killed += not fleet.is_settled()
        fleet.run("aggregator")
    return killed


@fault("SIGKILL of the broker, its database kept", least=2)
def broker_killed(fleet: FaultyFleet) -> int:
    """All clients reconnect."""
    return _kill_broker(fleet, delete_database=False)


@fault("SIGKILL of the broker, its database deleted", least=2)
def broker_killed_and_wiped(fleet: FaultyFleet) -> int:
    """All clients reconnect, and publish retained messages again."""
    return _kill_broker(fleet, delete_database=True)


def _kill_broker(fleet: FaultyFleet, *, delete_database: bool) -> int:
    fleet.net.up = SLOWER
    fleet.run()
    killed = 0
    for _ in range(3):
        fleet.wait_for_frames(fleet.aggregator_log)
        fleet.sleep_up_to(0.8)
        fleet.mosquitto.kill(delete_database=delete_database)
        killed += fleet.uploads()
        fleet.mosquitto.start()
    return killed


@fault("a client paused for up to 2 s", least=4)
def paused_clients(fleet: FaultyFleet) -> int:
    """The aggregator while devices upload, then each device while it downloads the head."""
    fleet.net.up = fleet.net.down = Faults(bytes_per_s=1_000_000)
    fleet.run()
    paused = 0
    for _ in range(3):
        fleet.wait_for_frames(fleet.aggregator_log)
        paused += fleet.uploads()
        fleet.pause_for_a_while("aggregator")
    for name in DEVICES:
        fleet.wait_for_frames(fleet.device_log, head=fleet.reference.head)
        paused += not fleet.is_settled()
        fleet.pause_for_a_while(name)
    return paused
