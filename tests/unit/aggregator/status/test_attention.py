"""Figures of a fleet beside its status: warnings and a forecast."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from aggregator.status.attention import attention_of
from aggregator.status.forecast import Forecast, gain
from aggregator.storage import stop_reason
from aggregator.storage.stop_reason import StopReason
from aggregator.storage.store import Store
from aggregator.storage.stored_values import LostFiles
from protocol.wire.messages import Evaluation
from tests.support.messages.submissions import TASK, device_info
from tests.unit.aggregator.status.stores import busy_store, collected, rendered


@pytest.fixture
def busy(tmp_path: Path) -> Store:
    return busy_store(tmp_path)


def test_aggregator_that_does_not_run_needs_an_operator(busy: Store) -> None:
    status = collected(busy)
    assert status.attention == ()
    (found,) = attention_of(replace(status, running=False))
    assert (found.level, found.text) == ("error", "start `aggregator run`")


def test_errors_are_before_warnings(busy: Store, tmp_path: Path) -> None:
    """The terminal and the page show the same."""
    stop_reason.create(tmp_path)
    stop_reason.write(tmp_path, StopReason(100.0, "the disk is full"))
    busy.facts.put(LostFiles(("ab" * 32,)))
    busy.submissions.add_lost(TASK, "c", b"digest", now_s=1.0)
    busy.quarantine.add(TASK, "a", reason="far", now_s=2.0)
    for device in "ab":
        busy.devices.put_info(device, device_info(problem="no room", warning="slow"), now_s=3.0)
    status = collected(busy)
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


@pytest.mark.parametrize(("correct", "incorrect"), [(0, 1), (1, 0), (80, 20), (0, 50), (50, 0)])
def test_gain_is_no_more_than_the_errors(correct: int, incorrect: int) -> None:
    found = gain(correct, incorrect)
    assert found is not None
    assert 0 <= found[0] < found[1] < 0.36


def test_more_held_out_images_narrow_the_forecast() -> None:
    few, many = gain(8, 2), gain(800, 200)
    assert few is not None
    assert many is not None
    assert many == pytest.approx((0.05 * 0.2, 0.35 * 0.2), abs=0.01)
    assert few[0] < many[0] < many[1] < few[1]
    assert gain(0, 0) is None


def test_status_forecasts_each_class_of_the_current_head(busy: Store) -> None:
    version = busy.heads.rollout(TASK).current
    for name in ("a", "b"):
        made = Evaluation(task=TASK, head_version=version, correct=(5, 0, 10), incorrect=(5, 0, 0))
        busy.evaluations.put(name, made, digest=name.encode(), now_s=60.0)
    status = collected(busy)
    one, _, three = status.classes
    assert [(each.label, each.images) for each in status.forecast] == [("", 40), (one, 20), (three, 20)]
    every, first, last = status.forecast
    assert last.most < every.most < first.most
    assert isinstance(first, Forecast)
    text = f"forecast twice as many images should bring 0.9 to 12.1 points: {one} "
    assert text in rendered(status)
