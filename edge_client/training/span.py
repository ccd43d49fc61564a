"""Training in the span of the data: with n images, a layer's gradients lie in the span of n features.

A layer W (D, L) that is trained on features X (n, L), n < L, moves by combinations of rows of X, and by multiples of
what it started from, as weight decay does. So the step runs on n + k coordinates instead of L: those in an orthonormal
basis Q of the rows of X, and for each row of W one for what lies outside of it (k, if W has k - 1 momenta that are not
zero). Features have zeros there.

The basis is never computed. X X^T + ridge = C C^T (Cholesky) gives the features' coordinates C = X Q^T and those of
a layer, W X^T C^-T. The ridge, of 1e-9 of the features' mean square length, stands for an axis of each image's own, so
that images may be equal; it changes an inner product by less than float32 resolves.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_client.runtime.onnx_model import Slot, Tensors, fit
from protocol.errors import GraphRefused
from protocol.models.onnx_metadata import Basis

MAX_IMAGES = 2048
"""Above, the matrices (n, n) are too large for a small device, and there is little to gain."""

RIDGE = 1e-9

_BLOCK = 512
"""Features standardized at once: no second copy of them is made."""

_Double = NDArray[np.float64]


def is_worthwhile(
    *, images: int, feature_size: int, rows: int, steps: int, batch_size: int, kept: int
) -> bool:
    """Return whether `steps` steps in the span save clearly more than the way there and back costs.

    `rows` is D, and `kept` the number of tensors that come back. The costs are multiplications for each value of the
    layer; passing over it counts as 100 of them. They depend on nothing that a restart changes.
    """
    if not 0 < images < feature_size or images > MAX_IMAGES:
        return False
    saved = steps * (2 * min(batch_size, images) + 200) * (1 - images / feature_size)
    products = kept * (2 * images + 200) + 2 * images**2 / rows
    inverse = 2 * images**3 / (feature_size * rows)
    return saved > 1.5 * (products + inverse)


@dataclass(frozen=True)
class _Group:
    """Tensors of the same rows, such as a layer and its momenta."""

    names: tuple[str, ...]
    """Those that are not zero at the start: what the others become is a combination of them."""
    factor: _Double
    """(rows, k, k): the coordinates outside of the features' span, by row, of each of the names."""
    inverse: _Double
    """Its inverse, (rows, k, k)."""


