"""A mapping whose changed copy takes constant time."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_ABSENT: Any = object()


class PersistentMap(Mapping[K, V]):
    """An immutable mapping; `with_item` returns a copy with one item changed, in constant time.

    All versions share one dict, which holds the version used last; every other version holds the item in which it
    differs from the next one towards it (H. G. Baker, Shallow binding makes functional arrays fast, 1991). Using an
    old version therefore takes time for the changes since then, and ends an iteration over another version. For use
    on one thread.
    """

    def __init__(self, items: Mapping[K, V]) -> None:
        self._held: dict[K, V] | tuple[PersistentMap[K, V], K, V] = dict(items)

    def with_item(self, key: K, value: V) -> "PersistentMap[K, V]":
        """Return a copy in which `key` has this value."""
        items = self._items()
        changed: PersistentMap[K, V] = PersistentMap({})
        self._held, changed._held = (changed, key, items.get(key, _ABSENT)), items
        items[key] = value
        return changed

    def _items(self) -> dict[K, V]:
        """Return the dict, after making it hold this version."""
        path, version = [], self
        while not isinstance(held := version._held, dict):
            path.append((version, *held))
            version = held[0]
        items = held
        for older, newer, key, value in reversed(path):
            newer._held = (older, key, items.get(key, _ABSENT))  # noqa: SLF001 - of another version
            older._held = items  # noqa: SLF001
            if value is _ABSENT:
                del items[key]
            else:
                items[key] = value
        return items

    def __getitem__(self, key: K) -> V:
        return self._items()[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items())

    def __len__(self) -> int:
        return len(self._items())
