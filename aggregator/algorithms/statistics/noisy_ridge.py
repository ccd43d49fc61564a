"""Ridge regression from sums with noise, whose scatter is not that of any rows, and the map of their rows."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import ABSENT_LOGIT
from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.statistics.feature_map import Nodes
from aggregator.algorithms.statistics.ridge import TEMPERATURE
from protocol.errors import ProtofleetError
from protocol.statistics.integer_rows import MAX_VALUE
from protocol.statistics.noisy_sums import UNITS, deviations
from protocol.statistics.public_map import PublicMap
from protocol.statistics.second_moment import from_triangle

MIN_VARIANCE = 1e-9
"""Of a component, relative to the first one's."""

CLIP_QUANTILE = 0.1
"""Of the lengths of public rows, the one that longer rows are shortened to."""


@dataclass(frozen=True, kw_only=True)
class NoisyTotal:
    """The sum of the releases of several devices, each with noise of its own.

    Attributes:
        counts: int64 (C,), images in units of 1/64.
        sums: int64 (C, D), in units of 1/64.
        second_moment: int64 (D (D + 1) / 2,), the upper triangle by rows.
        noise_multiplier: of all the noise together: sqrt(K) times that of each of K devices.
    """

    counts: NDArray[np.int64]
    sums: NDArray[np.int64]
    second_moment: NDArray[np.int64]
    noise_multiplier: float


def solve_noisy(total: NoisyTotal) -> tuple[Dense, float]:
    """Return the layer from rows (n, D) to logits (n, C), and its ridge.

    The regression in which all classes count alike (`ridge.solve`). With r = n sqrt(D), n being the standard deviation
    of the products' noise, the eigenvalues of the noise lie within 2 r: those of the scatter within classes become
    sqrt(l^2 - 4 r^2), and 0 up to 2 r, which is the nearest to the scatter without noise (Nadakuditi 2014, OptShrink).
    The ridge is r, chosen on validation images of CIFAR-10. A class with fewer images than their standard deviation is
    absent.

    Raises:
        ProtofleetError: fewer than two classes stand out from the noise.
    """
    scale = deviations(total.noise_multiplier)
    every_image, deviation = images_of(total)
    present = every_image > deviation
    if np.count_nonzero(present) < min(2, len(present)):
        least = math.ceil(deviation)
        raise ProtofleetError(
            f"the noise is as large as the sums: more than {least} images of a class are needed, a larger epsilon, "
            "or a smaller images_per_person"
        )
    images = every_image[present][:, None]
    means = total.sums[present] / UNITS / images
    classes, size = means.shape
    scatter = from_triangle(total.second_moment, size) - (means * images).T @ means
    squares, axes = np.linalg.eigh(scatter)
    ridge = scale["products"] * math.sqrt(size)
    shrunk = np.sqrt(np.maximum(np.sign(squares) * squares**2 - 4 * ridge**2, 0))
    middle, each = means.mean(axis=0), float(images.sum()) / classes
    directions = (means - middle) @ axes
    divided = (directions / (shrunk + ridge)).T
    weight = axes @ divided @ np.linalg.inv(np.eye(classes) + each * directions @ divided) * each
    every_weight = np.zeros((len(present), size))
    every_bias = np.full(len(present), ABSENT_LOGIT)
    every_weight[present] = weight.T / TEMPERATURE
    every_bias[present] = (1 / classes - middle @ weight) / TEMPERATURE
    return Dense(every_weight.astype(np.float32), every_bias.astype(np.float32)), ridge


def images_of(total: NoisyTotal) -> tuple[NDArray[np.float64], float]:
    """Return the images of each class (C,), by noisy counts and class sums together, and their standard deviation.

    Rows of a fleet have much in common, as the public center is another than theirs. So a class's sum along the mean of
    all rows, divided by its length, is about the number of its images, with less noise than its count. How much classes
    differ along that mean is what the two estimates differ by, beside their noise. Both have weights by variance.
    """
    scale, counts = deviations(total.noise_multiplier), total.counts / UNITS
    sums, images = total.sums / UNITS, max(float(counts.sum()), 1.0)
    noise = scale["sums"] / UNITS
    mean = sums.sum(axis=0) / images
    of_noise = len(mean) * len(counts) * (noise / images) ** 2
    square = float(mean @ mean) - of_noise
    if square <= of_noise:
        return counts, scale["counts"] / UNITS
    along = sums @ mean / float(np.linalg.norm(mean)) / math.sqrt(square)
    of_count, of_sum = (scale["counts"] / UNITS) ** 2, noise**2 / square
    of_sum += max(float(np.mean((along - counts) ** 2)) - of_count - of_sum, 0.0)
    return (along * of_count + counts * of_sum) / (of_count + of_sum), math.sqrt(
        of_count * of_sum / (of_count + of_sum)
    )


@dataclass(frozen=True)
class Shortening:
    """Features (n, L) less the public center, shortened as rows are: what the layer of `of_features` takes.

    The length of a row is taken to be that of the feature, as if the components missed no direction.
    """

    public: PublicMap

    random_features: ClassVar[int] = 0

    @property
    def feature_size(self) -> int:
        return len(self.public.center)

    size = feature_size

    def nodes(self) -> Nodes:
        """Return the nodes of an ONNX graph, `feature` to `projection`, and its constants."""
        scale = np.linalg.norm(self.public.components[0]) / self.public.longest
        constants: dict[str, NDArray[np.generic]] = {
            "map_center": self.public.center,
            "map_scale": np.array(scale, np.float32),
            "map_axes": np.array([1]),
            "map_whole": np.array(1, np.float32),
        }
        return [
            "row_centered = Sub(feature, map_center)",
            "row_length = ReduceL2<keepdims=1>(row_centered, map_axes)",
            "row_scaled = Mul(row_length, map_scale)",
            "row_divisor = Max(row_scaled, map_whole)",
            "projection = Div(row_centered, row_divisor)",
        ], constants


def of_features(layer: Dense, public: PublicMap) -> Dense:
    """Return a layer of rows as one of shortened features (n, L)."""
    return Dense((layer.weight @ public.components).astype(np.float32), layer.bias)


def make_public_map(features: NDArray[np.float32], size: int) -> PublicMap:
    """Return the map of the `size` principal components of public features (n, L).

    Raises:
        ProtofleetError: the features vary in fewer directions.
    """
    center = features.mean(axis=0, dtype=np.float64)
    deviations_of = features - center
    squares, axes = np.linalg.eigh(deviations_of.T @ deviations_of)
    usable = int(np.count_nonzero(squares > MIN_VARIANCE * squares[-1]))
    if not 1 <= size <= usable:
        raise ProtofleetError(
            f"expected 1 to {usable} components of these {len(features)} images, got {size}: "
            "take fewer components, or more public images"
        )
    components = axes[:, : -size - 1 : -1].T
    lengths = np.linalg.norm(deviations_of @ components.T, axis=1)
    components = components * (MAX_VALUE / float(np.quantile(lengths, CLIP_QUANTILE)))
    return PublicMap(center.astype(np.float32), components.astype(np.float32))
