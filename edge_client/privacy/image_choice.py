"""The choice of images where fewer count than there are: by a keyed hash, never by name, order or time.

Names and times are of other people's making: with "the first n", whoever adds a file decides which image it
displaces. By a keyed hash, an image's rank depends on its own digest and on the key alone. An image that is added still
displaces one other where the limit is reached, so the noise has to be that of two images.
"""

import hmac
from collections.abc import Collection


def chosen(digests: Collection[bytes], limit: int, key: bytes) -> frozenset[bytes]:
    """Return the `limit` digests with the smallest HMAC-SHA256 under the key; all of them if there are no more.

    The order of the digests does not matter, and equal ones are one.
    """
    distinct = frozenset(digests)
    if len(distinct) <= limit:
        return distinct
    return frozenset(sorted(distinct, key=lambda each: (hmac.digest(key, each, "sha256"), each))[:limit])
