"""Held-out images: how many of each class, and which."""

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.data.holdout import held_out, held_out_count
from edge_client.data.images import LabeledImage

FRACTIONS = st.sampled_from([0.0, 0.001, 0.1, 0.2, 0.25, 0.29, 0.3, 0.5, 0.7, 0.9, 0.99]) | st.floats(0, 0.99)
NAMES = st.lists(st.text(min_size=1, max_size=5), unique=True, max_size=40)
CLASSES = st.lists(NAMES, min_size=1, max_size=3)


def _images(classes: Sequence[Sequence[str]]) -> list[LabeledImage]:
    return [
        LabeledImage(Path(), f"{label}/{name}", label, size_bytes=1, mtime_ns=1)
        for label, names in enumerate(classes)
        for name in names
    ]


@pytest.mark.parametrize(
    ("images", "fraction", "count"),
    [
        (15, 0.2, 3), (4, 0.2, 0), (5, 0.2, 1), (9, 0.2, 1), (10, 0.2, 2), (5, 0.1, 1), (19, 0.1, 1),
        (100, 0.29, 29), (10, 0.7, 7), (3, 0.5, 1), (4, 0.9, 3), (0, 0.9, 0), (1000, 0.0, 0),
    ],
)  # fmt: skip
def test_the_fraction_is_rounded_down(images: int, fraction: float, count: int) -> None:
    """Also where the product of floats is a little below the number; of five images at least one is held out."""
    assert held_out_count(images, fraction) == count


@given(CLASSES, FRACTIONS)
def test_every_class_holds_out_its_own_share(classes: list[list[str]], fraction: float) -> None:
    """Never above the fraction, except for one image of few."""
    images = _images(classes)
    kept = held_out(images, fraction)
    assert kept <= {image.relative for image in images}
    for label, names in enumerate(classes):
        count = sum(path.startswith(f"{label}/") for path in kept)
        assert count == held_out_count(len(names), fraction)
        assert count <= Fraction(str(fraction)) * len(names) or (count == 1 and len(names) >= 5)
        assert count >= 1 or len(names) < 5 or fraction == 0


@given(CLASSES, FRACTIONS, st.randoms())
def test_which_images_are_held_out_depends_on_the_paths_of_their_class(
    classes: list[list[str]], fraction: float, random: Random
) -> None:
    """Order, folder, contents of files and other classes do not matter."""
    images = _images(classes)
    kept = held_out(images, fraction)
    moved = [
        LabeledImage(Path("/moved"), image.relative, image.label, size_bytes=3, mtime_ns=4)
        for image in images
    ]
    random.shuffle(moved)
    assert held_out(moved, fraction) == kept
    first = [image for image in images if not image.label]
    assert held_out(first, fraction) == {path for path in kept if path.startswith("0/")}


@given(NAMES.filter(bool), FRACTIONS)
def test_a_new_image_changes_the_side_of_at_most_one_other(names: list[str], fraction: float) -> None:
    """A removed image reverses that."""
    *before, added = _images([names])
    others = {image.relative for image in before}
    assert len((held_out(before, fraction) ^ held_out([*before, added], fraction)) & others) <= 1


def test_paths_outside_utf8_are_accepted() -> None:
    images = _images([[os.fsdecode(b"\xff%d" % number) for number in range(5)]])
    assert len(held_out(images, 0.2)) == 1
