"""The novelty of an image, and a threshold that few images of known classes exceed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.algorithms.novelty import FALSE_ALARMS, class_directions, novelty_threshold
from protocol.statistics.confidence import novelty_bins
from protocol.wire.messages import CONFIDENCE_BINS


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
