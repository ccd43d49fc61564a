"""The span attack on everything that a device releases of a block: additions, other layers, and a dissolved block."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_client.prototypes.principal_prototypes import share
from research.privacy.blocks.membership import span_shares
from research.privacy.blocks.uploads import Pool, Upload, draw_rows, upload
from research.privacy.leakage import CANDIDATES

ADDED = 60
"""Images that a device adds after its first upload, or that leave it: enough for a block of their own."""

LEAST_DEVICES = 3

AGAIN = "not done: made again without images"


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """Success of the span attack on what was released."""

    released: str
    images: int
    first: float
    """Share of the images that have the largest share in the span among CANDIDATES of their class."""
    leverage: float
    """The largest share that an image has of a combination of what was released, exactly; NaN where not computed."""


def measure(pool: Pool, *, images: int, classes: int, members: int, seed: int) -> Iterator[Exposed]:
    """Attack devices that upload once, add images, change layers, dissolve their block, or make it again.

    The pool's first layers are asked for first, and all of them later. A device never makes a block again: this shows
    what it would reveal of the images that left.
    """
    rng = np.random.default_rng([seed, images])
    first, everything = slice(0, sum(pool.widths[:-1]) or None), slice(None)
    hits: dict[str, list[NDArray[np.bool_]]] = {}
    leverage: dict[str, float] = {}
    for _ in range(max(LEAST_DEVICES, members // images)):
        mine, others = draw_rows(pool, images=images + ADDED, classes=classes, rng=rng)
        of_class = [mine[pool.labels[mine] == label] for label in np.unique(pool.labels[mine])]
        new = np.concatenate([rows[: ADDED // classes] for rows in of_class])
        made = [upload(pool, rows, rng=rng) for rows in (np.setdiff1d(mine, new), new, mine)]
        if any(each is None for each in made):
            continue
        one, added, again = (each for each in made if each is not None)
        two = [one.block.rows, added.block.rows, _between(one, added)]
        for name, attacked, about, vectors, columns, exact in (
            ("one block", one.rows, one, [one.block.rows], first, _leverage(one)),
            ("and added images", one.rows, one, two, first, _leverage(one)),
            ("and in other layers", one.rows, one, two, everything, _leverage(one)),
            (
                "dissolved",
                one.rows,
                one,
                [one.block.rows, _batches(one)],
                first,
                _leverage(one, dissolved=True),
            ),
            (AGAIN, new, again, [again.block.rows, one.block.rows, _between(again, one)], first, np.nan),
        ):
            spanned = np.concatenate(vectors)[:, columns]
            for at, label in enumerate(about.block.labels.tolist()):
                inside = attacked[pool.labels[attacked] == label]
                outside = others[pool.labels[others] == label][: CANDIDATES - 1]
                features = pool.features[np.concatenate([inside, outside])]
                shares = span_shares(spanned, (features - about.block.means[at])[:, columns])
                hits.setdefault(name, []).append(shares[: len(inside)] > shares[len(inside) :].max())
            leverage[name] = float(np.maximum(leverage.get(name, 0.0), exact))
    for name, found in hits.items():
        first_of = float(np.concatenate(found).mean())
        yield Exposed(released=name, images=images, first=first_of, leverage=leverage[name])


def _between(one: Upload, other: Upload) -> NDArray[np.float32]:
    """Return the differences of the class means of two blocks of the same classes."""
    return one.block.means - other.block.means


def _batches(made: Upload) -> NDArray[np.float32]:
    """Return the deviations of batches from their class means."""
    at = np.searchsorted(made.block.labels, made.batches.labels)
    return made.batches.values - made.block.means[at]


def _leverage(made: Upload, *, dissolved: bool = False) -> float:
    """Return the largest share of an image in a combination of rows and class means, or also of batches."""
    numbers = np.empty(len(made.rows), np.intp)
    for number, members in enumerate(made.batches.members):
        numbers[members] = number
    if not dissolved:
        labels = made.batches.labels[numbers]
        numbers = np.unique(labels, return_inverse=True)[1]
    of_number = np.bincount(numbers)[numbers]
    return float((share(made.coefficients.astype(np.float16), numbers) + 1 / of_number).max())
