"""Folders and lists of labeled images: what is there, what is held out, and one image decoded."""

import csv
import difflib
import hashlib
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
"""What counts as an image in a folder, in upper or lower case. A list may name files of any suffix."""

# Every other format of Pillow is left out: some start other programs (EPS), none comes out of a camera.
IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")

UNLABELED = -1


@dataclass(frozen=True, slots=True)
class LabeledImage:
    """One labeled image as it lay on the disk when it was found."""

    folder: Path
    """Where the search began: the folder of all classes, or the list's."""
    relative: str
    """Its path from there."""
    label: int
    """Index into the task's classes, or UNLABELED."""
    size_bytes: int
    mtime_ns: int

    @property
    def path(self) -> Path:
        """Where it lies; made when asked for, since there may be very many images."""
        return self.folder / self.relative

    @property
    def identity(self) -> str:
        """Key of what was computed from it: another file, or the same file changed, has another one."""
        return f"{self.size_bytes}-{self.mtime_ns}-{self.relative}"


def find_images(
    source: Path, classes: Sequence[str], *, may_be_none: bool = False
) -> tuple[LabeledImage, ...]:
    """Find the labeled images of a device, in order of their relative paths.

    Args:
        source: a folder with one sub-folder per class (images may lie deeper in it; hidden files and files
            without one of IMAGE_SUFFIXES are not looked at), or a CSV file with the columns `path` and
            `label`, the paths relative to the file.
        classes: the task's class names; labels are indices into them.
        may_be_none: no image at all is no error.

    Raises:
        ConfigError: there is nothing to be found, or something that is not of the task.
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
    """Take a single file as an image of no known class."""
    return _image(Path(), str(path), UNLABELED)


def held_out(image: LabeledImage, fraction: float) -> bool:
    """Tell whether an image is kept out of the prototypes, to evaluate heads on.

    It depends on the relative path alone, so that no other image, and no restart, ever moves one across.
    """
    drawn = hashlib.sha256(os.fsencode(image.relative)).digest()[:8]
    return int.from_bytes(drawn, "big") < fraction * 2**64


def decode(path: Path) -> Image.Image:
    """Read one image whole, turned upright by its EXIF orientation; the first frame of several.

    Returns:
        A loaded Pillow image in its own mode, one that `preprocess` takes.

    Raises:
        UnreadableImage: names the file and why: not an image, truncated, corrupt, too large.
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
    except Exception as error:  # a broken file can raise nearly anything inside a decoder
        raise UnreadableImage(f"{path}: {error or type(error).__name__}") from error


def _check_kind(image: Image.Image) -> None:
    pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS or 0
    if pixels > most > 0:
        raise UnreadableImage(
            f"{image.width} x {image.height} pixels are more than the {most} that are decoded"
        )
    if image.mode in {"I", "F"}:
        raise UnreadableImage("its 32-bit pixels have no agreed white; save it with 8 bits a channel")


def _image(folder: Path, relative: str, label: int) -> LabeledImage:
    """Describe a file; one that cannot be looked at is found all the same, and refused when it is read."""
    try:
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
    """Yield the images in a folder and below; a folder reached once more through a link is not entered."""
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
    """Leave out pipes and devices, which could block for ever; a dangling link stays, to be named later."""
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
                image = _listed_image(row, where, source.parent, labels)
                if image.relative in lines:
                    raise ConfigError(f"{where}: {image.relative} is in line {lines[image.relative]} already")
                lines[image.relative] = rows.line_num
                yield image
    except (UnicodeError, csv.Error) as error:
        raise ConfigError(f"{source} cannot be read as a CSV file in UTF-8: {error}") from error


def _listed_image(
    row: Mapping[str, str | None], where: str, folder: Path, labels: Mapping[str, int]
) -> LabeledImage:
    relative = (row["path"] or "").strip()
    label = _label_of((row["label"] or "").strip(), labels, where=where)
    if not relative or not (folder / relative).is_file():
        raise ConfigError(f"{where}: there is no file {folder / relative}")
    return _image(folder, relative, label)


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
    """Give the same name for the same letters: some file systems take accents apart."""
    return unicodedata.normalize("NFC", name)


def _name_some(names: Iterable[str], most: int = 20) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
