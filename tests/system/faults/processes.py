"""Processes killed or paused at random moments."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil

from tests.support.network.proxy import Faults
from tests.system.faults.fleet import DEVICES, SEED, FaultyFleet, fault

SLOW = Faults(bytes_per_s=50_000)
"""A submission takes 15 seconds, so that little crosses between two faults, also on a busy machine."""


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


@fault("SIGKILL of the aggregator while it receives, trains and sends", least=7)
def aggregator_killed(fleet: FaultyFleet) -> int:
    """Acknowledged data is there after each restart; the rest is uploaded, trained and downloaded again."""
    fleet.net.up = SLOW
    fleet.run()
    uploading = 0
    for _ in range(4):
        fleet.wait_for_frames(fleet.aggregator_log, "aggregator")
        fleet.sleep_up_to(0.8)
        fleet.kill("aggregator")
        uploading += fleet.uploads()
        fleet.run("aggregator")
    fleet.net.up = Faults()
    training = _kill_in_training(fleet)
    downloading = 0
    for _ in range(3):
        fleet.wait_for_frames(fleet.aggregator_log, "aggregator", head=fleet.reference.head)
        fleet.sleep_up_to(0.3)
        fleet.kill("aggregator")
        downloading += not fleet.is_settled()
        fleet.run("aggregator")
    assert uploading >= 3
    assert training >= 2
    assert downloading >= 2
    return uploading + training + downloading


def _kill_in_training(fleet: FaultyFleet) -> int:
    """Kill it while its training runs, which ends with it."""
    killed = 0
    for _ in range(3):
        fleet.wait_until("a training", lambda: _is_training(fleet))
        fleet.net.down = Faults(bytes_per_s=200_000)
        fleet.sleep_up_to(1.0)
        fleet.kill("aggregator")
        killed += not fleet.status()["heads"]
        fleet.run("aggregator")
    return killed


def _is_training(fleet: FaultyFleet) -> bool:
    try:
        jobs = fleet.jobs("aggregator")
        return any("tests.support.fleets.fast_training" in each.cmdline() for each in jobs)
    except psutil.Error:
        return False  # a child that ends this very moment


@fault("SIGKILL of the broker, its database kept or deleted", least=3)
def broker_killed(fleet: FaultyFleet) -> int:
    """All clients reconnect, and publish retained messages again."""
    fleet.net.up = SLOW
    fleet.run()
    killed = 0
    for number in range(4):
        fleet.wait_for_frames(fleet.aggregator_log)
        fleet.sleep_up_to(0.8)
        fleet.mosquitto.kill(delete_database=number % 2 == 1)
        killed += fleet.uploads()
        fleet.mosquitto.start()
    return killed


@fault("packets delayed by up to 0.2 s, clients paused for up to 2 s", least=100)
def delays(fleet: FaultyFleet) -> int:
    """The aggregator pauses while devices upload, then each device while it downloads the head."""
    fleet.net.up, fleet.net.down = replace(SLOW, delay_s=0.2), Faults(bytes_per_s=1_000_000, delay_s=0.2)
    fleet.run()
    paused = 0
    for _ in range(3):
        fleet.wait_for_frames(fleet.aggregator_log)
        paused += fleet.uploads()
        fleet.pause_for_a_while("aggregator")
    fleet.net.up = fleet.net.down
    for name in DEVICES:
        fleet.wait_for_frames(fleet.device_log, head=fleet.reference.head)
        paused += not fleet.is_settled()
        fleet.pause_for_a_while(name)
    assert paused >= 4
    return paused + fleet.net.counts["delayed"]
