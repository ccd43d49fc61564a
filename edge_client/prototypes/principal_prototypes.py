"""Principal prototypes: class means, and the strongest directions of the scatter within classes. Pure.

The images of a **block** are summed up by linear combinations: the indicator of each class, and k rows of coefficients
that are fixed when the block is made. The rows serve every later backbone and layer, so that what is released of a
block is always in the same linear span of its images. Of every combination in it, an image has at most 1 / `batch_size`
of the squared coefficients, as with means of `batch_size` images (`edge_client.privacy.image_blocks` has the proof).
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.wire.principal_prototypes import IMAGES_PER_ROW, PrincipalPrototypes

FIRST_IMAGES = 200
"""Images of a block of which each IMAGES_PER_ROW have a row; of the others, twice as many."""

VALUES_PER_ROW = 6
"""Values of a feature for each row, at least."""

MOST_FEATURE_VALUES = 10_000_000
"""Values of a block's features, about, which are in memory together: of more images, several blocks are made."""

ROUNDS = 40
"""Times that deviations are shortened, at most."""

MARGIN = 0.95
"""Share of its limit that an image is shortened to."""

RANK_TOLERANCE = 1e-6
"""Least eigenvalue of a row, relative to the largest one: less is rounding of float32."""

SPAN_TOLERANCE = 1e-12
"""Least squared length of a direction in a span, relative to the largest one: less is rounding of float64."""

IMAGES = 1024
"""Images that are computed with at once."""


def most_rows(images: int, size: int) -> int:
    """Return the rows of a block of so many images whose features have `size` values."""
    first = min(images, FIRST_IMAGES)
    return min(first // IMAGES_PER_ROW + (images - first) // (2 * IMAGES_PER_ROW), size // VALUES_PER_ROW)


def coefficients(
    features: NDArray[np.float32],
    labels: NDArray[np.integer],
    groups: NDArray[np.integer],
    *,
    batch_size: int,
    widths: Sequence[int] = (),
) -> NDArray[np.float16] | None:
    """Return the rows' coefficients on a block's images, (k, n); None if the features have fewer than k directions.

    They are the strongest eigenvectors of the scatter within classes. An image whose share would exceed the limit has
    its deviation shortened before (at most ROUNDS times), and None is returned if that is not enough. The features are
    overwritten, as nothing else takes memory in proportion to them.

    Args:
        features: (n, L), of all layers that the backbones give.
        labels: (n,), the class of each image, from 0.
        groups: (n,), the group of each image, from 0; all images of a group are of one class.
        batch_size: the least number of images that a share is of, at most that of the smallest group.
        widths: the number of values of each layer; each is brought to the same scatter. Empty for one.
    """
    means, squares = _means(features, labels), np.zeros(features.shape[1])
    for part in _parts(len(features)):
        features[part] -= means[labels[part]]
        squares += (features[part] ** 2).sum(axis=0, dtype=np.float64)
    starts = np.cumsum([0, *widths[:-1]])
    traces = np.repeat(np.add.reduceat(squares, starts), widths or [features.shape[1]])
    features /= np.sqrt(np.where(traces > 0, traces, 1)).astype(np.float32)
    rows = most_rows(*features.shape)
    limits = _limits(labels, batch_size)
    factors = np.ones(len(features), np.float32)
    for _ in range(ROUNDS):
        found = _strongest(features, factors, rows)
        if found is None:
            return None
        shares = np.stack([share(found, labels), share(found, groups)])
        excess = shares - limits
        if (excess <= 0).all():
            return found
        wanted = np.sqrt(MARGIN * np.divide(limits, shares, out=np.ones_like(shares), where=excess > 0))
        shortest = np.where(excess > 0, wanted, 1).min(axis=0)
        factors *= shortest.astype(np.float32)
    return None


def rows_within(coefficients: NDArray[np.float16], labels: NDArray[np.integer], *, batch_size: int) -> int:
    """Return how many of the first rows keep each image's share at 1 / `batch_size`, the least images of a class."""
    limits = _limits(labels, batch_size)[0]
    low, high = 0, len(coefficients)
    while low < high:  # the share grows with the rows
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if (share(coefficients[:middle], labels) <= limits).all() else (low, middle - 1)
        )
    return low


