"""Accuracy over all classes alike, whatever the mixture of the images."""

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

Counts = Sequence[int] | Mapping[int, int]
"""Images of each class, by its index."""


def balanced_accuracy(correct: Counts, incorrect: Counts, classes: Collection[int]) -> float | None:
    """Return the mean over these classes of the share of images that were classified correctly.

    A class without images counts as 0: the figure is what is shown at least. None if no class has images.
    """
    totals = {label: correct[label] + incorrect[label] for label in classes}
    if not any(totals.values()):
        return None
    return fmean(correct[label] / total if total else 0.0 for label, total in totals.items())