class Span:
    """The coordinates of features, and of the tensors of a step, at the start of a training."""

    def __init__(self, feature: NDArray[np.float32], start: Tensors, basis: Basis) -> None:
        """Compute the coordinates of `start`, the state and the round's tensors, whose arrays must not change.

        Raises:
            GraphRefused: a tensor is missing, or has another length than the features.
            np.linalg.LinAlgError: the values are too large, or not finite.
        """
        self._feature = feature
        length = feature.shape[1]
        self._mean, self._deviation = (
            fit(name, _named(start, name), Slot(np.dtype(np.float32), (length,)))
            for name in (basis.mean, basis.deviation)
        )
        self._shapes = {name: _named(start, name).shape for name in (*basis.tensors, *basis.momenta)}
        self._tensors = {
            name: fit(name, start[name], Slot(np.dtype(np.float32), (*shape[:-1], length))).reshape(
                -1, length
            )
            for name, shape in self._shapes.items()
        }
        alike: dict[tuple[int, ...], list[str]] = {}
        for name, shape in self._shapes.items():
            alike.setdefault(shape[:-1], []).append(name)
        moving = [
            (tuple(names), tuple(name for name in names if self._tensors[name].any()))
            for names in alike.values()
        ]
        images, self._outside = len(feature), max(len(names) for _, names in moving)
        gram, products, inner = self._products([names for _, names in moving])
        lower = np.linalg.cholesky(gram + RIDGE * (np.trace(gram) / images or 1.0) * np.eye(images))
        self._inverse = np.linalg.inv(lower)
        inside = {name: product @ self._inverse.T for name, product in products.items()}
        self._groups: dict[str, _Group] = {}
        self._first: dict[str, NDArray[np.float32]] = {}
        for (names, nonzero), whole in zip(moving, inner, strict=True):
            group = _outside(nonzero, whole, [inside[name] for name in nonzero])
            for name in names:
                self._groups[name] = group
                self._first[name] = self._coordinates(name, inside.get(name), group)
        self.feature = np.zeros((images, images + self._outside), np.float32)
        """The coordinates of the standardized features, (n, r)."""
        self.feature[:, :images] = lower
        self.constants = {
            basis.mean: np.zeros(images + self._outside, np.float32),
            basis.deviation: np.ones(images + self._outside, np.float32),
        }
        """The mean and the deviation of the coordinates, by name."""
        if not all(np.isfinite(array).all() for array in (self.feature, *self._first.values())):
            raise np.linalg.LinAlgError("coordinates are not finite")

    @property
    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """The coordinates of the tensors, (..., r)."""
        size = len(self.feature) + self._outside
        return {name: array.reshape(*self._shapes[name][:-1], size) for name, array in self._first.items()}

    def restored(self, coordinates: Tensors) -> dict[str, NDArray[np.float32]]:
        """Return tensors in all features, (..., L), by their coordinates after some steps."""
        images = len(self.feature)
        made = {}
        for name, array in coordinates.items():
            values = array.reshape(-1, images + self._outside).astype(np.float64)
            group = self._groups[name]
            outside = values[:, images : images + len(group.names)]
            kept = np.einsum("rk,rkj->rj", outside, group.inverse) if group.names else outside
            moved = values[:, :images]
            for number, first in enumerate(group.names):
                moved = moved - kept[:, number, None] * self._first[first][:, :images]
            made[name] = self._combined(
                group.names, kept.astype(np.float32), (moved @ self._inverse).astype(np.float32)
            )
        return {name: array.reshape(self._shapes[name]) for name, array in made.items()}

    def _combined(
        self, names: Sequence[str], kept: NDArray[np.float32], moved: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return a combination of the tensors at the start, (rows, k), and of the features, (rows, n)."""
        made = np.empty((len(moved), self._feature.shape[1]), np.float32)
        for part, rows in self._blocks():
            made[:, part] = moved @ rows
            for number, name in enumerate(names):
                made[:, part] += kept[:, number, None] * self._tensors[name][:, part]
        return made

    def _blocks(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """Yield the standardized features block by block."""
        for at in range(0, self._feature.shape[1], _BLOCK):
            part = slice(at, at + _BLOCK)
            with np.errstate(all="ignore"):
                yield part, (self._feature[:, part] - self._mean[part]) / self._deviation[part]

    def _products(self, groups: Sequence[Sequence[str]]) -> tuple[_Double, dict[str, _Double], list[_Double]]:
        """Return inner products: of images (n, n), of rows with images (rows, n), and with each other (rows, k, k)."""
        images = len(self._feature)
        gram = np.zeros((images, images))
        products = {name: np.zeros((len(self._tensors[name]), images)) for group in groups for name in group}
        inner = [
            np.zeros((len(self._tensors[group[0]]) if group else 0, len(group), len(group)))
            for group in groups
        ]
        with np.errstate(all="ignore"):
            for part, rows in self._blocks():
                double = rows.astype(np.float64)
                gram += double @ double.T
                for name in products:
                    products[name] += self._tensors[name][:, part] @ rows.T
                for group, whole in zip(groups, inner, strict=True):
                    stack = [self._tensors[name][:, part] for name in group]
                    for i, one in enumerate(stack):
                        for j, other in enumerate(stack):
                            whole[:, i, j] += np.einsum("rl,rl->r", one, other)
        if not all(np.isfinite(array).all() for array in (gram, *products.values(), *inner)):
            raise np.linalg.LinAlgError("inner products are not finite")
        return gram, products, inner

    def _coordinates(self, name: str, inside: _Double | None, group: _Group) -> NDArray[np.float32]:
        images = len(self._feature)
        made = np.zeros((len(self._tensors[name]), images + self._outside), np.float32)
        if inside is not None:
            made[:, :images] = inside
            made[:, images : images + len(group.names)] = group.factor[:, group.names.index(name)]
        return made


def _outside(names: tuple[str, ...], whole: _Double, inside: Sequence[_Double]) -> _Group:
    """Return coordinates of what lies outside of the features' span, from inner products and coordinates inside."""
    if not names:
        return _Group(names, whole, whole)
    rest = whole - np.einsum("irn,jrn->rij", inside, inside)
    lengths, axes = np.linalg.eigh(rest)
    # What is nothing but rounding gets a length of its own: only the ratio to it is used.
    least = 1e-12 * np.einsum("rkk->r", whole)[:, None] + np.finfo(np.float32).tiny
    scale = np.sqrt(np.maximum(lengths, least))
    return _Group(names, axes * scale[:, None], axes.transpose(0, 2, 1) / scale[:, :, None])


def _named(tensors: Mapping[str, NDArray[np.generic]], name: str) -> NDArray[np.generic]:
    if name not in tensors:
        raise GraphRefused(f"the step graph names {name}; there are {', '.join(tensors) or 'no tensors'}")
    return tensors[name]
