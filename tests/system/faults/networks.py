"""Networks that cut, delay, throttle, duplicate, reorder, drop and damage."""

from tests.support.network.proxy import Faults
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


@fault("duplicated and reordered publications", least=40)
def duplicates(fleet: FaultyFleet) -> int:
    reordered = _run_with(fleet, Faults(duplicate=0.3, reorder=0.4), count="reordered", least=20)
    fleet.wait_until("20 duplicates", lambda: fleet.net.counts["duplicated"] >= 20)
    return reordered + fleet.net.counts["duplicated"]


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
