"""Networks that cut, delay, throttle, duplicate, reorder and drop."""

from tests.support.network_proxy import Faults
from tests.system.faults.catalogue import fault
from tests.system.faults.fleet import FaultyFleet

FRAMES_OF_HEAD = 30
"""A network stays bad until that many have arrived: about a tenth of what three devices fetch."""


def _endure(fleet: FaultyFleet, faults: Faults, *, what: str, least: int) -> int:
    """Have faults both ways from the first connection until the head is on its way."""
    fleet.net.up = fleet.net.down = faults
    fleet.run()
    fleet.wait_until(f"{least} times {what}", lambda: fleet.net.counts[what] >= least)
    fleet.wait_until(
        "frames of the head", lambda: fleet.watch.frames_down(fleet.reference.head) >= FRAMES_OF_HEAD
    )
    return fleet.net.counts[what]


@fault("connections cut, also within a packet", least=10)
def cuts(fleet: FaultyFleet) -> int:
    """Somewhere within one in twenty-five publications."""
    return _endure(fleet, Faults(cut=0.04), what="cut", least=10)


@fault("packets delayed by up to 0.2 s", least=100)
def delays(fleet: FaultyFleet) -> int:
    """Each of them, and what follows waits too."""
    return _endure(fleet, Faults(delay_s=0.2), what="delayed", least=100)


@fault("publications that come twice", least=20)
def duplicates(fleet: FaultyFleet) -> int:
    """Every third one."""
    return _endure(fleet, Faults(duplicate=0.3), what="duplicated", least=20)


@fault("publications that change places", least=20)
def reorders(fleet: FaultyFleet) -> int:
    """Two out of five, with the next one."""
    return _endure(fleet, Faults(reorder=0.4), what="reordered", least=20)


@fault("a broker that acknowledges and loses", least=10)
def losses(fleet: FaultyFleet) -> int:
    """One in ten frames, receipts and requests."""
    return _endure(fleet, Faults(drop=0.1), what="dropped", least=10)


@fault("frames over a link of 100 kB/s, keepalive 10 s", least=40, options="max_keepalive 10")
def narrow(fleet: FaultyFleet) -> int:
    """Both ways, for several times the keepalive, which the broker sets."""
    fleet.net.up = fleet.net.down = Faults(bytes_per_s=100_000)
    fleet.run()
    fleet.wait_until(
        "frames of the head", lambda: fleet.watch.frames_down(fleet.reference.head) >= 2 * FRAMES_OF_HEAD
    )
    return fleet.watch.frames_up() + fleet.watch.frames_down()
