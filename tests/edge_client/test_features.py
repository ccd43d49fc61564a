"""Pictures to features: once each, whatever their number, whatever is wrong with some."""

import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_client.backbone import Backbone
from edge_client.feature_cache import FeatureCache
from edge_client.features import Extraction, Interrupted, extract
from edge_client.images import Picture, decode, find_pictures
from protocol.errors import StateError
from protocol.preprocessing import preprocess
from tests.edge_client.made import CLASSES, choosy, tiny, write_pictures


def run(
    pictures: tuple[Picture, ...], backbone: Backbone, cache: FeatureCache, *, stop_after: int | None = None
) -> tuple[Extraction, list[tuple[int, int]]]:
    """Extract in batches of four with two decoding threads; returns what on_progress was told as well."""
    told: list[tuple[int, int]] = []

    def should_stop() -> bool:
        return stop_after is not None and told[-1][0] >= stop_after

    extraction = extract(
        pictures,
        backbone,
        cache,
        batch_size=4,
        workers=2,
        on_progress=lambda done, total: told.append((done, total)),
        should_stop=should_stop,
    )
    return extraction, told


def test_features_are_the_backbones(tmp_path: Path) -> None:
    """What streams back is what the backbone gives for each picture, in the order that was asked for."""
    pictures = find_pictures(write_pictures(tmp_path / "data", count=9), CLASSES)
    backbone, cache = tiny(tmp_path), FeatureCache(tmp_path / "features.sqlite")
    extraction, told = run(pictures, backbone, cache)
    assert extraction == Extraction(computed=18, cached=0, refused=())
    assert told[0] == (0, 18)
    assert told[-1] == (18, 18)
    order = [pictures[number] for number in (17, 0, 5)]
    features = np.concatenate(list(cache.chunks([p.identity for p in order], backbone.sha256)))
    pixels = np.stack([preprocess(decode(p.path), backbone.metadata.preprocessing) for p in order])
    np.testing.assert_allclose(features, backbone.features(pixels), rtol=1e-5)


def test_a_restart_computes_nothing_again(tmp_path: Path) -> None:
    """A second run, in a new process so to speak, takes everything from the disk."""
    pictures = find_pictures(write_pictures(tmp_path / "data", count=5), CLASSES)
    backbone = tiny(tmp_path)
    first = FeatureCache(tmp_path / "features.sqlite")
    run(pictures, backbone, first)
    first.close()
    extraction, _ = run(pictures, backbone, FeatureCache(tmp_path / "features.sqlite"))
    assert extraction == Extraction(computed=0, cached=10, refused=())


def test_only_what_changed_is_computed(tmp_path: Path) -> None:
    """A changed picture is computed again, a removed one is forgotten, another backbone starts anew."""
    data = write_pictures(tmp_path / "data", count=3)
    backbone, cache = tiny(tmp_path), FeatureCache(tmp_path / "features.sqlite")
    run(find_pictures(data, CLASSES), backbone, cache)
    changed, removed = data / "cat" / "0000.png", data / "dog" / "0000.png"
    Image.new("RGB", (9, 9)).save(changed)
    os.utime(changed, ns=(1, 1))
    removed.unlink()
    pictures = find_pictures(data, CLASSES)
    assert run(pictures, backbone, cache)[0] == Extraction(computed=1, cached=4, refused=())
    assert cache.known(backbone.sha256) == {picture.identity for picture in pictures}
    assert run(pictures, tiny(tmp_path, seed=1), cache)[0].computed == 5


def test_an_interruption_keeps_what_was_computed(tmp_path: Path) -> None:
    """Ctrl-C, or another task, in the middle costs no more than a batch."""
    pictures = find_pictures(write_pictures(tmp_path / "data", count=8), CLASSES)
    backbone, cache = tiny(tmp_path), FeatureCache(tmp_path / "features.sqlite")
    with pytest.raises(Interrupted):
        run(pictures, backbone, cache, stop_after=8)
    assert run(pictures, backbone, cache)[0] == Extraction(computed=8, cached=8, refused=())


def test_a_broken_picture_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    """Unreadable and truncated pictures are refused with their reasons, and not decoded again at each start."""
    data = write_pictures(tmp_path / "data", count=4)
    whole = (data / "cat" / "0000.png").read_bytes()
    (data / "cat" / "0000.png").write_bytes(whole[: len(whole) // 2])
    (data / "dog" / "0001.png").write_text("not a picture")
    pictures = find_pictures(data, CLASSES)
    backbone, cache = tiny(tmp_path), FeatureCache(tmp_path / "features.sqlite")
    extraction, _ = run(pictures, backbone, cache)
    assert [path.name for path, _ in extraction.refused] == ["0000.png", "0001.png"]
    assert all(reason for _, reason in extraction.refused)
    assert extraction.computed == 6
    assert run(pictures, backbone, cache)[0] == Extraction(computed=0, cached=6, refused=extraction.refused)


def test_a_picture_with_nan_features_is_refused(tmp_path: Path) -> None:
    """NaN never enters the cache; the picture it came from is named, and its neighbours are kept."""
    data = write_pictures(tmp_path / "data", count=3)
    Image.new("RGB", (12, 10), "white").save(data / "cat" / "white.png")
    backbone, cache = choosy(tmp_path), FeatureCache(tmp_path / "features.sqlite")
    extraction, _ = run(find_pictures(data, CLASSES), backbone, cache)
    assert [path.name for path, _ in extraction.refused] == ["white.png"]
    assert "NaN" in extraction.refused[0][1]
    assert extraction.computed == 6


def test_a_damaged_cache_is_put_aside(tmp_path: Path) -> None:
    """A cache file that is no database is moved away, not trusted and not deleted."""
    file = tmp_path / "features.sqlite"
    file.write_bytes(b"this was a database once" * 100)
    cache = FeatureCache(file)
    assert cache.known("any") == set()
    assert (tmp_path / "features.damaged").is_file()


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A cache in the place of a folder is a StateError that names it."""
    (tmp_path / "features.sqlite").mkdir()
    with pytest.raises(StateError, match=r"features\.sqlite"):
        FeatureCache(tmp_path / "features.sqlite")


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    """A batch that does not fit is not there at all, and the error says so."""
    cache = FeatureCache(tmp_path / "features.sqlite")
    cache.put("b", [("a", np.ones(4, dtype=np.float32))], [])
    pages = cache._db.execute("PRAGMA page_count").fetchone()[0]
    cache._db.execute(f"PRAGMA max_page_count = {pages}")
    many = [(str(number), np.ones(2000, dtype=np.float32)) for number in range(100)]
    with pytest.raises(StateError, match="full"):
        cache.put("b", many, [])
    cache._db.execute("PRAGMA max_page_count = 100000")
    assert cache.known("b") == {"a"}
    cache.put("b", many, [])
    assert len(cache.known("b")) == 101


def test_missing_features_are_told(tmp_path: Path) -> None:
    """Somebody else emptying the cache while it is read is an error, not a wrong prototype."""
    cache = FeatureCache(tmp_path / "features.sqlite")
    cache.put("b", [("a", np.ones(4, dtype=np.float32))], [])
    with sqlite3.connect(tmp_path / "features.sqlite") as other:
        other.execute("DELETE FROM features")
    with pytest.raises(StateError, match="changed"):
        list(cache.chunks(["a"], "b"))
