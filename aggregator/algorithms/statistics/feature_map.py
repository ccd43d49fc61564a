"""The map from a backbone's features to the rows whose sums devices upload: integers, the same on every machine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta, UnsetType
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import OneShot
from protocol.errors import ConfigError
from protocol.statistics.integer_rows import MAX_VALUE
from protocol.wire.messages import MAX_MAPPED_SIZE

LEVELS = 8
"""Integers for one standard deviation of a value."""

FINE_LEVELS = 32
"""The same of normalized features: hidden layers lose 0.7 points by eighths (Fashion-MNIST, 60,000 images)."""

MIN_LENGTH = 1e-12

ROUNDED = 0.5
"""Most that rounding adds to a value."""

SINGULAR_SLACK = 1.2
"""Times sqrt(L) + sqrt(F) that the largest singular value of R is at most, with room for small matrices."""

BLOCK = 1024
"""Rows that are converted to floating point at once: a submission may hold ten thousands."""

GROUP_LENGTH = 1.5
"""Times the length of the longest image's row that a group's row counts at most."""

_ROOTS = (
    "magnitudes = Abs({feature})",
    "roots = Sqrt(magnitudes)",
    "signs = Sign({feature})",
    "signed_roots = Mul(signs, roots)",
    "row_mean = ReduceMean<keepdims=1>(signed_roots, map_axes)",
    "centered = Sub(signed_roots, row_mean)",
    "row_length = ReduceL2<keepdims=1>(centered, map_axes)",
    "row_divisor = Max(row_length, map_min_length)",
    "row_unit = Div(centered, row_divisor)",
    "row_scaled = Mul(row_unit, map_scale)",
)

_NORMALIZED = ("row_scaled = Mul({feature}, map_scale)",)

_RANDOM = (
    "identity_row = Clip(row_rounded, map_smallest, map_largest)",
    "map_directions = Cast<to=1>(map_signs)",
    "random_row = MatMul(identity_row, map_directions)",
    "positive_row = Relu(random_row)",
    "shrunk_row = Div(positive_row, map_divisor)",
    "shrunk_rounded = Round(shrunk_row)",
    "relu_row = Min(shrunk_rounded, map_largest)",
    "projection = Concat<axis=1>(identity_row, relu_row)",
)


Nodes = tuple[list[str], dict[str, NDArray[np.generic]]]
"""The nodes of an ONNX graph, `feature` to `projection`, and its constants."""


def selected(columns: Sequence[tuple[int, int]] | UnsetType, feature_size: int) -> NDArray[np.intp]:
    """Return the columns in these ranges, start and end; all of `feature_size` without ranges."""
    return np.concatenate([np.arange(*each) for each in columns or [(0, feature_size)]])


@dataclass(frozen=True)
class FeatureMap:
    """Features (n, L) to rows (n, L + F): normalized square roots, and random ReLU features of these.

    The signed square roots of an image's features get the mean 0 and the variance 1, which bounds them whatever the
    backbone, and are rounded to eighths. Features that a backbone has normalized in this way, block by block, are
    rounded to thirty-seconds. Beside them are F values relu(row R) / sqrt(L), with R of random signs, as in
    RanPAC (McDonnell et al., NeurIPS 2023, eq. 6), but with integers: their products are exact in float32.

    Attributes:
        feature_size: L, before the selection.
        random_features: F; 0 for none.
        seed: of R.
        columns: the ranges of features that are used, start and end; empty for all.
        normalized: True if the backbones normalize their features.
    """

    feature_size: int
    random_features: int
    seed: int
    columns: tuple[tuple[int, int], ...] = ()
    normalized: bool = False

    @property
    def selected(self) -> int:
        """The number of features that are used."""
        return len(selected(self.columns, self.feature_size))

    @property
    def size(self) -> int:
        """The length of a row."""
        return self.selected + self.random_features

    def check_size(self) -> None:
        """Raise ConfigError if its rows are too long."""
        if self.size > MAX_MAPPED_SIZE:
            raise ConfigError(
                f"{self.selected} features of the backbones and {self.random_features} random ones are more than "
                f"{MAX_MAPPED_SIZE}: lower statistics.features, or use fewer backbones or layers"
            )

    @cached_property
    def signs(self) -> NDArray[np.int8]:
        """R, (L, F), of -1 and 1."""
        bits = np.random.default_rng(self.seed).integers(0, 2, (self.selected, self.random_features), np.int8)
        return 2 * bits - 1

    @property
    def longest(self) -> tuple[tuple[slice, float], ...]:
        """The parts of a row, identity and random features, each with the length that no image's is above."""
        root, value = math.sqrt(self.selected), self._levels + ROUNDED
        identity = (slice(self.selected), value * root)
        if not self.random_features:
            return (identity,)
        random_root = math.sqrt(self.random_features)
        relu = value * SINGULAR_SLACK * (root + random_root) + ROUNDED * random_root
        return identity, (slice(self.selected, None), relu)

    def nodes(self) -> Nodes:
        constants: dict[str, NDArray[np.generic]] = {
            "map_smallest": np.array(-MAX_VALUE, np.float32),
            "map_largest": np.array(MAX_VALUE, np.float32),
        }
        nodes, feature = [], "feature"
        if self.columns:
            constants["map_columns"] = selected(self.columns, self.feature_size)
            nodes, feature = ["selected = Gather<axis=1>(feature, map_columns)"], "selected"
        if self.normalized:
            constants["map_scale"] = np.array(self._levels, np.float32)
        else:
            # The factor that brings a row of unit length to integers of variance LEVELS squared.
            constants |= {
                "map_axes": np.array([1]),
                "map_min_length": np.array(MIN_LENGTH, np.float32),
                "map_scale": np.array(np.float32(LEVELS * np.sqrt(self.selected))),
            }
        scaled = _NORMALIZED if self.normalized else _ROOTS
        nodes += [*(node.format(feature=feature) for node in scaled), "row_rounded = Round(row_scaled)"]
        if not self.random_features:
            return [*nodes, "projection = Clip(row_rounded, map_smallest, map_largest)"], constants
        constants |= {"map_signs": self.signs, "map_divisor": np.array(np.float32(np.sqrt(self.selected)))}
        return [*nodes, *_RANDOM], constants

    @property
    def _levels(self) -> int:
        return FINE_LEVELS if self.normalized else LEVELS


