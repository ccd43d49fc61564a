"""Images to features: once each, whatever their number, whatever is wrong with some."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from edge_client.data.extraction import Extraction, Interrupted, extract, extract_all, feature_batches
from edge_client.data.images import LabeledImage, decode, find_images
from edge_client.runtime.backbone import Backbone
from edge_client.storage.feature_cache import FeatureCache
from protocol.preprocessing import preprocess
from tests.support.device_factory import CLASSES, choosy, tiny, write_images
from tests.support.image_files import not_root
from tests.support.machine import open_folder


def run(
    images: tuple[LabeledImage, ...],
    backbone: Backbone,
    cache: FeatureCache,
    *,
    stop_after: int | None = None,
) -> tuple[Extraction, list[tuple[int, int]]]:
    """Extract in batches of four with two decoding threads; returns what on_progress was told as well."""
    told: list[tuple[int, int]] = []

    def should_stop() -> bool:
        return stop_after is not None and told[-1][0] >= stop_after

    extraction = extract(
        images,
        backbone,
        cache,
        batch_size=4,
        workers=2,
        on_progress=lambda done, total: told.append((done, total)),
        should_stop=should_stop,
    )
    return extraction, told


def test_features_are_the_backbones(tmp_path: Path) -> None:
    """What streams back is what the backbone gives for each image, in the order that was asked for."""
    images = find_images(write_images(tmp_path / "data", count=9), CLASSES)
    backbone, cache = tiny(tmp_path), FeatureCache(tmp_path / "features.sqlite")
    extraction, told = run(images, backbone, cache)
    assert extraction == Extraction(computed=18, cached=0, refused=())
    assert told[0] == (0, 18)
    assert told[-1] == (18, 18)
    order = [images[number] for number in (17, 0, 5)]
    features = np.concatenate(list(cache.chunks([p.identity for p in order], backbone.sha256)))
    pixels = np.stack([preprocess(decode(p.path), backbone.metadata.preprocessing) for p in order])
    np.testing.assert_allclose(features, backbone.features(pixels), rtol=1e-5)


def test_a_restart_computes_nothing_again(tmp_path: Path) -> None:
    """A second run, in a new process so to speak, takes everything from the disk."""
    images = find_images(write_images(tmp_path / "data", count=5), CLASSES)
    backbone = tiny(tmp_path)
    first = FeatureCache(tmp_path / "features.sqlite")
    run(images, backbone, first)
    first.close()
    extraction, _ = run(images, backbone, FeatureCache(tmp_path / "features.sqlite"))
    assert extraction == Extraction(computed=0, cached=10, refused=())


def test_only_what_changed_is_computed(tmp_path: Path) -> None:
    """A changed image is computed again, a removed one is forgotten, another backbone starts anew."""
    data = write_images(tmp_path / "data", count=3)
    backbone, cache = tiny(tmp_path), FeatureCache(tmp_path / "features.sqlite")
    run(find_images(data, CLASSES), backbone, cache)
    changed, removed = data / "cat" / "0000.png", data / "dog" / "0000.png"
    Image.new("RGB", (9, 9)).save(changed)
    os.utime(changed, ns=(1, 1))
    removed.unlink()
    images = find_images(data, CLASSES)
    assert run(images, backbone, cache)[0] == Extraction(computed=1, cached=4, refused=())
    assert cache.known(backbone.sha256) == {image.identity for image in images}
    assert run(images, tiny(tmp_path, seed=1), cache)[0].computed == 5


def run_all(
    images: tuple[LabeledImage, ...], backbones: list[Backbone], cache: FeatureCache
) -> tuple[Extraction, list[str], list[tuple[int, int]]]:
    """Extract with several backbones; returns which were opened and what on_progress was told as well."""
    by_digest = {backbone.sha256: backbone for backbone in backbones}
    opened: list[str] = []
    told: list[tuple[int, int]] = []

    def open_backbone(sha256: str) -> Backbone:
        opened.append(sha256)
        return by_digest[sha256]

    extraction = extract_all(
        images,
        list(by_digest),
        cache,
        open_backbone=open_backbone,
        batch_size=4,
        workers=2,
        on_progress=lambda done, total: told.append((done, total)),
        should_stop=lambda: False,
    )
    return extraction, opened, told


def test_several_backbones_are_run_one_after_the_other(tmp_path: Path) -> None:
    """Each computes what is missing of its own features and is opened only then; progress counts them all."""
    data = write_images(tmp_path / "data", count=3)
    cache = FeatureCache(tmp_path / "features.sqlite")
    one, two = tiny(tmp_path), tiny(tmp_path, seed=1, feature_size=5)
    run(find_images(data, CLASSES), one, cache)
    extraction, opened, told = run_all(find_images(data, CLASSES), [one, two], cache)
    assert extraction == Extraction(computed=6, cached=6, refused=())
    assert opened == [two.sha256]
    assert told == [(6, 12), (6, 12), (10, 12), (12, 12)]
    extraction, opened, told = run_all(find_images(data, CLASSES), [one, two], cache)
    assert extraction == Extraction(computed=0, cached=12, refused=())
    assert opened == []
    write_images(data, count=4)
    extraction, opened, _ = run_all(find_images(data, CLASSES), [one, two], cache)
    assert (extraction.computed, opened) == (2 * 8, [one.sha256, two.sha256])


def test_an_image_that_one_backbone_refuses_is_left_out_for_all(tmp_path: Path) -> None:
    """It is named once, those after it do not try it, and a restart opens none of them for it."""
    data = write_images(tmp_path / "data", count=2)
    Image.new("RGB", (12, 10), "white").save(data / "cat" / "white.png")
    (data / "dog" / "junk.png").write_text("junk")
    backbones = [tiny(tmp_path), choosy(tmp_path), tiny(tmp_path, seed=1)]
    images, cache = find_images(data, CLASSES), FeatureCache(tmp_path / "features.sqlite")
    extraction, _, told = run_all(images, backbones, cache)
    assert extraction.computed == 5 + 4 + 4
    assert [path.name for path, _ in extraction.refused] == ["white.png", "junk.png"]
    assert "NaN" in extraction.refused[0][1]
    assert told[-1] == (18, 18)
    known = cache.known(*(backbone.sha256 for backbone in backbones))
    assert known == {image.identity for image in images if image.path.stem.isdigit()}
    again, opened, _ = run_all(images, backbones, cache)
    assert again == Extraction(computed=0, cached=13, refused=extraction.refused)
    assert opened == []


def test_one_pass_gives_the_features_of_all_backbones(tmp_path: Path) -> None:
    """Each image is decoded once for all of them, also where they want different sizes."""
    images = find_images(write_images(tmp_path / "data", count=3), CLASSES)
    one, two = tiny(tmp_path), tiny(tmp_path, seed=1, feature_size=5)
    grown = msgspec.structs.replace(two.metadata.preprocessing, crop_pct=0.5)
    two = replace(two, metadata=msgspec.structs.replace(two.metadata, preprocessing=grown))
    (batch,) = feature_batches(images, [one, two], batch_size=9, workers=1)
    for backbone, columns in ((one, slice(0, 16)), (two, slice(16, 21))):
        pixels = np.stack([preprocess(decode(p.path), backbone.metadata.preprocessing) for p in images])
        found = np.stack([feature for _, feature in batch])[:, columns]  # type: ignore[misc]
        np.testing.assert_allclose(found, backbone.features(pixels), rtol=1e-5)


def test_an_interruption_keeps_what_was_computed(tmp_path: Path) -> None:
    """Ctrl-C, or another task, in the middle costs no more than a batch."""
    images = find_images(write_images(tmp_path / "data", count=8), CLASSES)
    backbone, cache = tiny(tmp_path), FeatureCache(tmp_path / "features.sqlite")
    with pytest.raises(Interrupted):
        run(images, backbone, cache, stop_after=8)
    assert run(images, backbone, cache)[0] == Extraction(computed=8, cached=8, refused=())


def test_a_broken_image_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    """Unreadable and truncated images are refused with their reasons, and not decoded again at each start."""
    data = write_images(tmp_path / "data", count=4)
    whole = (data / "cat" / "0000.png").read_bytes()
    (data / "cat" / "0000.png").write_bytes(whole[: len(whole) // 2])
    (data / "dog" / "0001.png").write_text("not an image")
    images = find_images(data, CLASSES)
    backbone, cache = tiny(tmp_path), FeatureCache(tmp_path / "features.sqlite")
    extraction, _ = run(images, backbone, cache)
    assert [path.name for path, _ in extraction.refused] == ["0000.png", "0001.png"]
    assert all(reason for _, reason in extraction.refused)
    assert extraction.computed == 6
    assert run(images, backbone, cache)[0] == Extraction(computed=0, cached=6, refused=extraction.refused)


def test_an_image_with_nan_features_is_refused(tmp_path: Path) -> None:
    """NaN never enters the cache; the image it came from is named, and its neighbors are kept."""
    data = write_images(tmp_path / "data", count=3)
    Image.new("RGB", (12, 10), "white").save(data / "cat" / "white.png")
    backbone, cache = choosy(tmp_path), FeatureCache(tmp_path / "features.sqlite")
    extraction, _ = run(find_images(data, CLASSES), backbone, cache)
    assert [path.name for path, _ in extraction.refused] == ["white.png"]
    assert "NaN" in extraction.refused[0][1]
    assert extraction.computed == 6


def test_the_cut_into_batches_changes_nothing(tmp_path: Path) -> None:
    """Batches of one, of seven or of all, decoded by one thread or four: the same features."""
    images = find_images(write_images(tmp_path / "data", count=8), CLASSES)
    backbone = tiny(tmp_path)
    made = []
    for batch_size, workers in ((1, 1), (7, 4), (100, 2)):
        batches = list(feature_batches(images, [backbone], batch_size=batch_size, workers=workers))
        assert [image for batch in batches for image, _ in batch] == list(images)
        assert max(map(len, batches)) <= batch_size
        made.append(np.stack([feature for batch in batches for _, feature in batch]))  # type: ignore[misc]
    np.testing.assert_allclose(made[0], made[1], rtol=1e-5)
    np.testing.assert_allclose(made[0], made[2], rtol=1e-5)


def test_decoding_never_runs_far_ahead(tmp_path: Path) -> None:
    """However slow the backbone, no more than two batches of images are in memory."""
    found = find_images(write_images(tmp_path / "data", count=30), CLASSES)
    taken = 0

    def one_by_one() -> Iterator[LabeledImage]:
        nonlocal taken
        for image in found:
            taken += 1
            yield image

    done = 0
    for batch in feature_batches(one_by_one(), [tiny(tmp_path)], batch_size=4, workers=2):
        done += len(batch)
        assert taken <= done + 4
    assert done == len(found)


def test_a_broken_image_is_tried_again_when_its_file_changes(tmp_path: Path) -> None:
    """An image that was still being copied is taken in once it is whole."""
    data = write_images(tmp_path / "data", count=1)
    whole = (data / "cat" / "0000.png").read_bytes()
    (data / "cat" / "0000.png").write_bytes(whole[:-40])
    backbone, cache = tiny(tmp_path), FeatureCache(tmp_path / "features.sqlite")
    assert len(run(find_images(data, CLASSES), backbone, cache)[0].refused) == 1
    (data / "cat" / "0000.png").write_bytes(whole)
    assert run(find_images(data, CLASSES), backbone, cache)[0] == Extraction(1, 1, ())


def test_what_can_pass_is_not_remembered(tmp_path: Path) -> None:
    """An image that may not be read now is refused now, and taken in later although it has not changed."""
    with open_folder() as folder:
        data = write_images(folder / "data", count=1)
        (data / "cat" / "0000.png").chmod(0)
        images = find_images(data, CLASSES)
        backbone, cache = tiny(tmp_path), FeatureCache(tmp_path / "features.sqlite")
        with not_root():
            refused = run(images, backbone, cache)[0].refused
        assert refused == ((data / "cat" / "0000.png", "Permission denied"),)
        (data / "cat" / "0000.png").chmod(0o644)
        assert run(images, backbone, cache)[0] == Extraction(computed=1, cached=1, refused=())


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("long.png", Image.new("RGB", (20_000_000, 1))),
        ("bomb.png", Image.new("1", (9600, 9600))),
        ("float.tif", Image.new("F", (9, 9))),
    ],
)
def test_an_image_that_decodes_to_something_odd_is_refused_quietly(
    tmp_path: Path, name: str, image: Image.Image, recwarn: pytest.WarningsRecorder
) -> None:
    """Whatever goes wrong between file and pixels refuses that image; Pillow's own warnings are not shown."""
    data = write_images(tmp_path / "data", count=1)
    image.save(data / "cat" / name)
    backbone, cache = tiny(tmp_path), FeatureCache(tmp_path / "features.sqlite")
    extraction, _ = run(find_images(data, CLASSES), backbone, cache)
    assert [path.name for path, _ in extraction.refused] == [name]
    assert str(tmp_path) not in extraction.refused[0][1]
    assert "\n" not in extraction.refused[0][1]
    assert extraction.computed == 2
    assert not recwarn.list


