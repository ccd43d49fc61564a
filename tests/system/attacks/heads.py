"""Attacks by what devices run: an aggregator in an attacker's hands, whose manifests are signed correctly."""

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from edge_client.runtime.backbone import open_backbone
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import Heads
from protocol.wire.codec import digest_of
from tests.support.device_factory import linear_head
from tests.support.fleet import write_digits
from tests.support.graphs import tiny_backbone
from tests.system.attacks.captured import CLASSES, DEVICE, Captured
from tests.system.attacks.catalogue import attack
from tests.system.attacks.fleet import AttackedFleet
from tests.system.attacks.graphs import EXHAUSTING, REFUSED, endless, spoilt

BY_REPORT = "the device's `problem`, the head's `reason`"
HELD_BYTES = 400 * 1024**2
"""Memory of a head at which the program is killed."""


class Bench:
    """A device with a good head of the captured aggregator."""

    def __init__(self, captured: Captured, folder: Path) -> None:
        self.captured = captured
        self.backbone = tiny_backbone()
        path = folder / "guinea.onnx"
        path.write_bytes(self.backbone)
        weights = np.random.default_rng(0).normal(size=(16, len(CLASSES))).astype(np.float32)
        self.good = linear_head([open_backbone(path, provider="cpu", threads=1)], weights, classes=CLASSES)
        self.task = captured.task(self.backbone)
        self.version = 1
        captured.head(self.task, self.version, self.good)
        captured.start()
        assert captured.report_of(1) == ""

    def try_head(self, file: bytes) -> str:
        """Publish a head; returns why the device does not use it."""
        self.version += 1
        self.captured.head(self.task, self.version, file)
        return self.captured.report_of(self.version)

    def uses_the_good_one(self) -> bool:
        """Return whether the good head is still the one in use."""
        installed = DeviceState(self.captured.state, read_only=True).get(Heads).installed
        return installed is not None and installed.head == digest_of(self.good)


def benched(fleet: AttackedFleet, life: str) -> Captured:
    """Return the captured aggregator; its device has images of two classes."""
    data = fleet.root / "images-guinea"
    if not data.exists():
        write_digits(data, classes=[0, 1])
    return Captured(fleet, data, life)


@attack(
    "a graph that reads files or runs foreign code, signed by the aggregator",
    stopped_by="device",
    but=BY_REPORT,
)
def foreign_graphs(fleet: AttackedFleet) -> Iterator[bool]:
    """As a head, as a backbone, and as a graph of a program: external data, a domain of its own, and a hidden one."""
    with benched(fleet, "foreign") as captured:
        bench = Bench(captured, fleet.root)
        for spoil, words in REFUSED.items():
            problem = bench.try_head(spoilt(bench.good, spoil))
            yield words not in problem or not bench.uses_the_good_one()
        for spoil, words in REFUSED.items():
            captured.task(spoilt(bench.backbone, spoil))
            captured.until_problem(words)
            yield not bench.uses_the_good_one()
            captured.task(bench.backbone)
            captured.until_problem("")
            captured.task(bench.backbone, spoilt(bench.good, spoil))
            captured.until_problem(words)
            yield not bench.uses_the_good_one()
            captured.task(bench.backbone)
            captured.until_problem("")
        assert fleet.processes[DEVICE].poll() is None


@attack(
    "a head that takes all memory or all time, signed by the aggregator", stopped_by="device", but=BY_REPORT
)
def exhausting_heads(fleet: AttackedFleet) -> Iterator[bool]:
    """Terabytes at once, gigabytes by repetition, and a loop without end; then one for which the program is killed."""
    with benched(fleet, "exhausting") as captured:
        bench = Bench(captured, fleet.root)
        for spoil, words in EXHAUSTING.items():
            problem = bench.try_head(spoilt(bench.good, spoil))
            yield words not in problem or not bench.uses_the_good_one()
        bench.version += 1
        captured.head(
            bench.task, bench.version, spoilt(bench.good, functools.partial(endless, held_bytes=HELD_BYTES))
        )
        for _ in range(3):
            _kill_when_large(fleet)
            captured.start()
        problem = captured.report_of(bench.version)
        yield "ended 3 times while testing it" not in problem or not bench.uses_the_good_one()


def _kill_when_large(fleet: AttackedFleet) -> None:
    """Kill the device as a machine without memory does."""
    process = fleet.processes[DEVICE]
    fleet.wait_until(
        f"{DEVICE} that has taken much memory",
        lambda: psutil.Process(process.pid).memory_info().rss > HELD_BYTES,
        pause_s=0.02,
    )
    fleet.kill(DEVICE)
