"""Tests for the bounds on devices and refused messages in the database: clients can make up any number of names."""

from pathlib import Path

import pytest

from aggregator.storage import devices
from aggregator.storage.store import Store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with room for three kinds of refusals and two devices."""
    monkeypatch.setattr(devices, "MAX_REFUSALS", 3)
    monkeypatch.setattr(devices, "MAX_PINNED_DEVICES", 2)
    return Store(tmp_path)


def test_refusals_beyond_limit_are_counted_together(store: Store) -> None:
    """The first devices are counted each, all others under a name that no device can have."""
    first = [
        store.refusals.count(f"device-{number}", reason="signature", detail="", now_s=0.0)
        for number in range(10)
    ]
    store.refusals.count("device-0", reason="signature", detail="", now_s=0.0)
    assert first == [True, True, True, True, *[False] * 6]
    counts = {refusal.device: refusal.count for refusal in store.refusals.all()}
    assert counts == {"?": 7, "device-0": 2, "device-1": 1, "device-2": 1}


def test_refusals_of_enrolled_device_are_always_counted(store: Store) -> None:
    """Made-up names cannot hide them."""
    store.keys.enroll("shed-1", bytes(32), now_s=0.0)
    for device in (*"abcdefgh", "shed-1"):
        store.refusals.count(device, reason="signature", detail="", now_s=0.0)
    assert devices.Refusal("shed-1", "signature", 1, "") in store.refusals.all()


def test_unenrolled_devices_are_limited(store: Store) -> None:
    """Known and enrolled devices have room."""
    for device in ("a", "b"):
        assert store.devices.has_room_for(device)
        store.devices.put_presence(device, state="online", epoch=1, now_s=0.0)
    store.keys.enroll("z", bytes(32), now_s=0.0)
    assert [store.devices.has_room_for(device) for device in ("a", "c", "z")] == [True, False, True]
