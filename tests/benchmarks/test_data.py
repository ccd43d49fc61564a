import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.data import DataSet, load_data, sample


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for data."""
    monkeypatch.setenv("PROTOFLEET_BENCH_DATA", str(tmp_path))
    return tmp_path


def _shares(data: DataSet) -> list[float]:
    """Which share of each class is there to learn from."""
    train, test = (np.bincount(part.labels) for part in (data.train, data.test))
    return [float(share) for share in train / (train + test)]


def test_digits_of_scikit_learn() -> None:
    """Real pictures of 8 by 8 pixels over the whole range of grey, cut the same way every time."""
    first, second = load_data("digits"), load_data("digits")
    assert first.train.pictures.shape[1:] == (8, 8)
    assert (first.train.pictures.min(), first.train.pictures.max()) == (0, 240)
    assert len(first.train.labels) + len(first.test.labels) == 1797
    assert np.array_equal(first.train.pictures, second.train.pictures)
    assert _shares(first) == pytest.approx([0.55] * 10, abs=0.01)


def test_a_data_set_in_one_part(folder: Path) -> None:
    """Every class is cut in two, and no picture is in both parts."""
    pictures = np.arange(80, dtype=np.uint8)[:, None, None] * np.ones((1, 4, 4), np.uint8)
    np.savez(folder / "mnist_m.npz", x=pictures, y=np.arange(80, dtype=np.uint8) % 4)
    data = load_data("mnist_m")
    assert _shares(data) == [0.75] * 4
    numbers = [*data.train.pictures[:, 0, 0], *data.test.pictures[:, 0, 0]]
    assert sorted(numbers) == list(range(80))
    assert np.array_equal(data.train.labels, data.train.pictures[:, 0, 0] % 4)


def test_a_domain_of_an_archive(folder: Path) -> None:
    """Both kinds of picture count, and other domains do not."""
    with zipfile.ZipFile(folder / "pacs.zip", "w") as archive:
        for name in ("sketch", "photo"):
            for number in range(8):
                picture = io.BytesIO()
                Image.new("RGB", (6, 6), (number,) * 3).save(picture, "PNG")
                kind = "png" if number % 2 else "jpg"
                archive.writestr(
                    f"{name}/{'dog' if number < 4 else 'cat'}/{number}.{kind}", picture.getvalue()
                )
    data = load_data("pacs_sketch")
    assert data.train.pictures.shape == data.test.pictures.shape == (4, 6, 6, 3)
    assert _shares(data) == [0.5, 0.5]


def test_a_sample() -> None:
    """The same pictures every time, each with its class; all of them where there are no more."""
    train = load_data("digits").train
    some = sample(train, 20)
    assert np.array_equal(some.pictures, sample(train, 20).pictures)
    for picture, label in zip(some.pictures, some.labels, strict=True):
        found = (train.pictures == picture).all(axis=(1, 2))
        assert label in train.labels[found]
    assert len(sample(train, 10**6).labels) == len(train.labels)