def shortened(rows: NDArray[np.integer], feature_map: FeatureMap) -> NDArray[np.int8]:
    """Return rows of groups (n, D), of which none is longer than GROUP_LENGTH times an image's.

    A row is as far from its class's mean as one image if the images of its group are independent. Those of others
    are longer, and a device could make them as long as their integers allow.
    """
    short = np.array(rows, np.int8)
    for at in range(0, len(rows), BLOCK):
        block = rows[at : at + BLOCK].astype(np.float64)
        for part, longest in feature_map.longest:
            length = np.linalg.norm(block[:, part], axis=1, keepdims=True)
            block[:, part] *= np.minimum(1.0, GROUP_LENGTH * longest / np.maximum(length, longest))
        short[at : at + BLOCK] = np.rint(block)
    return short


class Statistics(OneShot, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[statistics]`: the features whose sums devices upload."""

    name: ClassVar[str] = "statistics"
    unused: ClassVar[frozenset[tuple[str, ...]]] = OneShot.unused | {
        ("training", name) for name in ("recipe", "restore", "epochs", "device", "seed", "gpus")
    }
    sums: ClassVar[bool] = True

    features: Annotated[int, Meta(ge=0, le=MAX_MAPPED_SIZE)] = 1024
    """Random features beside those of the backbones, at most 4096 together."""

    def feature_map(
        self, feature_size: int, *, seed: int, columns: tuple[tuple[int, int], ...], normalized: bool
    ) -> FeatureMap:
        return FeatureMap(feature_size, self.features, seed, columns, normalized)
