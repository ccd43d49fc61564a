"""Digests of image files that metadata does not change."""

import io
import os
import tracemalloc
import zlib
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from edge_client.data.image_content import content_key
from edge_client.data.images import MAX_FILE_BYTES, decode
from edge_client.submission import image_features
from edge_client.submission.prepared_submission import NoPrototype, prepare_prototypes
from protocol.errors import UnreadableImage
from tests.support.devices.device_factory import image_file, make_manifest, make_workspace, noise

RATING, ORIENTATION = 0x4746, 0x0112


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def tagged(jpeg: bytes, tags: dict[int, int]) -> bytes:
    """Return a JPEG file with Exif tags, as photo programs write them: nothing is encoded again."""
    exif = Image.Exif()
    exif.update(tags)
    segment = b"Exif\0\0" + exif.tobytes().removeprefix(b"Exif\0\0")
    return jpeg[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + jpeg[2:]


def png_exif(tags: dict[int, int]) -> bytes:
    exif = Image.Exif()
    exif.update(tags)
    return saved(noise(), "png", exif=exif)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """Return the PNG file with a chunk after its header."""
    chunk = kind + data
    return PNG[:33] + len(data).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") + PNG[33:]


def webp(**options: Any) -> bytes:
    return saved(noise(), "webp", **options)


def webp_exif(tags: dict[int, int]) -> bytes:
    exif = Image.Exif()
    exif.update(tags)
    return webp(exif=exif)


def text(**texts: str) -> PngInfo:
    info = PngInfo()
    for name, value in texts.items():
        info.add_text(name, value)
    return info


JPEG, PNG = saved(noise(), "jpeg"), saved(noise(), "png")
SCANS = saved(noise(), "jpeg", progressive=True)
SAME = {
    "a rating": (JPEG, tagged(JPEG, {RATING: 5})),
    "another rating": (tagged(JPEG, {RATING: 4}), tagged(JPEG, {RATING: 5})),
    "a rating of a turned image": (
        tagged(JPEG, {ORIENTATION: 6}),
        tagged(JPEG, {ORIENTATION: 6, RATING: 5}),
    ),
    "a comment": (JPEG, saved(noise(), "jpeg", comment=b"a dog")),
    "an upright orientation": (JPEG, tagged(JPEG, {ORIENTATION: 1})),
    "a resolution": (saved(noise(), "jpeg", dpi=(72, 72)), saved(noise(), "jpeg", dpi=(300, 300))),
    "a text": (PNG, saved(noise(), "png", pnginfo=text(Title="a dog"))),
    "a rating in a PNG": (PNG, png_exif({RATING: 5})),
    "a rating of a turned PNG": (png_exif({ORIENTATION: 6}), png_exif({ORIENTATION: 6, RATING: 5})),
    "a rating of a PNG turned otherwise": (
        saved(noise(), "png", pnginfo=text(xmp='tiff:Orientation="6"')),
        saved(noise(), "png", pnginfo=text(xmp='xmp:Rating="5" tiff:Orientation="6"')),
    ),
    "a resolution of a PNG": (PNG, png_chunk(b"pHYs", bytes(8) + b"\1")),
    "a PNG with something behind it": (PNG, PNG + b"something"),
    "a film behind a JPEG": (JPEG, JPEG + b"film" + JPEG),
    "a film behind a JPEG of several scans": (SCANS, SCANS + b"film" * 2**20),
    "a rating in a WEBP": (webp(), webp_exif({RATING: 5})),
    "a profile and a text in a WEBP": (webp(), webp(icc_profile=b"profile", xmp=b'xmp:Rating="5"')),
    "a rating of a turned WEBP": (webp_exif({ORIENTATION: 6}), webp_exif({ORIENTATION: 6, RATING: 5})),
    "a WEBP with something behind it": (webp(), webp() + b"something"),
}
OTHER = {
    "another image": (JPEG, saved(noise(seed=1), "jpeg")),
    "another PNG image": (PNG, saved(noise(seed=1), "png")),
    "an orientation": (JPEG, tagged(JPEG, {ORIENTATION: 6})),
    "an orientation in a PNG": (PNG, png_exif({ORIENTATION: 6})),
    "a transparent color in a PNG": (PNG, png_chunk(b"tRNS", bytes(6))),
    "a truncated file": (JPEG, JPEG[:-1]),
    "a truncated header": (JPEG, JPEG[:21]),
    "a truncated PNG": (PNG, PNG[:40]),
    "a JPEG without its last scan": (SCANS, SCANS[: SCANS.rindex(b"\xff\xda")] + b"\xff\xd9"),
    "another WEBP image": (webp(), saved(noise(seed=1), "webp")),
    "an orientation in a WEBP": (webp(), webp_exif({ORIENTATION: 6})),
    "an orientation in a text of a WEBP": (webp(), webp(xmp=b'tiff:Orientation="6"')),
    "a truncated WEBP": (webp(), webp()[:-2]),
    "a truncated header of a WEBP": (webp(), webp_exif({RATING: 5})[:20]),
    "another format": (PNG, saved(noise(), "bmp")),
}


@pytest.mark.parametrize(("files", "is_same"), [(SAME, True), (OTHER, False)])
def test_metadata_does_not_change_an_image(
    tmp_path: Path, files: dict[str, tuple[bytes, bytes]], *, is_same: bool
) -> None:
    """Its orientation, and all that changes how it is decoded, do."""
    for what, pair in files.items():
        keys = []
        for data in pair:
            (tmp_path / "image").write_bytes(data)
            keys.append(content_key(tmp_path / "image"))
        assert (keys[0] == keys[1]) == is_same, what
        assert None not in keys


def test_a_file_that_cannot_be_read_has_no_key(tmp_path: Path) -> None:
    assert content_key(tmp_path / "none.jpg") is None


def test_large_files_take_little_memory(tmp_path: Path) -> None:
    """A film of JPEG images, or a PNG file with a text of 16 MB; what is too large to be decoded is not read."""
    long = (16_000_000).to_bytes(4, "big") + b"tEXt"
    for name, start in (("film.jpg", JPEG), ("text.png", PNG[:33] + long), ("raw.bmp", b"BM")):
        file = tmp_path / name
        file.write_bytes(start)
        os.truncate(file, 16_000_000)
        tracemalloc.start()
        try:
            assert content_key(file) is not None
            assert tracemalloc.get_traced_memory()[1] < 4_000_000
        finally:
            tracemalloc.stop()
        os.truncate(file, MAX_FILE_BYTES + 1)
        assert content_key(file) is None
        with pytest.raises(
            UnreadableImage, match="expected a file of at most 536870912 bytes, got one of 536870913"
        ):
            decode(file)


@pytest.mark.parametrize("when", ["extract", "content_key"])
def test_files_that_change_while_they_are_read_reveal_no_new_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """An editor saves all images between two readings of them; later one image is new, whose feature would be found."""
    folder, workspace = tmp_path / "data" / "cat", make_workspace(tmp_path)
    manifest = make_manifest(min_images=5)
    key, new = manifest.backbones[0].digest.hex(), folder / "new.png"
    sums: list[np.ndarray] = []

    def save_all(seed: int) -> None:
        for number in range(10):
            image_file(folder / f"{number}.png", noise(seed=seed + number))

    def upload() -> None:
        with suppress(NoPrototype):
            prepared = prepare_prototypes(workspace, manifest, workspace.extract(manifest, lambda: False))
            sums.append(prepared.prototypes.astype(np.float64).T @ prepared.counts)

    save_all(0)
    whole, seeds = getattr(image_features, when), count(100, 100)

    def save_and_read(*args: Any, **options: Any) -> Any:
        if when == "extract" and args[0]:
            save_all(next(seeds))
        made = whole(*args, **options)
        if when == "content_key":
            save_all(next(seeds))
        return made

    with monkeypatch.context() as patched:
        patched.setattr(image_features, when, save_and_read)
        upload()
    image_file(new, noise(seed=99))
    upload()
    (found,) = [image for image in workspace.find_images(manifest) if image.path == new]
    feature = workspace.features([found], [key], 16)[0]
    assert sums
    for before in (np.zeros(16), *sums[:-1]):
        assert np.linalg.norm(sums[-1] - before - feature) > 0.1 * np.linalg.norm(feature)


def test_a_rating_does_not_reveal_a_new_image(tmp_path: Path) -> None:
    """Of two groups an image is rated, and one image is new: with other groups, it was their difference."""
    workspace, manifest = make_workspace(tmp_path), make_manifest(batch_size=5, min_images=5)
    folder = tmp_path / "data" / "cat"
    folder.mkdir(parents=True)

    def total() -> np.ndarray:
        prepared = prepare_prototypes(workspace, manifest, workspace.extract(manifest, lambda: False))
        sums: np.ndarray = prepared.prototypes.astype(np.float64).T @ prepared.counts
        return sums

    for number in range(10):
        (folder / f"{number}.jpg").write_bytes(saved(noise(seed=number), "jpeg"))
    before = total()
    images = workspace.find_images(manifest)
    keys = workspace.content_keys(images)
    for group in workspace.store.image_groups.read().groups.values():
        path = next(image.path for image in images if keys[image.identity] in group.images)
        path.write_bytes(tagged(path.read_bytes(), {RATING: 5}))
    (folder / "new.jpg").write_bytes(saved(noise(seed=99), "jpeg"))
    np.testing.assert_array_equal(total(), before)
