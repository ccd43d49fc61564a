"""Devices in the database: refusals, quarantine, keys, and their bounds."""

import pytest

from aggregator.coordination.round_state import DeviceDecisions
from aggregator.storage import devices, keys, refusals
from aggregator.storage.quarantine import REVOKED, QuarantinedDevice
from aggregator.storage.store import Store
from tests.support.messages.submissions import TASK


def test_refusals_are_counted_per_device_and_reason(store: Store) -> None:
    """The first of each pair is reported, so that it can be logged; the last detail is kept."""
    is_first = [
        store.refusals.count(device, reason=reason, detail=detail, now_s=1.0)
        for device, reason, detail in (
            ("a", "shape", "1"),
            ("a", "shape", "2"),
            ("a", "dtype", "3"),
            ("b", "shape", "4"),
        )
    ]
    assert is_first == [True, False, True, True]
    assert store.refusals.all() == [
        refusals.Refusal("a", "dtype", 1, "3", 1.0),
        refusals.Refusal("a", "shape", 2, "2", 1.0),
        refusals.Refusal("b", "shape", 1, "4", 1.0),
    ]


def test_refused_devices_are_not_online(store: Store) -> None:
    """A revoked device, or one not enrolled in a closed fleet, cannot report that it goes offline."""
    for device in ("enrolled", "pinned", "revoked", "new"):
        store.devices.put_presence(device, "online", now_s=1.0)
    store.keys.enroll("enrolled", b"1" * 32, now_s=1.0)
    store.keys.enroll("revoked", b"2" * 32, now_s=1.0)
    store.keys.pin("pinned", b"3" * 32, now_s=1.0)
    store.keys.revoke("revoked", now_s=2.0)
    assert store.devices.online() == {"enrolled", "pinned", "new"}
    store.keys.close_fleet()
    assert store.devices.online() == {"enrolled"}


@pytest.fixture
def small(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(refusals, "MAX_REFUSALS", 3)
    monkeypatch.setattr(devices, "MAX_PINNED_DEVICES", 2)
    return store


def test_refusals_beyond_limit_are_counted_together(small: Store) -> None:
    """The first devices are counted each, all others under a name that no device can have."""
    first = [
        small.refusals.count(f"device-{number}", reason="signature", detail="", now_s=0.0)
        for number in range(10)
    ]
    small.refusals.count("device-0", reason="signature", detail="", now_s=0.0)
    assert first == [True, True, True, True, *[False] * 6]
    counts = {refusal.device: refusal.count for refusal in small.refusals.all()}
    assert counts == {"?": 7, "device-0": 2, "device-1": 1, "device-2": 1}


def test_refusals_of_enrolled_device_are_always_counted(small: Store) -> None:
    small.keys.enroll("shed-1", bytes(32), now_s=0.0)
    for device in (*"abcdefgh", "shed-1"):
        small.refusals.count(device, reason="signature", detail="", now_s=0.0)
    assert refusals.Refusal("shed-1", "signature", 1, "", 0.0) in small.refusals.all()


def test_unenrolled_devices_are_limited(small: Store) -> None:
    for device in ("a", "b"):
        assert small.devices.has_room_for(device)
        small.devices.put_presence(device, "online", now_s=0.0)
    small.keys.enroll("z", bytes(32), now_s=0.0)
    assert [small.devices.has_room_for(device) for device in ("a", "c", "z")] == [True, False, True]


def test_only_revoked_devices_do_not_count(store: Store) -> None:
    """Other quarantined devices still submit, and are judged again."""
    store.quarantine.add(TASK, "a", reason="far off", now_s=5.0)
    store.quarantine.add(TASK, "b", reason=REVOKED, now_s=5.0)
    expected = DeviceDecisions(quarantined=frozenset("b"))
    assert store.decisions(TASK) == expected
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
    store.keys.pin("a", b"a" * 32, now_s=1)
    store.keys.revoke("a", now_s=2)
    assert store.decisions(TASK) == store.decisions(bytes(32)) == DeviceDecisions(quarantined=frozenset("a"))
    with store.transaction():
        store.keys.enroll("b", b"b" * 32, now_s=3)
        store.keys.close_fleet()
    assert store.decisions(TASK) == DeviceDecisions(quarantined=frozenset("a"), enrolled=frozenset("b"))
    store.keys.revoke("b", now_s=4)
    assert store.decisions(TASK).enrolled == frozenset()


def test_made_up_names_take_bounded_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are read with every frame, and a client can make up any number of names."""
    monkeypatch.setattr(keys, "MAX_CACHED", 10)
    for number in range(100):
        assert store.keys.get(f"made-up-{number}") is None
        assert len(store.keys._cache) <= 10
