"""`python -m benchmarks device features` compares whole programs, and rates without their start."""

from benchmarks.device.features import ARRAYS, COLUMNS, OURS, _rows
from benchmarks.device.measurement import Cost


def test_rows_have_rates_without_the_start() -> None:
    """The arrays are no whole program."""
    few = {OURS: [Cost(1.0, 2.0, 10**8)], ARRAYS: [Cost(0.5, 0.5, 10**8)]}
    many = {
        OURS: [Cost(10.0, 20.0, 10**8)],
        ARRAYS: [Cost(5.0, 9.5, 10**8)],
    }
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in _rows({100: few, 1000: many})]
    assert [row["images/s"] for row in rows] == [100, 200]
    assert [row["rate, ours to this"] for row in rows] == [1, 0.5]
    assert [row["CPU ms an image"] for row in rows] == [20, 10]
    assert [row["seconds, times ours"] for row in rows] == [1, None]
