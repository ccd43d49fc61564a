"""Sums and second moments of integer rows, accuracy over all classes alike, and bins of confidence."""

import tracemalloc
import zlib
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from protocol.errors import MalformedMessage
from protocol.statistics.balanced_accuracy import balanced_accuracy
from protocol.statistics.confidence import LOWEST, WIDTH, bin_centers, confidence_bins
from protocol.statistics.integer_rows import triangle_size
from protocol.statistics.row_sums import RowSums
from protocol.statistics.second_moment import add_products, decode, encode, from_triangle, to_triangle
from protocol.wire.arrays import to_tensor
from protocol.wire.messages import CONFIDENCE_BINS, Tensor

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


ROWS = hnp.arrays(np.int8, st.tuples(st.integers(1, 40), st.integers(1, 9)), elements=st.integers(-127, 127))


def direct(rows: NDArray[Any]) -> NDArray[np.int64]:
    """The triangle by integer arithmetic."""
    whole = rows.astype(np.int64)
    matrix: NDArray[np.int64] = whole.T @ whole
    return matrix[np.triu_indices(len(matrix))]


def added(*parts: NDArray[Any]) -> NDArray[np.int64]:
    """The triangle of rows that are added in several calls."""
    matrix = np.zeros((parts[0].shape[1],) * 2, np.int64)
    for part in parts:
        add_products(matrix, part)
    return to_triangle(matrix)


def class_sums(rows: NDArray[Any], labels: NDArray[Any]) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
    classes = np.unique(labels)
    sums = [rows[labels == each].sum(axis=0, dtype=np.int32) for each in classes]
    return np.array([(labels == each).sum() for each in classes], np.uint32), np.array(sums, np.int32)


@settings(max_examples=30)
@given(ROWS, st.integers(0, 40), st.randoms())
def test_any_order_and_any_division_gives_the_same_integers(rows: NDArray[Any], at: int, random: Any) -> None:
    shuffled = rows[random.sample(range(len(rows)), len(rows))]
    for result in (added(rows), added(shuffled), added(rows[:at], rows[at:]), added(rows.astype(np.float32))):
        np.testing.assert_array_equal(result, direct(rows))


@settings(max_examples=30)
@given(ROWS, st.data())
def test_row_with_a_weight_is_as_many_rows(rows: NDArray[Any], data: st.DataObject) -> None:
    weights = data.draw(hnp.arrays(np.uint32, len(rows), elements=st.integers(1, 300)))
    matrix = np.zeros((rows.shape[1],) * 2, np.int64)
    add_products(matrix, rows, weights)
    np.testing.assert_array_equal(to_triangle(matrix), direct(np.repeat(rows, weights, axis=0)))


def test_sums_of_many_largest_values_are_exact() -> None:
    """More rows than a float32 sum holds exactly, over several blocks of the matrix."""
    rows = np.full((5000, 300), 127, np.int8)
    rows[::2] = -126
    assert (added(rows) == 2500 * (127**2 + 126**2)).all()


@settings(max_examples=30)
@given(ROWS)
def test_triangle_of_a_matrix_gives_it_back(rows: NDArray[Any]) -> None:
    triangle, size = direct(rows), rows.shape[1]
    matrix = from_triangle(triangle, size)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(to_triangle(matrix), triangle)
    assert len(triangle) == triangle_size(size)


@settings(max_examples=30)
@given(ROWS, st.data())
def test_encoding_gives_the_triangle_back(rows: NDArray[Any], data: st.DataObject) -> None:
    labels = data.draw(hnp.arrays(np.uint8, len(rows), elements=st.integers(0, 3)))
    counts, sums = class_sums(rows, labels)
    tensor = encode(direct(rows), counts, sums)
    np.testing.assert_array_equal(decode(tensor, counts, sums), direct(rows))


@pytest.mark.parametrize("images", [1, 10_000_000])
def test_extreme_values_fit(images: int) -> None:
    """Of as many equal images as a device can have, and where the sums predict nothing."""
    counts = np.array([images], np.uint32)
    for value, sign in ((127, 1), (-127, 1), (127, 0)):
        sums = np.full((1, 3), sign * value * images, np.int32)
        triangle = np.full(6, 127**2 * images, np.int64)
        np.testing.assert_array_equal(decode(encode(triangle, counts, sums), counts, sums), triangle)
        np.testing.assert_array_equal(decode(encode(-triangle, counts, sums), counts, sums), -triangle)


