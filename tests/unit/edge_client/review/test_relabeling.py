"""Images move between folders, and back; none is lost."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_client.data.images import LabeledImage, find_images
from edge_client.review.relabeling import NotMoved, Relabeling
from protocol.errors import ConfigError
from tests.support.devices.device_factory import CLASSES, write_images

CAT, DOG = 0, 1


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_images(tmp_path / "data", count=2)


@pytest.fixture
def image(data: Path) -> LabeledImage:
    return find_images(data, CLASSES)[0]


def _contents(*folders: Path) -> list[bytes]:
    return sorted(path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file())


def test_image_moves_under_a_free_name_and_back(data: Path, image: LabeledImage) -> None:
    before, folders = _contents(data), Relabeling(data, CLASSES, None)
    moved = folders.move(image, image.path, DOG)
    assert moved == data / "dog" / "0000-2.png"
    assert folders.move(image, moved, DOG) == moved
    assert folders.undo() == (moved, image.path)
    assert folders.undo() is None
    assert image.is_unchanged()
    assert _contents(data) == before


def test_folder_of_a_class_is_made_and_an_existing_one_is_found_by_its_normal_form(
    data: Path, image: LabeledImage
) -> None:
    decomposed = data / "cafe\u0301"
    decomposed.mkdir()
    folders = Relabeling(data, ("caf\u00e9", "bird"), None)
    moved = folders.move(image, image.path, 0)
    assert moved.parent == decomposed
    assert folders.move(image, moved, 1) == data / "bird" / image.path.name


@pytest.fixture
def other_disk(data: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")  # noqa: S108 - a disk, not a file of ours
    if not memory.is_dir() or memory.stat().st_dev == data.stat().st_dev:
        pytest.skip("no other disk")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder) / "others"


def test_image_moves_to_another_disk_and_back(data: Path, image: LabeledImage, other_disk: Path) -> None:
    content, folders = image.path.read_bytes(), Relabeling(data, CLASSES, other_disk)
    moved = folders.move(image, image.path, None)
    assert (moved, moved.read_bytes(), image.path.exists()) == (other_disk / image.path.name, content, False)
    folders.undo()
    assert image.is_unchanged()


@pytest.mark.parametrize("fault", ["changed", "missing", "link", "no folder"])
def test_image_that_is_not_the_one_that_was_found_stays(data: Path, image: LabeledImage, fault: str) -> None:
    if fault == "changed":
        image.path.write_bytes(b"changed")
    elif fault == "missing":
        image.path.unlink()
    elif fault == "link":
        image.path.rename(data / "target.png")
        image.path.symlink_to(data / "target.png")
    before, label = _contents(data), None if fault == "no folder" else DOG
    with pytest.raises(NotMoved, match=r"review the images again|no folder for images"):
        Relabeling(data, CLASSES, None).move(image, image.path, label)
    assert _contents(data) == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EXDEV])
def test_disk_that_fails_loses_nothing(
    data: Path, image: LabeledImage, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Nothing is left at the new place."""
    before = _contents(data)

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "replace", fail)
    monkeypatch.setattr(shutil, "copy2", fail)
    with pytest.raises(NotMoved, match="cannot be moved into"):
        Relabeling(data, CLASSES, None).move(image, image.path, DOG)
    assert _contents(data) == before


def test_lists_and_names_that_no_folder_can_have_are_refused(data: Path) -> None:
    listed = data / "images.csv"
    listed.write_text("path,label\n")
    with pytest.raises(ConfigError, match="change them there"):
        Relabeling(listed, CLASSES, None)
    for name in ("a/b", "..", ""):
        with pytest.raises(ConfigError, match="no folder can have the name of the class"):
            Relabeling(data, ("cat", name), None)
