"""The map from a backbone's features to the rows whose sums devices upload: integers, the same on every machine."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from protocol.statistics.second_moment import MAX_VALUE

LEVELS = 8
"""Integers for one standard deviation of a value."""

MIN_LENGTH = 1e-12

_IDENTITY = (
    "magnitudes = Abs(feature)",
    "roots = Sqrt(magnitudes)",
    "signs = Sign(feature)",
    "signed_roots = Mul(signs, roots)",
    "row_mean = ReduceMean<keepdims=1>(signed_roots, map_axes)",
    "centered = Sub(signed_roots, row_mean)",
    "row_length = ReduceL2<keepdims=1>(centered, map_axes)",
    "row_divisor = Max(row_length, map_min_length)",
    "row_unit = Div(centered, row_divisor)",
    "row_scaled = Mul(row_unit, map_scale)",
    "row_rounded = Round(row_scaled)",
)

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


@dataclass(frozen=True)
class FeatureMap:
    """Features (n, L) to rows (n, L + F): normalized square roots, and random ReLU features of these.

    The signed square roots of an image's features get the mean 0 and the variance 1, which bounds them whatever the
    backbone, and are rounded to eighths. Beside them are F values relu(row R) / sqrt(L), with R of random signs, as in
    RanPAC (McDonnell et al., NeurIPS 2023, eq. 6), but with integers: their products are exact in float32.

    Attributes:
        feature_size: L.
        random_features: F; 0 for none.
        seed: of R.
    """

    feature_size: int
    random_features: int
    seed: int

    @property
    def size(self) -> int:
        """The length of a row."""
        return self.feature_size + self.random_features

    @cached_property
    def signs(self) -> NDArray[np.int8]:
        """R, (L, F), of -1 and 1."""
        bits = np.random.default_rng(self.seed).integers(
            0, 2, (self.feature_size, self.random_features), np.int8
        )
        return 2 * bits - 1

    def nodes(self) -> tuple[list[str], dict[str, NDArray[np.generic]]]:
        """Return the nodes of the ONNX graph, `feature` to `projection`, and its constants."""
        constants: dict[str, NDArray[np.generic]] = {
            "map_axes": np.array([1]),
            "map_min_length": np.array(MIN_LENGTH, np.float32),
            "map_scale": np.array(self._scale),
            "map_smallest": np.array(-MAX_VALUE, np.float32),
            "map_largest": np.array(MAX_VALUE, np.float32),
        }
        if not self.random_features:
            return [*_IDENTITY, "projection = Clip(row_rounded, map_smallest, map_largest)"], constants
        constants |= {"map_signs": self.signs, "map_divisor": np.array(self._divisor)}
        return [*_IDENTITY, *_RANDOM], constants

    @property
    def _scale(self) -> np.float32:
        """Of a row of unit length, to integers of variance LEVELS squared."""
        return np.float32(LEVELS * np.sqrt(self.feature_size))

    @property
    def _divisor(self) -> np.float32:
        return np.float32(np.sqrt(self.feature_size))
