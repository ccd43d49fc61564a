"""Each head gets one calibrated version, whatever happens meanwhile, and no device decides its confidence alone."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.fedtc.head import Dense
from aggregator.cli import cli
from aggregator.commands.operator_commands import forget, make_current
from aggregator.config.limits import Limits
from aggregator.config.schema import Robust
from aggregator.coordination.bounds import FLEET_SHARE
from aggregator.coordination.minimums import CALIBRATION_IMAGES
from aggregator.coordination.rollout_state import Settings
from aggregator.coordination.round_state import Entry
from aggregator.graphs.calibrated_head import UNCALIBRATED, logits_and_probabilities
from aggregator.graphs.head_export import head_to_onnx
from aggregator.heads import rollout
from aggregator.heads.calibration import RETRY_S, pooled
from aggregator.heads.head_rate import limited_until_s
from aggregator.heads.next_head import folder_of, store_head
from aggregator.heads.rollout import Rollout
from aggregator.heads.schedule import Schedule
from aggregator.security.device_keys import revoke_key
from aggregator.storage.heads import CALIBRATED_FROM
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks.task_preparation import Task
from aggregator.training import calibration_job
from aggregator.training.jobs import CalibrationJob, HeadJob, Result
from aggregator.training.trainer import Finished
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef, DifferentialPrivacy, Evaluation
from tests.support.graphs.backbones import tiny_backbone
from tests.support.graphs.heads import head_metadata
from tests.support.messages.evaluations import binned
from tests.support.messages.heads import add_head
from tests.support.messages.jobs import NoJobs, workspace
from tests.support.messages.submissions import EXPECTATION, FEATURE_SIZE, MANIFEST, SERVED, evaluation
from tests.support.messages.tasks import served_task
from tests.support.simulation.clocks import FakeClock
from tests.support.simulation.releases import write_files
from tests.support.simulation.submissions import accept

BACKBONE = tiny_backbone(feature_size=FEATURE_SIZE)
SERVED_MANIFEST = structs.replace(
    MANIFEST, backbones=(BlobRef(digest=digest_of(BACKBONE), size_bytes=len(BACKBONE), name="tiny.onnx"),)
)
TASK = digest_of(encode(SERVED_MANIFEST))
DEVICES = "abcde"
DEADLINE_S = 600.0
EXPECTED = replace(EXPECTATION, task=TASK, manifest=SERVED_MANIFEST)
SERVING = served_task(EXPECTED, quorum=1, deadline_s=DEADLINE_S, limits=Limits(heads_per_hour=2))
METRICS = {"seconds": 1.0, "onnx_max_difference": 0.0, "images": 50.0, "counted_images": 50.0}
FEATURES = np.random.default_rng(1).normal(size=(20, FEATURE_SIZE)).astype(np.float32)


def _head_file(version: int) -> bytes:
    weight = np.random.default_rng(version).normal(size=(3, FEATURE_SIZE)).astype(np.float32)
    metadata = head_metadata(BACKBONE, version=version, task=TASK.hex())
    return head_to_onnx([Dense(weight, np.zeros(3, np.float32))], metadata=metadata)


@dataclass
class World:
    """The heads of a fleet with head 1 of all devices, in use; jobs run when a test says so, in this process."""

    store: Store
    task: Task = SERVING
    jobs: list[HeadJob | CalibrationJob] = field(default_factory=list)
    now_s: float = 1000.0
    job: HeadJob | CalibrationJob | None = None
    is_stopping: bool = False

    def __post_init__(self) -> None:
        self.clock = self.store.clock = FakeClock(self.now_s)
        self.store.facts.put(structs.replace(SERVED, digest=TASK))
        for blob in (encode(SERVED_MANIFEST), BACKBONE):
            self.store.blobs.put(blob)
        digest = self.store.blobs.put(file := _head_file(1))
        members = {device: self._submitted(device) for device in DEVICES}
        made = {
            "digest": digest,
            "size_bytes": len(file),
            "file": digest,
            "trained_s": self.now_s,
            "prototypes": 5,
        }
        add_head(self.store, 1, task=TASK, members=members, is_used=False, **made, metrics=METRICS)
        self.restart()
        self.tick()

    def _submitted(self, device: str, sequence: int = 1) -> bytes:
        data = f"{device} {sequence}".encode()
        entry = Entry(sequence, digest_of(data), self.now_s)
        self.store.submissions.put(TASK, SubmissionRecord(device, entry, len(data), 10, 2, {0: 2}))
        return self.store.blobs.put(data)

    def restart(self) -> None:
        self.job = None
        self.training = Schedule(self.task, self.store, NoJobs())
        self.training._trainer = self  # type: ignore[assignment]  # no process
        self.releases = Rollout(self.task, self.store)

    def start(self, job: HeadJob | CalibrationJob) -> None:
        self.job = job
        self.jobs.append(job)

    def stop(self) -> None:
        self.job = None
        self.jobs.append(self.jobs[-1])

    def calibrate(self, job: HeadJob | CalibrationJob) -> Result:
        """Run a calibration where it leaves its head to be stored."""
        assert isinstance(job, CalibrationJob)
        return calibration_job.run(job, workspace(self.store.blobs, folder_of(self.store, job)))

    def tick(self, seconds: float = 2.0) -> None:
        self.now_s += seconds
        self.clock.elapsed_s = self.now_s
        self.releases.tick()
        self.training.tick()

    def finish(self) -> bool:
        """End the last job that was started."""
        job, result = self.jobs[-1], Result(metrics=METRICS, prototypes=5)
        self.job = None
        if isinstance(job, CalibrationJob):
            result = self.calibrate(job)
        else:
            (folder := folder_of(self.store, job)).mkdir(parents=True, exist_ok=True)
            (folder / "head.onnx").write_bytes(_head_file(job.version))
        is_made = self.training._finish(job, Finished(result))
        self.tick()
        return is_made

    def fail(self) -> bool:
        """Let the first job that was started fail."""
        self.job = None
        return self.training._finish(self.jobs[0], Finished(None, "no memory"))

    def evaluate(self, found: Mapping[str, Evaluation]) -> None:
        for device, each in found.items():
            self.store.evaluations.put(device, each, digest=b"e", now_s=1.0)

    def report(self, found: Mapping[str, Evaluation], *, after_s: float = 2.0) -> None:
        """Let devices evaluate a head, and the aggregator notice it."""
        self.evaluate(found)
        self.tick(after_s)

    def upload(self, device: str) -> None:
        data = b"another of " + device.encode()
        entry = Entry(9, digest_of(data), self.now_s)
        accept(self.training, SubmissionRecord(device, entry, len(data), 10, 2, {0: 2}), data)
        self.tick()

    @property
    def versions(self) -> list[int]:
        """The version that each head calibrates, 0 for a trained one."""
        return [int(head.metrics.get(CALIBRATED_FROM, 0)) for head in self.store.heads.all(TASK)]


def _all(correct: int = 15, images: int = 20, *, version: int = 1) -> dict[str, Evaluation]:
    return {device: binned(correct, images, task=TASK, head_version=version) for device in DEVICES}


@pytest.fixture
def world(store: Store, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(rollout, "POLL_S", 0.0)
    return World(store)


def test_head_is_calibrated_once_all_devices_have_evaluated_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The same predictions of the same members; the new version is current at once, and not calibrated again."""
    caplog.set_level(logging.INFO)
    world.report(dict(list(_all().items())[:-1]))
    assert world.jobs == []
    world.report(_all())
    (job,) = world.jobs
    assert isinstance(job, CalibrationJob)
    assert (job.images[20], sum(job.images), sum(job.correct)) == (100, 100, 75)
    assert world.finish()
    assert "head calibrated version=2 of=1 held_out_images=100" in caplog.text
    assert "head activated version=2" in caplog.text
    first, second = world.store.heads.all(TASK)
    assert (set(world.store.members(second)), first.devices, second.prototypes) == (set(DEVICES), 5, 5)
    before, after = (
        logits_and_probabilities(world.store.blobs.read(each.file), FEATURES) for each in (first, second)
    )
    assert (before[1].argmax(axis=1) == after[1].argmax(axis=1)).all()
    np.testing.assert_allclose(after[1].max(axis=1), 0.75, atol=0.26)
    rollout = world.store.heads.rollout(TASK)
    assert (rollout.current, rollout.earlier, rollout.trial) == (2, (), None)
    write_files(world.releases)
    model = onnx.load(world.store.folder / "model.onnx")
    assert UNCALIBRATED in {name.removeprefix("head/") for node in model.graph.node for name in node.output}
    world.report(_all(version=2), after_s=2 * RETRY_S)
    world.restart()
    world.tick()
    assert len(world.jobs) == 1
    assert world.versions == [0, 1]


