"""Features on disk: found again under any name, deleted in time, never trusted when damaged."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_client.store.feature_cache import OTHERS_MAX_AGE_S, FeatureCache
from protocol.errors import BackboneMismatch, StateError
from tests.support.machine_faults import full_disk

ANY_NAME = st.binary(max_size=40).map(lambda name: name.decode(errors="surrogateescape"))


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path / "features.sqlite")


def rows(count: int, length: int = 8, start: int = 0) -> list[tuple[str, NDArray[np.float32]]]:
    """Identities and features that are all different."""
    return [(str(number), np.full(length, number, np.float32)) for number in range(start, start + count)]


def test_features_are_found_under_any_file_name(cache: FeatureCache) -> None:
    """File names are bytes."""
    backbones = iter(range(10**6))

    @given(st.lists(ANY_NAME, unique=True, min_size=1, max_size=5))
    def check(names: list[str]) -> None:
        backbone = str(next(backbones))
        features = [(name, np.full(3, number, np.float32)) for number, name in enumerate(names)]
        cache.put(backbone, features[1:], [(names[0], "broken")])
        assert cache.states(backbone).get(names[0]) == "broken"
        assert all(cache.states(backbone).get(name) == "" for name in names[1:])
        assert cache.known(backbone) == set(names[1:])
        found = [chunk for part in cache.chunks(names[1:], backbone) for chunk in part]
        assert [int(feature[0]) for feature in found] == list(range(1, len(names)))

    check()


def test_features_of_several_backbones_are_side_by_side(cache: FeatureCache) -> None:
    """They come in the order of the identities, and in small chunks."""
    cache.put("b", rows(300, length=2), [])
    cache.put("c", [(name, -vector) for name, vector in rows(300, length=3)], [])
    order = [str(number) for number in reversed(range(300))]
    numbers = np.arange(299.0, -1, -1)[:, None]
    expected = np.concatenate([-numbers, -numbers, -numbers, numbers, numbers], axis=1)
    np.testing.assert_array_equal(cache.matrix(order, "c", "b", size=5), expected)
    chunks = list(cache.chunks(order, "c", "b"))
    assert [len(chunk) for chunk in chunks] == [256, 44]
    assert all(chunk.dtype == np.float32 for chunk in chunks)
    np.testing.assert_array_equal(np.concatenate(chunks), expected)
    assert cache.matrix([], "c", "b", size=5).shape == (0, 5)
    with pytest.raises(BackboneMismatch, match="expected 4 features from 2 backbones, got 5"):
        cache.matrix(order, "c", "b", size=4)


def test_a_reader_gets_the_features_that_are_stored_and_misses_no_other(tmp_path: Path) -> None:
    """Another program prunes the file meanwhile: what it has deleted is not there, for either backbone."""
    writer = FeatureCache(tmp_path / "features.sqlite")
    writer.put("b", rows(4, length=2), [("bad", "broken")])
    writer.put("c", rows(3, length=1), [])
    reader = FeatureCache(tmp_path / "features.sqlite", read_only=True)
    wanted = ["3", "bad", "2", "0", "unheard of"]
    assert {name: list(each) for name, each in reader.stored_features(wanted, "c", "b").items()} == {
        "2": [2, 2, 2],
        "0": [0, 0, 0],
    }
    writer.prune(["0", "3"], "b", "c")
    assert list(reader.stored_features(wanted, "b")) == ["3", "0"]
    assert reader.stored_features([], "b") == {}


def test_pruning_deletes_missing_images_and_shrinks_the_file(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path / "features.sqlite")
    for backbone in ("old", "new"):
        cache.put(backbone, rows(200, length=1000), [("bad", "broken")])
        cache.prune([identity for identity, _ in rows(200)], backbone)
    cache.close()
    before = (tmp_path / "features.sqlite").stat().st_size
    cache = FeatureCache(tmp_path / "features.sqlite")
    cache.prune(["3", "5", "unheard of"], "new")
    assert cache.known("new") == cache.known("old") == {"3", "5"}
    assert cache.states("new").get("bad") is None
    cache.close()
    assert (tmp_path / "features.sqlite").stat().st_size < before / 10


class AgingCache(FeatureCache):
    """A cache whose backbones have features of the same images, used one second after the other."""

    def __init__(self, folder: Path, *backbones: str, length: int = 8) -> None:
        self.now_s = 1e9
        super().__init__(folder / "features.sqlite", clock=lambda: self.now_s)
        self.features = rows(50, length=length)
        for backbone in backbones:
            self.use(backbone, after_s=1)
            self.put(backbone, self.features, [])

    def use(self, *backbones: str, after_s: float) -> None:
        self.now_s += after_s
        self.prune([identity for identity, _ in self.features], *backbones)

    def has(self, *backbones: str) -> list[bool]:
        return [len(self.known(backbone)) == 50 for backbone in backbones]


def test_feature_of_a_deleted_image_is_in_no_file(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path / "features.sqlite")
    (_, vector), kept = rows(2, length=1000, start=1)
    cache.put("b", [("deleted", vector), kept], [])
    cache.prune([kept[0]], "b")
    assert not any(vector.tobytes()[:400] in file.read_bytes() for file in tmp_path.iterdir())


def test_backbones_in_use_are_never_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = AgingCache(tmp_path, "one", "two", "other")
    monkeypatch.setattr("edge_client.store.feature_cache.OTHERS_MAX_BYTES", 0)
    cache.use("one", "two", after_s=2 * OTHERS_MAX_AGE_S)
    assert cache.has("one", "two", "other") == [True, True, False]


def test_large_cache_deletes_the_oldest_backbone_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It deletes no more than it must."""
    cache = AgingCache(tmp_path, "oldest", "older", "new", length=2000)
    for limit, kept in ((1_000_000, [False, True, True]), (0, [False, False, True])):
        monkeypatch.setattr("edge_client.store.feature_cache.OTHERS_MAX_BYTES", limit)
        cache.use("new", after_s=0)
        assert cache.has("oldest", "older", "new") == kept


def test_damage_found_while_reading_creates_the_cache_anew(tmp_path: Path) -> None:
    file = tmp_path / "features.sqlite"
    cache = FeatureCache(file)
    cache.put("b", rows(300, length=1000), [])
    cache.close()
    size = file.stat().st_size
    with file.open("r+b") as damaged:
        damaged.seek(4096)
        damaged.write(b"\xa5" * (size - 4096))
    cache = FeatureCache(file)
    with pytest.raises(StateError, match="damaged and has been created anew"):
        cache.known("b")
    assert cache.known("b") == set()
    cache.put("b", rows(3), [])
    assert FeatureCache(file).known("b") == {"0", "1", "2"}
    assert (tmp_path / "features.damaged").stat().st_size == size


def test_full_disk_stores_no_part_of_a_batch(cache: FeatureCache) -> None:
    cache.put("b", rows(3), [])
    with full_disk(after_bytes=100_000), pytest.raises(StateError, match=r"cannot use .*features\.sqlite"):
        cache.put("b", rows(100, length=2000, start=10), [])
    assert cache.known("b") == {"0", "1", "2"}
    cache.put("b", rows(100, length=2000, start=10), [])
    assert len(cache.known("b")) == 103
