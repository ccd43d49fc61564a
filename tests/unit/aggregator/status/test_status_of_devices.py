"""Tests for `aggregator status`: what it says of devices."""

import re
from pathlib import Path

from aggregator.status import model
from aggregator.status.collect import collect_status
from aggregator.storage.devices import ForgottenDevice
from aggregator.storage.heads import HeadRecord
from tests.support.messages.submissions import TASK
from tests.unit.aggregator.status.stores import busy_store, collected, rendered, started_store


def test_outliers_that_are_not_quarantined(tmp_path: Path) -> None:
    """The newest head's warning is shown."""
    store = started_store(tmp_path)
    digest = store.blobs.put(b"head")
    for version, warning in ((1, "old"), (2, "2 of [9] devices are far from the others")):
        store.heads.add(HeadRecord(version, TASK, digest, 99, 50.0, 10, {}, {}, warning=warning))
    status = collect_status(store)
    store.close()
    assert [head.warning for head in status.heads] == ["old", "2 of [9] devices are far from the others"]
    assert "outliers of head 2: 2 of [9] devices are far from the others" in rendered(status)


def test_quarantined_and_released_devices(tmp_path: Path) -> None:
    store = busy_store(tmp_path)
    for device in "ab":
        store.quarantine.add(TASK, device, reason="far [off]", now_s=100.0)
    store.quarantine.release(TASK, "b", now_s=200.0)
    status = collected(store)
    assert [(one.device, one.since_s, one.released_s) for one in status.quarantine] == [
        ("a", 100.0, None),
        ("b", 100.0, 200.0),
    ]
    text = rendered(status)
    assert "quarantined a since 1970-01-01 " in text
    assert "released b since 1970-01-01 " in text
    assert text.count(": far [off]") == 2


def test_enrolled_device_without_presence_is_shown(tmp_path: Path) -> None:
    """It may be unable to connect. A device that was revoked before its first message is not shown."""
    store = busy_store(tmp_path)
    for device in ("a", "new", "gone"):
        store.keys.enroll(device, device.encode(), now_s=1.0)
    store.keys.revoke("gone", now_s=2.0)
    store.keys.close_fleet()
    status = collected(store)
    assert {row.device: row.state for row in status.devices} == {
        "a": "online", "b": "not enrolled", "idle": "not enrolled", "new": "enrolled"
    }  # fmt: skip
    assert status.enrollment == model.Enrollment(closed=True, enrolled=2, first_use=0, revoked=1)
    assert "closed, 2 enrolled, 1 revoked" in rendered(status)


def test_submissions_of_devices_that_are_not_enrolled_cover_no_class(tmp_path: Path) -> None:
    """No head is trained on them."""
    store = busy_store(tmp_path)
    before = collected(store)
    store.keys.enroll("b", b"b", now_s=1.0)
    store.keys.close_fleet()
    after = collected(store)
    assert [(each.prototypes, each.devices) for each in before.coverage.values()] == [(9, 2), (0, 0), (4, 1)]
    assert [(each.prototypes, each.devices) for each in after.coverage.values()] == [(3, 1), (0, 0), (0, 0)]


def test_greatest_reported_privacy_loss_is_shown(tmp_path: Path) -> None:
    """Over all tasks; the number of images of such a device is not known and not shown."""
    store = busy_store(tmp_path)
    assert "epsilon" not in rendered(collected(store))
    for total in (1.5, 3.25, 2.0):
        store.devices.raise_epsilon("a", total)
    status = collected(store)
    assert {row.device: row.epsilon for row in status.devices} == {"a": 3.25, "b": None, "idle": None}
    text = rendered(status)
    assert "epsilon" in text
    (row,) = (line for line in text.splitlines() if line.startswith("a "))
    assert row.split()[:3] == ["a", "online", "2"]  # then the number of classes
    assert "3.25" in row


def test_forgotten_devices_are_shown(tmp_path: Path) -> None:
    """With the head in use that learned from one, and that one has uploaded again."""
    store = busy_store(tmp_path)
    for device, head in (("a", 1), ("gone", 0)):
        store.forgotten.put(TASK, ForgottenDevice(device, head, 50.0))
    status = collected(store)
    assert [(each.device, each.head) for each in status.forgotten] == [("a", 1), ("gone", 0)]
    text = rendered(status)
    assert re.search(
        r"forgotten a since [0-9: -]+: head 1 learned from it, and is used until the next one; "
        r"it has uploaded again\n",
        text,
    )
    assert re.search(r"forgotten gone since [0-9: -]+\n", text)
