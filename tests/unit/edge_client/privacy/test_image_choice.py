"""The keyed choice of images: one image displaces at most one other."""

import os

import pytest

from edge_client.privacy.image_choice import chosen
from protocol.wire.codec import digest_of

DIGESTS = [digest_of(str(number).encode()) for number in range(60)]


@pytest.mark.parametrize("limit", [0, 1, 20, 59, 60, 61])
def test_as_many_are_chosen_as_may_count(limit: int) -> None:
    """Fewer only if there are fewer; the order and repetitions do not matter."""
    found = chosen(DIGESTS, limit, b"key")
    assert len(found) == min(limit, len(DIGESTS))
    assert found <= set(DIGESTS)
    assert chosen([*reversed(DIGESTS), *DIGESTS], limit, b"key") == found


def test_an_image_displaces_at_most_one_other() -> None:
    """For every image that is added, under many keys."""
    displaced = set()
    for key in (os.urandom(32) for _ in range(20)):
        with_all = chosen(DIGESTS, 20, key)
        for digest in DIGESTS:
            without = chosen([each for each in DIGESTS if each != digest], 20, key)
            displaced.add(len(without - with_all))
            assert with_all - without <= {digest}
    assert displaced == {0, 1}


def test_another_key_chooses_other_images() -> None:
    """Every image is chosen by some key, so that no name or pixel decides."""
    sets = [chosen(DIGESTS, 20, os.urandom(32)) for _ in range(200)]
    assert frozenset.union(*sets) == set(DIGESTS)
    assert len(set(sets)) == len(sets)
