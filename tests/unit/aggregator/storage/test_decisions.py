"""Decisions about devices as stored: quarantine, revoked keys and enrollment, over restarts and tasks."""

from pathlib import Path

import pytest

from aggregator.coordination.rounds import DeviceDecisions, Entry, Settings, waiting
from aggregator.storage.devices import REVOKED, QuarantinedDevice
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from tests.support.submissions import TASK

SETTINGS = Settings(quorum=3, deadline_s=100.0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A state with a head of device a's submission that excluded device b's."""
    store = Store(tmp_path)
    for device in "ab":
        record = SubmissionRecord(device, Entry(1, device.encode(), 0.0), 1, 1, 1, {0: 1})
        store.submissions.put(TASK, record)
    members, excluded = {"a": b"a".hex()}, {"b": b"b".hex()}
    store.heads.add(HeadRecord(1, TASK, bytes(32), 9, 0.0, 1, members, {}, quarantined=excluded))
    return store


def test_excluded_submission_waits_once_its_device_is_released(store: Store) -> None:
    """The restored state of the round logic knows which submissions the head excluded."""
    store.quarantine.add(TASK, "b", reason="far off", now_s=5.0)
    assert waiting(store.round_state(TASK), SETTINGS) == {}
    store.quarantine.release(TASK, "b", now_s=6.0)
    assert waiting(store.round_state(TASK), SETTINGS).keys() == {"b"}


def test_only_revoked_devices_do_not_count(store: Store) -> None:
    """Other quarantined devices still submit, and are judged again."""
    store.quarantine.add(TASK, "a", reason="far off", now_s=5.0)
    store.quarantine.add(TASK, "b", reason=REVOKED, now_s=5.0)
    expected = DeviceDecisions(quarantined=frozenset("b"))
    assert store.decisions(TASK) == store.round_state(TASK).decisions == expected
    assert store.decisions(bytes(32)) == DeviceDecisions()


def test_release_holds_until_the_next_quarantine(store: Store) -> None:
    """A repeated quarantine or release keeps its date; a deleted entry cannot be released."""
    store.quarantine.add(TASK, "a", reason="far off", now_s=5.0)
    store.quarantine.add(TASK, "a", reason="farther off", now_s=6.0)
    assert store.quarantine.all(TASK) == {"a": QuarantinedDevice("a", "farther off", 5.0, None)}
    store.quarantine.release(TASK, "a", now_s=7.0)
    store.quarantine.release(TASK, "a", now_s=8.0)
    assert store.quarantine.all(TASK) == {"a": QuarantinedDevice("a", "farther off", 5.0, 7.0)}
    assert store.decisions(TASK) == DeviceDecisions(released=frozenset("a"))
    store.quarantine.add(TASK, "a", reason=REVOKED, now_s=9.0)
    assert store.quarantine.all(TASK) == {"a": QuarantinedDevice("a", REVOKED, 9.0, None)}
    store.quarantine.delete(TASK, "a")
    store.quarantine.release(TASK, "a", now_s=10.0)
    assert (store.quarantine.all(TASK), store.decisions(TASK)) == ({}, DeviceDecisions())


def test_keys_decide_for_every_task(store: Store) -> None:
    """A revoked key counts in no task; from the first enrollment, only enrolled devices count."""
    other = Store(store.folder)
    other.keys.pin("a", b"a" * 32, now_s=1)
    other.keys.revoke("a", now_s=2)
    assert store.decisions(TASK) == store.decisions(bytes(32)) == DeviceDecisions(quarantined=frozenset("a"))
    with other.transaction():
        other.keys.enroll("b", b"b" * 32, now_s=3)
        other.keys.close_fleet()
    assert store.decisions(TASK) == DeviceDecisions(quarantined=frozenset("a"), enrolled=frozenset("b"))
    other.keys.revoke("b", now_s=4)
    assert store.decisions(TASK).enrolled == frozenset()
