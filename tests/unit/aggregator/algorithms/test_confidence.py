"""The calibration of a head, and the novelty of an image."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import ABSENT_LOGIT
from aggregator.algorithms.confidence import ISOTONIC_FROM, MIN_LEAD, ConfidenceMap, calibrated, fit_map
from aggregator.algorithms.novelty import FALSE_ALARMS, class_directions, novelty_threshold
from protocol.statistics.confidence import bin_centers, confidence_bins, novelty_bins
from protocol.wire.messages import CONFIDENCE_BINS
from tests.support.messages.evaluations import COUNTS, softmax

LOGITS = arrays(
    np.float32,
    st.tuples(st.integers(1, 6), st.integers(2, 6)),
    elements=st.floats(-200, 200, width=32) | st.sampled_from([0.0, 1.0, np.nextafter(np.float32(1), 2)]),
)


@given(COUNTS, st.integers(2, 1000))
def test_map_does_not_decrease(counts: tuple[list[int], list[int]], classes: int) -> None:
    """Whatever was counted; it is finite, so that no image is certain."""
    found = fit_map(*map(np.array, counts), classes=classes)
    assert (np.diff(found.inputs) > 0).all()
    assert (np.diff(found.outputs) >= 0).all()
    assert np.isfinite([*found.inputs, *found.outputs]).all()
    assert len(found.inputs) == len(found.outputs) >= 2


@given(LOGITS, COUNTS)
def test_best_class_remains_the_best(
    logits: NDArray[np.float32], counts: tuple[list[int], list[int]]
) -> None:
    """Of equal ones the first; probabilities add up to 1, and the others keep their proportions."""
    after = calibrated(logits, fit_map(*map(np.array, counts), classes=logits.shape[1]))
    best = softmax(logits).argmax(axis=1)
    assert (softmax(after).argmax(axis=1) == best).all()
    np.testing.assert_allclose(softmax(after).sum(axis=1), 1, rtol=1e-5)
    others = np.arange(logits.shape[1]) != logits.argmax(axis=1)[:, None]
    np.testing.assert_array_equal(after[others], logits[others])


@given(st.lists(st.floats(-3, 11), min_size=2, max_size=9, unique=True), COUNTS)
def test_confidence_follows_the_map(values: list[float], counts: tuple[list[int], list[int]]) -> None:
    """Of two classes; where it would be below one half, it stays just above."""
    found = fit_map(*map(np.array, counts), classes=2)
    logits = np.array([[max(each, 0.01), 0] for each in sorted(values)], np.float32)
    after = calibrated(logits, found)[:, 0]
    np.testing.assert_allclose(after, np.maximum(found.mapped(logits[:, 0]), MIN_LEAD), rtol=1e-4, atol=1e-5)
    assert (np.diff(after) >= -1e-5).all()


def test_overconfident_head_gets_its_accuracy() -> None:
    """Half of the predictions at log-odds around 8 are correct, and nine of ten at 10."""
    images, correct = np.zeros((2, CONFIDENCE_BINS))
    (sure, surer) = confidence_bins(1 / (1 + np.exp(-np.array([[8.1, -8.1], [10.1, -10.1]]))))
    images[[sure, surer]], correct[[sure, surer]] = (200, 100), (100, 90)
    found = fit_map(correct, images, classes=2)
    logits = np.array([[bin_centers()[sure], 0], [0, bin_centers()[surer]], [0, 99]], np.float32)
    np.testing.assert_allclose(softmax(calibrated(logits, found)).max(axis=1), [0.50025, 0.9, 0.9], atol=1e-3)


def test_few_images_give_a_temperature() -> None:
    """A straight line of log-odds to those of chance, which is flatter if more is incorrect; not by the last image."""
    images = np.zeros(CONFIDENCE_BINS)
    images[[16, 20, 24]] = ISOTONIC_FROM / 4
    assert images.sum() < ISOTONIC_FROM
    slopes = []
    for share in (0.5, 0.8, 1.0):
        found = fit_map(share * images, images, classes=10)
        slopes.append(float(np.diff(found.outputs)[0]))
        np.testing.assert_allclose(np.diff(found.outputs), slopes[-1], rtol=1e-4)
        chance = -np.log(9)
        np.testing.assert_allclose(
            found.outputs - chance, slopes[-1] / 0.5 * (found.inputs - chance), rtol=1e-3, atol=1e-5
        )
    assert 0 < slopes[0] < slopes[1] < slopes[2] < 10
    images *= 2
    assert np.unique(np.diff(fit_map(0.5 * images, images, classes=10).outputs)).tolist() == [0]


def test_absent_classes_stay_absent() -> None:
    """A head that knows one class of several is as sure of it as before."""
    confidence = ConfidenceMap(np.array([0, 1], np.float32), np.array([0, 0.5], np.float32))
    alone = np.array([[3, ABSENT_LOGIT, ABSENT_LOGIT]], np.float32)
    np.testing.assert_array_equal(calibrated(alone, confidence), alone)
    known = softmax(calibrated(np.array([[9, 0, ABSENT_LOGIT]], np.float32), confidence))
    np.testing.assert_allclose(known, [[0.622, 0.378, 0]], atol=1e-3)


@pytest.mark.parametrize("place", [0, 13, CONFIDENCE_BINS - 1])
def test_one_bin_is_enough(place: int) -> None:
    images = np.zeros(CONFIDENCE_BINS)
    images[place] = 400
    found = fit_map(0.75 * images, images, classes=3)
    np.testing.assert_allclose(found.outputs, np.log(3), rtol=1e-5)


def test_novelty_is_one_minus_the_greatest_cosine() -> None:
    """Each row is compared with each mean, by the formula written out; factors scale both."""
    random = np.random.default_rng(0)
    means, rows = random.normal(size=(3, 7)), random.normal(size=(5, 7)).astype(np.float32)
    factors = random.uniform(0.5, 1, 7).astype(np.float32)
    for scale in (None, factors):
        by = np.ones(7) if scale is None else scale
        expected = [
            1 - max((x * by) @ (m * by) / np.linalg.norm(x * by) / np.linalg.norm(m * by) for m in means)
            for x in rows
        ]
        np.testing.assert_allclose(class_directions(means, scale).novelty(rows), expected, atol=1e-6)


def test_length_does_not_matter_and_zeros_have_no_direction() -> None:
    directions = class_directions(np.eye(3)[:2])
    rows = np.array([[5, 0, 0], [0, 0.1, 0], [0, 0, 9], [-1, 0, 0], [0, 0, 0]], np.float32)
    np.testing.assert_allclose(directions.novelty(rows), [0, 0, 1, 1, 1], atol=1e-6)


def test_bins_have_the_last_one_for_all_above() -> None:
    found = novelty_bins(np.array([-1e-7, 0, 1 / 32, 0.0624, 0.5, 0.999, 1, 2], np.float32))
    assert found.tolist() == [0, 0, 1, 1, 16, 31, 31, 31]


@given(st.lists(st.integers(0, 400), min_size=CONFIDENCE_BINS, max_size=CONFIDENCE_BINS).filter(any))
def test_as_many_images_exceed_the_threshold_as_are_allowed(counts: list[int]) -> None:
    """If they are spread evenly within a bin; none of fewer than 99."""
    images = np.array(counts, float)
    place = novelty_threshold(images) * CONFIDENCE_BINS
    inside = int(np.ceil(place)) - 1
    above = images[inside + 1 :].sum() + images[inside] * (inside + 1 - place)
    assert above == pytest.approx(max(FALSE_ALARMS * (images.sum() + 1) - 1, 0), abs=1e-6)


def test_one_image_in_a_hundred_exceeds_the_threshold() -> None:
    """On average, over 200 fleets of 300 held-out images, of 300 further images."""
    random = np.random.default_rng(0)
    shares = []
    for _ in range(200):
        held_out, further = random.gamma(9, 0.03, size=(2, 300))
        images = np.bincount(novelty_bins(held_out), minlength=CONFIDENCE_BINS).astype(float)
        shares.append(float((further > novelty_threshold(images)).mean()))
    assert np.mean(shares) == pytest.approx(FALSE_ALARMS, abs=0.003)
