"""Attacks by ONNX graphs, from an aggregator that an attacker controls."""

import contextlib
import functools
from collections.abc import Iterable, Iterator

import psutil

from tests.support.graphs.backbones import changed
from tests.support.graphs.hostile_graphs import ENDLESS, FAILING, REFUSED, Change, infinite_loop
from tests.system.attacks.compromised_aggregator import DEVICE, CompromisedAggregator
from tests.system.attacks.fleet import AttackedFleet, attack

REPORT = "the device's `problem`, the head's `reason`"
RUN_S = 4.0
"""Limit of a graph that exceeds it."""
HELD_BYTES = 400 * 1024**2
"""Memory of a head at which its job is killed."""


@attack(
    "a graph with external files or custom operators, signed by the aggregator",
    stopped_by="device",
    otherwise=REPORT,
)
def foreign_graphs(fleet: AttackedFleet) -> Iterator[bool]:
    """Send them as a head, as a backbone, and as a graph of a program."""
    with CompromisedAggregator(fleet, "foreign") as aggregator:
        for change, words in REFUSED.items():
            yield from _refused(aggregator, [change], words)
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
    """Terabytes at once, gigabytes by repetition, one that gets its job killed, endless loops and products."""
    with CompromisedAggregator(fleet, "exhausting") as aggregator:
        yield from _refused(aggregator, FAILING, "fails on its inputs")
        large = functools.partial(infinite_loop, held_bytes=HELD_BYTES)
        aggregator.publish_head(changed(aggregator.valid_head, large))
        for _ in range(3):
            _kill_when_large(fleet)
        problem = aggregator.wait_for_report()
        yield "3 jobs ended while running the head" not in problem or not aggregator.device_uses_valid_head()
        aggregator.restart_device(run_s=RUN_S)
        yield from _refused(aggregator, ENDLESS, "exceeded the time limit of")


def _refused(aggregator: CompromisedAggregator, changes: Iterable[Change], words: str) -> Iterator[bool]:
    """Publish changed heads; yields for each whether it is used, or refused without these words."""
    for change in changes:
        aggregator.publish_head(changed(aggregator.valid_head, change))
        yield words not in aggregator.wait_for_report() or not aggregator.device_uses_valid_head()


@attack(
    "a backbone that exhausts memory or never returns, signed by the aggregator",
    stopped_by="device",
    otherwise="the device's `problem`",
)
def exhausting_backbones(fleet: AttackedFleet) -> Iterator[bool]:
    """A loop, which another task ends; then one for which three jobs in a row are killed."""
    with CompromisedAggregator(fleet, "backbones") as aggregator:
        begun = fleet.log(DEVICE).count("computing features")
        aggregator.publish_task(changed(aggregator.backbone, infinite_loop))
        fleet.wait_for_log(DEVICE, "computing features", times=begun + 1)
        yield not _follows_another_task(aggregator)
        deadly = functools.partial(infinite_loop, held_bytes=HELD_BYTES)
        aggregator.publish_task(changed(aggregator.backbone, deadly))
        for _ in range(3):
            _kill_when_large(fleet)
        aggregator.wait_for_problem("3 jobs ended while running the task's graphs")
        yield not aggregator.device_uses_valid_head() or fleet.processes[DEVICE].poll() is not None
        yield not _follows_another_task(aggregator)


def _follows_another_task(aggregator: CompromisedAggregator) -> bool:
    """Publish the valid task again with another head; return whether the same program of the device uses that."""
    program = aggregator.fleet.processes[DEVICE]
    aggregator.publish_task(aggregator.backbone)
    aggregator.publish_valid_head()
    problem = aggregator.wait_for_report()
    return not problem and aggregator.device_uses_valid_head() and program.poll() is None


def _kill_when_large(fleet: AttackedFleet) -> None:
    """Kill the device's job as a machine without memory does; the service runs it again."""

    def large() -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            jobs = psutil.Process(fleet.processes[DEVICE].pid).children()
            return [job for job in jobs if job.memory_info().rss > HELD_BYTES]
        return []

    fleet.wait_until(f"large memory of a job of {DEVICE}", large, pause_s=0.02)
    for job in large():
        job.kill()
        job.wait()
