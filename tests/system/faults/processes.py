"""Processes that are killed, or stand still for a while, at random moments."""

import random
from concurrent.futures import ThreadPoolExecutor

import psutil

from tests.support.network_proxy import Faults
from tests.system.faults.catalogue import fault
from tests.system.faults.fleet import DEVICES, Fleet

SLOW = Faults(bytes_per_s=250_000)
"""A submission takes three seconds: there are moments within it."""

SLOWER = Faults(bytes_per_s=100_000)
"""It takes seven: what gets through between two faults is little."""


@fault("SIGKILL of a device within its transfer", least=20)
def device_killed(fleet: Fleet) -> int:
    """Each device loses its power again and again, and every time a little more has got through."""
    fleet.net.up = SLOW
    fleet.start()
    with ThreadPoolExecutor() as pool:
        return sum(pool.map(lambda name: _torment(fleet, name), DEVICES))


def _torment(fleet: Fleet, name: str) -> int:
    chance, killed = random.Random(f"{fleet.seed}/{name}"), 0
    for _ in range(8):
        fleet.until_frames(fleet.watch, name)
        fleet.moment(0.25, chance)
        fleet.kill(name)
        killed += fleet.uploads(name)
        fleet.start(name)
    fleet.say(f"killed {name} {killed} times within its transfer")
    return killed


@fault("SIGKILL of the aggregator while it takes submissions", least=8)
def aggregator_killed_while_it_takes(fleet: Fleet) -> int:
    """What it has said to have is there when it is back; the rest is uploaded again."""
    fleet.net.up = SLOWER
    fleet.start()
    killed = 0
    for _ in range(10):
        fleet.until_frames(fleet.delivered, "aggregator")
        fleet.moment(0.8)
        fleet.kill("aggregator")
        killed += fleet.uploads()
        fleet.say(f"killed the aggregator within transfers, {killed}")
        fleet.start("aggregator")
    return killed


def _trains(fleet: Fleet) -> bool:
    """Whether the aggregator's training runs."""
    try:
        children = psutil.Process(fleet.processes["aggregator"].pid).children()
        return any("aggregator.training.train_head" in child.cmdline() for child in children)
    except psutil.Error:
        return False  # a child that ends this very moment


@fault("SIGKILL of the aggregator during a training", least=3)
def aggregator_killed_while_it_trains(fleet: Fleet) -> int:
    """With the training, as by a power cut, and without it."""
    fleet.start()
    killed = 0
    for with_training in (True, False, True, False, True):
        fleet.until("a training", lambda: _trains(fleet))
        fleet.moment(1.0)
        fleet.kill("aggregator", with_children=with_training)
        killed += fleet.head() is None
        fleet.say(f"killed the aggregator within a training, {killed}")
        fleet.start("aggregator")
    return killed


@fault("SIGKILL of the aggregator while the head is fetched", least=3)
def aggregator_killed_while_it_publishes(fleet: Fleet) -> int:
    """Devices fetch the rest of the head when it is back."""
    fleet.net.down = Faults(bytes_per_s=1_000_000)
    fleet.start()
    killed = 0
    for _ in range(5):
        fleet.until_frames(fleet.delivered, "aggregator", head=fleet.reference.head)
        fleet.moment(0.3)
        fleet.kill("aggregator")
        killed += not fleet.is_settled()
        fleet.say(f"killed the aggregator while the head was fetched, {killed}")
        fleet.start("aggregator")
    return killed


@fault("SIGKILL of the broker, its memory kept", least=3)
def broker_killed(fleet: Fleet) -> int:
    """Everybody comes back to it."""
    return _kill_broker(fleet, forgetting=False)


@fault("SIGKILL of the broker, its memory lost", least=3)
def broker_killed_and_wiped(fleet: Fleet) -> int:
    """Everybody comes back to it, and says again what it has forgotten."""
    return _kill_broker(fleet, forgetting=True)


def _kill_broker(fleet: Fleet, *, forgetting: bool) -> int:
    fleet.net.up = SLOWER
    fleet.start()
    killed = 0
    for _ in range(5):
        fleet.until_frames(fleet.delivered)
        fleet.moment(0.8)
        fleet.broker.kill(forgetting=forgetting)
        killed += fleet.uploads()
        fleet.say(f"killed the broker within transfers, {killed}")
        fleet.broker.start()
    return killed


@fault("a subscriber that stands still for seconds", least=4)
def slow_subscribers(fleet: Fleet) -> int:
    """The aggregator while devices send, then each device while it fetches the head."""
    fleet.net.up = fleet.net.down = Faults(bytes_per_s=1_000_000)
    fleet.start()
    stopped = 0
    for _ in range(3):
        fleet.until_frames(fleet.delivered)
        stopped += fleet.uploads()
        fleet.freeze("aggregator", fleet.chance.uniform(0.5, 2.0))
    for name in DEVICES:
        fleet.until_frames(fleet.watch, head=fleet.reference.head)
        stopped += not fleet.is_settled()
        fleet.freeze(name, fleet.chance.uniform(0.5, 2.0))
    return stopped
