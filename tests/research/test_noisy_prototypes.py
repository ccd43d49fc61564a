"""The Gaussian mechanism: sensitivity, noise, and what is released."""

import math
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.errors import PrivacyRefused
from research.privacy import noisy_prototypes
from research.privacy.noisy_prototypes import (
    COUNT_WEIGHT,
    MAX_PROTOTYPES,
    MAX_VALUES,
    Mechanism,
    max_prototypes,
    private_prototypes,
)

SECRET = b"s" * 32
HOW = Mechanism(clip_norm=2.0, noise_multiplier=1.5, batch_size=10, min_images=3)
QUIET = replace(HOW, noise_multiplier=1e-9)


def _features(count: int, size: int = 8, *, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(scale=scale, size=(count, size)).astype(np.float32)


def _names(count: int) -> list[str]:
    return [f"image-{number}" for number in range(count)]


def _clipped(features: NDArray[np.float32], norm: float) -> NDArray[np.float64]:
    wide = features.astype(np.float64)
    clipped: NDArray[np.float64] = wide * np.minimum(1, norm / np.linalg.norm(wide, axis=1, keepdims=True))
    return clipped


def test_without_noise_prototypes_average_to_the_mean_of_clipped_features() -> None:
    """Every image is in exactly one batch."""
    features = _features(105, scale=3.0)
    values, counts = private_prototypes(features, _names(105), QUIET, secret=SECRET, key=os.urandom(32))
    assert len(values) == 10
    assert counts.sum() == 105
    mean = (values * counts[:, None]).sum(axis=0) / 105
    np.testing.assert_allclose(mean, _clipped(features, 2.0).mean(axis=0), atol=1e-5)


def _released(features: NDArray[np.float32], names: list[str], batches: int) -> NDArray[np.float64]:
    """Return the values that get noise in both steps, for M batches: the weighted counts, and the sums in S."""
    dealt = np.array([noisy_prototypes._batch_of(name, batches, SECRET) for name in names], np.intp)
    sums = noisy_prototypes._clipped_sums(features, dealt, batches=batches, clip_norm=2.0)
    counts = COUNT_WEIGHT * np.bincount(dealt, minlength=batches)
    return np.concatenate([[COUNT_WEIGHT * len(features)], sums.ravel(), counts])


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 40),
    batches=st.integers(1, 7),
    scale=st.sampled_from([1e-6, 1.0, 1e6, 1e30]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_one_image_changes_the_release_by_at_most_the_sensitivity(
    count: int, batches: int, scale: float, seed: int, data: st.DataObject
) -> None:
    """Without any one image, the two steps together change by at most sqrt(1 + 2 w^2), whatever its norm."""
    features, names = _features(count, seed=seed, scale=scale), _names(count)
    gone = data.draw(st.integers(0, count - 1))
    rest = [number for number in range(count) if number != gone]
    whole = _released(features, names, batches)
    less = _released(features[rest], [names[number] for number in rest], batches)
    assert np.linalg.norm(whole - less) <= math.sqrt(1 + 2 * COUNT_WEIGHT**2) + 1e-12
    moved = (whole - less)[1 : 1 + batches * 8].reshape(batches, 8).any(axis=1)
    assert moved.sum() <= 1, "no other batch knows of it"


def test_sensitivity_is_reached_by_a_feature_of_the_clipping_norm() -> None:
    """Less noise would not suffice."""
    one = np.zeros((1, 8), np.float32)
    one[0, 0] = 2.0
    moved = _released(one, ["a"], 3)
    assert np.linalg.norm(moved) == pytest.approx(math.sqrt(1 + 2 * COUNT_WEIGHT**2))
    assert QUIET.noise / QUIET.noise_multiplier == pytest.approx(np.linalg.norm(moved))


def test_noise_has_the_stated_deviation() -> None:
    """Over many releases: of class counts, sums and batch counts."""
    how = replace(HOW, batch_size=400, noise_multiplier=2.0)
    features, names = _features(600, size=64), _names(600)
    clean, size = private_prototypes(features, names, replace(how, noise_multiplier=1e-9), secret=SECRET,
                                     key=os.urandom(32))  # fmt: skip
    assert size.tolist() == [600]
    sums, counts = [], []
    for _ in range(300):
        values, noisy = private_prototypes(features, names, how, secret=SECRET, key=os.urandom(32))
        sums.append((values[0] * noisy[0] - clean[0] * 600) / how.clip_norm)
        counts.append(int(noisy[0]))
    assert how.noise == pytest.approx(2.0 * math.sqrt(1.125))
    assert np.std(counts) == pytest.approx(how.noise / COUNT_WEIGHT, rel=0.2)
    assert np.std(np.array(sums)) == pytest.approx(how.noise, rel=0.1)
    assert np.mean(counts) == pytest.approx(600, abs=3)


def test_number_of_prototypes_depends_on_the_noisy_count_only() -> None:
    """Without noise M = floor(n / B), and none below B; with noise, a class without images may have prototypes."""

    def batches(images: int, how: Mechanism = QUIET) -> int:
        key = os.urandom(32)
        return len(private_prototypes(_features(images), _names(images), how, secret=SECRET, key=key)[0])

    assert [batches(images) for images in (0, 9, 11, 19, 21, 105)] == [0, 0, 1, 1, 2, 10]
    loud = replace(HOW, noise_multiplier=20.0)
    of_nothing = [batches(0, loud) for _ in range(40)]
    assert min(of_nothing) == 0
    assert max(of_nothing) > 0


def test_counts_are_at_least_min_images() -> None:
    loud = replace(HOW, noise_multiplier=20.0)
    smallest = []
    for _ in range(40):
        values, counts = private_prototypes(
            _features(30), _names(30), loud, secret=SECRET, key=os.urandom(32)
        )
        assert np.isfinite(values).all()
        assert len(values) == len(counts)
        smallest += counts.tolist()
    assert min(smallest) == HOW.min_images


def test_same_key_gives_the_same_release() -> None:
    """The key is the only randomness: a release can be repeated at no cost."""
    features, names, key = _features(50), _names(50), os.urandom(32)
    one = private_prototypes(features, names, HOW, secret=SECRET, key=key)
    again = private_prototypes(features, names, HOW, secret=SECRET, key=key)
    np.testing.assert_array_equal(one[0], again[0])
    np.testing.assert_array_equal(one[1], again[1])
    other, _ = private_prototypes(features, names, HOW, secret=SECRET, key=os.urandom(32))
    assert other.shape != one[0].shape or (other != one[0]).all()


def test_other_images_do_not_change_the_batch_of_an_image() -> None:
    """It depends on the identity, the secret and the number of batches."""
    batch_of = noisy_prototypes._batch_of
    assert {batch_of(name, 7, SECRET) for name in _names(200)} == set(range(7))
    first, again, other = (
        [batch_of(name, 7, secret) for name in _names(40)] for secret in (SECRET, SECRET, b"o" * 32)
    )
    assert first == again != other


def test_number_of_prototypes_is_bounded_for_any_noise() -> None:
    loudest = replace(HOW, noise_multiplier=1e6, batch_size=1, min_images=1)
    sizes = set()
    for _ in range(12):
        values, _ = private_prototypes(_features(4, 2), _names(4), loudest, secret=SECRET, key=os.urandom(32))
        sizes.add(len(values))
    assert max(sizes) == MAX_PROTOTYPES


@pytest.mark.parametrize(("classes", "size"), [(1, 16), (10, 1280), (4096, 1280), (4096, 4095)])
def test_all_values_of_a_submission_are_bounded(classes: int, size: int) -> None:
    """Each class has as many prototypes as noise can give: 4096 classes of 1280 features took 5.5 GB."""
    most = max_prototypes(classes, size)
    assert 1 <= most <= MAX_PROTOTYPES
    assert classes * most * (size + 1) <= MAX_VALUES
    loudest = replace(HOW, noise_multiplier=1e6, batch_size=1, min_images=1, max_prototypes=most)
    sizes = [
        len(private_prototypes(_features(0, 2), [], loudest, secret=SECRET, key=os.urandom(32))[0])
        for _ in range(12)
    ]
    assert max(sizes) == most


def test_no_feature_makes_the_clipping_fail() -> None:
    """The largest feature at the smallest clipping norm that a task may have: a failure would reveal the image."""
    features = np.full((30, 8), np.finfo(np.float32).max)
    values, _ = private_prototypes(
        features, _names(30), replace(QUIET, clip_norm=1e-6), secret=SECRET, key=os.urandom(32)
    )
    np.testing.assert_allclose(np.linalg.norm(values, axis=1), 1e-6, rtol=1e-3)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_nonfinite_feature_is_refused(wrong: float) -> None:
    features = _features(30)
    features[7, 3] = wrong
    with pytest.raises(PrivacyRefused, match="not finite"):
        private_prototypes(features, _names(30), HOW, secret=SECRET, key=os.urandom(32))


@pytest.mark.parametrize(
    ("how", "names", "problem"),
    [
        (replace(HOW, clip_norm=0.0), _names(30), "above 0"),
        (replace(HOW, noise_multiplier=0.0), _names(30), "above 0"),
        (replace(HOW, noise_multiplier=math.nan), _names(30), "above 0"),
        (HOW, _names(29), "one feature per image"),
        (HOW, [*_names(29), "image-0"], "each image once"),  # it would have twice the weight
    ],
)
def test_parameters_out_of_range_are_refused(how: Mechanism, names: list[str], problem: str) -> None:
    with pytest.raises(PrivacyRefused, match=problem):
        private_prototypes(_features(30), names, how, secret=SECRET, key=os.urandom(32))
