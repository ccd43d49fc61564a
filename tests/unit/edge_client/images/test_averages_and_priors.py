"""Batch-level averages, class means and rows of statistics; the class prior of a place."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from scipy import stats

from edge_client.heads.class_prior import (
    FEWEST,
    WINDOW,
    Adjuster,
    Choice,
    Prior,
    adjusted,
    chi_squared_limit,
    choose,
    estimate,
    label_shares,
    log_gain,
    smoothed,
)
from edge_client.prototypes.outlier_filter import closest_features
from edge_client.prototypes.prototype_averaging import average, class_means
from edge_client.prototypes.statistics import group_rows, to_rows
from protocol.errors import ConfigError, GraphRefused, ProtofleetError
from protofleet.prototypes import average_class

Features = NDArray[np.float32]


def _prototypes_of(
    features: Features, *, alpha: float = 1.0, batch_size: int = 5, min_images: int = 2, seed: int = 0
) -> tuple[Features, NDArray[np.uint32]]:
    rng = np.random.default_rng(seed)
    return average_class(features, batch=batch_size, rng=rng, alpha=alpha, min_images=min_images)


def _random_features(count: int, size: int = 3) -> Features:
    return np.random.default_rng(count).random((count, size), dtype=np.float32)


# Multiples of 1/4 within 16 bits: sums of them are exact, so that laws can be compared without tolerance.
features_of_a_class = hnp.arrays(
    np.float32,
    st.tuples(st.integers(0, 60), st.integers(1, 4)),
    elements=st.integers(0, 4000).map(lambda quarter: quarter / 4),
)
settings_in_range = st.integers(1, 12).flatmap(
    lambda batch_size: st.tuples(st.just(batch_size), st.integers(1, batch_size))
)


@given(
    features=features_of_a_class, settings=settings_in_range, alpha=st.sampled_from([0.07, 0.5, 0.99, 1.0])
)
def test_counts_add_up_to_the_kept_images(
    features: Features, settings: tuple[int, int], alpha: float
) -> None:
    batch_size, min_images = settings
    _, counts = _prototypes_of(features, alpha=alpha, batch_size=batch_size, min_images=min_images)
    hundredths = round(alpha * 100)
    kept = -(-hundredths * len(features) // 100)
    assert counts.sum() == (kept if kept >= min_images else 0)


@given(features=features_of_a_class, settings=settings_in_range)
def test_prototype_averages_at_least_a_batch(features: Features, settings: tuple[int, int]) -> None:
    """Counts lie in B to 2B - 1; only a class smaller than B has one smaller prototype."""
    batch_size, min_images = settings
    _, counts = _prototypes_of(features, batch_size=batch_size, min_images=min_images)
    if len(features) >= batch_size:
        assert (counts[:-1] == batch_size).all()
        assert batch_size <= counts[-1] < 2 * batch_size
    else:
        assert counts.tolist() == ([len(features)] if len(features) >= min_images else [])


@given(features=features_of_a_class, settings=settings_in_range, seed=st.integers(0, 5))
def test_weighted_mean_of_prototypes_is_mean_of_features(
    features: Features, settings: tuple[int, int], seed: int
) -> None:
    batch_size, min_images = settings
    prototypes, counts = _prototypes_of(features, batch_size=batch_size, min_images=min_images, seed=seed)
    if len(counts):
        mean = np.average(prototypes, axis=0, weights=counts)
        np.testing.assert_allclose(mean, features.mean(axis=0, dtype=np.float64), rtol=1e-5)


def assert_same(chunks: list[Features], features: Features) -> None:
    kept = closest_features(lambda: chunks, alpha=0.8)
    np.testing.assert_array_equal(kept, closest_features(lambda: [features], alpha=0.8))
    numbers = np.arange(len(features)) % 5
    for cut, whole in zip(
        average(lambda: chunks, numbers), average(lambda: [features], numbers), strict=True
    ):
        np.testing.assert_array_equal(cut, whole)


@given(
    features=hnp.arrays(np.float32, (40, 3), elements=st.floats(-1e3, 1e3, width=32)),
    cuts=st.lists(st.integers(0, 40), max_size=8),
)
def test_any_chunking_gives_the_same_bits(features: Features, cuts: list[int]) -> None:
    """Empty chunks included."""
    assert_same([features[start:stop] for start, stop in pairwise([0, *sorted(cuts), 40])], features)


def test_chunks_across_block_borders_give_the_same_bits() -> None:
    features = _random_features(1000, 17)
    for size in (1, 100, 255, 256, 257, 999):
        assert_same([features[at : at + size] for at in range(0, 1000, size)], features)


def test_prototypes_match_the_equations() -> None:
    """With B = 1 they are the features with the highest cosines to the mean."""
    features = _random_features(50)
    prototypes, _ = _prototypes_of(features, alpha=0.9, batch_size=1, min_images=1)
    mean = features.mean(axis=0)
    cosines = features @ mean / np.linalg.norm(features, axis=1) / np.linalg.norm(mean)
    expected = features[np.argsort(cosines)[5:]]
    np.testing.assert_allclose(np.sort(prototypes, axis=0), np.sort(expected, axis=0))


def test_equal_scores_keep_the_earlier_images() -> None:
    """A device uploads the same after a restart."""
    powers_of_two = 2.0 ** np.arange(10, dtype=np.float32)
    features = powers_of_two[:, None] * np.array([[1.0, 2.0]], dtype=np.float32)
    prototypes, _ = _prototypes_of(features, alpha=0.5, batch_size=1, min_images=1)
    assert sorted(prototypes[:, 0].tolist()) == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_zero_feature_scores_zero() -> None:
    """It is the first to be omitted."""
    features = np.vstack([np.zeros((1, 3), dtype=np.float32), np.ones((9, 3), dtype=np.float32)])
    prototypes, _ = _prototypes_of(features, alpha=0.9, batch_size=3)
    np.testing.assert_array_equal(prototypes, np.ones((3, 3)))
    nothing_but_zeros, counts = _prototypes_of(np.zeros((7, 3), dtype=np.float32))
    np.testing.assert_array_equal(nothing_but_zeros, np.zeros((1, 3)))
    assert counts.tolist() == [7]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_features_are_refused(value: float) -> None:
    features = _random_features(10)
    features[3, 1] = value
    with pytest.raises(ProtofleetError, match="finite"):
        _prototypes_of(features)


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(0, 4), st.randoms(use_true_random=False))
def test_class_means_are_plain_means(labels: list[int], min_images: int, shuffler: random.Random) -> None:
    """Of every class with enough images, in any order; other classes have none."""
    projection = _random_features(len(labels), size=4)
    means, classes, counts = class_means(
        projection, np.array(labels, np.int64), num_classes=7, min_images=min_images
    )
    wanted = [label for label in range(7) if labels.count(label) >= max(min_images, 1)]
    assert classes.tolist() == wanted
    assert counts.tolist() == [labels.count(label) for label in wanted]
    assert means.shape == (len(wanted), 4)
    for mean, label in zip(means, wanted, strict=True):
        of_class = projection[np.array(labels) == label].astype(np.float64)
        np.testing.assert_allclose(mean, of_class.mean(axis=0), rtol=1e-6)
    order = list(range(len(labels)))
    shuffler.shuffle(order)
    moved = class_means(
        projection[order], np.array(labels, np.int64)[order], num_classes=7, min_images=min_images
    )
    np.testing.assert_allclose(moved[0], means, rtol=1e-6)
    assert moved[1].tolist() == wanted


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


SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 6))
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
HOSTILE = hnp.arrays(np.float32, SHAPES, elements=st.floats(-1, 2, width=32) | FINITE)
SEEDS = st.integers(0, 2**32 - 1)


def _probabilities(seed: int, shares: list[float], images: int = 200) -> NDArray[np.float32]:
    """Return calibrated probabilities of images at a place with these shares, by a head without a prior."""
    random = np.random.default_rng(seed)
    labels = random.choice(len(shares), images, p=shares)
    odds = np.exp(4 * (np.eye(len(shares))[labels] + random.normal(size=(images, len(shares))) / 2))
    odds /= odds.sum(axis=1, keepdims=True)
    return np.asarray(odds, np.float32)


@pytest.mark.parametrize("freedom", [1, 2, 3, 9, 99, 4095])
def test_quantile_is_scipys(freedom: int) -> None:
    assert chi_squared_limit(freedom) == pytest.approx(stats.chi2.ppf(0.999, freedom), rel=0.035)


def test_estimate_follows_the_formula_of_its_source() -> None:
    """Written with loops: 50 steps of EM from equal shares, with one more of each class."""
    rows = _probabilities(0, [0.7, 0.2, 0.1]).astype(float)
    rows /= rows.sum(axis=1, keepdims=True)
    shares = [1 / 3] * 3
    for _ in range(50):
        of_image = [[p * q / sum(row * shares) for p, q in zip(row, shares, strict=True)] for row in rows]
        shares = [(sum(each[label] for each in of_image) + 1) / (len(rows) + 3) for label in range(3)]
    found = estimate(rows.astype(np.float32))
    assert found is not None
    np.testing.assert_allclose(found, shares, rtol=1e-4)
    np.testing.assert_allclose(found, [0.7, 0.2, 0.1], atol=0.08)


@given(SEEDS)
def test_even_classes_and_few_images_show_no_prior(seed: int) -> None:
    """One image cannot; these are exactly even."""
    rows = _probabilities(seed, [0.5, 0.5])
    assert estimate(np.concatenate([rows, rows[:, ::-1]])) is None
    assert estimate(rows[:1]) is None


@given(SEEDS, st.lists(st.floats(0.05, 1), min_size=2, max_size=5))
def test_order_of_images_and_unknown_classes_do_not_matter(seed: int, weights: list[float]) -> None:
    rows = _probabilities(seed, list(np.array(weights) / sum(weights)))
    found = estimate(rows)
    turned, wider = estimate(rows[::-1]), estimate(np.insert(rows, 1, 0, axis=1))
    assert (found is None) == (turned is None) == (wider is None)
    if found is not None and turned is not None and wider is not None:
        np.testing.assert_allclose(found, turned, rtol=1e-6)
        np.testing.assert_allclose(np.insert(found, 1, 0), wider, rtol=1e-6)


@given(HOSTILE)
def test_results_are_probabilities_whatever_the_head_gives(rows: NDArray[np.float32]) -> None:
    classes = rows.shape[1]
    found = estimate(rows)
    if found is not None:
        assert found.sum() == pytest.approx(1)
        assert (found >= 0).all()
    for shares in (found, np.full(classes, 1 / classes)):
        if shares is not None:
            changed = adjusted(rows, shares)
            assert np.isfinite(changed).all()
            np.testing.assert_allclose(changed.sum(axis=1), 1, rtol=1e-5)


@given(SEEDS, st.integers(2, 6))
def test_equal_shares_change_nothing(seed: int, classes: int) -> None:
    rows = _probabilities(seed, [1 / classes] * classes)
    np.testing.assert_allclose(adjusted(rows, np.full(classes, 1 / classes)), rows, rtol=1e-5, atol=1e-7)


def test_labels_give_smoothed_shares() -> None:
    """Of the head's classes; a class without images has the least share."""
    adjuster = Adjuster(("cat", "dog", "owl"), "labels", labels={"cat": 6, "owl": 1, "elk": 9})
    _, prior = adjuster.adjust(np.full((1, 3), 1 / 3, np.float32))
    assert prior == Prior("labels", "as requested", {"cat": 0.7, "dog": 0.1, "owl": 0.2})
    assert prior.fields(["owl"]) == {
        "prior": "labels",
        "prior_reason": "as requested",
        "prior_shares": {"owl": 0.2},
    }
    assert smoothed(np.zeros(4)).tolist() == [0.25] * 4


