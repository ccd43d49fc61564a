"""Heads of lists: planned of devices in lists only, after restarts, failures, and commands of other processes."""

import shutil
from pathlib import Path

import msgspec
from msgspec import structs

from aggregator.commands.operator_commands import forget
from aggregator.heads.schedule import Schedule
from aggregator.job_processes import JobEnded, JobOrder
from aggregator.storage.quarantine import REVOKED
from aggregator.storage.store import Store
from aggregator.sums.second_operator import SecondOperatorLists
from aggregator.sums.stored_lists import sums_of
from aggregator.tasks.restoration import heal
from aggregator.training.jobs import RESULT_FILE, Failure, Result
from protocol.storage.blobstore import write_atomically
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import SumReply
from protocol.wire.transfer import frames_of
from tests.support.messages.jobs import NoJobs
from tests.support.messages.submissions import SERVED as STORED_TASK
from tests.support.simulation.submissions import retry
from tests.unit.aggregator.sums.test_second_operator import (
    SERVED,
    TASK,
    World,
    refusal,
    wait_for_verification,
)


class Orders(NoJobs):
    """Notes which jobs are started."""

    def __init__(self) -> None:
        self.folders = list[Path]()

    def start(self, order: JobOrder) -> None:
        self.folders.append(order.folder)


class Fleet:
    """A fleet with a second operator, whose trainings end when a test says so."""

    def __init__(self, store: Store) -> None:
        self.world, self.store, self.orders = World(store), store, Orders()
        self.training = Schedule(SERVED, store, self.orders)
        assert isinstance(self.training.sums, SecondOperatorLists)
        self.world.lists = self.training.sums

    def tick(self, times: int = 1) -> None:
        """Let the schedule pass several times, at each once what it reads is read and counted."""
        for _ in range(times):
            self.training._count_s = 0.0
            self.training.tick()
            if wait_for_verification(self.world.lists):
                self.training.tick()

    def request(self) -> bytes:
        request = self.world.lists.request()
        assert request is not None
        return request

    def receive(self, reply: SumReply) -> None:
        payload = encode(reply)
        for frame in frames_of(payload, digest=digest_of(payload)):
            self.training.take_sum(encode(frame))

    def opened(self) -> None:
        self.receive(self.world.reply(self.request()))

    def end(self, result: Result | Failure) -> bool:
        """End the job that was started last; return True if it has made a head."""
        folder = self.orders.folders[-1]
        for name in ("head.onnx", "total.bin"):
            write_atomically(folder / name, f"{name} of {folder.name}".encode())
        write_atomically(folder / RESULT_FILE, msgspec.json.encode(result))
        return self.training.finish(JobEnded(folder))

    def make(self) -> None:
        assert self.end(Result(metrics={"seconds": 1.0, "onnx_max_difference": 0.0}))


def test_device_that_comes_after_a_head_waits_for_others(store: Store) -> None:
    """The head after it is planned once there are enough for a list, whatever has changed meanwhile."""
    fleet = Fleet(store)
    fleet.world.upload(1, 2, 3)
    fleet.tick()
    fleet.opened()
    fleet.tick()
    fleet.make()
    for number in (4, 5):
        fleet.world.upload(number)
        fleet.tick(3)
        assert fleet.training.plan is None
        assert not fleet.world.pending
    fleet.world.upload(6)
    fleet.tick()
    assert set(fleet.world.pending) == {"dev4", "dev5", "dev6"}
    fleet.opened()
    fleet.tick()
    fleet.make()
    head = fleet.training.newest
    assert head is not None
    assert (head.version, head.devices) == (2, 6)


def test_device_that_wants_more_devices_belongs_to_a_later_head(store: Store) -> None:
    """It counts for that one as if it had come after the first."""
    fleet = Fleet(store)
    fleet.world.upload(1, 2, 3)
    fleet.world.upload(4, min_devices=5)
    fleet.tick()
    assert set(fleet.world.pending) == {"dev1", "dev2", "dev3"}
    plan = fleet.training.plan
    assert plan is not None
    assert set(store.members(plan)) == {"dev1", "dev2", "dev3"}
    fleet.opened()
    fleet.tick()
    fleet.make()
    fleet.world.upload(5, 6, 7)
    fleet.tick(2)
    assert set(fleet.world.pending) == {"dev5", "dev6", "dev7"}
    fleet.opened()
    fleet.tick()
    fleet.make()
    fleet.world.upload(8, 9, 10, 11)
    fleet.tick(2)
    assert set(fleet.world.pending) == {"dev4", "dev8", "dev9", "dev10", "dev11"}


def test_refused_list_is_made_again_without_a_revoked_device(store: Store) -> None:
    """At once; while nothing changes, the same list is requested again later."""
    fleet = Fleet(store)
    fleet.world.upload(1, 2, 3, 4)
    fleet.world.upload(5, min_devices=9)
    fleet.tick()
    fleet.receive(refusal(digest_of(fleet.request()), "dev1 is not in the list of devices"))
    fleet.tick(3)
    plan = fleet.training.plan
    assert plan is not None
    reason = "the second operator opens no sum: dev1 is not in the list of devices"
    assert (plan.failures, plan.problem) == (1, reason)
    retry(fleet.training)
    fleet.tick(3)
    assert set(fleet.world.pending) == {"dev1", "dev2", "dev3", "dev4"}
    assert fleet.world.lists.request() is None
    store.quarantine.add(TASK, "dev1", reason=REVOKED, now_s=0.0)
    fleet.tick(2)
    assert set(fleet.world.pending) == {"dev2", "dev3", "dev4"}
    fleet.opened()
    fleet.tick()
    assert len(fleet.orders.folders) == 1


