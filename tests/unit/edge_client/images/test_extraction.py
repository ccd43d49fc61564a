"""Images to features: each computed once, unusable images refused, memory for decoding estimated and limited."""

import contextlib
import math
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from edge_client.graphs.backbone import Backbone
from edge_client.images import decoding_memory, extraction
from edge_client.images.decoding import decode
from edge_client.images.decoding_memory import available_bytes, limit_bytes, reserve
from edge_client.images.extraction import Extraction, extract, feature_batches
from edge_client.images.images import LabeledImage, find_images, unlabeled
from edge_client.store.feature_cache import FeatureCache
from protocol.models.preprocessing import Preprocessing, preprocess
from tests.support.devices.device_factory import CLASSES, choosy, image_file, noise, tiny, write_images
from tests.support.machine_faults import not_root, open_folder


class KilledError(Exception):
    """Stands for the end of the job."""


class Extractor:
    """A cache, and extractions with one or more backbones in batches of four."""

    def __init__(self, folder: Path, *backbones: Backbone) -> None:
        self.file = folder / "features.sqlite"
        self.cache = FeatureCache(self.file)
        self.backbones = {backbone.sha256: backbone for backbone in backbones or (tiny(folder),)}
        self.opened: list[str] = []
        self.progress: list[int] = []

    def __call__(self, images: Sequence[LabeledImage], *, stop_after: float = math.inf) -> Extraction:
        """Extract with all backbones; `opened` and `progress` hold what was called.

        The job is killed after so many images.
        """
        self.opened, self.progress = [], []

        def on_progress(cached: int, computed: int) -> None:
            self.progress.append(cached + computed)
            if sum(self.progress) >= stop_after:
                raise KilledError

        return extract(
            images,
            list(self.backbones),
            self.cache,
            open_backbone=self._open,
            batch_size=4,
            on_progress=on_progress,
        )

    def _open(self, sha256: str) -> Backbone:
        self.opened.append(sha256)
        return self.backbones[sha256]


def test_features_are_the_backbones(tmp_path: Path) -> None:
    """Stored features equal the backbone's, in any order; after a restart none is computed again."""
    images = find_images(write_images(tmp_path / "data", count=9), CLASSES)
    extractor, backbone = Extractor(tmp_path), tiny(tmp_path)
    assert extractor(images) == Extraction(computed=18, cached=0, refused=())
    assert extractor.progress == [0, 4, 4, 4, 4, 2]
    order = [images[number] for number in (17, 0, 5)]
    features = np.concatenate(list(extractor.cache.chunks([p.identity for p in order], backbone.sha256)))
    pixels = np.stack([preprocess(decode(p.path), backbone.metadata.preprocessing) for p in order])
    np.testing.assert_allclose(features, backbone.features(pixels), rtol=1e-5)
    extractor.cache.close()
    assert Extractor(tmp_path)(images) == Extraction(computed=0, cached=18, refused=())


def test_image_unusable_for_one_backbone_is_skipped_for_all(tmp_path: Path) -> None:
    """It is named once, the backbones after it do not try it, and a restart opens none of them for it."""
    data = write_images(tmp_path / "data", count=2)
    Image.new("RGB", (12, 10), "white").save(data / "cat" / "white.png")
    (data / "dog" / "junk.png").write_text("junk")
    images = find_images(data, CLASSES)
    extractor = Extractor(tmp_path, tiny(tmp_path), choosy(tmp_path), tiny(tmp_path, seed=1))
    extraction = extractor(images)
    assert extraction.computed == 5 + 4 + 4
    assert [path.name for path, _ in extraction.refused] == ["white.png", "junk.png"]
    assert "NaN" in extraction.refused[0][1]
    assert sum(extractor.progress) == 18
    known = extractor.cache.known(*extractor.backbones)
    assert known == {image.identity for image in images if image.path.stem.isdigit()}
    assert extractor(images) == Extraction(computed=0, cached=13, refused=extraction.refused)
    assert extractor.opened == []


def test_interruption_keeps_finished_batches(tmp_path: Path) -> None:
    images = find_images(write_images(tmp_path / "data", count=8), CLASSES)
    extractor = Extractor(tmp_path)
    with pytest.raises(KilledError):
        extractor(images, stop_after=8)
    assert extractor(images) == Extraction(computed=8, cached=8, refused=())


