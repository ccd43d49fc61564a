"""Brokers and disks with little room, and a broker whose access list is too narrow."""

import resource

from tests.support.network_proxy import Faults
from tests.system.faults.catalogue import fault
from tests.system.faults.fleet import DEVICES, FaultyFleet

SMALL_BYTES = 20_000
WITHOUT_UP = "topic read pf/#\ntopic write pf/1/+/+\ntopic write pf/1/+/d/+/+\n"
"""An access list that leaves out the one topic of a device with a level more."""
DENIED = "the broker does not accept this device's upload"
"""Logged by a device whose upload the broker denies."""
NO_SPACE = "the aggregator has no space"
"""Logged by a device whose upload the aggregator cannot store."""


@fault("a broker that takes 20,000 bytes a packet", least=100, options=f"max_packet_size {SMALL_BYTES}")
def small_packets(fleet: FaultyFleet) -> int:
    """It announces its limit when a client connects, so that nothing larger is sent."""
    fleet.run()
    fleet.settle()
    return fleet.watch.frames_up() + fleet.watch.frames_down()


@fault(
    "packets too large for a broker of MQTT 3.1.1",
    least=5,
    options=f"max_packet_size {SMALL_BYTES}",
    without_mqtt5=True,
)
def small_packets_unsaid(fleet: FaultyFleet) -> int:
    """It only disconnects, until each client has found its limit."""
    fleet.run()
    fleet.settle()
    return fleet.mosquitto.log().count("oversize packet")


@fault(
    "frames that a full queue of the broker drops",
    least=5,
    options="max_queued_messages 10\nmax_inflight_messages 5",
)
def overflow(fleet: FaultyFleet) -> int:
    """The aggregator's link becomes narrow while all devices send: the broker acknowledges, and drops."""
    fleet.net.up = Faults(bytes_per_s=300_000)
    fleet.run()
    fleet.wait_until(
        "frames of every device", lambda: all(fleet.watch.frames_up(name) > 1 for name in DEVICES)
    )
    fleet.aggregator_net.down = Faults(bytes_per_s=30_000)
    # Of these, the broker has room for fifteen.
    fleet.wait_until("lost frames", lambda: fleet.watch.frames_up() - fleet.delivered.frames_up() >= 22)
    fleet.settle()
    return fleet.watch.frames_up() - fleet.delivered.frames_up()


@fault("publications that the broker denies", least=3, options="acl_file {folder}/acl\nlog_type all")
def denied(fleet: FaultyFleet) -> int:
    """Each device logs once that the access list denies its upload, and retries until it is corrected."""
    fleet.run()
    fleet.wait_until("denials", lambda: fleet.mosquitto.log().count("Denied PUBLISH") >= len(DEVICES))
    times = fleet.mosquitto.log().count("Denied PUBLISH")
    if not fleet.without_mqtt5:
        for name in DEVICES:
            fleet.wait_for_log(name, DENIED)
    fleet.mosquitto.allow("topic readwrite pf/#\n")
    fleet.settle()
    for name in DEVICES:
        assert fleet.log(name).count(DENIED) <= 1, fleet.log(name)
        assert "connection lost" not in fleet.log(name)
    return times


@fault(
    "the same over MQTT 3.1.1",
    least=3,
    options="acl_file {folder}/acl\nlog_type all",
    without_mqtt5=True,
)
def denied_unsaid(fleet: FaultyFleet) -> int:
    """The broker acknowledges what it denies."""
    return denied.provoke(fleet)


@fault("writes that a full disk of the aggregator refuses", least=3)
def full_disk(fleet: FaultyFleet) -> int:
    """No file of it grows past 100 kB for a while: it refuses every upload, which each device logs once."""
    fleet.run("aggregator")
    fleet.wait_until("a connection", lambda: "connected to the broker" in fleet.log("aggregator"))
    process = fleet.processes["aggregator"].pid
    resource.prlimit(process, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    fleet.run(*DEVICES)
    fleet.wait_until("refusals", lambda: _refusals(fleet) >= 3)
    for name in DEVICES:
        fleet.wait_for_log(name, NO_SPACE)
    times = _refusals(fleet)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    fleet.settle()
    assert [fleet.log(name).count(NO_SPACE) for name in DEVICES] == [1] * len(DEVICES)
    assert {refusal["reason"] for refusal in fleet.status()["refusals"]} <= {"no_space"}
    return times


def _refusals(fleet: FaultyFleet) -> int:
    return fleet.watch.answers["no_space"]
