"""Attacks by ONNX graphs, from an aggregator that an attacker controls."""

import functools
from collections.abc import Iterator

import psutil

from tests.system.attacks.catalogue import attack
from tests.system.attacks.compromised_aggregator import DEVICE, CompromisedAggregator
from tests.system.attacks.fleet import AttackedFleet
from tests.system.attacks.malicious_graphs import EXHAUSTING, REFUSED, changed, infinite_loop

REPORT = "the device's `problem`, the head's `reason`"
HELD_BYTES = 400 * 1024**2
"""Memory of a head at which the program is killed."""


@attack(
    "a graph with external files or custom operators, signed by the aggregator",
    stopped_by="device",
    otherwise=REPORT,
)
def foreign_graphs(fleet: AttackedFleet) -> Iterator[bool]:
    """As a head, as a backbone, and as a graph of a program."""
    with CompromisedAggregator(fleet, "foreign") as aggregator:
        for change, words in REFUSED.items():
            aggregator.publish_head(changed(aggregator.valid_head, change))
            yield words not in aggregator.wait_for_report() or not aggregator.device_uses_valid_head()
        for change, words in REFUSED.items():
            backbone = aggregator.backbone
            for task in (
                (changed(backbone, change),),
                (backbone, changed(aggregator.valid_head, change)),
            ):
                aggregator.publish_task(*task)
                aggregator.wait_for_problem(words)
                yield not aggregator.device_uses_valid_head()
                aggregator.publish_task(backbone)
                aggregator.wait_for_problem("")
        assert fleet.processes[DEVICE].poll() is None


@attack(
    "a head that exhausts memory or never returns, signed by the aggregator",
    stopped_by="device",
    otherwise=REPORT,
)
def exhausting_heads(fleet: AttackedFleet) -> Iterator[bool]:
    """Terabytes at once, gigabytes by repetition, an infinite loop; then one for which the program is killed."""
    with CompromisedAggregator(fleet, "exhausting") as aggregator:
        for change, words in EXHAUSTING.items():
            aggregator.publish_head(changed(aggregator.valid_head, change))
            yield words not in aggregator.wait_for_report() or not aggregator.device_uses_valid_head()
        large = functools.partial(infinite_loop, held_bytes=HELD_BYTES)
        aggregator.publish_head(changed(aggregator.valid_head, large))
        for _ in range(3):
            _kill_when_large(fleet)
            aggregator.start_device()
        problem = aggregator.wait_for_report()
        yield "ended 3 times while testing it" not in problem or not aggregator.device_uses_valid_head()


def _kill_when_large(fleet: AttackedFleet) -> None:
    """Kill the device as a machine without memory does."""
    process = psutil.Process(fleet.processes[DEVICE].pid)
    fleet.wait_until(
        f"large memory of {DEVICE}", lambda: process.memory_info().rss > HELD_BYTES, pause_s=0.02
    )
    fleet.kill(DEVICE)
