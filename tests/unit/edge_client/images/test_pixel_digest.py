"""Digests of images: metadata, and the kind of the file, do not change them."""

import io
import os
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from edge_client.images.decoding import MAX_FILE_BYTES, decode, decoded, pixel_digest
from edge_client.images.extraction import extract
from edge_client.kinds import image_features
from edge_client.kinds.image_features import training_feature_keys
from edge_client.kinds.prepared_submission import NoPrototype
from protocol.errors import UnreadableImage
from protocol.wire.messages import Perturbation
from tests.support.devices.device_factory import (
    image_file,
    make_manifest,
    make_submission,
    make_workspace,
    noise,
)

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


def with_exif(kind: str, tags: dict[int, int]) -> bytes:
    exif = Image.Exif()
    exif.update(tags)
    return saved(noise(), kind, exif=exif)


def webp(**options: Any) -> bytes:
    return saved(noise(), "webp", **options)


def half_hidden(seed: int) -> bytes:
    """Return a file of the usual image, of which the left half is random pixels without opacity."""
    image, hidden = noise().convert("RGBA"), noise(width=20, seed=seed)
    hidden.putalpha(0)
    image.paste(hidden, (0, 0))
    return saved(image, "png")


def text(**texts: str) -> PngInfo:
    info = PngInfo()
    for name, value in texts.items():
        info.add_text(name, value)
    return info


JPEG, PNG = saved(noise(), "jpeg"), saved(noise(), "png")
LARGE, small, other_pixel = noise(width=600, height=500), noise(), noise()
other_pixel.putpixel((3, 5), (0, 0, 0))
SAME = {
    "a rating": (JPEG, tagged(JPEG, {RATING: 5})),
    "another rating": (tagged(JPEG, {RATING: 4}), tagged(JPEG, {RATING: 5})),
    "a rating of a turned image": (tagged(JPEG, {ORIENTATION: 6}), tagged(JPEG, {ORIENTATION: 6, RATING: 5})),
    "a comment": (JPEG, saved(noise(), "jpeg", comment=b"a dog")),
    "an upright orientation": (JPEG, tagged(JPEG, {ORIENTATION: 1})),
    "a text": (PNG, saved(noise(), "png", pnginfo=text(Title="a dog"))),
    "a rating in a PNG": (PNG, with_exif("png", {RATING: 5})),
    "a film behind a JPEG": (JPEG, JPEG + b"film" + JPEG),
    "a rating in a WEBP": (webp(), with_exif("webp", {RATING: 5})),
    "a profile and a text in a WEBP": (webp(), webp(icc_profile=b"profile", xmp=b'xmp:Rating="5"')),
    "another format without loss": (PNG, saved(noise(), "bmp")),
    "the same upright": (
        with_exif("png", {ORIENTATION: 6}),
        saved(noise().transpose(Image.Transpose.ROTATE_270), "png"),
    ),
    "hidden pixels": (half_hidden(1), half_hidden(2)),
    "an opaque alpha": (PNG, saved(noise().convert("RGBA"), "png")),
    "a palette": (saved(noise().quantize(16), "png"), saved(noise().quantize(16).convert("RGB"), "png")),
}
OTHER = {
    "another image": (JPEG, saved(noise(seed=1), "jpeg")),
    "an orientation": (JPEG, tagged(JPEG, {ORIENTATION: 6})),
    "an orientation in a PNG": (PNG, with_exif("png", {ORIENTATION: 6})),
    "one pixel of a small image": (saved(small, "png"), saved(other_pixel, "png")),
    "another quality": (JPEG, saved(noise(), "jpeg", quality=60)),
    "another size": (saved(Image.new("L", (300, 400)), "png"), saved(Image.new("L", (400, 300)), "png")),
    "a large image": (saved(LARGE, "png"), saved(noise(width=600, height=500, seed=1), "png")),
    "another palette": (
        saved(Image.new("RGB", (8, 8), "red").quantize(2), "png"),
        saved(Image.new("RGB", (8, 8), "blue").quantize(2), "png"),
    ),
    "16 bits": (
        saved(Image.fromarray(np.full((8, 8), 30_000, np.uint16)), "png"),
        saved(Image.fromarray(np.full((8, 8), 31_000, np.uint16)), "png"),
    ),
}


