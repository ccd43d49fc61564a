"""Heads damaged on the network and on the aggregator's disk."""

from tests.support.network_proxy import Faults
from tests.system.faults.catalogue import fault
from tests.system.faults.fleet import DEVICES, LATECOMER, FaultyFleet
from tests.system.tables import Reference


@fault("heads damaged on their way", least=3)
def damaged_on_the_way(fleet: FaultyFleet) -> int:
    """A byte of some frames of the head is changed: the device fetches it again."""
    fleet.net.down = Faults(bytes_per_s=2_000_000)
    fleet.run()
    fleet.wait_until("frames of the head", lambda: fleet.watch.frames_down(fleet.reference.head) > 0)
    fleet.net.down = Faults(bytes_per_s=2_000_000, damage=0.05)
    fleet.wait_until("damage", lambda: fleet.net.counts["damaged"] >= 3)
    return fleet.net.counts["damaged"]


@fault("heads damaged on the aggregator's disk", least=3)
def damaged_on_disk(fleet: FaultyFleet) -> int:
    """A second head is refused by all devices that have the first one, until the file is repaired."""
    fleet.run()
    fleet.settle()
    for name in DEVICES:
        fleet.kill(name)
    fleet.run(LATECOMER)
    fleet.wait_until("the late submission", lambda: fleet.status()["submissions"] == len(DEVICES) + 1)
    fleet.kill(LATECOMER)
    fleet.wait_until("the second head", lambda: len(fleet.status()["heads"]) == 2)
    digest = fleet.status()["heads"][1]["sha256"]
    blob = fleet.aggregator_state / "blobs" / digest
    whole = blob.read_bytes()
    blob.write_bytes(whole[:1000] + bytes(100) + whole[1100:])
    fleet.run(*DEVICES)
    refusal = "head 2 refused, the previous head stays in use"
    fleet.wait_until("refusals", lambda: all(refusal in fleet.log(name) for name in DEVICES))
    kept = sum(fleet.device_status(name)["head"]["head"] == fleet.reference.head for name in DEVICES)
    fleet.log_progress(f"{kept} devices have kept the first head")
    _mend(fleet, digest, whole)
    return int(kept)


def _mend(fleet: FaultyFleet, digest: str, whole: bytes) -> None:
    """Repair the blob, and let every device try again."""
    fleet.kill("aggregator")
    (fleet.aggregator_state / "blobs" / digest).write_bytes(whole)
    fleet.run("aggregator", LATECOMER)
    every = (*DEVICES, LATECOMER)
    fleet.wait_until(
        "the second head in use",
        lambda: all((fleet.device_status(name)["head"] or {}).get("head") == digest for name in every),
        pause_s=0.5,
    )
    devices = fleet.status()["devices"]
    late = next(device["prototypes"] for device in devices if device["device"] == LATECOMER)
    fleet.reference = Reference(
        (fleet.reference.head, digest), {**fleet.reference.prototypes, LATECOMER: late}
    )
