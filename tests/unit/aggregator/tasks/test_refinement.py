"""The task that follows FedTC's, once its head is in use: when it begins, what a restart serves, and when it ends."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from aggregator.algorithms.fedtc.head import Dense
from aggregator.config.task_file import load_task
from aggregator.coordination.rollout_state import State, Trial
from aggregator.coordination.round_state import Entry
from aggregator.coordination.rounds import Train
from aggregator.graphs.head_export import head_to_onnx, map_to_onnx
from aggregator.heads.forgotten_devices import forget
from aggregator.heads.pending_training import blobs_of, job_of
from aggregator.ingest import chunk_store, intake_status
from aggregator.service.aggregator import Aggregator
from aggregator.status.collect import collect_status
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.storage.stored_values import Refinement, ServedTask
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks import refinement
from aggregator.tasks.refinement import refinable_head
from aggregator.tasks.retention import needed_blobs
from aggregator.tasks.task_preparation import Task, prepare_task, task_to_serve
from aggregator.training.jobs import StatisticsJob
from protocol.models.onnx_metadata import HeadMetadata
from protocol.mqtt.reconnecting_session import BrokerAddress
from tests.support.fleets.aggregator_process import write_task
from tests.support.messages.submissions import evaluation
from tests.support.simulation.clocks import FakeClock
from tests.unit.aggregator.status.stores import rendered

LONG_S = 1e6
SIZE = 4


def _head_file(*, seed: int = 0) -> bytes:
    """Return a head of an adapter of one layer."""
    random = np.random.default_rng(seed)
    layers = [
        Dense(random.normal(size=shape).astype(np.float32), np.zeros(shape[0], np.float32))
        for shape in ((SIZE, 16), (3, SIZE))
    ]
    metadata = HeadMetadata(
        classes=("cat", "dog", "fox"),
        version=1,
        task="",
        backbones=(),
        feature_size=16,
        training={},
    )
    return head_to_onnx(layers, metadata=metadata)


def _add_head(store: Store, task: Task, version: int = 1, *, epochs: float = 5.0) -> HeadRecord:
    """Store a current head of device a's submission."""
    digest = store.blobs.put(_head_file(seed=version))
    payload = store.blobs.put(b"prototypes")
    store.submissions.put(task.digest, SubmissionRecord("a", Entry(1, payload, 0.0), 3000, 5, 1, {0: 1}))
    head = HeadRecord(
        *(version, task.digest, digest, 9, time.time(), 1, {"a": payload.hex()}, {"epochs": epochs}),
        file=digest,
    )
    store.heads.add(head)
    store.heads.put_rollout(task.digest, State(newest=version, current=version))
    return head


class Bench:
    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "state")
        self._read = load_task(write_task(folder, "max_submission_mb = 2\n[training]\nrefine = true"))

    def prepared(self) -> Task:
        """Return what an aggregator serves that is started now."""
        task = task_to_serve(prepare_task(*self._read, store=self.store), self.store)
        file = task.file
        served = (task.digest, 1, file.fleet, file.algorithm, file.classes)
        self.store.facts.put(ServedTask(*served, settings=file.settings))
        return task


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def _begins_after_s(store: Store, head: HeadRecord, *, deadline_s: float) -> float:
    """Return the elapsed time after which a head is refined although a device has not evaluated it; at most 20 s."""
    store.clock = clock = FakeClock()
    while not refinement.begin_if_due(store, head, deadline_s=deadline_s) and clock.elapsed_s < 20.0:
        clock.elapsed_s += 1.0
    return clock.elapsed_s


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
def test_jump_of_the_wall_clock_does_not_move_the_deadline(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, jump_s: float
) -> None:
    store = bench.store
    head = HeadRecord(1, b"t" * 32, b"h" * 32, 9, time.time(), 1, {}, {})
    store.devices.put_presence("b", "online", now_s=0.0)
    monkeypatch.setattr(time, "time", lambda: head.trained_s + jump_s)
    assert _begins_after_s(store, head, deadline_s=10.0) == 10.0


