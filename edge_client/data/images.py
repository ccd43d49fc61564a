"""Labeled images in folders or CSV lists: found, held out, decoded."""

import contextlib
import csv
import difflib
import errno
import functools
import hashlib
import io
import itertools
import logging
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG

from PIL import Image, ImageOps, PngImagePlugin, PpmImagePlugin, TiffImagePlugin, UnidentifiedImageError

from edge_client.data.decoding_memory import decoding_bytes, reserve
from edge_client.data.file_kind import HEAD_BYTES, IMAGE_FORMATS, is_image, kind_of, open_file, unidentified
from protocol.class_folders import is_of_system
from protocol.cli import plain
from protocol.errors import ConfigError, UnreadableImage
from protocol.log import event
from protocol.models.preprocessing import gray_of_16_bits, require_white_level, to_rgb

log = logging.getLogger(__name__)

IMAGE_SUFFIXES = (
    ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
"""Suffixes of images in a folder, in upper or lower case. A list may name files of any suffix."""

_FOREIGN_SUFFIXES = {".avif": "AVIF", ".heic": "HEIC", ".heif": "HEIC"}
"""Suffixes of formats that are not supported, and of JPEGs with a wrong name, which are."""

MAX_FILE_BYTES = 2**29
"""Of an image: about the largest that is decoded, without compression and with 16 bits a channel. Pillow reads some
parts of a file into memory as a whole."""

MAX_ROWS = 2**20
"""Of an image: Pillow takes about 20 bytes for each, 1.8 GB for one pixel in each of 89 million rows."""

DIGEST_EDGE = 256

UNLABELED = -1

MOST_NAMED = 20
"""Names, or kinds of skipped files, that a message lists."""

MOST_LISTED = 1000
"""Entries of a folder which is no class that are compared with the classes."""


class NoImages(ConfigError):
    """A device without images of the task's classes: it uploads nothing and still receives heads."""


@dataclass(frozen=True, slots=True)
class LabeledImage:
    """A labeled image file as it was when it was found."""

    folder: Path
    """The folder of all classes, or of the list."""
    relative: str
    label: int
    """Index into the task's classes, or UNLABELED."""
    size_bytes: int
    mtime_ns: int
    ctime_ns: int = field(default=0, compare=False)
    """Time of the last change to the file, its name or its times."""
    inode: int = field(default=0, compare=False)

    @property
    def path(self) -> Path:
        """Its full path, built on demand to save memory."""
        return self.folder / self.relative

    @property
    def identity(self) -> str:
        """Identifies its content: another file, or the same file changed, has another identity."""
        return f"{self.size_bytes}-{self.mtime_ns}-{self.relative}"

    def is_unchanged(self) -> bool:
        """Return whether the file is as it was when it was found: what was read of it before is this image's."""
        return _image(self.folder, self.relative, self.label, _status(self.path)) == self


@dataclass(frozen=True)
class ImageScan:
    """The labeled images of a device, and what was left out."""

    images: tuple[LabeledImage, ...]
    """The images in order of their relative paths."""
    unknown: tuple[str, ...] = ()
    """Folders or labels that are no class of the task, printable, the first ones with the class that may be meant."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Number of files and folders that are not used, by reason; hidden ones are not counted."""


def scan_images(source: Path, classes: Sequence[str], *, strict: bool = False) -> ImageScan:
    """Return the labeled images of a device, and what was left out.

    `source` is a folder with one sub-folder per class, searched recursively and ignoring hidden files, files without
    one of IMAGE_SUFFIXES, folders of the system and folders without permission, or a CSV file with the columns `path`
    (relative to the file) and `label`, of which files that do not exist are left out. Columns are separated by commas,
    or by semicolons or tabs as spreadsheets write them.

    Raises:
        ConfigError: the source, or none of a list's files, can be read, or with `strict` it has folders or labels that
            are no class.
    """
    labels = {_normal(name): label for label, name in enumerate(classes)}
    unknown: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    try:
        found = list(
            _listed(source, labels, unknown, skipped)
            if source.is_file()
            else _in_folders(source, labels, unknown, skipped)
        )
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {error.filename}; say in which folder the images are") from error
    except OSError as error:
        raise ConfigError(f"{error.filename or source} cannot be read: {error.strerror}") from error
    hints = {name: _hint(name, tuple(labels)) for name in itertools.islice(unknown, MOST_NAMED)}
    left_out = tuple(text + hints.get(name, "") for name, text in unknown.items())
    if unknown and strict:
        raise ConfigError(
            f"{source}: {name_some(left_out)}: no class of the task; its classes are "
            f"{name_some(classes)}: rename them, or omit --strict to leave their images out"
        )
    images = tuple(sorted(found, key=lambda image: image.relative))
    return ImageScan(images, left_out, dict(skipped.most_common(MOST_NAMED)))


def find_images(source: Path, classes: Sequence[str]) -> tuple[LabeledImage, ...]:
    """Return the labeled images that `scan_images` finds."""
    return scan_images(source, classes).images


def class_folder(data: Path, name: str) -> Path:
    """Return the folder of a class below `data`, which need not exist.

    Raises:
        ConfigError: `data` cannot be read, or no folder can have this name.
    """
    if name in {"", ".", ".."} or {"/", "\0"} & set(name):
        raise ConfigError(f"no folder can have the name of the class {name!r}: list the images in a CSV file")
    try:
        folders = [each.name for each in data.iterdir() if _normal(each.name) == _normal(name)]
    except OSError as error:
        raise ConfigError(f"{data} cannot be read: {error.strerror}") from error
    return data / min(folders, default=name)


def images_below(folder: Path, skipped: Counter[str]) -> Iterator[LabeledImage]:
    """Yield the images in a folder and below it as images of unknown class; `skipped` counts what is not used.

    Raises:
        OSError: the folder cannot be read, or the disk fails.
    """
    nowhere = Path()
    for path, status in _walk(folder, {_place(folder.stat())}, skipped):
        yield _image(nowhere, path.removeprefix("./"), UNLABELED, status)


def unlabeled_below(folder: Path, *, data: Path, skipped: Counter[str]) -> tuple[LabeledImage, ...]:
    """Return the images in a folder and below it as images of unknown class, in order of their paths.

    Raises:
        ConfigError: it cannot be read, is in `data`, where folders are classes, or has `data` in it.
    """
    own, labeled = folder.resolve(), data.resolve()
    if own.is_relative_to(labeled) or labeled.is_relative_to(own):
        raise ConfigError(f"expected a folder of unlabeled images outside of {data}, got {folder}")
    try:
        return tuple(sorted(images_below(folder, skipped), key=lambda image: image.relative))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from error


def unlabeled(path: Path) -> LabeledImage:
    """Return a single file as an image of unknown class."""
    return _image(Path(), str(path), UNLABELED, _status(path))


def decode(path: Path) -> Image.Image:
    """Return one image in 8 bits a channel, loaded and upright by its EXIF orientation; the first frame of several.

    Values are scaled by the bits or the greatest value that the file declares.

    Raises:
        UnreadableImage: it is not an image, truncated, corrupt, or too large, or its white level is unknown; the
            message names the file.
    """
    with contextlib.ExitStack() as reserved:
        return _loaded(path, reserved)


@contextlib.contextmanager
def decoded(source: Path | bytes) -> Iterator[Image.Image]:
    """Give an image as `decode` does, of a file or its bytes; memory to convert it to RGB stays reserved until the end.

    Raises:
        UnreadableImage: as for `decode`. Its cause is a MemoryError if there is too little memory.
    """
    with contextlib.ExitStack() as reserved:
        image = _loaded(source, reserved)
        reserved.callback(image.close)  # the caller has a reference
        yield image


def pixel_digest(image: Image.Image) -> bytes:
    """Return a digest of an upright image, 16 bytes: of its size, and of at most 256 x 256 of its pixels in RGB.

    Names, places and ratings that programs write into a file do not change it: such a file would otherwise be another
    image with the same feature, and the difference of two submissions could be the feature of a single one.
    """
    size = min(image.width, DIGEST_EDGE), min(image.height, DIGEST_EDGE)
    pixels = to_rgb(image.resize(size, Image.Resampling.NEAREST)).tobytes()
    return hashlib.sha256(f"{image.width} x {image.height}".encode() + pixels).digest()[:16]


def has_other_pixels(path: Path) -> bool:
    """Return whether version 2 of the preprocessing may change an image's pixels, by its header."""
    try:
        with open_file(path) as file:
            if kind_of(file.read(HEAD_BYTES)) == "JPEG":  # always of 8 bits and opaque, and slow to parse
                return False
        with _open(path) as (image, _):
            return image.mode.startswith("I") or image.has_transparency_data or _declared_bits(image) == 16
    except Exception:  # it is decoded again, for the reason
        return True


def _loaded(source: Path | bytes, reserved: contextlib.ExitStack) -> Image.Image:
    with _naming(source), _open(source) as (image, file_bytes):
        _check_kind(image)
        reserved.enter_context(reserve(decoding_bytes(image, file_bytes)))
        bits, is_negative = _declared_bits(image), _is_negative(image)
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return _in_8_bits(image, bits, is_negative=is_negative)


def _declared_bits(image: Image.Image) -> int:
    """Return the bits of a channel's values by the header of an opened image; 8 where Pillow scales them to 8 or 16."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return int(max(image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))))
    if isinstance(image, PngImagePlugin.PngImageFile | PpmImagePlugin.PpmImageFile) and image.tile:
        decoder = str(
            image.tile[0][3]
        )  # "I;16B", or of a PPM a mode and its greatest value: "('RGB', 65535)"
        return 16 if decoder.endswith((";16B", ", 65535)")) else 8
    return 8


def _is_negative(image: Image.Image) -> bool:
    """Return whether an opened image has gray of 16 bits in which 0 is white, which Pillow does not invert."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile) or not image.mode.startswith("I;16"):
        return False
    return bool(image.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0)


def _in_8_bits(image: Image.Image, bits: int, *, is_negative: bool) -> Image.Image:
    """Return a decoded image with 8 bits a channel.

    Raises:
        UnreadableImage: its white level is not in the file, as `require_white_level` finds it.
    """
    if image.mode.startswith("I"):
        image = gray_of_16_bits(image, bits=12 if bits == 12 else 16)
    if bits == 16:
        require_white_level(image)
        if isinstance(color := image.info.get("transparency"), tuple):  # which Pillow leaves at 16 bits
            image.info["transparency"] = tuple(level >> 8 for level in color)
    return ImageOps.invert(image) if is_negative else image


@contextlib.contextmanager
def _naming(source: Path | bytes) -> Iterator[None]:
    """Raise every error of an image as UnreadableImage, which begins with its path."""
    name = f"{source}: " if isinstance(source, Path) else ""
    try:
        yield
    except OSError as error:
        raise UnreadableImage(f"{name}{error.strerror or error}") from error
    except Exception as error:  # decoders raise errors of many classes on broken files
        raise UnreadableImage(f"{name}{error or type(error).__name__}") from error


@contextlib.contextmanager
def _open(source: Path | bytes) -> Iterator[tuple[Image.Image, int]]:
    """Give an opened image, which is not decoded, and the size of its file, bytes."""
    with open_file(source) if isinstance(source, Path) else io.BytesIO(source) as file:
        size = os.fstat(file.fileno()).st_size if isinstance(source, Path) else len(source)
        if not size:
            raise UnreadableImage("the file is empty")
        if size > MAX_FILE_BYTES:
            raise UnreadableImage(f"expected a file of at most {MAX_FILE_BYTES} bytes, got one of {size}")
        try:
            opened = Image.open(file, formats=IMAGE_FORMATS)
        except UnidentifiedImageError as error:
            file.seek(0)
            raise UnreadableImage(unidentified(file.read(HEAD_BYTES))) from error
        with opened as image:
            yield image, size


def _check_kind(image: Image.Image) -> None:
    pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS or 0
    if pixels > most > 0:
        raise UnreadableImage(
            f"{image.width} x {image.height} pixels are more than the {most} that are decoded"
        )
    if image.height > MAX_ROWS:
        raise UnreadableImage(f"{image.height} rows are more than the {MAX_ROWS} that are decoded")
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
        text = "the white level of signed and 32-bit pixels is undefined: save it with 8 bits a channel"
        raise UnreadableImage(text)


def _status(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Return a file's status; None if it has none: it is found all the same, and refused when it is read."""
    try:
        return os.stat(path)  # noqa: PTH116 - faster than a Path
    except OSError:
        return None


def _image(folder: Path, relative: str, label: int, status: os.stat_result | None) -> LabeledImage:
    if status is None:
        return LabeledImage(folder, relative, label, size_bytes=0, mtime_ns=0)
    size, mtime_ns, ctime_ns = status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return LabeledImage(folder, relative, label, size, mtime_ns, ctime_ns, status.st_ino)


def _in_folders(
    source: Path, labels: Mapping[str, int], unknown: dict[str, str], skipped: Counter[str]
) -> Iterator[LabeledImage]:
    """Yield the images in the classes' folders, and add what is left out to `unknown` and `skipped`."""
    with os.scandir(source) as entries:
        shown = [(Path(entry.path), _is_folder(entry)) for entry in entries if _is_shown(entry)]
    folders = sorted(path for path, is_folder in shown if is_folder)
    if loose := len(shown) - len(folders):
        skipped["in no class's folder"] += loose
    folders = [folder for folder in folders if not _skips_system(folder.name, skipped)]
    seen = {_place(source.stat()), *(_place(folder.stat()) for folder in folders)}
    for folder in folders:
        label = labels.get(_normal(folder.name))
        if label is None:
            unknown[folder.name] = f"{folder.name!r}" + _deeper(folder, labels)
            continue
        try:
            for path, status in _walk(folder, seen, skipped):
                yield _image(source, folder.name + path[len(str(folder)) :], label, status)
        except (FileNotFoundError, PermissionError) as error:
            _skip_folder(error, skipped)


def _walk(
    folder: Path, seen: set[tuple[int, int]], skipped: Counter[str]
) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield the images in a folder and below; folders already seen, through links, are not searched again.

    Raises:
        OSError: the folder cannot be read, or the disk fails. A folder below it that may not be read is skipped.
    """
    folders = [str(folder)]
    while folders:
        here, deeper = folders.pop(), list[str]()
        try:
            yield from _list_folder(here, deeper, skipped)
        except (FileNotFoundError, PermissionError) as error:
            if here == str(folder):
                raise
            _skip_folder(error, skipped)
        for path in sorted(deeper):
            try:
                place = _place(Path(path).stat())
            except (FileNotFoundError, PermissionError) as error:
                _skip_folder(error, skipped)
                continue
            if place not in seen:
                seen.add(place)
                folders.append(path)


def _list_folder(
    folder: str, deeper: list[str], skipped: Counter[str]
) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield the images in a folder, and add the folders in it to `deeper`."""
    with os.scandir(folder) as entries:
        for entry in filter(_is_shown, entries):
            if _is_folder(entry):
                if not _skips_system(entry.name, skipped):
                    deeper.append(entry.path)
            elif reason := _reason_to_skip(entry.name):
                skipped[reason] += 1
            else:
                status = _status(entry)
                if status is not None and not S_ISREG(
                    status.st_mode
                ):  # a pipe or a device could block forever
                    skipped["not a regular file"] += 1
                elif reason := _reason_of_content(entry.path, status):
                    skipped[reason] += 1
                else:
                    yield entry.path, status


def _skip_folder(error: OSError, skipped: Counter[str]) -> None:
    """Name a folder without permission; one that was deleted meanwhile has no images."""
    if isinstance(error, PermissionError):
        skipped[plain(f"the folder {error.filename} cannot be read: {error.strerror}")] += 1


def _skips_system(name: str, skipped: Counter[str]) -> bool:
    """Return whether a folder is one that systems add, and count it."""
    if is_of_system(name):
        skipped[f"folder {name} of the system"] += 1
        return True
    return False


def _deeper(folder: Path, labels: Mapping[str, int]) -> str:
    """Return the hint that the folders in one that is no class are classes; empty if they are not."""
    try:
        names = {_normal(path.name) for path in itertools.islice(folder.iterdir(), MOST_LISTED)}
    except OSError:
        return ""
    return plain(f" (the classes are one folder deeper, in {folder})") if names & labels.keys() else ""


def log_skipped(skipped: Mapping[str, int], logged: set[str], folder: Path) -> None:
    """Log what is skipped, each reason once and at most MOST_NAMED of them; `logged` gets these."""
    for reason, files in skipped.items():
        if reason not in logged and len(logged) < MOST_NAMED:
            logged.add(reason)
            event(log, logging.WARNING, "files skipped", files=files, reason=reason, data=folder)


def _reason_to_skip(name: str) -> str:
    """Return why a file of this name is not used as an image; empty if it may be used."""
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 - faster than a Path
    if suffix in IMAGE_SUFFIXES or suffix in _FOREIGN_SUFFIXES:
        return ""
    return plain(f"suffix {suffix}") if suffix else "no suffix"


def _reason_of_content(path: str, status: os.stat_result | None) -> str:
    """Return why a file whose suffix is of a foreign format is no image; empty if its first bytes are an image's.

    A file that cannot be read now is named when it is decoded.
    """
    suffix = os.path.splitext(path)[1].lower()  # noqa: PTH122 - faster than a Path
    kind = _FOREIGN_SUFFIXES.get(suffix)
    if kind is None or status is None:
        return ""
    try:
        if is_image(path, status.st_size, status.st_mtime_ns, status.st_ino):
            return ""
    except OSError:
        return ""
    return f"suffix {suffix}, {kind} is not supported: convert it to JPEG"


def _is_shown(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.EACCES}:  # a file system that fails hides no image
            raise
        return False


def _place(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _listed(
    source: Path, labels: Mapping[str, int], unknown: dict[str, str], skipped: Counter[str]
) -> Iterator[LabeledImage]:
    """Yield the images in a list, and add labels that are no class, with their first line, to `unknown`.

    Raises:
        ConfigError: the list is malformed, or none of its files exists: their disk may not be mounted.
    """
    lines: dict[str, int] = {}
    places: dict[str, str] = {}
    missing: list[int] = []
    first_missing = Path()
    for line, relative, name in _rows(source):
        label = labels.get(_normal(name))
        if label is None:
            unknown.setdefault(name, f"{name!r} in line {line}")
            continue
        path = source.parent / relative
        status = _listed_status(path)
        if status is None:
            first_missing = first_missing if missing else path
            missing.append(line)
            continue
        folder, file_name = os.path.split(relative)
        if folder not in places:
            places[folder] = os.path.realpath(source.parent / folder)
        place = os.path.join(places[folder], file_name)  # noqa: PTH118 - faster than a Path
        if place in lines:
            raise ConfigError(f"{source} line {line}: {relative} is already in line {lines[place]}")
        lines[place] = line
        yield _image(source.parent, relative, label, status)
    if missing and not lines:
        raise ConfigError(
            f"{source} line {missing[0]}: there is no file {first_missing}, nor any other of the list"
        )
    if missing:
        skipped[plain(f"there is no such file, the first in line {missing[0]}: {first_missing}")] += len(
            missing
        )


def _rows(source: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the path and the label of each row of a list."""
    try:
        with source.open(newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            rows = csv.DictReader(itertools.chain([header], file), delimiter=_delimiter(header))
            if not {"path", "label"} <= set(rows.fieldnames or ()):
                raise ConfigError(f"{source} must start with the header path,label, not {header.strip()!r}")
            for row in rows:
                yield rows.line_num, (row["path"] or "").strip(), (row["label"] or "").strip()
    except (UnicodeError, csv.Error) as error:
        raise ConfigError(f"{source} cannot be read as a CSV file in UTF-8: {error}") from error


def _delimiter(header: str) -> str:
    """Return the first separator in a header: a comma, or a semicolon or tab, as spreadsheets of some languages use."""
    return next((character for character in header if character in ",;\t"), ",")


def _listed_status(path: Path) -> os.stat_result | None:
    """Return the status of a file; None if there is no such file, or it is in a folder without permission.

    Raises:
        OSError: the disk fails, which hides no image.
    """
    try:
        status = path.stat()
    except ValueError:  # a null character
        return None
    except OSError as error:
        if error.errno not in {errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR}:
            raise
        return None
    return status if S_ISREG(status.st_mode) else None


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder; a task's class can have a name that no file can have."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


@functools.lru_cache(maxsize=MOST_NAMED)
def _hint(name: str, labels: tuple[str, ...]) -> str:
    """Return the class that may be meant by a name that is no class; empty if none is similar.

    It takes up to 0.1 s where there are thousands of classes.
    """
    by_lower_case = {known.lower(): known for known in labels}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    return f" (did you mean {by_lower_case[close[0]]!r}?)" if close else ""


def _normal(name: str) -> str:
    """Normalize accents, which some file systems decompose."""
    return unicodedata.normalize("NFC", name)


def name_some(names: Iterable[str]) -> str:
    """Return names as one text, at most MOST_NAMED of them and the number of the rest."""
    names = list(names)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
