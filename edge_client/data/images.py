"""Labeled images in folders or CSV lists: found, held out, decoded."""

import csv
import difflib
import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from PIL import Image, ImageOps, UnidentifiedImageError

from protocol.errors import ConfigError, UnreadableImage

IMAGE_SUFFIXES = (
    ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
"""Suffixes of images in a folder, in upper or lower case. A list may name files of any suffix."""

# No other formats of Pillow: some start other programs (EPS), and no camera writes them.
IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")

UNLABELED = -1


@dataclass(frozen=True, slots=True)
class LabeledImage:
    """A labeled image file as it was when it was found."""

    folder: Path
    """Of all classes, or of the list."""
    relative: str
    label: int
    """Index into the task's classes, or UNLABELED."""
    size_bytes: int
    mtime_ns: int

    @property
    def path(self) -> Path:
        """Its full path, built on demand to save memory."""
        return self.folder / self.relative

    @property
    def identity(self) -> str:
        """Identifies its content: another file, or the same file changed, has another identity."""
        return f"{self.size_bytes}-{self.mtime_ns}-{self.relative}"


def find_images(
    source: Path, classes: Sequence[str], *, may_be_none: bool = False
) -> tuple[LabeledImage, ...]:
    """Return the labeled images of a device, in order of their relative paths.

    `source` is a folder with one sub-folder per class, searched recursively and ignoring hidden files and files
    without one of IMAGE_SUFFIXES, or a CSV file with the columns `path` (relative to the file) and `label`.

    Raises:
        ConfigError: there are classes that are not the task's, or no images unless there may be none.
    """
    labels = {_normal(name): label for label, name in enumerate(classes)}
    try:
        found = list(_listed(source, labels) if source.is_file() else _in_folders(source, labels))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {error.filename}; say in which folder the images are") from error
    except OSError as error:
        raise ConfigError(f"{error.filename or source} cannot be read: {error.strerror}") from error
    if not found and not may_be_none:
        raise ConfigError(
            f"{source} holds no images; expected one folder of images per class ({_name_some(classes)}), "
            "or a CSV file of path,label"
        )
    return tuple(sorted(found, key=lambda image: image.relative))


def unlabeled(path: Path) -> LabeledImage:
    """Return a single file as an image of unknown class."""
    return _image(Path(), str(path), UNLABELED)


def decode(path: Path) -> Image.Image:
    """Return one image in its own mode, fully loaded and upright by its EXIF orientation; the first frame of several.

    Raises:
        UnreadableImage: it is not an image, truncated, corrupt, or too large; the message names the file.
    """
    try:
        with path.open("rb") as file, Image.open(file, formats=IMAGE_FORMATS) as image:
            _check_kind(image)
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return image
    except UnreadableImage as error:
        raise UnreadableImage(f"{path}: {error}") from error
    except UnidentifiedImageError as error:
        raise UnreadableImage(f"{path}: it is none of {', '.join(IMAGE_FORMATS)}") from error
    except OSError as error:
        raise UnreadableImage(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # decoders raise errors of many classes on broken files
        raise UnreadableImage(f"{path}: {error or type(error).__name__}") from error


def _check_kind(image: Image.Image) -> None:
    pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS or 0
    if pixels > most > 0:
        raise UnreadableImage(
            f"{image.width} x {image.height} pixels are more than the {most} that are decoded"
        )
    if image.mode in {"I", "F"}:
        raise UnreadableImage("the white level of 32-bit pixels is undefined; save it with 8 bits a channel")


def _image(folder: Path, relative: str, label: int) -> LabeledImage:
    try:  # a file without permission is found all the same, and refused when it is read
        status = (folder / relative).stat()
    except OSError:
        return LabeledImage(folder, relative, label, size_bytes=0, mtime_ns=0)
    return LabeledImage(folder, relative, label, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def _in_folders(source: Path, labels: Mapping[str, int]) -> Iterator[LabeledImage]:
    with os.scandir(source) as entries:
        folders = sorted(Path(entry.path) for entry in entries if _is_shown(entry) and entry.is_dir())
    seen = {_place(source.stat()), *(_place(folder.stat()) for folder in folders)}
    for folder in folders:
        label = _label_of(folder.name, labels, where=folder)
        for path in _walk(folder, seen):
            yield _image(source, os.path.relpath(path, source), label)


def _walk(folder: Path, seen: set[tuple[int, int]]) -> Iterator[str]:
    """Yield the images in a folder and below; folders already seen, through links, are skipped."""
    folders = [str(folder)]
    while folders:
        deeper = []
        with os.scandir(folders.pop()) as entries:
            for entry in filter(_is_shown, entries):
                if entry.is_dir():
                    deeper.append(entry.path)
                elif entry.name.lower().endswith(IMAGE_SUFFIXES) and _may_be_read(entry):
                    yield entry.path
        for path in sorted(deeper):
            place = _place(Path(path).stat())
            if place not in seen:
                seen.add(place)
                folders.append(path)


def _is_shown(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".")


def _may_be_read(entry: os.DirEntry[str]) -> bool:
    """Exclude pipes and devices, which could block forever; keep dangling links, to be named later."""
    try:
        return S_ISREG(entry.stat().st_mode)
    except OSError:
        return True


def _place(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _listed(source: Path, labels: Mapping[str, int]) -> Iterator[LabeledImage]:
    lines: dict[str, int] = {}
    try:
        with source.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            if not {"path", "label"} <= set(rows.fieldnames or ()):
                header = ",".join(rows.fieldnames or ())
                raise ConfigError(f"{source} must start with the header path,label, not '{header}'")
            for row in rows:
                where = f"{source} line {rows.line_num}"
                relative = (row["path"] or "").strip()
                label = _label_of((row["label"] or "").strip(), labels, where=where)
                if not relative or not (source.parent / relative).is_file():
                    raise ConfigError(f"{where}: there is no file {source.parent / relative}")
                if relative in lines:
                    raise ConfigError(f"{where}: {relative} is already in line {lines[relative]}")
                lines[relative] = rows.line_num
                yield _image(source.parent, relative, label)
    except (UnicodeError, csv.Error) as error:
        raise ConfigError(f"{source} cannot be read as a CSV file in UTF-8: {error}") from error


def _label_of(name: str, labels: Mapping[str, int], *, where: str | Path) -> int:
    label = labels.get(_normal(name))
    if label is not None:
        return label
    by_lower_case = {known.lower(): known for known in labels}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    hint = f" (did you mean {by_lower_case[close[0]]!r}?)" if close else ""
    raise ConfigError(
        f"{where}: {name!r} is no class of the task{hint}; its classes are {_name_some(labels)}"
    )


def _normal(name: str) -> str:
    """Normalize accents, which some file systems decompose."""
    return unicodedata.normalize("NFC", name)


def _name_some(names: Iterable[str], most: int = 20) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
