"""Rows of images and of groups of images."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from edge_client.data.statistics import group_rows, to_rows
from protocol.errors import GraphRefused

SIZE = 5


@settings(max_examples=30)
@given(hnp.arrays(np.int8, st.tuples(st.integers(1, 20), st.just(SIZE)), elements=st.integers(-127, 127)))
def test_groups_of_single_images_are_the_images(rows: NDArray[np.int8]) -> None:
    made, counts = group_rows([rows[:7], rows[7:]], np.arange(len(rows)), size=SIZE)
    np.testing.assert_array_equal(made, rows)
    assert (counts == 1).all()


def test_group_row_has_the_distance_of_one_image() -> None:
    """By the formula, with exact numbers: groups of 4 and 9 images about the class's mean."""
    rows = np.array([[10, 100, -127]] * 4 + [[-3, -100, -127]] * 9, np.int8)
    numbers = np.array([0] * 4 + [1] * 9)
    made, counts = group_rows([rows], numbers, size=3)
    mean = np.array([(40 - 27) / 13, (400 - 900) / 13, -127])
    expected = [mean + 2 * (rows[0] - mean), mean + 3 * (rows[-1] - mean)]
    np.testing.assert_array_equal(made, np.clip(np.rint(expected), -127, 127))
    assert counts.tolist() == [4, 9]
    assert made[0].tolist() == [19, 127, -127], "clipped"


def test_class_without_images_has_no_row() -> None:
    made, counts = group_rows([], np.zeros(0, np.intp), size=SIZE)
    assert made.shape == (0, SIZE)
    assert not len(counts)


@pytest.mark.parametrize("value", [0.5, 127.5, 128.0, -128.0, float("nan"), float("inf")])
def test_other_values_than_integers_in_range_are_refused(value: float) -> None:
    with pytest.raises(GraphRefused, match="expected integers from -127 to 127"):
        to_rows(np.array([[3, value]], np.float32))
    assert to_rows(np.array([[127, -127]], np.float32)).tolist() == [[127, -127]]