COUNTS = st.lists(st.integers(0, 500), min_size=2, max_size=6).filter(any)
"""A device's labeled images of each class."""


def _place(seed: int, counts: list[int], images: int, *, own: float) -> NDArray[np.float32]:
    """Return probabilities of images; a share of `own` is drawn by the device's classes, the rest of all alike."""
    shares = own * np.array(counts) / sum(counts) + (1 - own) / len(counts)
    rng = np.random.default_rng(seed)
    truth = np.eye(len(counts))[rng.choice(len(counts), images, p=shares)]
    rows = rng.dirichlet(np.ones(len(counts)), images) + rng.uniform(0, 3, (images, 1)) * truth
    probabilities: NDArray[np.float32] = (rows / rows.sum(axis=1, keepdims=True)).astype(np.float32)
    return probabilities


def _labels(counts: list[int]) -> NDArray[np.float64]:
    shares = label_shares([str(n) for n in range(len(counts))], {str(n): c for n, c in enumerate(counts)})
    assert shares is not None
    return shares


@given(SEEDS, COUNTS, st.integers(FEWEST, 150), st.floats(0, 1))
def test_labels_prior_is_used_as_long_as_it_makes_the_images_likelier(
    seed: int, counts: list[int], images: int, own: float
) -> None:
    """By the definition: sum log(p . labels) > sum log(p . uniform); the order of images and of classes is free."""
    rows, labels = _place(seed, counts, images, own=own), _labels(counts)
    uniform = np.full(len(counts), 1 / len(counts))
    gain = float((np.log(rows.astype(float) @ labels) - np.log(rows.astype(float) @ uniform)).sum())
    found = choose("auto", rows, labels)
    assert log_gain(rows, labels) == pytest.approx(gain, abs=1e-4)
    if abs(gain) > 1e-3:
        expected = ("labels", "likelier than no prior") if gain > 0 else ("none", "no likelier than no prior")
        assert (found.source, found.reason) == expected
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(counts))
        turned = choose("auto", rng.permutation(rows)[:, order], labels[order])
        assert turned[:2] == found[:2]
    assert (found.shares is labels) == (found.source == "labels")


