"""An attacker who combines everything that a device has released: all sums and differences with any factors."""

import numpy as np
from numpy.typing import NDArray


def fewest_images(sums: NDArray[np.float64], *, below: int) -> int:
    """Return the images in the smallest non-zero combination of sums (r, n); `below` if none has fewer.

    A combination that is zero on all images but some set exists if and only if removing the set's columns lowers the
    rank. Images that are always together are one column: a combination has all of them or none.
    """
    columns, sizes = np.unique(sums.T, axis=0, return_counts=True)
    atoms = [at for at in range(len(columns)) if columns[at].any() and sizes[at] < below]
    rank = int(np.linalg.matrix_rank(columns)) if columns.size else 0
    fewest = below
    open_sets: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    while open_sets:
        size, chosen = open_sets.pop()
        for at in atoms[atoms.index(chosen[-1]) + 1 if chosen else 0 :]:
            grown = size + int(sizes[at])
            if grown >= fewest:
                continue
            rest = np.delete(columns, [*chosen, at], axis=0)
            if (int(np.linalg.matrix_rank(rest)) if rest.size else 0) < rank:
                fewest = grown
            else:
                open_sets.append((grown, (*chosen, at)))
    return fewest