@pytest.mark.parametrize("is_stored", [False, True])
def test_kill_makes_no_second_version(world: World, *, is_stored: bool) -> None:
    """Before the head is stored, it is made again, of the same bytes; after that, it is activated."""
    world.report(_all())
    if is_stored:
        result = world.calibrate(world.jobs[0])
        plan = world.training.plan
        assert plan is not None
        store_head(world.task, world.store, plan, world.jobs[0], result)
    world.restart()
    world.tick()
    assert len(world.jobs) == (1 if is_stored else 2)
    assert (world.training.plan is None) == is_stored
    if not is_stored:
        assert world.jobs[0] == world.jobs[1]
        assert world.finish()
    world.tick()
    assert world.versions == [0, 1]
    assert world.store.heads.rollout(TASK).current == 2


def test_missing_devices_are_awaited_until_the_deadline(world: World) -> None:
    """Then half of them are enough; a third is not."""
    evaluations = list(_all(30, 40).items())
    world.report(dict(evaluations[:2]), after_s=DEADLINE_S + 10)
    assert world.jobs == []
    world.report(dict(evaluations[:3]))
    assert [sum(job.images) for job in world.jobs if isinstance(job, CalibrationJob)] == [120]


def test_deadline_is_that_of_the_first_head_that_waits(world: World) -> None:
    """A device that never answers prevents no calibration where heads or restarts follow each other faster."""
    world.tick(DEADLINE_S / 2)
    world.upload("a")
    assert world.finish()
    world.evaluate(dict(list(_all(30, 40, version=2).items())[:3]))
    world.restart()
    world.tick(DEADLINE_S / 2)
    world.tick()
    assert [type(job) for job in world.jobs] == [HeadJob, CalibrationJob]


