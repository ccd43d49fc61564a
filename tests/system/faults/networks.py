"""Networks that cut, delay, throttle, duplicate, reorder, drop and damage."""

from tests.support.network_proxy import Faults
from tests.system.faults.catalogue import fault
from tests.system.faults.fleet import FaultyFleet

HEAD_FRAMES = 30
"""Frames of the head that cross a faulty network: about a tenth of what three devices download."""


def _run_with(fleet: FaultyFleet, faults: Faults, *, count: str, least: int) -> int:
    """Apply faults in both directions from the first connection until a part of the head has crossed."""
    fleet.net.up = fleet.net.down = faults
    fleet.run()
    fleet.wait_until(f"{least} times {count}", lambda: fleet.net.counts[count] >= least)
    fleet.wait_for_head_frames(HEAD_FRAMES)
    return fleet.net.counts[count]


@fault("connections cut, also within a packet", least=10)
def cut_connections(fleet: FaultyFleet) -> int:
    return _run_with(fleet, Faults(cut=0.04), count="cut", least=10)


@fault("packets delayed by up to 0.2 s", least=100)
def delayed_packets(fleet: FaultyFleet) -> int:
    return _run_with(fleet, Faults(delay_s=0.2), count="delayed", least=100)


@fault("duplicated publications", least=20)
def duplicates(fleet: FaultyFleet) -> int:
    return _run_with(fleet, Faults(duplicate=0.3), count="duplicated", least=20)


@fault("reordered publications", least=20)
def reordered(fleet: FaultyFleet) -> int:
    return _run_with(fleet, Faults(reorder=0.4), count="reordered", least=20)


@fault("publications acknowledged and dropped by the broker", least=10)
def dropped(fleet: FaultyFleet) -> int:
    """One in ten frames, receipts and requests."""
    return _run_with(fleet, Faults(drop=0.1), count="dropped", least=10)


@fault("frames over a link of 100 kB/s, keepalive 10 s", least=40, options="max_keepalive 10")
def slow_link(fleet: FaultyFleet) -> int:
    """In both directions, for several times the keepalive, which the broker sets."""
    fleet.net.up = fleet.net.down = Faults(bytes_per_s=100_000)
    fleet.run()
    fleet.wait_for_head_frames(2 * HEAD_FRAMES)
    return fleet.device_log.frames_up() + fleet.device_log.frames_down()


@fault("head downloads damaged in transit", least=3)
def damaged_in_transit(fleet: FaultyFleet) -> int:
    """A byte of some frames of the head is changed: the device downloads it again."""
    fleet.net.down = Faults(bytes_per_s=2_000_000)
    fleet.run()
    fleet.wait_for_head_frames(1)
    fleet.net.down = Faults(bytes_per_s=2_000_000, damage=0.05)
    fleet.wait_until("damage", lambda: fleet.net.counts["damaged"] >= 3)
    return fleet.net.counts["damaged"]