def test_list_has_no_forgotten_device(store: Store) -> None:
    """`aggregator forget` comes after the verification of a list, and before it is stored."""
    fleet = Fleet(store)
    store.facts.put(structs.replace(STORED_TASK, digest=TASK))
    fleet.world.upload(1, 2, 3, 4)
    fleet.training.tick()
    wait_for_verification(fleet.world.lists)
    forget(store, "dev1")
    fleet.tick(3)
    assert set(fleet.world.pending) == {"dev2", "dev3", "dev4"}


def test_list_has_no_submission_that_was_replaced(store: Store) -> None:
    """A plan whose device has submitted again since is made again of the new submission."""
    fleet = Fleet(store)
    fleet.world.upload(1, 2, 3)
    fleet.training.tick()
    wait_for_verification(fleet.world.lists)
    replaced = fleet.world.members["dev1"]
    fleet.world.upload(1, min_devices=2)
    assert fleet.world.members["dev1"] != replaced
    fleet.tick(2)
    assert fleet.world.pending == {device: digest.hex() for device, digest in fleet.world.members.items()}


def test_lost_request_is_made_again_of_the_same_submissions(store: Store) -> None:
    fleet = Fleet(store)
    fleet.world.upload(1, 2, 3)
    fleet.tick()
    request = fleet.request()
    for is_replaced in (False, True):
        _damage(store, digest_of(request))
        if is_replaced:
            fleet.world.upload(2, min_devices=2)
        fleet.world.lists.connected()
        assert fleet.world.lists.request() == (None if is_replaced else request)
    lists = sums_of(store.facts, TASK)
    assert (lists.pending, lists.devices) == (None, ("dev1", "dev2", "dev3"))
    assert lists.problem


def test_failing_training_of_a_list_waits_although_other_devices_have_come(store: Store) -> None:
    """They belong to a later list: the repetition is of the same submissions, and has a delay that grows."""
    fleet = Fleet(store)
    fleet.world.upload(1, 2, 3)
    fleet.tick()
    fleet.opened()
    fleet.world.upload(4)
    fleet.tick()
    for _ in range(5):
        fleet.end(Failure(reason="out of memory"))
        fleet.tick()
    assert len(fleet.orders.folders) == 1


def test_devices_that_came_during_a_training_of_an_unusable_list_get_the_next_one(store: Store) -> None:
    """Also if nothing else happens afterwards."""
    fleet = Fleet(store)
    fleet.world.upload(1, 2, 3)
    fleet.tick()
    fleet.opened()
    fleet.tick()
    fleet.world.upload(4, 5, 6)
    fleet.end(Failure(reason="a device has lied", kind="list"))
    fleet.tick(3)
    assert set(fleet.world.pending) == {"dev4", "dev5", "dev6"}


def test_damaged_submission_does_not_hold_up_a_list(store: Store) -> None:
    """It counts no longer, and its device is asked for it again."""
    fleet = Fleet(store)
    fleet.world.upload(1, 2, 3, 4)
    _damage(store, fleet.world.members["dev1"])
    fleet.tick(3)
    assert [each.device for each in store.submissions.lost(TASK)] == ["dev1"]
    assert set(fleet.world.pending) == {"dev2", "dev3", "dev4"}


def test_lost_reply_is_requested_again(store: Store) -> None:
    """The list is the same, so that the second operator opens it again."""
    fleet = Fleet(store)
    fleet.world.upload(1, 2, 3)
    fleet.tick()
    fleet.opened()
    pending = sums_of(store.facts, TASK).pending
    assert pending is not None
    store.blobs.path(bytes.fromhex(pending.masks)).unlink()
    fleet.tick()
    assert not fleet.orders.folders
    fleet.opened()
    fleet.tick()
    assert len(fleet.orders.folders) == 1


def test_damaged_total_is_restored_from_its_copy(store: Store) -> None:
    """It cannot be made again: the submissions in it are deleted at once, and no copy of an earlier total is kept."""
    fleet = Fleet(store)
    for numbers in ((1, 2, 3), (4, 5, 6)):
        fleet.world.upload(*numbers)
        fleet.tick()
        fleet.opened()
        fleet.tick()
        fleet.make()
    assert not any(digest in store.blobs for digest in fleet.world.members.values())
    total = sums_of(store.facts, TASK).total
    assert [file.name for file in (store.folder / "totals").iterdir()] == [total]
    whole = store.blobs.read(bytes.fromhex(total))
    shutil.rmtree(store.folder / "training")
    _damage(store, bytes.fromhex(total))
    heal(SERVED, store, [bytes.fromhex(total)])
    assert store.blobs.read(bytes.fromhex(total)) == whole


def _damage(store: Store, digest: bytes) -> None:
    """Change a byte of a blob, as a disk does."""
    path = store.blobs.path(digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