def test_head_is_refined_once_online_devices_use_it(bench: Bench) -> None:
    """Or at the deadline; a restart before serves FedTC's task, one after it the statistics of its adapter."""
    store, fedtc = bench.store, bench.prepared()
    store.clock = FakeClock()
    head = _add_head(store, fedtc)
    store.devices.put_presence("a", "online", now_s=0.0)
    store.devices.put_presence("b", "online", now_s=0.0)
    store.evaluations.put("a", evaluation(task=fedtc.digest), digest=b"", now_s=0.0)
    assert not refinement.begin_if_due(store, head, deadline_s=LONG_S)
    assert bench.prepared().digest == fedtc.digest
    assert _begins_after_s(store, head, deadline_s=10.0) == 10.0
    store.facts.delete(Refinement)
    store.devices.put_presence("b", "offline", now_s=0.0)
    assert refinement.begin_if_due(store, head, deadline_s=LONG_S)
    refined, restarted = bench.prepared(), bench.prepared()
    assert refined.digest == restarted.digest != fedtc.digest
    manifest = refined.manifest
    assert manifest.statistics is not None
    assert (manifest.algorithm, manifest.alpha, manifest.statistics.size) == ("statistics", 1.0, SIZE)
    assert (manifest.batch_size, manifest.min_images, manifest.backbones) == (5, 2, fedtc.manifest.backbones)
    assert head.digest in needed_blobs(refined, store)
    train = Train(1, (("a", Entry(1, b"x", 0.0)),))
    job = job_of(train, refined, store, store.round_state(refined.digest), tensors=None)
    assert isinstance(job, StatisticsJob)
    assert refined.feature_map is not None
    assert map_to_onnx(job.feature_map, num_classes=3) == map_to_onnx(refined.feature_map, num_classes=3)
    assert blobs_of(job, refined) == [refined.digest, head.digest]


def test_device_cannot_prevent_it_by_newer_heads(bench: Bench) -> None:
    """A device that is online, uploads often and evaluates no head: the deadline is that of the first head."""
    store, fedtc = bench.store, bench.prepared()
    store.clock = clock = FakeClock()
    store.devices.put_presence("mallory", "online", now_s=0.0)
    begun = []
    for version in range(1, 6):
        clock.elapsed_s = 3.0 * version
        begun.append(refinement.begin_if_due(store, _add_head(store, fedtc, version), deadline_s=10.0))
    assert begun == [False, False, False, False, True]


def test_device_cannot_prevent_it_by_candidates(bench: Bench) -> None:
    """A canary that does not answer keeps the newest head a candidate until the next one; a restart continues."""
    store, fedtc = bench.store, bench.prepared()
    store.clock = clock = FakeClock()
    head = _add_head(store, fedtc)
    store.heads.put_rollout(fedtc.digest, State(newest=2, current=1, trial=Trial(2, 0.0)))
    assert not refinement.begin_if_due(store, head, deadline_s=10.0)
    clock.elapsed_s = 10.0
    assert refinement.begin_if_due(store, head, deadline_s=10.0)
    assert bench.prepared().refined == head


def test_next_refinement_has_a_deadline_of_its_own(bench: Bench) -> None:
    """After a device was forgotten, or once the operator sets `refine` again."""
    store, fedtc = bench.store, bench.prepared()
    store.clock = clock = FakeClock()
    store.devices.put_presence("b", "online", now_s=0.0)
    head = _add_head(store, fedtc)
    assert not refinement.begin_if_due(store, head, deadline_s=10.0)
    forget(store, "a")
    clock.elapsed_s = 10.0
    second = _add_head(store, fedtc, 2)
    assert not refinement.begin_if_due(store, second, deadline_s=10.0)
    clock.elapsed_s = 20.0
    assert refinement.begin_if_due(store, second, deadline_s=10.0)
    assert bench.prepared().refined == second
    assert not refinement.begin_if_due(store, _add_head(store, fedtc, 3), deadline_s=10.0)


