"""Heads damaged on the network and on the aggregator's disk."""

from tests.support.network_proxy import Faults
from tests.system.faults.catalogue import fault
from tests.system.faults.fleet import DEVICES, LATE_DEVICE, FaultyFleet
from tests.system.tables import Reference


@fault("head downloads damaged in transit", least=3)
def damaged_in_transit(fleet: FaultyFleet) -> int:
    """A byte of some frames of the head is changed: the device downloads it again."""
    fleet.net.down = Faults(bytes_per_s=2_000_000)
    fleet.run()
    fleet.wait_for_head_frames(1)
    fleet.net.down = Faults(bytes_per_s=2_000_000, damage=0.05)
    fleet.wait_until("damage", lambda: fleet.net.counts["damaged"] >= 3)
    return fleet.net.counts["damaged"]


@fault("heads damaged on the aggregator's disk", least=3)
def damaged_on_disk(fleet: FaultyFleet) -> int:
    """All devices refuse a second head and keep the first one, until the file is repaired."""
    fleet.run()
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
    for name in DEVICES:
        fleet.wait_for_log(name, "head 2 refused, the previous head stays in use")
    kept = sum(fleet.device_status(name)["head"]["head"] == fleet.reference.head for name in DEVICES)
    fleet.kill("aggregator")
    blob.write_bytes(whole)
    fleet.run("aggregator", LATE_DEVICE)
    fleet.wait_until(
        "the second head in use",
        lambda: all(_head_of(fleet, name) == digest for name in (*DEVICES, LATE_DEVICE)),
        pause_s=0.5,
    )
    devices = fleet.status()["devices"]
    late = next(device["prototypes"] for device in devices if device["device"] == LATE_DEVICE)
    prototypes = {**fleet.reference.prototypes, LATE_DEVICE: late}
    fleet.reference = Reference((fleet.reference.head, digest), prototypes)
    return int(kept)


def _head_of(fleet: FaultyFleet, name: str) -> str | None:
    return (fleet.device_status(name).get("head") or {}).get("head")