@given(SEEDS, COUNTS, st.integers(1, 60), st.floats(0, 1))
def test_classes_that_the_head_does_not_know_decide_nothing(
    seed: int, counts: list[int], images: int, own: float
) -> None:
    """Otherwise each label of a class that the head knows would speak for the device's labels."""
    rows = _place(seed, counts, images, own=own)
    wider = np.insert(rows, 1, 0, axis=1)
    narrow = _labels(counts)
    assert log_gain(wider, np.insert(narrow, 1, 0.2) / 1.2) == pytest.approx(log_gain(rows, narrow), abs=1e-6)


@given(SEEDS, COUNTS, st.integers(0, FEWEST - 1))
def test_labels_prior_without_a_comparison_for_few_images(seed: int, counts: list[int], images: int) -> None:
    labels = _labels(counts)
    found = choose("auto", _place(seed, counts, images, own=0), labels)
    assert found == Choice("labels", "fewer than 20 predictions", labels)


@given(SEEDS, COUNTS, st.integers(0, 150), st.floats(0, 1))
def test_without_labels_the_prior_is_estimated(seed: int, counts: list[int], images: int, own: float) -> None:
    """As with `images`, whatever the labels; equal labels never count as likelier."""
    rows = _place(seed, counts, images, own=own)
    estimated = estimate(rows)
    for found in (choose("auto", rows, None), choose("images", rows, _labels(counts))):
        assert found.source == ("none" if estimated is None else "images")
        assert (found.shares is None) == (estimated is None)
        assert estimated is None or np.array_equal(estimated, found.shares)  # type: ignore[arg-type]
    assert log_gain(rows, np.full(len(counts), 1 / len(counts))) == pytest.approx(0, abs=1e-9)


