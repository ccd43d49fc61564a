"""Moves images between the folders of classes, and back; never deletes or replaces one."""

import errno
import itertools
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from edge_client.images.images import LabeledImage, class_folder
from protocol.errors import ConfigError, ProtofleetError
from protocol.storage.blobstore import sync


class NotMoved(ProtofleetError):
    """An image stays where it is."""


class Relabeling:
    """Moves images into classes' folders.

    Args:
        data: folder with one sub-folder for each class.
        classes: the names of the head's classes.
        others: folder for images of none of the classes; None if there is none.

    Raises:
        ConfigError: the labels are in a CSV file, or a class's name cannot be a folder's.
    """

    def __init__(self, data: Path, classes: Sequence[str], others: Path | None) -> None:
        if not data.is_dir():
            raise ConfigError(
                f"the labels are in {data}: change them there; --page moves images between folders"
            )
        self._folders = [class_folder(data, name) for name in classes]
        self._others = others
        self._moves: list[tuple[Path, Path]] = []

    def move(self, image: LabeledImage, path: Path, label: int | None) -> Path:
        """Move an image that is at `path` into the folder of a class, or for None of no class; return its new path.

        Its own class is where it was found, which may be a folder below the class's.

        Raises:
            NotMoved: it is not the image that was found, is a link, or the disk fails.
        """
        folder = self._others if label is None else self._folders[label]
        if folder is None:
            raise NotMoved("no folder for images of none of the classes: give --unlabeled")
        if folder in image.path.parents:
            folder = image.path.parent
        if path.parent == folder:
            return path
        status = path.lstat() if path.exists() else None
        if status is None or (status.st_size, status.st_mtime_ns) != (image.size_bytes, image.mtime_ns):
            raise NotMoved(f"{path} was changed, moved or is a link: review the images again")
        moved = _move(path, folder, image.path.name)
        self._moves.append((path, moved))
        return moved

    def undo(self) -> tuple[Path, Path] | None:
        """Move the image that was moved last back; return where it was and where it is; None if none was moved.

        Raises:
            NotMoved: the disk fails, and the move can be undone later; or the image is gone.
        """
        if not self._moves:
            return None
        before, after = self._moves[-1]
        try:
            moved = _move(after, before.parent, before.name)
        except NotMoved:
            if not os.path.lexists(after):
                self._moves.pop()
            raise
        self._moves.pop()
        return after, moved


def _move(path: Path, folder: Path, name: str) -> Path:
    """Move a file into a folder under a name that is free there."""
    try:
        folder.mkdir(exist_ok=True)
        target = _reserved(folder, name)
        try:
            _replace(path, target)
        except BaseException:
            with suppress(OSError):
                if path.exists():
                    target.unlink()
            raise
        sync(folder)
    except OSError as error:
        raise NotMoved(f"{path} cannot be moved into {folder}: {error.strerror}") from error
    return target


def _reserved(folder: Path, name: str) -> Path:
    """Create an empty file under the first free name, which no other program can take meanwhile."""
    stem, suffix = os.path.splitext(name)  # noqa: PTH122 - a Path has no name without its folder
    for number in itertools.count(1):
        target = folder / (name if number == 1 else f"{stem}-{number}{suffix}")
        with suppress(FileExistsError):
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return target
    raise AssertionError


def _replace(path: Path, target: Path) -> None:
    try:
        path.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copy2(path, target)  # to another disk
        sync(target)
        path.unlink()
