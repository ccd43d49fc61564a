"""Brokers and disks with little room, and a broker that says no."""

import resource

from tests.support.network_proxy import Faults
from tests.system.faults.catalogue import fault
from tests.system.faults.fleet import DEVICES, Fleet

SMALL_BYTES = 20_000
WITHOUT_UP = "topic read pf/#\ntopic write pf/1/+/+\ntopic write pf/1/+/d/+/+\n"
"""An access list that leaves out the one topic of a device with a level more."""


@fault("a broker that takes 20,000 bytes a packet", least=100, options=f"max_packet_size {SMALL_BYTES}")
def small_packets(fleet: Fleet) -> int:
    """It says so when a client connects, so that nothing larger is sent."""
    fleet.start()
    fleet.settle()
    return fleet.watch.frames_up() + fleet.watch.frames_down()


@fault(
    "packets too large for a broker of MQTT 3.1.1",
    least=5,
    options=f"max_packet_size {SMALL_BYTES}",
    without_mqtt5=True,
)
def small_packets_unsaid(fleet: Fleet) -> int:
    """It only hangs up, until everybody has found out what it takes."""
    fleet.start()
    fleet.settle()
    return fleet.broker.log.count("oversize packet")


@fault(
    "frames that a full queue of the broker drops",
    least=5,
    options="max_queued_messages 10\nmax_inflight_messages 5",
)
def overflow(fleet: Fleet) -> int:
    """The aggregator's link becomes narrow while all devices send: the broker says yes, and forgets."""
    fleet.net.up = Faults(bytes_per_s=300_000)
    fleet.start()
    fleet.until("frames of every device", lambda: all(fleet.watch.frames_up(name) > 1 for name in DEVICES))
    fleet.aggregator_net.down = Faults(bytes_per_s=30_000)
    # Of these, the broker has room for fifteen.
    fleet.until("lost frames", lambda: fleet.watch.frames_up() - fleet.delivered.frames_up() >= 22)
    fleet.settle()
    return fleet.watch.frames_up() - fleet.delivered.frames_up()


@fault("publications that the broker denies", least=3, options="acl_file {folder}/acl\nlog_type all")
def denied(fleet: Fleet) -> int:
    """Until its access list is put right."""
    fleet.start()
    fleet.until("denials", lambda: fleet.broker.log.count("Denied PUBLISH") >= len(DEVICES))
    times = fleet.broker.log.count("Denied PUBLISH")
    fleet.broker.allow("topic readwrite pf/#\n")
    return times


@fault(
    "the same over MQTT 3.1.1",
    least=3,
    options="acl_file {folder}/acl\nlog_type all",
    without_mqtt5=True,
)
def denied_unsaid(fleet: Fleet) -> int:
    """The broker acknowledges what it denies."""
    return denied.provoke(fleet)


@fault("writes that a full disk of the aggregator refuses", least=3)
def full_disk(fleet: Fleet) -> int:
    """No file of it grows past 100 kB for a while; it says so to every device, and takes nothing."""
    fleet.start("aggregator")
    fleet.until("a connection", lambda: "connected to the broker" in fleet.log("aggregator"))
    process = fleet.processes["aggregator"].pid
    resource.prlimit(process, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    fleet.start(*DEVICES)
    fleet.until("refusals", lambda: _refusals(fleet) >= 3)
    times = _refusals(fleet)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return times


def _refusals(fleet: Fleet) -> int:
    return fleet.watch.answers["no_space"]
