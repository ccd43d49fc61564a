"""The forecast of a head's accuracy with twice as many images."""

from pathlib import Path

import pytest

from aggregator.status import model
from aggregator.status.forecast import gain
from protocol.wire.messages import Evaluation
from tests.support.messages.submissions import TASK
from tests.unit.aggregator.status.stores import busy_store, collected, rendered


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


def test_status_forecasts_each_class_of_the_current_head(tmp_path: Path) -> None:
    store = busy_store(tmp_path)
    version = store.heads.rollout(TASK).current
    for name in ("a", "b"):
        made = Evaluation(task=TASK, head_version=version, correct=(5, 0, 10), incorrect=(5, 0, 0))
        store.evaluations.put(name, made, digest=name.encode(), now_s=60.0)
    status = collected(store)
    one, _, three = status.classes
    assert [(each.label, each.images) for each in status.forecast] == [("", 40), (one, 20), (three, 20)]
    every, first, last = status.forecast
    assert last.most < every.most < first.most
    assert isinstance(first, model.Forecast)
    text = f"forecast twice as many images should bring 0.9 to 12.1 points: {one} "
    assert text in rendered(status)
