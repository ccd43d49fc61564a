"""Labeled images in folders or CSV lists: found, and what is left out."""

import csv
import difflib
import errno
import functools
import itertools
import logging
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG

from edge_client.images.file_kind import is_image
from protocol.class_folders import is_of_system
from protocol.cli import plain
from protocol.errors import ConfigError
from protocol.log import event

log = logging.getLogger(__name__)

IMAGE_SUFFIXES = (
    ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
"""Suffixes of images in a folder, in upper or lower case. A list may name files of any suffix."""

_FOREIGN_SUFFIXES = {".avif": "AVIF", ".heic": "HEIC", ".heif": "HEIC"}
"""Suffixes of formats that are not supported, and of JPEGs with a wrong name, which are."""

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
    person: str = field(default="", compare=False)
    """The person that a list names for it, or nothing."""

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
    unknown_names: frozenset[str] = frozenset()
    """The folders or labels in `unknown`, as `normal` returns them."""


def scan_images(source: Path, classes: Sequence[str]) -> ImageScan:
    """Return the labeled images of a device, and what was left out.

    `source` is a folder with one sub-folder per class, searched recursively and ignoring hidden files, files without
    one of IMAGE_SUFFIXES, folders of the system and folders without permission, or a CSV file with the columns `path`
    (relative to the file) and `label`, of which files that do not exist are left out, and perhaps `person`. Columns are
    separated by commas, or by semicolons or tabs as spreadsheets write them.

    Raises:
        ConfigError: the source, or none of a list's files, can be read.
    """
    labels = {normal(name): label for label, name in enumerate(classes)}
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
    images = tuple(sorted(found, key=lambda image: image.relative))
    skipped_most = dict(skipped.most_common(MOST_NAMED))
    return ImageScan(images, left_out, skipped_most, frozenset(map(normal, unknown)))


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
        folders = [each.name for each in data.iterdir() if normal(each.name) == normal(name)]
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


def _status(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Return a file's status; None if it has none: it is found all the same, and refused when it is read."""
    try:
        return os.stat(path)  # noqa: PTH116 - faster than a Path
    except OSError:
        return None


def _image(
    folder: Path, relative: str, label: int, status: os.stat_result | None, person: str = ""
) -> LabeledImage:
    if status is None:
        return LabeledImage(folder, relative, label, size_bytes=0, mtime_ns=0, person=person)
    size, mtime_ns, ctime_ns = status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return LabeledImage(folder, relative, label, size, mtime_ns, ctime_ns, status.st_ino, person)


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
        label = labels.get(normal(folder.name))
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
        names = {normal(path.name) for path in itertools.islice(folder.iterdir(), MOST_LISTED)}
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
    persons: dict[str, str] = {}
    for line, relative, name, person in _rows(source):
        label = labels.get(normal(name))
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
        yield _image(source.parent, relative, label, status, persons.setdefault(person, normal(person)))
    if missing and not lines:
        raise ConfigError(
            f"{source} line {missing[0]}: there is no file {first_missing}, nor any other of the list"
        )
    if missing:
        skipped[plain(f"there is no such file, the first in line {missing[0]}: {first_missing}")] += len(
            missing
        )


def listed_labels(source: Path) -> set[str]:
    """Return the labels in a list; raises ConfigError if it is malformed."""
    return {label for _, _, label, _ in _rows(source)} - {""}


def _rows(source: Path) -> Iterator[tuple[int, str, str, str]]:
    """Yield the line, the path, the label and the person of each row of a list."""
    try:
        with source.open(newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            rows = csv.DictReader(itertools.chain([header], file), delimiter=_delimiter(header))
            if not {"path", "label"} <= set(rows.fieldnames or ()):
                raise ConfigError(f"{source} must start with the header path,label, not {header.strip()!r}")
            for row in rows:
                path, label, person = ((row.get(name) or "").strip() for name in ("path", "label", "person"))
                yield rows.line_num, path, label, person
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


def normal(name: str) -> str:
    """Normalize accents, which some file systems decompose."""
    return unicodedata.normalize("NFC", name)


def name_some(names: Iterable[str]) -> str:
    """Return names as one text, at most MOST_NAMED of them and the number of the rest."""
    names = list(names)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
