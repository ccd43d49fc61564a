"""Digests of image files that metadata does not change."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from edge_client.data.image_content import content_key
from edge_client.submission.prepared_submission import prepare_prototypes
from tests.support.device_factory import make_manifest, make_workspace, noise

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


def text(**texts: str) -> PngInfo:
    info = PngInfo()
    for name, value in texts.items():
        info.add_text(name, value)
    return info


JPEG, PNG = saved(noise(), "jpeg"), saved(noise(), "png")
SAME = {
    "a rating": (JPEG, tagged(JPEG, {RATING: 5})),
    "another rating": (tagged(JPEG, {RATING: 4}), tagged(JPEG, {RATING: 5})),
    "a rating of a turned image": (
        tagged(JPEG, {ORIENTATION: 6}),
        tagged(JPEG, {ORIENTATION: 6, RATING: 5}),
    ),
    "a comment": (JPEG, saved(noise(), "jpeg", comment=b"a dog")),
    "a text": (PNG, saved(noise(), "png", pnginfo=text(Title="a dog"))),
}
OTHER = {
    "another image": (JPEG, saved(noise(seed=1), "jpeg")),
    "another PNG image": (PNG, saved(noise(seed=1), "png")),
    "an orientation": (JPEG, tagged(JPEG, {ORIENTATION: 6})),
    "an orientation in a PNG": (PNG, saved(noise(), "png", pnginfo=text(xmp='tiff:Orientation="6"'))),
    "a truncated file": (JPEG, JPEG[:-1]),
    "a truncated header": (JPEG, JPEG[:21]),
    "a truncated PNG": (PNG, PNG[:40]),
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