def test_too_few_images_are_counted_again_later(world: World) -> None:
    """Evaluations without counts, as those of earlier devices, have none."""
    few = (CALIBRATION_IMAGES - 1) // len(DEVICES)
    for evaluations in (_all(few, few), dict.fromkeys(DEVICES, evaluation(task=TASK))):
        world.report(evaluations, after_s=RETRY_S)
    world.report(_all())
    assert world.jobs == []
    world.tick(RETRY_S)
    assert len(world.jobs) == 1


def test_only_counting_devices_of_the_head_count(world: World) -> None:
    """Neither a revoked device nor one whose submission the head was made without."""
    revoke_key(world.store, "a", now_s=1.0)
    world.evaluate({**_all(20, 20), "a": binned(0, 20, task=TASK), "stranger": binned(0, 20, task=TASK)})
    world.clock.elapsed_s += 2
    job = world.training._calibration.job(world.store.heads.all(TASK)[-1])
    assert job is not None
    assert sum(job.correct) == sum(job.images) == 80


PRIVACY = DifferentialPrivacy(noise_multiplier=1.0, delta=1e-5, max_epsilon=8.0)
PRIVATE = structs.replace(SERVED_MANIFEST, differential_privacy=PRIVACY)


@pytest.mark.parametrize(
    "changed",
    [
        {"file": structs.replace(SERVING.file, training=Training(calibrate=False))},
        {"expectation": replace(EXPECTED, manifest=PRIVATE)},
    ],
    ids=["turned off", "private"],
)
def test_some_heads_are_not_calibrated(world: World, changed: dict[str, Any]) -> None:
    world.task = replace(SERVING, **changed)
    world.restart()
    world.report(_all())
    assert world.jobs == []


def test_upload_during_calibration_waits_for_it(world: World) -> None:
    """The next head is trained after it, and calibrated in turn; the rate of trainings counts the trained ones only."""
    world.report(_all())
    world.upload("a")
    assert len(world.jobs) == 1
    assert world.finish()
    assert [type(job) for job in world.jobs] == [CalibrationJob, HeadJob]
    assert world.finish()
    world.report(_all(version=3))
    assert world.finish()
    world.upload("b")
    assert world.finish()
    assert world.versions == [0, 1, 0, 3, 0]
    world.upload("c")
    assert limited_until_s(world.store, TASK, world.task.file.limits) is not None
    world.report(_all(version=5))
    assert world.finish()
    assert world.versions == [0, 1, 0, 3, 0, 5]
    assert world.store.heads.rollout(TASK).current == 6


