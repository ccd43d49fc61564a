"""Heads that do not arrive as they were made."""

from tests.support.network_proxy import Faults
from tests.system.faults.catalogue import fault
from tests.system.faults.fleet import DEVICES, LATECOMER, Fleet
from tests.system.faults.table import Reference


@fault("heads damaged on their way", least=3)
def damaged_on_the_way(fleet: Fleet) -> int:
    """A byte of some frames of the head is another one: the device fetches it again."""
    fleet.net.down = Faults(bytes_per_s=2_000_000)
    fleet.start()
    fleet.until("frames of the head", lambda: fleet.watch.frames_down(fleet.reference.head) > 0)
    fleet.net.down = Faults(bytes_per_s=2_000_000, damage=0.05)
    fleet.until("damage", lambda: fleet.net.counts["damaged"] >= 3)
    return fleet.net.counts["damaged"]


@fault("heads damaged on the aggregator's disk", least=3)
def damaged_on_disk(fleet: Fleet) -> int:
    """A second head is refused by all who have the first one, until the disk is mended."""
    fleet.start()
    fleet.settle()
    for name in DEVICES:
        fleet.kill(name)
    fleet.start(LATECOMER)
    fleet.until("the late submission", lambda: fleet.status()["submissions"] == len(DEVICES) + 1)
    fleet.kill(LATECOMER)
    fleet.until("the second head", lambda: len(fleet.status()["heads"]) == 2)
    digest = fleet.status()["heads"][1]["sha256"]
    blob = fleet.root / "aggregator" / "blobs" / digest
    whole = blob.read_bytes()
    blob.write_bytes(whole[:1000] + bytes(100) + whole[1100:])
    fleet.start(*DEVICES)
    refusal = "head 2 refused, the old one stays"
    fleet.until("refusals", lambda: all(refusal in fleet.log(name) for name in DEVICES))
    kept = sum(fleet.device_status(name)["head"]["head"] == fleet.reference.head for name in DEVICES)
    fleet.say(f"{kept} devices have kept their old head")
    _mend(fleet, digest, whole)
    return int(kept)


def _mend(fleet: Fleet, digest: str, whole: bytes) -> None:
    """Put the blob right, and let everybody try again."""
    fleet.kill("aggregator")
    (fleet.root / "aggregator" / "blobs" / digest).write_bytes(whole)
    fleet.start("aggregator", LATECOMER)
    every = (*DEVICES, LATECOMER)
    fleet.until(
        "the second head in use",
        lambda: all((fleet.device_status(name)["head"] or {}).get("head") == digest for name in every),
        pause_s=0.5,
    )
    devices = fleet.status()["devices"]
    late = next(device["prototypes"] for device in devices if device["device"] == LATECOMER)
    fleet.reference = Reference(
        (fleet.reference.head, digest), {**fleet.reference.prototypes, LATECOMER: late}
    )