def test_broken_image_is_named_and_tried_again_when_its_file_changes(tmp_path: Path) -> None:
    """Unreadable and truncated images are refused with reasons, and not decoded again at each start."""
    data = write_images(tmp_path / "data", count=4)
    whole = (data / "cat" / "0000.png").read_bytes()
    (data / "cat" / "0000.png").write_bytes(whole[: len(whole) // 2])
    (data / "dog" / "0001.png").write_text("not an image")
    images, extractor = find_images(data, CLASSES), Extractor(tmp_path)
    extraction = extractor(images)
    assert [path.name for path, _ in extraction.refused] == ["0000.png", "0001.png"]
    assert all(reason for _, reason in extraction.refused)
    assert extraction.computed == 6
    assert extractor(images) == Extraction(computed=0, cached=6, refused=extraction.refused)
    (data / "cat" / "0000.png").write_bytes(whole)
    assert extractor(find_images(data, CLASSES)) == Extraction(1, 6, extraction.refused[1:])


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
    for batch in feature_batches(one_by_one(), [tiny(tmp_path)], batch_size=4):
        done += len(batch)
        assert taken <= done + 4
    assert done == len(found)


def test_pipe_in_place_of_an_image_does_not_block(tmp_path: Path) -> None:
    """It has replaced the image since the scan; the image counts once it is back."""
    data = write_images(tmp_path / "data", count=1)
    images, extractor = find_images(data, CLASSES), Extractor(tmp_path)
    path = data / "cat" / "0000.png"
    path.rename(tmp_path / "image.png")
    os.mkfifo(path)
    script = (
        "import sys; from pathlib import Path; from edge_client.images.file_kind import open_file\n"
        "try: open_file(Path(sys.argv[1]))\n"
        "except OSError: sys.exit(0)\n"
        "sys.exit(1)"
    )
    # A process that reads the pipe would wait for ever.
    subprocess.run([sys.executable, "-c", script, path], check=True, timeout=60)
    made = extractor(images)
    assert (made.refused, made.may_pass) == (((path, "not a regular file"),), True)
    path.unlink()
    (tmp_path / "image.png").rename(path)
    assert extractor(images) == Extraction(computed=1, cached=1, refused=())


def test_refusal_that_may_pass_is_not_stored() -> None:
    """A file without permission, and a lack of memory, are tried again although the file has not changed."""
    with open_folder() as folder:
        data = write_images(folder / "data", count=1)
        (data / "cat" / "0000.png").chmod(0)
        images, extractor = find_images(data, CLASSES), Extractor(folder)
        with patch("edge_client.images.extraction.preprocess", side_effect=MemoryError):
            assert "MemoryError" in {reason for _, reason in extractor(images).refused}
        with not_root():
            made = extractor(images)
        assert (made.refused, made.may_pass) == (((data / "cat" / "0000.png", "Permission denied"),), True)
        (data / "cat" / "0000.png").chmod(0o644)
        assert extractor(images) == Extraction(computed=1, cached=1, refused=())


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("long.png", Image.new("RGB", (20_000_000, 1))),
        ("bomb.png", Image.new("1", (9600, 9600))),
        ("float.tif", Image.new("F", (9, 9))),
        ("integer.tif", Image.new("I", (9, 9))),
    ],
)
def test_odd_image_is_refused_without_warnings(
    tmp_path: Path, name: str, image: Image.Image, recwarn: pytest.WarningsRecorder
) -> None:
    """Whatever fails between file and pixels refuses that image; Pillow's own warnings are not shown."""
    data = write_images(tmp_path / "data", count=1)
    image.save(data / "cat" / name)
    extraction = Extractor(tmp_path)(find_images(data, CLASSES))
    assert [path.name for path, _ in extraction.refused] == [name]
    assert str(tmp_path) not in extraction.refused[0][1]
    assert "\n" not in extraction.refused[0][1]
    assert extraction.computed == 2
    assert not recwarn.list


