"""Forecasts a head's accuracy with twice as many images, from its errors on held-out images. Pure.

Each doubling of the images left 67 to 94 % of the errors (`python -m research forecast`). A curve from
the prototypes themselves was not right: left-out prototypes are few, and 3 to 4 times as often misclassified as images.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Annotated

import msgspec
from msgspec import Meta

LEAST, MOST = 0.05, 0.35
"""Share of the errors that a doubling of the images removes."""

Z = NormalDist().inv_cdf(0.9)
"""Half the width of the 80 % interval of the share of errors, in standard deviations."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The gain in accuracy that twice as many images should bring, from and to, 0 to 1."""

    label: Annotated[str, Meta(description="The class; empty for all.")]
    images: Annotated[int, Meta(description="Held-out images of it.")]
    least: float
    most: float


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


def forecasts(classes: Sequence[str], held_out: Sequence[tuple[int, int]]) -> Iterator[Forecast]:
    """Yield the forecast of all classes, then of each, by its correct and incorrect held-out images."""
    every = (sum(correct for correct, _ in held_out), sum(incorrect for _, incorrect in held_out))
    for label, (correct, incorrect) in (("", every), *zip(classes, held_out, strict=True)):
        if (expected := gain(correct, incorrect)) is not None:
            least, most = (round(value, 4) for value in expected)
            yield Forecast(label=label, images=correct + incorrect, least=least, most=most)