@given(SEEDS, COUNTS)
def test_requested_priors_and_personal_heads_are_not_compared(seed: int, counts: list[int]) -> None:
    rows, labels = _place(seed, counts, 40, own=0), _labels(counts)
    assert choose("labels", rows, labels, is_personal=True) == Choice("labels", "as requested", labels)
    assert choose("none", rows, labels) == Choice("none", "as requested")
    assert choose("auto", rows, labels, is_personal=True) == Choice("none", "personal head")


@given(SEEDS, st.integers(0, 150), st.integers(1, 150))
def test_window_forgets_all_but_the_newest_images(seed: int, before: int, images: int) -> None:
    """Any images before the last WINDOW change nothing, in whatever parts they came; those of one call all count."""
    counts = [300, 3, 0, 1]
    names = [str(number) for number in range(len(counts))]
    labels = dict(zip(names, counts, strict=True))
    earlier, rows = _place(seed, counts, before, own=0), _place(seed + 1, counts, images, own=1)
    adjuster = Adjuster(names, "auto", labels=labels)
    adjuster.adjust(earlier)
    found, prior = adjuster.adjust(rows)
    seen = np.concatenate([earlier, rows])[-max(WINDOW, images) :]
    expected = choose("auto", seen, _labels(counts))
    assert (prior.source, prior.reason) == expected[:2]
    np.testing.assert_array_equal(found, rows if expected.shares is None else adjusted(rows, expected.shares))


def test_prior_follows_a_change_of_the_classes_and_back() -> None:
    """A device of cats sees 100 cats, 100 images of every class, and 100 cats, one by one."""
    counts = [300, 0, 0, 0]
    names = [str(number) for number in range(len(counts))]
    adjuster = Adjuster(names, "auto", labels=dict(zip(names, counts, strict=True)))
    parts = [_place(seed, counts, WINDOW, own=own) for seed, own in enumerate((1, 0, 1))]
    used = [[adjuster.adjust(row[None])[1].reason for row in part] for part in parts]
    assert used[0] == ["fewer than 20 predictions"] * (FEWEST - 1) + ["likelier than no prior"] * (
        WINDOW - FEWEST + 1
    )
    assert [each[-1] for each in used[1:]] == ["no likelier than no prior", "likelier than no prior"]


def test_labels_of_other_classes_are_none() -> None:
    assert label_shares(("cat", "dog"), {"elk": 9}) is None
    assert Adjuster(("cat", "dog"), "auto", labels={"elk": 9}).adjust(np.ones((1, 2), np.float32))[
        1
    ] == Prior("none", "no evidence of uneven classes")
    with pytest.raises(ConfigError, match="no labeled images of the head's classes"):
        Adjuster(("cat", "dog"), "labels", labels={"elk": 9})
