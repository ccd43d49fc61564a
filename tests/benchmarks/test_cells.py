"""Batches of images that are alike."""

import numpy as np
import pytest

from benchmarks.research.cells import batches_of_cells


@pytest.mark.parametrize(("images", "cell"), [(203, 40), (203, 0), (9, 40), (1, 40), (0, 40)])
def test_batches_are_of_one_cell(images: int, cell: int) -> None:
    """Each has at least five images, and all images are in one; with cells, batch mates are near each other."""
    rng = np.random.default_rng(0)
    places = rng.normal(size=(5, 8)) * 50
    place = np.arange(images) % 5
    features = (places[place] + rng.normal(size=(images, 8))).astype(np.float32)
    numbers, cells = batches_of_cells(features, batch=5, cell=cell, alpha=1.0, rng=rng)
    if images < 2:
        assert not len(cells)
        assert not (numbers >= 0).any()
        return
    assert np.bincount(numbers).min() >= 5
    assert numbers.min() == 0
    assert len(np.bincount(numbers)) == len(cells)
    together = [len(np.unique(place[numbers == number])) for number in range(len(cells))]
    assert (np.mean(together) < 2.5) == (images == 203 and cell > 0)