def test_failed_calibration_is_repeated_later(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """It is no failed training, and delays none."""
    world.report(_all())
    assert not world.fail()
    assert 'head not calibrated: it stays in use as it is version=1 reason="no memory"' in caplog.text
    assert world.training.plan is None
    world.tick()
    assert len(world.jobs) == 1
    world.tick(RETRY_S)
    assert world.finish()
    assert world.versions == [0, 1]


def test_failing_training_is_not_interrupted_by_a_calibration(world: World) -> None:
    """Its failures would not count any more."""
    world.upload("a")
    assert not world.fail()
    world.report(_all())
    assert [type(job) for job in world.jobs] == [HeadJob]


def test_forgotten_device_ends_the_calibration(world: World) -> None:
    """Also if it has just ended; the head is made again without it."""
    world.report(_all())
    (job,) = world.jobs
    result = world.calibrate(job)
    forget(world.store, "a")
    assert not world.training._finish(job, Finished(result))
    world.tick()
    assert isinstance(world.jobs[-1], HeadJob)
    assert set(world.jobs[-1].members) == set(DEVICES) - {"a"}
    assert world.finish()
    assert world.versions == [0, 0]


def test_rollback_during_calibration_remains(world: World) -> None:
    """The calibrated version of a head that was rolled back is rejected."""
    world.report(_all())
    assert world.finish()
    world.upload("a")
    assert world.finish()
    world.report(_all(version=3))
    make_current(world.store, "rollback", 1)
    world.tick()
    assert world.finish()
    rollout = world.store.heads.rollout(TASK)
    assert (rollout.current, rollout.rejected[4]) == (1, "head 3, which it calibrates, is not current")
    assert world.versions == [0, 1, 0, 3]


def test_candidate_is_calibrated_once_it_is_current(world: World) -> None:
    """And its calibrated version has no canaries."""
    canaries = Settings(canary_fraction=0.5, min_canaries=1)
    world.task = replace(SERVING, file=structs.replace(SERVING.file, rollout=canaries))
    world.restart()
    for device in DEVICES:
        world.store.devices.put_presence(device, "online", now_s=1.0)
    world.upload("a")
    assert world.finish()
    trial = world.store.heads.rollout(TASK).trial
    assert trial is not None
    found = _all(version=2)
    world.report({device: each for device, each in found.items() if device not in trial.awaited})
    assert world.store.heads.rollout(TASK).current == 1
    assert len(world.jobs) == 1
    command = ["promote", "--state", str(world.store.folder)]
    assert (
        CliRunner().invoke(cli, command).output == "head 2 will be current when the aggregator is started\n"
    )
    world.tick()
    world.report(found)
    assert world.finish()
    rollout = world.store.heads.rollout(TASK)
    assert (rollout.current, rollout.trial, world.versions) == (3, None, [0, 0, 2])


COUNTED = st.integers(1, 300).flatmap(lambda images: st.tuples(st.integers(0, images), st.just(images)))


@given(st.lists(COUNTED, min_size=5, max_size=12), st.integers(0, 10**7))
def test_no_device_decides_alone(honest: list[tuple[int, int]], claimed: int) -> None:
    """One that claims any number of images has a quarter of all at most."""
    evaluations = [binned(*counts, place=20) for counts in honest]
    correct, images, _ = pooled([*evaluations, binned(0, claimed, place=3)], Robust().max_multiple)
    assert (correct <= images + 1e-9).all()
    assert images[20] <= sum(each for _, each in honest) + 1e-6
    assert images[3] <= FLEET_SHARE * images.sum() + 1e-6


def test_counts_of_few_devices_are_added() -> None:
    """Without any, they are zeros."""
    with_novelty = binned(1, 5, place=0, novelty_images=(2, 3, *[0] * 30))
    correct, images, novelty = pooled([binned(3, 4), evaluation(task=TASK), with_novelty, binned(0, 0)], 5.0)
    assert novelty.tolist() == [2, 3, *[0] * 30]
    assert {place: (correct[place], images[place]) for place in np.flatnonzero(images)} == {
        0: (1, 5),
        20: (3, 4),
    }
    assert not np.any(pooled([], 5.0))