def test_what_class_means_predict_takes_no_bytes() -> None:
    """Images of a class that are nearly alike take a byte a value, and less than without class sums."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 600)
    rows = np.clip(rng.integers(-120, 120, (3, 40))[labels] + rng.integers(-1, 2, (600, 40)), -127, 127)
    counts, sums = class_sums(rows, labels)
    tensor = encode(direct(rows), counts, sums)
    assert len(tensor.data) < 0.6 * len(encode(direct(rows), counts, np.zeros_like(sums)).data)


COUNTS, SUMS = np.array([2, 1], np.uint8), np.array([[200, -254], [5, 127]], np.int32)
STREAM = encode(np.array([20_000, -100, 32_000], np.int64), COUNTS, SUMS).data


def _bytes(data: bytes) -> Tensor:
    return to_tensor(np.frombuffer(data, np.uint8))


MALFORMED: list[tuple[str, Tensor, NDArray[Any], NDArray[Any]]] = [
    ("no zlib stream", _bytes(b"hello"), COUNTS, SUMS),
    ("nothing after it", _bytes(STREAM[:-1]), COUNTS, SUMS),
    ("nothing after it", _bytes(STREAM + b"\0"), COUNTS, SUMS),
    ("nothing after it", _bytes(zlib.compress(bytes(16))), COUNTS, SUMS),
    ("nothing after it", _bytes(b""), COUNTS, SUMS),
    ("1 to 5 bytes", _bytes(zlib.compress(b"")), COUNTS, SUMS),
    ("1 to 5 bytes", _bytes(zlib.compress(bytes(4))), COUNTS, SUMS),
    ("u1", Tensor("i1", (len(STREAM),), STREAM), COUNTS, SUMS),
    ("u1", Tensor("u1", (1, len(STREAM)), STREAM), COUNTS, SUMS),
    ("expected 3 bytes", Tensor("u1", (3,), STREAM), COUNTS, SUMS),
    ("second moment is more", _bytes(zlib.compress(b"\xff" * 15)), COUNTS, SUMS),
    ("class sums for", _bytes(STREAM), COUNTS[:1], SUMS),
    ("class sums for", _bytes(STREAM), COUNTS, SUMS[0]),
    ("class sums for", _bytes(STREAM), COUNTS, np.zeros((2, 4097), np.int32)),
    ("class sum is more", _bytes(STREAM), COUNTS, SUMS * 2),
    ("class sum is more", _bytes(STREAM), COUNTS, np.full((2, 2), -(2**31), np.int32)),
    ("expected counts", _bytes(STREAM), np.array([0, 1], np.uint8), SUMS),
    ("expected counts", _bytes(STREAM), np.array([2**32 - 1, 1], np.uint32), SUMS),
]


@pytest.mark.parametrize(("text", "tensor", "counts", "sums"), MALFORMED)
def test_malformed_encoding_is_refused(
    text: str, tensor: Tensor, counts: NDArray[Any], sums: NDArray[Any]
) -> None:
    with pytest.raises(MalformedMessage, match=text):
        decode(tensor, counts, sums)


def test_stream_that_expands_takes_no_memory() -> None:
    """A stream of 20 kB that expands to 20 MB is refused, and only what a second moment may take is expanded."""
    bomb = _bytes(zlib.compress(bytes(20_000_000)))
    assert bomb.shape[0] < 25_000
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage, match="zlib stream of at most 15 bytes"):
            decode(bomb, COUNTS, SUMS)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("correct", "incorrect", "classes", "expected"),
    [
        ((90, 0, 3), (10, 10, 1), {0, 1}, 0.45),
        ((90, 0, 3), (10, 10, 1), {0, 1, 2}, 0.55),
        ((49, 0), (1, 0), {0, 1}, 0.49),  # a class without images counts as not recognized
        ((0, 0), (0, 0), {0, 1}, None),
        ((5, 0), (1, 0), {1}, None),
        ((5, 0), (1, 0), (), None),
    ],
)
def test_every_class_counts_alike(
    correct: tuple[int, ...], incorrect: tuple[int, ...], classes: Collection[int], expected: float | None
) -> None:
    """Without images of the classes that are asked for there is no accuracy."""
    assert balanced_accuracy(correct, incorrect, classes) == (expected and pytest.approx(expected))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_it_is_at_most_the_accuracy_of_the_best_class(counts: list[tuple[int, int]]) -> None:
    """It is at least 0."""
    correct, incorrect = zip(*counts, strict=True)
    balanced = balanced_accuracy(correct, incorrect, range(len(counts)))
    shares = [one / (one + other) for one, other in counts if one + other]
    assert (balanced is None) == (not shares)
    assert balanced is None or 0 <= balanced <= max(shares) + 1e-9


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ([0.5, 0.5], 8),
        ([0.49, 0.26, 0.25], 7),
        ([0.25, 0.75], 10),
        ([1e-5, 1 - 1e-5], 31),
        ([1.0, 0.0], 31),
        ([0.001] * 1000, 0),
        ([0.0, 0.0], 0),
        ([-1.0, -2.0], 0),
        ([3.0, -2.0], 31),
    ],
)
def test_bin_of_a_row(row: list[float], place: int) -> None:
    """From chance among many classes to certainty; what a broken head gives has some bin as well."""
    assert confidence_bins(np.array([row], np.float32)).tolist() == [place]


@given(st.lists(st.floats(-5, 13), min_size=1, max_size=20), st.integers(2, 30))
def test_bin_contains_the_log_odds(values: list[float], classes: int) -> None:
    """Whichever class is the best, and however the others share the rest."""
    log_odds = np.maximum(np.array(values), 0.1 - np.log(classes - 1))
    best = 1 / (1 + np.exp(-log_odds))
    rows = np.repeat(((1 - best) / (classes - 1))[:, None], classes, axis=1)
    rows[np.arange(len(rows)), np.arange(len(rows)) % classes] = best
    places = confidence_bins(rows)
    inside = np.clip(log_odds, bin_centers()[0], bin_centers()[-1])
    assert (np.abs(bin_centers()[places] - inside) <= WIDTH / 2 + 1e-9).all()
    assert bin_centers()[0] == LOWEST + WIDTH / 2
    assert len(bin_centers()) == CONFIDENCE_BINS
