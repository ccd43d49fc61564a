"""Receivers that divide the shards, each by its own clock."""

import time
from unittest.mock import Mock

import pytest

from aggregator.intake.intake_status import IntakeStatus
from aggregator.server.upload_receiver import DEAD_S, FORGET_S, REPORT_S, ShardAssignment, divided
from aggregator.storage.store import Store
from protocol.errors import StateError
from protocol.wire.topics import SHARDS


def test_shards_are_divided_and_few_change() -> None:
    """Each has one owner, and another receiver takes shards from the others, which exchange none."""
    every = range(SHARDS)
    before, after = divided(every, ("a", "b", "c")), divided(every, ("a", "b", "c", "d"))
    for owners in (before, after):
        assert sorted(shard for own in owners.values() for shard in own) == list(every)
        assert all(owners.values())
    assert all(after[name] <= before[name] for name in before)
    assert divided(every, ()) == {}


class Machine:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def pass_s(self, seconds: float, *alive: ShardAssignment) -> None:
        """Let time pass for receivers, in steps of a report."""
        for _ in range(int(seconds // REPORT_S)):
            self.now_s += REPORT_S
            for each in alive:
                each.tick(IntakeStatus())


def test_a_dead_receivers_shards_move(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """After DEAD_S without a report; at once if it ends; its row is deleted later. Fixed shards stay."""
    machine = Machine(monkeypatch)
    one, two, fixed = (
        ShardAssignment(store, name, fixed=given)
        for name, given in (("one", None), ("two", None), ("fixed", frozenset({5, 6})))
    )
    machine.pass_s(2 * REPORT_S, one, two, fixed)
    assert fixed.shards == {5, 6}
    assert one.shards | two.shards == set(range(SHARDS)) - {5, 6}
    assert not one.shards & two.shards
    machine.pass_s(DEAD_S - REPORT_S, one, fixed)
    assert len(one.shards) < SHARDS - 2
    machine.pass_s(2 * REPORT_S, one, fixed)
    assert len(one.shards) == SHARDS - 2
    assert set(store.receivers.all()) == {"fixed", "one", "two"}
    fixed.end()
    machine.pass_s(REPORT_S, one)
    assert len(one.shards) == SHARDS
    machine.now_s += FORGET_S
    one.tick(IntakeStatus())
    assert set(store.receivers.all()) == {"one"}
    machine.pass_s(REPORT_S, one, two)
    machine.pass_s(REPORT_S, one, two)
    assert one.shards | two.shards == set(range(SHARDS))
    assert two.shards


def test_the_other_receivers_are_not_dead_after_a_pause_of_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when their broker was away: the first one that reports again does not take all shards."""
    machine = Machine(monkeypatch)
    one, two = (ShardAssignment(store, name, fixed=None) for name in ("one", "two"))
    machine.pass_s(2 * REPORT_S, one, two)
    own = one.shards
    machine.now_s += 2 * DEAD_S
    one.resume()
    one.tick(IntakeStatus())
    assert one.shards == own
    machine.pass_s(DEAD_S + REPORT_S, one)
    one.resume()
    machine.pass_s(REPORT_S, one)
    assert len(one.shards) == SHARDS


def test_a_shared_name_is_noticed(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once by each of the two; not after a restart, nor after a report that failed once it was stored."""
    machine = Machine(monkeypatch)
    ended = ShardAssignment(store, "one", fixed=None)
    machine.pass_s(3 * REPORT_S, ended)
    one, two = ShardAssignment(store, "one", fixed=None), ShardAssignment(store, "two", fixed=None)
    machine.pass_s(3 * REPORT_S, one, two)
    with monkeypatch.context() as patch:
        patch.setattr(store.receivers, "all", Mock(side_effect=StateError("cut off")))
        with pytest.raises(StateError):
            machine.pass_s(REPORT_S, one)
    machine.pass_s(3 * REPORT_S, one, two)
    assert "same name" not in caplog.text
    same = ShardAssignment(store, "one", fixed=None)
    machine.pass_s(4 * REPORT_S, one, two, same)
    assert caplog.text.count("another receiver has the same name") == 2
    assert one.shards == same.shards


def test_a_receiver_reports_its_intake(store: Store) -> None:
    ShardAssignment(store, "one", fixed=None).tick(IntakeStatus(7.0, "the disk is full"))
    ((_, record),) = store.receivers.all().values()
    assert (record.stopped_s, record.reason) == (7.0, "the disk is full")
