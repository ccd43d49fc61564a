"""The map of noisy sums: from features to short rows of integers, made of public images only."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.errors import GraphRefused, MalformedMessage
from protocol.statistics.integer_rows import MAX_VALUE
from protocol.wire.arrays import to_array, to_tensor
from protocol.wire.codec import decode, encode
from protocol.wire.messages import MAX_MAPPED_SIZE, Tensors


@dataclass(frozen=True)
class PublicMap:
    """Features f (L,) to rows round(scale P (f - c)) (D,) that are no longer than MAX_VALUE, but for rounding.

    Attributes:
        center: c, float32 (L,): the mean of public features.
        components: P, float32 (D, L): principal components of the deviations of public features, scaled so that most
            rows have the greatest length. Longer rows are shortened, which keeps their direction.
    """

    center: NDArray[np.float32]
    components: NDArray[np.float32]

    @property
    def longest(self) -> float:
        """The greatest length before rounding, which adds 1/12 to each square, on average."""
        return math.sqrt(MAX_VALUE**2 - len(self.components) / 12) - 0.5

    def rows(self, features: NDArray[np.float32]) -> NDArray[np.int8]:
        """Return rows (n, D) of features (n, L), each computed by itself: no image changes another's row."""
        components, center = self.components.astype(np.float64), self.center.astype(np.float64)
        rows = np.empty((len(features), len(components)), np.int8)
        for number, feature in enumerate(features):
            usable = np.nan_to_num(feature.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
            value = components @ (usable - center)
            value *= min(1.0, self.longest / max(float(np.linalg.norm(value)), 1.0))
            rows[number] = np.rint(value)
        return rows

    def to_bytes(self) -> bytes:
        """Return the map as a `tensors` message, the blob that devices download."""
        values = {"center": to_tensor(self.center), "components": to_tensor(self.components)}
        return encode(Tensors(values=values))


def read_map(data: bytes) -> PublicMap:
    """Return the map of a `tensors` message.

    Raises:
        GraphRefused: it is no such message, or its values are not finite.
    """
    try:
        values = {
            name: to_array(each) for name, each in decode(data, Tensors, max_bytes=len(data)).values.items()
        }
    except MalformedMessage as error:
        raise GraphRefused(f"expected a public map, got {error}") from error
    center, components = (values.get(name, np.empty(0)) for name in ("center", "components"))
    is_map = (
        values.keys() == {"center", "components"}
        and center.dtype == components.dtype == np.float32
        and (center.ndim, components.ndim) == (1, 2)
        and components.shape[1:] == center.shape
        and 1 <= len(components) <= MAX_MAPPED_SIZE
        and bool(np.isfinite(center).all() and np.isfinite(components).all())
    )
    if not is_map:
        raise GraphRefused("expected a public map: `center` f4 (L,) and `components` f4 (D, L), all finite")
    return PublicMap(center, components)
