"""The sums of one device's submission, and what outlier detection compares of them."""

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.statistics.feature_map import BLOCK, FeatureMap, shortened
from aggregator.algorithms.statistics.moments import (
    Moments,
    class_means,
    moments_of,
    of_all_classes,
    require_image_lengths,
    require_possible,
    squares_of,
)
from aggregator.intake.validation import Expectation, Prototypes, Refused, check_statistics
from aggregator.training.robust.outlier_statistics import ClassSummary, DeviceSummary
from protocol.errors import MalformedMessage, ProtofleetError
from protocol.statistics.second_moment import decode
from protocol.wire.messages import Submission


def summary_of(part: Moments) -> DeviceSummary:
    """Return the summary of class sums of single images: they have one variance, that within the device's classes.

    As a class has no variance of its own, it counts as one prototype, whose scatter is not compared.
    """
    labels, squares, images = np.flatnonzero(part.counts), squares_of(part), int(part.counts.sum())
    means = class_means(part)
    within = squares - float((part.counts * np.square(means).sum(axis=1)).sum())
    freedom = images - len(labels)
    variance = max(within, 0.0) / freedom if freedom else np.nan
    classes = {
        int(label): ClassSummary(means[label].copy(), float(part.counts[label]), 1.0, variance)
        for label in labels
    }
    return DeviceSummary(classes, float(images), squares / max(images, 1), 1.0)


def submitted_moments(submission: Submission, expectation: Expectation, feature_map: FeatureMap) -> Moments:
    """Return the moments of one device; raises Refused unless they can be those of images."""
    values, labels, counts = check_statistics(submission, expectation)
    classes = len(expectation.manifest.classes)
    labels, counts = labels.astype(np.int64), counts.astype(np.int64)
    if not submission.tensors:
        return moments_of(shortened(values, feature_map), labels, counts, num_classes=classes)
    try:
        second_moment = decode(submission.tensors["second_moment"], counts, values)
    except MalformedMessage as error:
        raise Refused("malformed", str(error)) from error
    moments = of_all_classes(int(counts.sum()), labels, counts, values, second_moment, num_classes=classes)
    try:
        require_image_lengths(moments, feature_map)
        require_possible(moments)
    except ProtofleetError as error:
        raise Refused("implausible", str(error)) from error
    return moments


def grouped(
    rows: NDArray[np.integer], labels: NDArray[np.integer], counts: NDArray[np.integer]
) -> Prototypes:
    """Return the means of groups of images, of which a row is as far from its class's mean as one image."""
    values = rows.astype(np.float32)
    weights = counts.astype(np.float32)
    for label in np.unique(labels):
        mine = np.flatnonzero(labels == label)
        blocks = [mine[at : at + BLOCK] for at in range(0, len(mine), BLOCK)]
        mean = (
            np.array([weights[block] @ values[block] for block in blocks]).sum(axis=0) / weights[mine].sum()
        )
        for block in blocks:
            values[block] = mean + (values[block] - mean) / np.sqrt(weights[block])[:, None]
    return Prototypes(values, labels.astype(np.int64), counts.astype(np.int64))
