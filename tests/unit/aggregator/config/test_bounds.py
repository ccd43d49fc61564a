"""What anybody can make up without end takes no more than so much room: names, and what was refused of them."""

from pathlib import Path

import pytest

from aggregator.service.device_messages import bounded_info
from aggregator.storage import devices
from aggregator.storage.store import Store
from protocol.wire.messages import DeviceInfo


def test_refusals_of_ever_more_names_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that came first each for itself, all others under a name that no device can have."""
    monkeypatch.setattr(devices, "MAX_REFUSALS", 3)
    store = Store(tmp_path)
    first = [
        store.refusals.count(f"device-{number}", reason="signature", detail="", now_s=0.0)
        for number in range(10)
    ]
    store.refusals.count("device-0", reason="signature", detail="", now_s=0.0)
    assert first == [True, True, True, True, *[False] * 6]
    assert {row[0]: row[2] for row in store.refusals.all()} == {
        "?": 7,
        "device-0": 2,
        "device-1": 1,
        "device-2": 1,
    }


def test_who_is_enrolled_is_named_however_many_others_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dishonest device cannot hide behind names that it has made up before."""
    monkeypatch.setattr(devices, "MAX_REFUSALS", 3)
    store = Store(tmp_path)
    store.keys.enroll("shed-1", bytes(32), now_s=0.0)
    for device in (*"abcdefgh", "shed-1"):
        store.refusals.count(device, reason="signature", detail="", now_s=0.0)
    assert ("shed-1", "signature", 1, "") in store.refusals.all()


def test_devices_that_nobody_has_enrolled_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is known, and who is enrolled, is shown all the same."""
    monkeypatch.setattr(devices, "MAX_PINNED_DEVICES", 2)
    store = Store(tmp_path)
    for device in ("a", "b"):
        assert store.devices.has_room_for(device)
        store.devices.put_presence(device, state="online", epoch=1, now_s=0.0)
    store.keys.enroll("z", bytes(32), now_s=0.0)
    assert [store.devices.has_room_for(device) for device in ("a", "c", "z")] == [True, False, True]


def test_of_a_devices_word_only_what_the_task_knows_is_kept() -> None:
    """Classes that it does not have, and reasons that there are not, take no room."""
    info = DeviceInfo(
        epoch=1, software="", runtime="", backbones=(), unusable_images=0, images={"cat": 3, "made up": 9},
        refused_messages={"signature": 2, "made up": 9},
    )  # fmt: skip
    shown = bounded_info(info, ("cat", "dog"))
    assert (shown.images, shown.refused_messages) == ({"cat": 3}, {"signature": 2})
