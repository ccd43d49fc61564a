"""A persistent map: every version keeps its items, in whatever order the versions are used."""

from hypothesis import given
from hypothesis import strategies as st

from aggregator.coordination.persistent_map import PersistentMap

ITEMS = st.tuples(st.sampled_from("abcd"), st.integers(0, 3))


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers()),
    st.lists(st.tuples(st.integers(0, 100), ITEMS)),
    st.lists(st.integers(0, 100)),
)
def test_every_version_is_the_dict_that_it_stands_for(
    first: dict[str, int], changes: list[tuple[int, tuple[str, int]]], reads: list[int]
) -> None:
    """Versions of versions, each made from any earlier one, and read in any order."""
    versions, expected = [PersistentMap(first)], [dict(first)]
    for number, (key, value) in changes:
        parent = number % len(versions)
        versions.append(versions[parent].with_item(key, value))
        expected.append({**expected[parent], key: value})
    for number in [*reads, *range(len(versions))]:
        version, items = versions[number % len(versions)], expected[number % len(versions)]
        assert dict(version) == items
        assert version == items
        assert len(version) == len(items)
        assert version.get("a") == items.get("a")


def test_later_change_of_the_source_changes_nothing() -> None:
    source = {"a": 1}
    made = PersistentMap(source)
    source["a"] = 2
    assert made == {"a": 1}


def test_long_history_needs_no_recursion() -> None:
    """An old version is still there after many changes."""
    first = newest = PersistentMap({"a": 0})
    for number in range(1, 5000):
        newest = newest.with_item("a", number)
    assert (first["a"], newest["a"]) == (0, 4999)
