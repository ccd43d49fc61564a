"""The discrete Gaussian distribution, compared with its probabilities written out."""

import hashlib
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare

from edge_client.privacy.discrete_gaussian import _Bits, discrete_gaussian

KEY = bytes(range(32))


def _probabilities(variance: int, most: int) -> NDArray[np.float64]:
    """Of the integers from -most to most; what is beyond is below 1e-12."""
    values = np.arange(-most, most + 1)
    weights = np.exp(-(values**2) / (2 * variance))
    return np.asarray(weights / weights.sum())


@pytest.mark.parametrize("variance", [1, 2, 7, 40])
def test_each_integer_has_its_probability(variance: int) -> None:
    """The key is fixed, so that the test has one result."""
    most = math.ceil(8 * math.sqrt(variance))
    samples = discrete_gaussian(KEY, 20_000, variance=variance)
    assert np.abs(samples).max() <= most
    expected = 20_000 * _probabilities(variance, most)
    found = np.bincount(samples + most, minlength=2 * most + 1)
    middle = expected > 5
    rest = [found[~middle].sum() + found[middle][0]], [expected[~middle].sum() + expected[middle][0]]
    assert chisquare([*found[middle][1:], *rest[0]], [*expected[middle][1:], *rest[1]]).pvalue > 0.001


@pytest.mark.parametrize("variance", [10**4, 10**10, 2**90])
def test_wide_distributions_are_normal(variance: int) -> None:
    from scipy.stats import kstest

    samples = discrete_gaussian(KEY, 3000, variance=variance)
    assert kstest(samples / math.sqrt(variance), "norm").pvalue > 0.001


def test_same_key_gives_the_same_samples_and_another_key_others() -> None:
    first = discrete_gaussian(KEY, 50, variance=10**8)
    np.testing.assert_array_equal(first[:20], discrete_gaussian(KEY, 20, variance=10**8))
    assert not np.intersect1d(first, discrete_gaussian(KEY[::-1], 50, variance=10**8)).size


@pytest.mark.parametrize(("key", "variance"), [(KEY[1:], 4), (KEY, 0), (KEY, -1), (KEY, 2**100)])
def test_unsafe_arguments_are_refused(key: bytes, variance: int) -> None:
    with pytest.raises(ValueError, match="expected 32 bytes"):
        discrete_gaussian(key, 1, variance=variance)


@pytest.mark.parametrize("limit", [1, 2, 3, 2**64, 2**64 + 1, 10**30])
def test_uniform_integers_are_below_their_limit(limit: int) -> None:
    random = _Bits(KEY)
    drawn = [random.below(limit) for _ in range(2000)]
    assert 0 <= min(drawn) <= max(drawn) < limit
    assert abs(sum(drawn) / 2000 - (limit - 1) / 2) <= 5 * limit / math.sqrt(12 * 2000)


def test_random_bytes_are_blocks_of_shake_256() -> None:
    """A release that is built again after a crash or an update has the same noise."""
    random = _Bits(KEY)
    words = b"".join(random.word().to_bytes(8, "big") for _ in range(3 * 2**13))
    assert words == b"".join(hashlib.shake_256(KEY + bytes([0] * 7 + [n])).digest(2**16) for n in range(3))


def test_comparison_goes_on_where_the_first_word_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """1/3 has the digits 0x5555..., of which all words are equal."""
    words = iter([0x5555555555555555, 0x5555555555555555, 0x5555555555555554])
    random = _Bits(KEY)
    monkeypatch.setattr(random, "word", lambda: next(words))
    assert random.is_true(1, 3)
    assert not list(words)
