"""The images that arguments name: files, folders, patterns, and paths from stdin."""

import glob
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from edge_client.images.images import MOST_NAMED, images_below, is_folder
from protocol.cli import say
from protocol.errors import ConfigError

STDIN = Path("-")


def named_images(arguments: Iterable[Path]) -> list[Path]:
    """Return the images that arguments name, in their order, and those in a folder or of a pattern by path.

    A folder is searched as a class folder is; what is not used is listed on stderr. A pattern (`*`,
    `?`, `[...]`, and `**` for folders at any depth) is one that the shell has not replaced. `-` reads paths from stdin
    until its end, one per line.

    An image is read as it is now, also where a program may be writing it: the caller knows, and nothing is uploaded.

    Raises:
        ConfigError: there is no image in a folder, or no file for a pattern.
        OSError: a folder cannot be read.
    """
    return [path for argument in arguments for path in _named(argument)]


def _named(argument: Path) -> Iterable[Path]:
    if argument == STDIN:
        return [path for line in _lines() for path in _in(Path(os.fsdecode(line)))]
    if not os.path.lexists(argument) and glob.has_magic(str(argument)):
        found = sorted(glob.iglob(str(argument), recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        if not found:
            raise ConfigError(f"no file for the pattern {argument}")
        return [Path(each) for each in found if not is_folder(Path(each))]
    return _in(argument)


def _in(path: Path) -> list[Path]:
    if not is_folder(path):
        return [path]
    skipped: Counter[str] = Counter()
    found = sorted(image.relative for image in images_below(path, skipped))
    say_skipped(skipped)
    if not found:
        raise ConfigError(f"no image in {path}")
    return [Path(each) for each in found]


def say_skipped(skipped: Counter[str]) -> None:
    """List what a search for images has skipped, on stderr."""
    for reason, number in skipped.most_common(MOST_NAMED):
        say(f"skipped: {reason} ({number:,})", err=True)


def _lines() -> Iterator[bytes]:
    return filter(None, (line.rstrip(b"\r\n") for line in sys.stdin.buffer))
