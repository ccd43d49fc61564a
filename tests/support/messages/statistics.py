"""Tasks with statistics, and valid uploads of devices for them."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.algorithms.statistics.moments import moments_of
from aggregator.graphs.head_export import map_to_onnx, mapped
from aggregator.intake.validation import Expectation
from protocol.statistics.second_moment import encode as encode_moment
from protocol.wire.arrays import to_tensor, to_unsigned
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef, Statistics, Submission, TaskManifest
from tests.support.messages.submissions import FEATURE_SIZE, MANIFEST

FEATURE_MAP = FeatureMap(FEATURE_SIZE, 8, seed=0)
_MAP = map_to_onnx(FEATURE_MAP, num_classes=len(MANIFEST.classes))


def manifest_of(*, batch_size: int) -> TaskManifest:
    return msgspec.structs.replace(
        MANIFEST,
        algorithm="statistics",
        alpha=1.0,
        batch_size=batch_size,
        min_images=min(2, batch_size),
        statistics=Statistics(
            map=BlobRef(digest=digest_of(_MAP), size_bytes=len(_MAP), name="map.onnx"), size=FEATURE_MAP.size
        ),
    )


SINGLE, GROUPS = manifest_of(batch_size=1), manifest_of(batch_size=5)
SINGLE_EXPECTATION, GROUPS_EXPECTATION = (
    Expectation(digest_of(encode(manifest)), manifest, FEATURE_MAP.size) for manifest in (SINGLE, GROUPS)
)


def images(seed: int, each: int = 20, *, shift: float = 0.0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return features of so many images of each class around the class's mean, and their classes."""
    means = np.random.default_rng(99).exponential(size=(len(MANIFEST.classes), FEATURE_SIZE)) + shift
    labels = np.repeat(np.arange(len(means)), each)
    noise = np.random.default_rng(seed).normal(0, 0.2, (len(labels), FEATURE_SIZE))
    return np.maximum(means[labels] + noise, 0).astype(np.float32), labels


def sums_of(features: NDArray[np.float32], labels: NDArray[np.int64], *, sequence: int = 1) -> Submission:
    """Return the class sums and the second moment of single images."""
    rows = mapped(FEATURE_MAP, features)
    moments = moments_of(
        rows.astype(np.int8), labels, np.ones(len(labels), np.int64), num_classes=len(SINGLE.classes)
    )
    present = np.flatnonzero(moments.counts)
    sums, counts = moments.sums[present], moments.counts[present]
    return Submission(
        task=SINGLE_EXPECTATION.task,
        sequence=sequence,
        prototypes=to_tensor(sums.astype(np.int32)),
        labels=to_unsigned(present),
        counts=to_unsigned(counts),
        images=len(labels),
        tensors={"second_moment": encode_moment(moments.second_moment, counts, sums)},
    )


def groups_of(features: NDArray[np.float32], labels: NDArray[np.int64], *, sequence: int = 1) -> Submission:
    """Return a row for every five images, sorted by class."""
    rows = mapped(FEATURE_MAP, features)
    means = np.array([rows[labels == label].mean(axis=0) for label in labels[::5]])
    restored = means + np.sqrt(5) * (rows.reshape(-1, 5, rows.shape[1]).mean(axis=1) - means)
    return Submission(
        task=GROUPS_EXPECTATION.task,
        sequence=sequence,
        prototypes=to_tensor(np.clip(np.rint(restored), -127, 127).astype(np.int8)),
        labels=to_unsigned(labels[::5]),
        counts=to_unsigned(np.full(len(restored), 5)),
        images=len(labels),
    )
