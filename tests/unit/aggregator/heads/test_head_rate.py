"""Heads per hour, for devices that upload again and again, in simulated time."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from aggregator.config.schema import Limits
from aggregator.coordination.round_state import Entry
from aggregator.heads.head_rate import limited_until_s
from aggregator.heads.schedule import Schedule
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from aggregator.training.jobs import HeadJob, Result
from aggregator.training.runner import Finished
from protocol.wire.codec import digest_of, encode
from tests.support.messages.submissions import MANIFEST
from tests.support.messages.tasks import served_task
from tests.support.simulation.clocks import FakeClock
from tests.support.simulation.submissions import accept

HOURLY = 6
TRAINING_S = 10.0
TASK = served_task(limits=Limits(heads_per_hour=HOURLY))


@dataclass
class World:
    """A head training whose job takes `TRAINING_S` seconds, and its clock."""

    store: Store
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """The devices that each training excludes, with reasons."""
    now_s: float = 1000.0
    jobs: list[HeadJob] = field(default_factory=list)
    ends_s: float = math.inf
    """When the running job ends."""

    def __post_init__(self) -> None:
        self.clock = self.store.clock = FakeClock(self.now_s)
        self.store.blobs.put(encode(MANIFEST))
        self.restart()

    def restart(self) -> None:
        self.training = Schedule(TASK, self.store, on_event=lambda _: None)
        self.training._trainer = self  # type: ignore[assignment]  # no process

    def limited_until_s(self) -> float | None:
        return limited_until_s(self.store, TASK.digest, TASK.file.limits)

    def start(self, job: HeadJob) -> None:
        self.jobs.append(job)
        self.ends_s = self.now_s + TRAINING_S
        folder = self.store.folder / "training" / f"head-{job.version}"
        folder.mkdir(parents=True)
        (folder / "head.onnx").write_bytes(b"%d" % job.version)

    def submit(self, device: str, sequence: int) -> None:
        data = b"%s %d" % (device.encode(), sequence)
        entry = Entry(sequence, digest_of(data), self.now_s)
        accept(self.training, SubmissionRecord(device, entry, len(data), 10, 2, {0: 2}), data)

    def run(self, seconds: int, upload: Callable[[int], None] = lambda _: None, *, every_s: int = 1) -> None:
        """Let time pass, with an upload now and then."""
        for number in range(seconds // every_s):
            self.now_s += every_s
            self.clock.elapsed_s = self.now_s
            upload(number)
            if self.now_s >= self.ends_s:
                self.ends_s = math.inf
                metrics = {"seconds": 1.0, "onnx_max_difference": 0.0}
                quarantined = dict(self.quarantined)
                self.training.finish(
                    Finished(self.jobs[-1], Result(metrics=metrics, prototypes=2, quarantined=quarantined))
                )
            self.training.tick()


@pytest.fixture
def world(store: Store) -> World:
    made = World(store)
    for device in ("honest", "mallory"):
        made.submit(device, 1)
    made.run(60, every_s=10)
    return made


def test_quarantined_device_makes_no_heads(world: World) -> None:
    """60 uploads in two minutes make none; the next head of another device judges the last upload."""
    world.quarantined = {"mallory": "far off"}
    world.submit("mallory", 2)
    world.run(60, every_s=10)
    before = len(world.jobs)
    world.run(120, lambda number: world.submit("mallory", 3 + number), every_s=2)
    assert len(world.jobs) == before
    world.submit("honest", 2)
    world.run(60, every_s=10)
    assert len(world.jobs) == before + 1
    assert world.jobs[-1].members["mallory"] == digest_of(b"mallory 62").hex()


def test_heads_of_an_hour_are_bounded(world: World) -> None:
    """A burst and then one from time to time, each of all submissions; `status` has the time of the next."""
    before = len(world.jobs)
    world.run(2 * 3600, lambda number: world.submit("mallory", 2 + number), every_s=90)
    assert 2 * HOURLY <= len(world.jobs) - before <= 3 * HOURLY
    limit_s = world.limited_until_s()
    assert limit_s is not None
    assert 0 < limit_s - world.now_s <= 3600 / HOURLY
    world.submit("honest", 2)
    world.run(3600 // HOURLY + 60, every_s=10)
    assert world.jobs[-1].members["honest"] == digest_of(b"honest 2").hex()
    world.run(3600, every_s=60)
    assert world.limited_until_s() is None


def test_restarts_do_not_fill_the_bucket(world: World) -> None:
    """An aggregator that is started again every ten minutes makes no more heads than one that runs on."""
    before = len(world.jobs)
    for sequence in range(2, 722, 60):

        def upload(number: int, first: int = sequence) -> None:
            world.submit("mallory", first + number)

        world.run(600, upload, every_s=10)
        world.restart()
        limit_s = world.limited_until_s()
        assert limit_s is None or limit_s > world.now_s
    assert 2 * HOURLY <= len(world.jobs) - before <= 3 * HOURLY