def test_want_of_memory_refuses_an_image_for_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image too large for the memory that is free at the moment is named, and tried again the next time."""

    def no_memory(*_: object) -> None:
        raise MemoryError

    images = find_images(write_images(tmp_path / "data", count=1), CLASSES)
    backbone, cache = tiny(tmp_path), FeatureCache(tmp_path / "features.sqlite")
    with monkeypatch.context() as patched:
        patched.setattr("edge_client.data.extraction.preprocess", no_memory)
        assert [reason for _, reason in run(images, backbone, cache)[0].refused] == ["MemoryError"] * 2
    assert run(images, backbone, cache)[0] == Extraction(computed=2, cached=0, refused=())


def test_a_file_name_outside_utf8_is_no_obstacle(tmp_path: Path) -> None:
    """An image is extracted, kept and found again under any name that Linux allows."""
    data = write_images(tmp_path / "data", count=1)
    (data / "cat" / "0000.png").rename(os.fsdecode(os.fsencode(data) + b"/cat/\xe4\xff.png"))
    images = find_images(data, CLASSES)
    backbone, cache = tiny(tmp_path), FeatureCache(tmp_path / "features.sqlite")
    assert run(images, backbone, cache)[0] == Extraction(computed=2, cached=0, refused=())
    assert run(images, backbone, cache)[0] == Extraction(computed=0, cached=2, refused=())


_WEIGH = """
import sys
from pathlib import Path
from edge_client.runtime.backbone import open_backbone
from edge_client.storage.feature_cache import FeatureCache
from edge_client.data.extraction import extract
from edge_client.data.images import find_images

data, backbone, state = map(Path, sys.argv[1:])
extraction = extract(
    find_images(data, ["cat"]), open_backbone(backbone, provider="cpu", threads=1), FeatureCache(state),
    batch_size=32, workers=2, on_progress=lambda done, total: None, should_stop=lambda: False,
)
print(extraction.computed, Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_memory_does_not_grow_with_the_images(tmp_path: Path) -> None:
    """Extracting 5,000 images takes hardly more memory than extracting 1,000."""
    image = write_images(tmp_path, count=1) / "cat" / "0000.png"
    tiny(tmp_path)
    peak_kb = {}
    for count in (1000, 5000):
        folder = tmp_path / str(count) / "cat"
        folder.mkdir(parents=True)
        for number in range(count):
            (folder / f"{number:05}.png").hardlink_to(image)
        paths = (folder.parent, tmp_path / "tiny-0.onnx", tmp_path / f"{count}.sqlite")
        done = subprocess.run(
            [sys.executable, "-c", _WEIGH, *map(str, paths)], capture_output=True, text=True, check=True
        )
        computed, peak_kb[count] = map(int, done.stdout.split())
        assert computed == count
    assert peak_kb[5000] < 1.05 * peak_kb[1000]