def share(coefficients: NDArray[np.float16], numbers: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the largest squared share (n,) that each image has of a combination of rows (k, n) less their means.

    Rows are orthonormalized after the mean over the images of each number was subtracted.
    """
    means = _means(coefficients.T, numbers)

    def centered() -> Iterator[tuple[slice, NDArray[np.float64]]]:
        for block in _parts(len(numbers)):
            yield block, coefficients[:, block].T.astype(np.float64) - means[numbers[block]]

    products = np.zeros((len(coefficients), len(coefficients)))
    for _, rows in centered():
        products += rows.T @ rows
    squares, axes = np.linalg.eigh(products)
    axes = axes[:, squares > SPAN_TOLERANCE * squares.max(initial=0)]
    axes /= np.sqrt((axes * (products @ axes)).sum(axis=0))
    shares = np.empty(len(numbers))
    for block, rows in centered():
        shares[block] = ((rows @ axes) ** 2).sum(axis=1)
    return shares


def basis(coefficients: NDArray[np.float16], numbers: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return orthonormal rows (at most k, n) of the span of rows (k, n) less their means over each number."""
    rows = coefficients.astype(np.float64)
    rows -= _means(rows.T, numbers).T[:, numbers]
    return _orthonormal(rows)


def share_of_new(
    vectors: NDArray[np.float64], axes: NDArray[np.float64], numbers: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Return what new vectors (m, n) add to each image's share, (n,).

    The share is that of combinations of rows with the basis `axes`, and of the sums over the images of each number.
    """
    new = vectors - _means(vectors.T, numbers).T[:, numbers]
    new -= (new @ axes.T) @ axes
    return np.asarray((_orthonormal(new) ** 2).sum(axis=0))


def principal_prototypes(
    features: NDArray[np.float32], labels: NDArray[np.integer], coefficients: NDArray[np.float16]
) -> PrincipalPrototypes:
    """Return the principal prototypes of a block's images.

    Args:
        features: (n, L), of the task's layers.
        labels: (n,), the class of each image in the task.
        coefficients: (k, n), of the first rows of the block.
    """
    classes, numbers = np.unique(labels, return_inverse=True)
    means = _means(features, numbers)
    rows = np.zeros((len(coefficients), features.shape[1]))
    squares = np.zeros(features.shape[1])
    for part in _parts(len(features)):
        deviations = features[part] - means[numbers[part]]
        rows += coefficients[:, part].astype(np.float64) @ deviations
        squares += (deviations**2).sum(axis=0)
    return PrincipalPrototypes(
        means=means.astype(np.float32),
        labels=classes.astype(np.int64),
        counts=np.bincount(numbers).astype(np.int64),
        rows=rows.astype(np.float32),
        diagonal=np.maximum(squares - (rows**2).sum(axis=0), 0).astype(np.float32),
    )


def _orthonormal(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return orthonormal rows (at most k, n) of the span of rows (k, n)."""
    _, sizes, axes = np.linalg.svd(rows, full_matrices=False)
    return np.asarray(axes[sizes**2 > SPAN_TOLERANCE * (sizes**2).max(initial=0)])


def _limits(labels: NDArray[np.integer], batch_size: int) -> NDArray[np.float64]:
    """Return the largest shares of rows less their class means, and less their group means, (2, n)."""
    of_class = np.bincount(labels)[labels]
    return np.stack([1 / batch_size - 1 / of_class, np.full(len(labels), 1 / batch_size)])


def _strongest(
    deviations: NDArray[np.float32], factors: NDArray[np.float32], rows: int
) -> NDArray[np.float16] | None:
    """Return the coefficients (k, n) of the strongest directions of deviations (n, L) times factors (n,)."""
    images, size = deviations.shape
    if images <= size:
        products = (deviations @ deviations.T) * np.outer(factors, factors)
    else:
        products = np.zeros((size, size), np.float32)
        for part in _parts(images):
            shortened = deviations[part] * factors[part, None]
            products += shortened.T @ shortened
    squares, vectors = np.linalg.eigh(products)
    if rows == 0 or squares[-rows] <= RANK_TOLERANCE * squares[-1]:
        return None
    strongest = slice(-1, -rows - 1, -1)
    if images <= size:
        return np.asarray(vectors[:, strongest].T, np.float16)
    axes = vectors[:, strongest] / np.sqrt(squares[strongest])
    found = np.empty((rows, images), np.float16)
    for part in _parts(images):
        found[:, part] = ((deviations[part] * factors[part, None]) @ axes).T
    return found


def _means(rows: NDArray[np.floating], numbers: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the mean of the rows (n, L) of each number, (max + 1, L)."""
    counts = np.bincount(numbers)
    sums = np.zeros((len(counts), rows.shape[1]))
    for part in _parts(len(rows)):
        np.add.at(sums, numbers[part], rows[part].astype(np.float64))
    return sums / np.maximum(counts, 1)[:, None]


def _parts(images: int) -> list[slice]:
    """Return parts of the images that are computed with at once."""
    return [slice(start, start + IMAGES) for start in range(0, images, IMAGES)]
