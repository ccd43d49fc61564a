"""The warnings that need an operator, and a fleet in a line."""

from pathlib import Path

from msgspec.structs import replace

from aggregator.intake import intake_status
from aggregator.intake.intake_status import IntakeStatus
from aggregator.status.summary import attention_of, summary_of
from aggregator.storage.stored_values import LostFiles
from tests.support.messages.submissions import TASK, device_info
from tests.unit.aggregator.status.stores import busy_store, collected, rendered


def test_nothing_needs_an_operator(tmp_path: Path) -> None:
    status = collected(busy_store(tmp_path))
    assert status.attention == ()
    assert summary_of(status).attention == ()


def test_errors_are_before_warnings(tmp_path: Path) -> None:
    """The terminal, the page and the overview show the same."""
    store = busy_store(tmp_path)
    intake_status.create(tmp_path)
    intake_status.write(tmp_path, IntakeStatus(100.0, "the disk is full"))
    store.facts.put(LostFiles(("ab" * 32,)))
    store.submissions.add_lost(TASK, "c", b"digest", now_s=1.0)
    store.quarantine.add(TASK, "a", reason="far", now_s=2.0)
    for device in "ab":
        store.devices.put_info(device, device_info(problem="no room", warning="slow"), now_s=3.0)
    status = collected(store)
    assert [(each.level, each.title) for each in status.attention] == [
        ("error", "intake stopped"),
        ("error", "file lost"),
        ("warning", "submission lost"),
        ("warning", "1 device quarantined"),
        ("warning", "2 devices cannot take part"),
        ("warning", "2 devices with a warning"),
    ]
    text = rendered(status)
    assert all(f"{each.title} {each.text}" in text for each in status.attention)
    assert "2 devices cannot take part a: no room; also b" in text
    assert summary_of(status).attention == status.attention


def test_aggregator_that_does_not_run_needs_an_operator(tmp_path: Path) -> None:
    (found,) = attention_of(replace(collected(busy_store(tmp_path)), running=False))
    assert (found.level, found.text) == ("error", "start `aggregator run`")


def test_summary_has_the_figures_of_the_current_head(tmp_path: Path) -> None:
    summary = summary_of(collected(busy_store(tmp_path)))
    assert (summary.fleet, summary.devices, summary.online, summary.submissions) == ("barn", 3, 1, 2)
    assert (summary.head, summary.accuracy) == (1, 0.9)
