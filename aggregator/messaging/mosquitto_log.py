"""What mosquitto's log says of those whom it has turned away: the attempts that never reach us.

It reads the lines of mosquitto 2 that `log_type debug`, `notice` and `error` make. A line is what a stranger can
write into in part, so names and topics are looked at before they are shown, and whatever is unknown is passed over.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from protocol.errors import ConfigError
from protocol.wire.topics import is_name

MAX_BYTES = 4 * 1024**2
"""Bytes of the log that are read at once; what a flood leaves unread comes next time."""

MAX_LINE_BYTES = 4096

Turned = tuple[str, str, str]
"""Who, `denied` or `no_entry`, and what for, in the broker's words: one who has no name that it knows is `?`."""

_STAMP = re.compile(r"^\S+: ")
_DENIED = re.compile(r"Denied PUBLISH from (?P<who>\S+) \(d\d, q\d, r\d, m\d+, '(?P<topic>.*)', \.\.\. ")
_NO_ENTRY = (
    re.compile(r"Client connection from \S+ failed: (?:error:[0-9A-F]+:)?(?P<why>.*?)\.?$"),
    re.compile(r"OpenSSL Error\[0\]: (?:error:[0-9A-F]+:)?(?P<why>.*?)\.?$"),
    re.compile(r"Client (?P<who>\S+) disconnected, (?P<why>not authorized)\.$"),
    re.compile(
        r"Client (?P<who>\S+) disconnected due to (?P<why>malformed packet|protocol error|oversize packet)\.$"
    ),
)


def read_line(line: str) -> Turned | None:
    """Who was turned away, if that is what a line of the log is about."""
    said = _STAMP.sub("", line.rstrip("\r\n"), count=1)
    if match := _DENIED.match(said):
        return _name(match["who"]), "denied", f"publishing to {_plain(match['topic'])}"
    for pattern in _NO_ENTRY:
        if match := pattern.match(said):
            return _name(match.groupdict().get("who") or ""), "no_entry", _plain(match["why"])
    return None


def count(lines: Iterable[str]) -> Counter[Turned]:
    """How often each was turned away: that of two pieces of a log adds up to that of both."""
    return Counter(turned for line in lines if (turned := read_line(line)) is not None)


class Position(msgspec.Struct, frozen=True):
    """How far a log was read."""

    file: int
    """Its inode: after a rotation, another."""
    at: int
    """Bytes."""


class BrokerLog:
    """A log file that grows, and is another one from time to time.

    Args:
        path: where it is.
        position: how far it was read before; without it, what stands there already is passed over.

    Raises:
        ConfigError: it cannot be read.
    """

    def __init__(self, path: Path, *, position: Position | None = None) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
        except OSError as error:
            raise ConfigError(
                f"cannot read the broker's log {path}: {error.strerror}; mosquitto makes it for itself alone, unless "
                "it finds one that others may read"
            ) from error
        self._position = position or Position(found.st_ino, found.st_size)
        self._rest = b""

    @property
    def position(self) -> Position:
        """Where the next start goes on."""
        return Position(self._position.file, self._position.at - len(self._rest))

    def read(self) -> list[str]:
        """The whole lines that were added, at most `MAX_BYTES` of them; none where the file cannot be read."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._position.file or found.st_size < self._position.at:
                    self._position, self._rest = Position(found.st_ino, 0), b""
                file.seek(self._position.at)
                added = file.read(MAX_BYTES)
        except OSError:
            return []
        self._position = Position(self._position.file, self._position.at + len(added))
        *lines, rest = (self._rest + added).split(b"\n")
        self._rest = rest if len(rest) <= MAX_LINE_BYTES else b""
        return [line[:MAX_LINE_BYTES].decode("utf-8", errors="replace") for line in lines]


def _name(who: str) -> str:
    return who if is_name(who) else "?"


def _plain(text: str) -> str:
    """A stranger's text as one line that does nothing to a terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text[:200])