def test_forgotten_device_is_in_no_adapter(bench: Bench) -> None:
    """FedTC makes another head, whose adapter is refined; nothing of the first refinement stays."""
    store, fedtc = bench.store, bench.prepared()
    first = _add_head(store, fedtc)
    refinement.begin_if_due(store, first, deadline_s=LONG_S)
    refined = bench.prepared()
    payload = store.blobs.put(b"statistics")
    record = SubmissionRecord("b", Entry(1, payload, 0.0), 1000, 5, 1, {0: 1})
    store.submissions.put(refined.digest, record)
    store.quarantine.add(refined.digest, "c", reason="far off", now_s=0.0)
    assert not refinement.is_over(store, first)
    assert "FedTC's head is made again without it, and refined again" in forget(store, "a")[1]
    assert refinement.is_over(store, first)
    assert bench.prepared().digest == fedtc.digest
    assert (store.submissions.all(refined.digest), store.quarantine.all(refined.digest)) == ({}, {})
    assert refinable_head(store.heads.rollout(fedtc.digest), [first]) is None
    second = _add_head(store, fedtc, 2)
    assert refinement.begin_if_due(store, second, deadline_s=LONG_S)
    again = bench.prepared()
    assert again.refined == second
    assert again.digest not in (refined.digest, fedtc.digest)


def test_device_without_part_in_the_adapter_is_subtracted(bench: Bench) -> None:
    """It came after FedTC's head: only the refined head is made again."""
    store = bench.store
    head = _add_head(store, bench.prepared())
    refinement.begin_if_due(store, head, deadline_s=LONG_S)
    refined = bench.prepared()
    payload = store.blobs.put(b"statistics")
    record = SubmissionRecord("late", Entry(1, payload, 0.0), 1000, 5, 1, {0: 1})
    store.submissions.put(refined.digest, record)
    forget(store, "late")
    assert not refinement.is_over(store, head)
    assert bench.prepared().digest == refined.digest


def test_discriminants_are_not_refined(bench: Bench) -> None:
    store, fedtc = bench.store, bench.prepared()
    used, head = State(newest=1, current=1), _add_head(store, fedtc)
    assert refinable_head(used, [head]) == head
    assert refinable_head(State(), []) is None
    assert refinable_head(used, [_add_head(store, fedtc, 2, epochs=0.0)]) is None


def test_other_task_is_followed_once_there_is_room(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the running aggregator serves the task before, with its intake stopped. No other file is read."""
    store, fedtc = bench.store, bench.prepared()
    _add_head(store, fedtc)
    daemon = Aggregator(fedtc, store, broker=BrokerAddress("127.0.0.1", 1))
    (tmp_path / "tiny.onnx").unlink()
    with monkeypatch.context() as almost_full:
        disk = shutil.disk_usage(tmp_path)
        almost_full.setattr(chunk_store, "disk_usage", lambda _: disk._replace(free=500_000))
        daemon.handle([])
        daemon.handle([])
    assert (daemon._is_over, intake_status.read(store.folder).stopped_s is None) == (False, False)
    daemon._receiver._trial_s = 0.0
    daemon.handle([])
    assert (daemon._is_over, intake_status.read(store.folder).stopped_s) == (True, None)
    refined = task_to_serve(fedtc, store)
    assert refined.refined is not None
    Aggregator(refined, store, broker=BrokerAddress("127.0.0.1", 1))
    forget(store, "a")
    assert task_to_serve(fedtc, store) == fedtc
    assert store.blobs.is_whole(fedtc.digest)


def test_lost_adapter_returns_to_fedtc(bench: Bench) -> None:
    """Its next head has another one."""
    store, fedtc = bench.store, bench.prepared()
    head = _add_head(store, fedtc)
    refinement.begin_if_due(store, head, deadline_s=LONG_S)
    assert bench.prepared().refined is not None
    (store.blobs.folder / head.digest.hex()).unlink()
    assert bench.prepared().digest == fedtc.digest


def test_bytes_are_shown_beside_fedtcs(bench: Bench) -> None:
    store, fedtc = bench.store, bench.prepared()
    head = _add_head(store, fedtc)
    store.evaluations.put("a", evaluation(task=fedtc.digest), digest=b"", now_s=0.0)
    assert collect_status(store).refines is None
    refinement.begin_if_due(store, head, deadline_s=LONG_S)
    refined = bench.prepared()
    record = SubmissionRecord("a", Entry(1, b"s", 0.0), 1_250_000, 5, 1, {0: 1})
    store.submissions.put(refined.digest, record)
    status = collect_status(store)
    assert status.refines is not None
    assert (status.refines.head, status.refines.devices, status.refines.bytes) == (1, 1, 3000)
    assert (
        "refines FedTC's head 1, accuracy 90.0% on held-out images: prototypes of 1 device, 0.00 MB; then "
        "statistics of its adapter's features, 1.25 MB" in rendered(status)
    )
