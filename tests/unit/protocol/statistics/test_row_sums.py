"""Sums of integer rows: the same integers in any order and any division over pieces and devices."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from protocol.statistics.row_sums import RowSums

SIZE = 5
PIECES = st.lists(
    st.tuples(
        st.integers(0, 3),
        hnp.arrays(np.int8, st.tuples(st.integers(0, 6), st.just(SIZE)), elements=st.integers(-127, 127)),
    ),
    max_size=8,
)


Sums = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]


def summed(pieces: list[tuple[int, NDArray[Any]]]) -> Sums:
    sums = RowSums(SIZE)
    for label, rows in pieces:
        sums.add(label, rows)
    return sums.result()


@settings(max_examples=30)
@given(PIECES, st.randoms())
def test_order_and_pieces_do_not_matter(pieces: list[tuple[int, NDArray[Any]]], random: Any) -> None:
    """Against sums by integer arithmetic, of the same rows one by one in another order."""
    single = [(label, row[None]) for label, rows in pieces for row in rows]
    random.shuffle(single)
    labels, counts, class_sums, triangle = summed(pieces)
    for found, again in zip((labels, counts, class_sums, triangle), summed(single), strict=True):
        np.testing.assert_array_equal(found, again)
    rows = np.array([row[0] for _, row in single], np.int64).reshape(-1, SIZE)
    np.testing.assert_array_equal(triangle, (rows.T @ rows)[np.triu_indices(SIZE)])
    for label, count, total in zip(labels, counts, class_sums, strict=True):
        members = [row[0] for each, row in single if each == label]
        assert count == len(members)
        np.testing.assert_array_equal(total, np.sum(members, axis=0, dtype=np.int64))


@settings(max_examples=30)
@given(PIECES, st.integers(0, 8))
def test_division_over_devices_does_not_matter(pieces: list[tuple[int, NDArray[Any]]], at: int) -> None:
    together, parts = summed(pieces), [summed(pieces[:at]), summed(pieces[at:])]
    np.testing.assert_array_equal(parts[0][3] + parts[1][3], together[3])
    images, sums = np.zeros(4, np.int64), np.zeros((4, SIZE), np.int64)
    for labels, counts, class_sums, _ in parts:
        images[labels] += counts
        sums[labels] += class_sums
    np.testing.assert_array_equal(images[together[0]], together[1])
    np.testing.assert_array_equal(sums[together[0]], together[2])


def test_sums_of_many_rows_are_added_in_blocks() -> None:
    rows = np.random.default_rng(0).integers(-127, 128, (2500, SIZE)).astype(np.int8)
    whole = rows.astype(np.int64)
    triangle = summed([(0, rows[at : at + 300]) for at in range(0, 2500, 300)])[3]
    np.testing.assert_array_equal(triangle, (whole.T @ whole)[np.triu_indices(SIZE)])
