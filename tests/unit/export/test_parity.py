"""The comparison with torch finds the worst photo and reads any photograph."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from export.parity import BATCH, COMPARED, Reference, compare, compared_photos, photos_in, sample_photos
from protocol.errors import ConfigError
from tests.support.graphs.torch_networks import described


def first_value_of(photo: Image.Image) -> int:
    """Return the value that distinguishes the test's images."""
    return int(np.asarray(photo)[0, 0, 0])


def reference_of(file: bytes, *, wrong_at: int, factor: float) -> Reference:
    """Return the features that the file itself computes, changed for one photo."""
    import onnxruntime

    from protocol.models.preprocessing import preprocess

    session = onnxruntime.InferenceSession(file)

    def reference(photo: Image.Image) -> NDArray[np.float32]:
        image = preprocess(photo, described().preprocessing)[None]
        feature: NDArray[np.float32] = session.run(["feature"], {"image": image})[0][0]
        return feature * np.float32(factor) if first_value_of(photo) == wrong_at else feature

    return reference


def images(count: int) -> Iterator[Image.Image]:
    """Gray images, each of another shade."""
    return (Image.new("RGB", (20, 20), (shade, shade, shade)) for shade in range(count))


@pytest.mark.parametrize(
    ("wrong_at", "factor", "error", "cosine"),
    [(0, 2, 0.5, 1), (3, 2, 0.5, 1), (BATCH + 2, 2, 0.5, 1), (1, -1, 2, -1)],
)
def test_worst_image_decides_parity(
    tiny_file: bytes, wrong_at: int, factor: float, error: float, cosine: float
) -> None:
    parity = compare(
        tiny_file,
        preprocessing=described().preprocessing,
        reference=reference_of(tiny_file, wrong_at=wrong_at, factor=factor),
        photos=images(BATCH + 3),
    )
    assert parity.images == BATCH + 3
    assert parity.relative_error == pytest.approx(error, rel=1e-4)
    assert parity.cosine == pytest.approx(cosine)


def test_sample_photos_are_real() -> None:
    photos = sample_photos()
    assert [photo.size for photo in photos] == [(640, 427), (640, 427)]
    assert all(len(np.unique(np.asarray(photo).reshape(-1, 3), axis=0)) > 5000 for photo in photos)


def test_photos_are_read_from_subfolders(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for index, name in enumerate(["a.jpg", "b.PNG", "below/c.webp"]):
        Image.new("L", (9, 9), 40 * index).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("nothing to see")
    photos = list(photos_in(tmp_path))
    assert [photo.mode for photo in photos] == ["RGB"] * 3
    assert [first_value_of(photo) for photo in photos] == [0, 40, 80]


def test_folder_without_photos_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no photos"):
        photos_in(tmp_path)


def test_broken_photo_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"not a photo")
    with pytest.raises(ConfigError, match=r"broken\.jpg"):
        list(photos_in(tmp_path))


def test_photos_of_a_large_folder_are_compared_at_even_distances(tmp_path: Path) -> None:
    for shade in range(COMPARED + 50):
        Image.new("RGB", (1, 1), (shade, 0, 0)).save(tmp_path / f"{shade:03}.png")
    shades = [first_value_of(photo) for photo in compared_photos(tmp_path)]
    assert shades == list(range(0, COMPARED + 50, 2))