def test_file_name_outside_utf8_is_extracted(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", count=1)
    (data / "cat" / "0000.png").rename(os.fsdecode(os.fsencode(data) + b"/cat/\xe4\xff.png"))
    images, extractor = find_images(data, CLASSES), Extractor(tmp_path)
    assert extractor(images) == Extraction(computed=2, cached=0, refused=())
    assert extractor(images) == Extraction(computed=0, cached=2, refused=())


_WEIGH = """
import sys
from pathlib import Path
from typing import Any
from edge_client.graphs.backbone import open_backbone
from edge_client.store.feature_cache import FeatureCache
from edge_client.images.extraction import extract
from edge_client.images.images import find_images

data, backbone, state = map(Path, sys.argv[1:])
opened = open_backbone(backbone, provider="cpu", threads=1)
extraction = extract(
    find_images(data, ["cat"]), [opened.sha256], FeatureCache(state), open_backbone=lambda _: opened,
    batch_size=32, on_progress=lambda *_: None,
)
print(extraction.computed, Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_memory_does_not_grow_with_the_images(tmp_path: Path) -> None:
    """Extracting 5,000 images takes hardly more memory than extracting 1,000."""
    image = write_images(tmp_path, count=1) / "cat" / "0000.png"
    tiny(tmp_path, feature_size=1000)  # 16 MB of features in 4,000 images
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
    assert peak_kb[5000] < 1.1 * peak_kb[1000]


def test_only_images_whose_preprocessing_has_changed_are_computed_again(tmp_path: Path) -> None:
    """With a cache of an earlier version: transparent ones and those of 16 bits, and those that were unusable."""
    cat, base = tmp_path / "data" / "cat", noise()
    for name in ("1.jpg", "2.png", "3.gif"):
        image_file(cat / name, base)
    base.putalpha(100)
    image_file(cat / "4.png", base)
    deep = Image.fromarray(np.full((8, 8), 40_000, np.uint16))
    image_file(cat / "5.png", deep)
    image_file(cat / "6.pgm", deep.convert("I"))
    images, extractor = find_images(tmp_path / "data", CLASSES), Extractor(tmp_path)
    extractor(images)
    (key,) = extractor.backbones
    features = extractor.cache.matrix([image.identity for image in images], key, size=16)
    digests = extractor.cache.contents()
    extractor.cache.close()
    with contextlib.closing(sqlite3.connect(extractor.file, isolation_level=None)) as earlier:
        earlier.execute("UPDATE features SET vector = zeroblob(64)")
        earlier.execute(
            "UPDATE features SET vector = NULL, unusable = 'of 32 bits' WHERE identity LIKE '%.pgm'"
        )
        earlier.execute("DELETE FROM contents WHERE identity LIKE '%.pgm'")
        earlier.execute("UPDATE contents SET digest = zeroblob(16)")
        earlier.execute("UPDATE contents SET preprocessing = 1")
    upgraded = Extractor(tmp_path)
    assert upgraded(images) == Extraction(computed=3, cached=3, refused=())
    features[:3] = 0
    found = upgraded.cache.matrix([image.identity for image in images], key, size=16)
    np.testing.assert_array_equal(found, features)
    now = upgraded.cache.contents()
    assert [now[each.identity] == digests[each.identity] for each in images] == [False] * 3 + [True] * 3
    assert upgraded(images) == Extraction(computed=0, cached=6, refused=())
    assert Extractor(tmp_path)(images) == Extraction(computed=0, cached=6, refused=())


@pytest.mark.parametrize("name", ["large", "small"])
def test_large_images_are_decoded_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Others are decoded in all threads: each of four waits for the other three."""
    monkeypatch.setattr(decoding_memory, "SMALL_BYTES", 0)
    monkeypatch.setattr(decoding_memory, "LARGE_BYTES", 99 if name == "large" else 2**20)
    write_images(tmp_path, count=4, classes=("cat",))  # of 120 pixels
    inside, most, lock, together = 0, 0, threading.Lock(), threading.Barrier(4)

    def watched(image: Image.Image, spec: Preprocessing) -> NDArray[np.uint8]:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        if name == "small":
            together.wait(timeout=60)
        else:
            time.sleep(0.1)  # another thread could begin
        pixels = preprocess(image, spec)
        with lock:
            inside -= 1
        return pixels

    monkeypatch.setattr(extraction, "preprocess", watched)
    monkeypatch.setattr(extraction, "decoding_threads", lambda: 4)
    images = map(unlabeled, sorted((tmp_path / "cat").iterdir()))
    ((*made,),) = feature_batches(images, [tiny(tmp_path)], batch_size=4)
    assert all(isinstance(feature, np.ndarray) for _, feature in made)
    assert most == (1 if name == "large" else 4)


_WEIGH_FORMATS = """
import sys
from pathlib import Path
from PIL import Image
from edge_client.images.decoding_memory import decoding_bytes
from edge_client.images.decoding import decoded
from edge_client.graphs.session import release_memory
from protocol.models.preprocessing import Preprocessing, preprocess

def resident(kind):
    return 1024 * int(Path("/proc/self/status").read_text().split(kind)[1].split()[0])

for path in [sys.argv[1], *sys.argv[1:]]:  # the first one loads modules
    with Image.open(path) as image:
        estimate = decoding_bytes(image, Path(path).stat().st_size)
    release_memory()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS:")
    with decoded(Path(path)) as image:
        preprocess(image, Preprocessing(height=32, width=32))
    print(Path(path).name, estimate, resident("VmHWM:") - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc"
)
def test_no_format_takes_more_memory_than_estimated(tmp_path: Path) -> None:
    """JPEG in all colors, progressive and turned, PNG, PGM, WEBP and TIFF; estimated at most 2.5 times the peak."""
    base, turned = noise(300, 300).resize((2000, 2000)), Image.Exif()
    turned[0x112] = 6
    for mode in ("L", "RGB", "CMYK"):
        image = base.convert(mode)
        image.save(tmp_path / f"{mode}.jpg")
        image.save(tmp_path / f"{mode}-progressive.jpg", progressive=True, subsampling=0)
        image.save(tmp_path / f"{mode}-turned.jpg", exif=turned)
        image.save(tmp_path / f"{mode}.tif", compression="tiff_lzw", tiffinfo={278: 2000})
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        base.convert(mode).save(tmp_path / f"{mode}.png", compress_level=1)
    Image.new("I;16", base.size, 40_000).save(tmp_path / "16.png", compress_level=1)
    Image.new("I;16", base.size, 40_000).convert("I").save(tmp_path / "16.pgm")
    few = noise(300, 300).quantize(16).resize(base.size)
    few.save(tmp_path / "transparent.png", compress_level=1, transparency=3)
    base.save(tmp_path / "transparent-RGB.png", compress_level=1, transparency=(1, 2, 3))
    base.save(tmp_path / "lossless.webp", lossless=True, method=0, quality=0)
    base.convert("RGBA").save(tmp_path / "lossy.webp", method=0)
    files = map(str, sorted(tmp_path.iterdir()))
    done = subprocess.run(
        [sys.executable, "-c", _WEIGH_FORMATS, *files], capture_output=True, text=True, check=True
    )
    for line in done.stdout.splitlines()[1:]:
        name, estimate, peak = line.split()
        assert int(peak) < int(estimate) + 2**22, name
        assert int(estimate) < 2.5 * int(peak), name


@pytest.mark.parametrize(
    ("group", "mount", "names", "prefix"),
    [
        ("0::/a/b", "sys/fs/cgroup", ("memory.max", "memory.current"), ""),
        ("4:cpu,memory:/a/b", "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ],
)  # fmt: skip
def test_limits_of_control_groups_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, mount: str, names: tuple[str, str], prefix: str
) -> None:  # fmt: skip
    """Those of groups above as well, without cached files; a container sees its own group at the mount."""
    monkeypatch.setattr(decoding_memory, "_ROOT", tmp_path)
    for folder, limit in (("a/b", "max"), ("a", "400000000"), ("", "500000000")):
        place = tmp_path / mount / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / names[0]).write_text(f"{limit}\n")
        (place / names[1]).write_text("300000000\n")
        (place / "memory.stat").write_text(f"{prefix}inactive_file 50000000\n{prefix}active_file 10000000\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"{group}\n")
    assert (limit_bytes(), available_bytes()) == (400_000_000, 160_000_000 - decoding_memory.MARGIN_BYTES)
    (tmp_path / "proc/self/cgroup").write_text(group.replace("/a/b", "/docker/0"))
    assert limit_bytes() == 500_000_000


def test_image_waits_for_the_memory_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that fit only one after the other are both decoded; one that does not fit alone is refused."""
    monkeypatch.setattr(decoding_memory, "available_bytes", lambda: 100_000_000)
    begun = threading.Event()

    def decode() -> None:
        with reserve(60_000_000):
            begun.set()

    thread = threading.Thread(target=decode)
    with pytest.raises(MemoryError, match="it needs 120 MiB"), reserve(125_000_000):
        pass
    with reserve(60_000_000):
        thread.start()
        assert not begun.wait(0.2)
    thread.join(timeout=60)
    assert begun.is_set()