@pytest.mark.parametrize(("files", "is_same"), [(SAME, True), (OTHER, False)])
def test_what_changes_no_pixel_does_not_change_an_image(
    files: dict[str, tuple[bytes, bytes]], *, is_same: bool
) -> None:
    for what, pair in files.items():
        digests = []
        for data in pair:
            with decoded(data) as image:
                digests.append(pixel_digest(image))
        assert (digests[0] == digests[1]) == is_same, what
        assert {*map(len, digests)} == {16}


def test_a_file_that_is_too_large_to_be_decoded_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "raw.bmp"
    file.write_bytes(b"BM")
    os.truncate(file, MAX_FILE_BYTES + 1)
    with pytest.raises(
        UnreadableImage, match="expected a file of at most 536870912 bytes, got one of 536870913"
    ):
        decode(file)


def test_groups_of_an_earlier_digest_stay(tmp_path: Path) -> None:
    """A file has the digest with which it was stored first: of an earlier version, or of another decoder."""
    workspace, manifest = make_workspace(tmp_path), make_manifest(batch_size=5, min_images=5)
    for number in range(5):
        image_file(tmp_path / "data" / "cat" / f"{number}.png", noise(seed=number))
    images = workspace.find_images(manifest).images
    old = {image.identity: bytes([number]) * 16 for number, image in enumerate(images)}
    workspace.cache.put_contents(old)
    make_submission(workspace, manifest, workspace.extract(manifest))
    assert workspace.cache.contents() == old
    assert workspace.store.partition.number_of.keys() == {*old.values()}


def test_a_feature_without_a_digest_is_computed_again(tmp_path: Path) -> None:
    """No image is grouped without one."""
    workspace, manifest = make_workspace(tmp_path), make_manifest()
    image_file(tmp_path / "data" / "cat" / "0.png")
    (image,) = workspace.find_images(manifest).images
    key = manifest.backbones[0].digest.hex()
    workspace.cache.put(key, [(image.identity, np.zeros(16, np.float32))], [])
    workspace.extract(manifest)
    assert len(workspace.cache.contents()) == 1
    assert workspace.features([image], [key], 16).any()


def test_a_new_name_of_a_grouped_image_is_not_held_out(tmp_path: Path) -> None:
    """Which is known once it is decoded: with perturbed images its feature is then computed again, perturbed."""
    workspace = make_workspace(tmp_path, holdout=0.5)
    perturbation = Perturbation(on="images", scale=0.1)
    manifest = make_manifest(perturbation=perturbation, batch_size=5, min_images=5)
    folder = tmp_path / "data" / "cat"
    for number in range(10):
        image_file(folder / f"{number}.png", noise(seed=number))
    found = workspace.extract(manifest)
    make_submission(workspace, manifest, found)
    assert len(found.held_out) == 5
    for image in found.for_training():
        image.path.rename(folder / f"a-{image.path.name}")
    again = workspace.extract(manifest)
    assert again.held_out == found.held_out
    assert len(workspace.cache.known(*training_feature_keys(manifest))) >= 5
    make_submission(workspace, manifest, again)


def test_files_that_change_while_they_are_read_reveal_no_new_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
            prepared = make_submission(workspace, manifest, workspace.extract(manifest))
            sums.append(prepared.prototypes.astype(np.float64).T @ prepared.counts)

    save_all(0)
    whole, seeds = extract, count(100, 100)

    def save_and_read(*args: Any, **options: Any) -> Any:
        if args[0]:
            save_all(next(seeds))
        return whole(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(image_features, "extract", save_and_read)
        upload()
    image_file(new, noise(seed=99))
    upload()
    (found,) = [image for image in workspace.find_images(manifest).images if image.path == new]
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
        prepared = make_submission(workspace, manifest, workspace.extract(manifest))
        sums: np.ndarray = prepared.prototypes.astype(np.float64).T @ prepared.counts
        return sums

    for number in range(10):
        (folder / f"{number}.jpg").write_bytes(saved(noise(seed=number), "jpeg"))
    before = total()
    images = workspace.find_images(manifest).images
    keys = workspace.cache.contents()
    for group in workspace.store.partition.groups.values():
        path = next(image.path for image in images if keys[image.identity] in group.images)
        path.write_bytes(tagged(path.read_bytes(), {RATING: 5}))
    (folder / "new.jpg").write_bytes(saved(noise(seed=99), "jpeg"))
    np.testing.assert_array_equal(total(), before)
