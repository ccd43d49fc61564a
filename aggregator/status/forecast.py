"""Forecasts a head's accuracy with twice as many images, from its errors on held-out images. Pure.

Each doubling of the images left 67 to 94 % of the errors (`python -m benchmarks accuracy forecast`). A curve from
the prototypes themselves was not right: left-out prototypes are few, and 3 to 4 times as often misclassified as images.
"""

import math
from statistics import NormalDist

LEAST, MOST = 0.05, 0.35
"""Share of the errors that a doubling of the images removes."""

Z = NormalDist().inv_cdf(0.9)
"""Half the width of the 80 % interval of the share of errors, in standard deviations."""


def gain(correct: int, incorrect: int) -> tuple[float, float] | None:
    """Return how much accuracy twice as many images should add, from and to, 0 to 1; None without held-out images.

    The share of errors has the interval of Wilson (Journal of the American Statistical Association 22, 1927).
    """
    images = correct + incorrect
    if not images:
        return None
    share, spread = incorrect / images, Z**2 / images
    center = share + spread / 2
    half = math.sqrt(share * (1 - share) * spread + spread**2 / 4)
    low, high = ((center + sign * half) / (1 + spread) for sign in (-1, 1))
    return LEAST * max(low, 0.0), MOST * high
