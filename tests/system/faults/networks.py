"""Faults of networks, of the broker (packet limits, full queues, denials), and of the aggregator's disk."""

import contextlib
import resource

from tests.support.network.proxy import Faults
from tests.system.faults.fleet import CONNECTED, DEVICES, LATE_DEVICE, FaultyFleet, fault
from tests.system.tables import Reference

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


WITHOUT_UPLOADS = "topic read pf/#\ntopic write pf/1/+/+\ntopic write pf/1/+/d/+/+\n"
"""An access list that omits a device's topic for uploads, which has one more level."""
DENIED = "the broker does not accept this device's upload"
"""Logged by a device whose upload the broker denies."""
DENYING = "acl_file {folder}/acl\nlog_type all"


@fault("a broker's packet limit of 20,000 bytes", least=100, options="max_packet_size 20000")
def packet_limit(fleet: FaultyFleet) -> int:
    """The broker announces its limit when a client connects, so that nothing larger is sent."""
    fleet.run()
    fleet.settle()
    return fleet.device_log.frames_up() + fleet.device_log.frames_down()


@fault(
    "a broker's packet limit of 20,000 bytes, not announced",
    least=5,
    options="message_size_limit 20000\nlog_type all",
)
def unannounced_packet_limit(fleet: FaultyFleet) -> int:
    """The connection of a client that exceeds it ends, until the client has found the limit."""
    fleet.run()
    fleet.settle()
    return fleet.mosquitto.log().count("Dropped too large PUBLISH")


@fault(
    "frames dropped by a full broker queue",
    least=5,
    options="max_queued_messages 10\nmax_inflight_messages 5\nmax_packet_size 32000",
)
def full_queue(fleet: FaultyFleet) -> int:
    """The aggregator's link is slower than all devices' links together: the broker acknowledges, and drops."""
    fleet.net.up = Faults(bytes_per_s=150_000)
    fleet.aggregator_net.down = Faults(bytes_per_s=15_000)
    fleet.run()

    def difference() -> int:
        return fleet.device_log.frames_up() - fleet.aggregator_log.frames_up()

    # The broker has room for fifteen of them.
    fleet.wait_until("lost frames", lambda: difference() >= 30)
    fleet.settle()
    return difference()


@fault("publications denied by the broker", least=3, options=DENYING)
def denied(fleet: FaultyFleet) -> int:
    """Each device logs once that the access list denies its upload, and retries until it is corrected."""
    fleet.run()
    fleet.wait_until("denials", lambda: fleet.mosquitto.log().count("Denied PUBLISH") >= len(DEVICES))
    times = fleet.mosquitto.log().count("Denied PUBLISH")
    if fleet.mqtt5:
        for name in DEVICES:
            fleet.wait_for_log(name, DENIED)
    fleet.mosquitto.allow("topic readwrite pf/#\n")
    fleet.settle()
    for name in DEVICES:
        assert fleet.log(name).count(DENIED) <= 1, fleet.log(name)
        assert "connection lost" not in fleet.log(name)
    return times


@fault("publications denied by the broker, MQTT 3.1.1", least=3, options=DENYING, without_mqtt5=True)
def denied_silently(fleet: FaultyFleet) -> int:
    """The broker acknowledges what it denies."""
    return denied.provoke(fleet)


@fault("the aggregator's disk is full", least=3)
def full_disk(fleet: FaultyFleet) -> int:
    """For a while, no file of it grows past 100 kB: it ends, says why, and is started again; devices send again."""
    fleet.run("aggregator")
    fleet.wait_for_log("aggregator", CONNECTED)
    processes = [each.pid for each in fleet.services("aggregator")]
    for process in processes:  # programs that are started again have the supervisor's limit
        resource.prlimit(process, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    fleet.run(*DEVICES)
    fleet.wait_for_log("aggregator", "program ended program=serve")
    # A start that succeeds clears the reason, and the next upload ends it again.
    fleet.wait_for("the reason", lambda s: "cannot use" in s["intake"]["reason"])
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process, resource.RLIMIT_FSIZE, unlimited)
    fleet.settle()
    assert fleet.status()["intake"]["reason"] == ""
    return len(DEVICES)


@fault("a head damaged in transit, and on the aggregator's disk", least=4)
def damaged_head(fleet: FaultyFleet) -> int:
    """A device downloads it again; the aggregator notices it before it sends it, and restores it from its copy."""
    fleet.net.down = Faults(bytes_per_s=500_000)
    fleet.run()
    fleet.wait_for_head_frames(1)
    fleet.net.down = Faults(bytes_per_s=500_000, damage=0.05)
    fleet.wait_until("damage", lambda: fleet.net.counts["damaged"] >= 3)
    fleet.settle()
    for name in DEVICES:
        fleet.kill(name)
    fleet.run(LATE_DEVICE)
    fleet.wait_for("the late submission", lambda s: s["submissions"] == len(DEVICES) + 1)
    fleet.kill(LATE_DEVICE)
    digest = fleet.wait_for("the second head", lambda s: len(s["heads"]) == 2)["heads"][1]["sha256"]
    blob = fleet.aggregator_state / "blobs" / digest
    whole = blob.read_bytes()
    blob.write_bytes(whole[:1000] + bytes(100) + whole[1100:])
    fleet.run(*DEVICES)
    fleet.run(LATE_DEVICE)
    fleet.wait_until(
        "the second head in use",
        lambda: all(_head_of(fleet, name) == digest for name in (*DEVICES, LATE_DEVICE)),
        pause_s=0.5,
    )
    devices = fleet.status()["devices"]
    late = next(device["prototypes"] for device in devices if device["device"] == LATE_DEVICE)
    prototypes = {**fleet.reference.prototypes, LATE_DEVICE: late}
    fleet.reference = Reference((fleet.reference.head, digest), prototypes)
    on_disk = sum(1 for _ in (fleet.aggregator_state / "damaged").iterdir())
    assert on_disk >= 1
    return on_disk + fleet.net.counts["damaged"]


def _head_of(fleet: FaultyFleet, name: str) -> str | None:
    return (fleet.device_status(name).get("head") or {}).get("head")
