"""A model of a disk: what was synced survives a power loss; of the rest any part may, in any order.

What a program does to its files, and what it sends, is read from a record of strace.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.system.injection.strace import Strace

SECTOR_BYTES = 512


@dataclass(frozen=True)
class Operation:
    """A system call that changes or syncs a file or folder."""

    path: str


@dataclass(frozen=True)
class Create(Operation):
    """Open a file, which is created if missing."""

    truncates: bool


@dataclass(frozen=True)
class MakeFolder(Operation):
    """Create a folder."""


@dataclass(frozen=True)
class Write(Operation):
    """Write bytes at an offset, or at the end."""

    offset: int | None
    data: bytes


@dataclass(frozen=True)
class Truncate(Operation):
    """Set the size of a file."""

    size: int


@dataclass(frozen=True)
class Sync(Operation):
    """Make a file's contents, or a folder's names, durable."""


@dataclass(frozen=True)
class Rename(Operation):
    """Give a file or folder another name."""

    after: str


@dataclass(frozen=True)
class Link(Operation):
    """Give a file a second name."""

    after: str


@dataclass(frozen=True)
class Unlink(Operation):
    """Delete a name."""


@dataclass(eq=False)
class _Node:
    """A file or a folder; `durable` is what a file had at its last sync, and `changes` what came after."""

    is_folder: bool
    contents: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    changes: list[Write | Truncate] = field(default_factory=list)

    def change(self, change: Write | Truncate) -> None:
        _apply(self.contents, change)
        self.changes.append(change)

    def after_loss(self, choice: random.Random, share: float) -> bytes:
        """Return the durable contents with a share of the later changes, and a part of one more write."""
        found = bytearray(self.durable)
        for change in self.changes:
            if choice.random() < share:
                _apply(found, change)
            elif isinstance(change, Write) and choice.random() < 0.5:
                sectors = choice.randint(0, len(change.data) // SECTOR_BYTES)
                _apply(found, Write(change.path, change.offset, change.data[: sectors * SECTOR_BYTES]))
        return bytes(found)


@dataclass(frozen=True)
class _NameChange:
    """A name that was added (`before` is empty), deleted (`after` is empty) or changed."""

    before: str
    after: str
    node: _Node

    def apply(self, names: dict[str, _Node]) -> None:
        if self.before:
            names.pop(self.before, None)
        if self.after:
            names[self.after] = self.node
        if self.before and self.after:
            for name in [name for name in names if name.startswith(f"{self.before}/")]:
                names[self.after + name.removeprefix(self.before)] = names.pop(name)

    def is_in(self, folder: str) -> bool:
        return any(path and str(PurePosixPath(path).parent) == folder for path in (self.before, self.after))


class Disk:
    """The files below an existing folder; `syncs` is False for a disk that reports writes too early."""

    def __init__(self, folder: str, *, syncs: bool = True) -> None:
        self._folder = folder
        self._syncs = syncs
        root = _Node(is_folder=True)
        self._names = {folder: root}
        self._durable = {folder: root}
        self._pending: list[_NameChange] = []

    def apply(self, operation: Operation) -> None:
        """Do what a system call has done."""
        node = self._names.get(operation.path)
        match operation:
            case Create() | MakeFolder() if node is None:
                self._rename("", operation.path, _Node(is_folder=isinstance(operation, MakeFolder)))
            case Create(truncates=True) if node is not None:
                node.change(Truncate(operation.path, 0))
            case (Write() | Truncate()) as change if node is not None:
                node.change(change)
            case Sync() if node is not None and self._syncs:
                self._sync(operation.path, node)
            case Rename(after=after) if node is not None:
                self._rename(operation.path, after, node)
            case Link(after=after) if node is not None:
                self._rename("", after, node)
            case Unlink() if node is not None:
                self._rename(operation.path, "", node)

    def _rename(self, before: str, after: str, node: _Node) -> None:
        change = _NameChange(before, after, node)
        change.apply(self._names)
        self._pending.append(change)

    def _sync(self, path: str, node: _Node) -> None:
        if not node.is_folder:
            node.durable, node.changes = bytes(node.contents), []
            return
        for change in self._pending:
            if change.is_in(path):
                change.apply(self._durable)
        self._pending = [change for change in self._pending if not change.is_in(path)]

    def after_power_loss(self, choice: random.Random) -> dict[str, bytes | None]:
        """Return a possible state: paths with contents, or None for folders, each after its folder."""
        names, names_share, data_share = dict(self._durable), *choice.choices((0.0, 0.5, 1.0), k=2)
        for change in self._pending:
            if choice.random() < names_share:
                change.apply(names)
        found: dict[str, bytes | None] = {}
        for path in sorted(names):
            if path == self._folder or str(PurePosixPath(path).parent) in found:
                node = names[path]
                found[path] = None if node.is_folder else node.after_loss(choice, data_share)
        return found


def _apply(contents: bytearray, change: Write | Truncate) -> None:
    start = len(contents) if isinstance(change, Write) and change.offset is None else 0
    if isinstance(change, Write):
        start = change.offset if change.offset is not None else start
        contents.extend(bytes(max(0, start - len(contents))))
        contents[start : start + len(change.data)] = change.data
    else:
        del contents[change.size :]
        contents.extend(bytes(change.size - len(contents)))


_CALLS = (
    "openat,write,writev,pwrite64,pwritev,pwritev2,fsync,fdatasync,ftruncate,rename,renameat,renameat2,link,linkat,"
    "unlink,unlinkat,mkdir,mkdirat,sendto,sendmsg"
)
_LINE = re.compile(r"(\d+) +([\d.]+) (.*)")
_CALL = re.compile(r"(\w+)\((.*)\) += (\d+)\b")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_FILE = re.compile(r"(\d+)<((?:\\x[0-9a-f]{2})*)>")


def record(pid: int, log: Path) -> Strace:
    """Record what a stopped program does to files, and what it sends, with all bytes."""
    return Strace(pid, log, "-ttt", "-xx", "-s", str(2**28), "-e", f"trace={_CALLS}")


@dataclass
class Recording:
    """The actions of a program below a folder, and its messages, each with the time of its end (unix seconds)."""

    operations: list[tuple[float, Operation]] = field(default_factory=list)
    sent: list[tuple[float, bytes]] = field(default_factory=list)


def read_recording(log: Path, folder: Path) -> Recording:
    """Return what strace has recorded of a program."""
    found = Recording()
    positions: dict[tuple[str, str], int | None] = {}
    for time_s, name, arguments, result in _calls(log):
        texts = [bytes.fromhex(text.replace("\\x", "")) for text in _TEXT.findall(arguments)]
        if name in {"sendto", "sendmsg"}:
            found.sent.append((time_s, b"".join(texts)))
            continue
        file = _FILE.match(arguments)
        is_of_file = file is not None and name in {
            *("write", "writev", "pwrite64", "pwritev", "pwritev2", "fsync", "fdatasync", "ftruncate")
        }
        path = bytes.fromhex(file[2].replace("\\x", "")) if file and is_of_file else texts[0]
        handle = file[1] if file and is_of_file else str(result)
        if not Path(path.decode(errors="replace")).is_relative_to(folder):
            continue
        paths = [path.decode(), *(text.decode() for text in texts[1:] if not is_of_file)]
        data = b"".join(texts)[:result]
        for operation in _operations(name, arguments, paths, data, handle=handle, positions=positions):
            found.operations.append((time_s, operation))
    return found


def _operations(
    name: str,
    arguments: str,
    paths: list[str],
    data: bytes,
    *,
    handle: str,
    positions: dict[tuple[str, str], int | None],
) -> Iterator[Operation]:
    """Yield what a call has done; `positions` are those of open files, None for files that are appended to."""
    path, last = paths[0], arguments.rsplit(", ", 1)[-1]
    match name:
        case "openat":
            positions[handle, path] = None if "O_APPEND" in arguments else 0
            if "O_CREAT" in arguments or "O_TRUNC" in arguments:
                yield Create(path, "O_TRUNC" in arguments)
        case "mkdir" | "mkdirat":
            yield MakeFolder(path)
        case "write" | "writev":
            position = positions.setdefault((handle, path), 0)
            positions[handle, path] = None if position is None else position + len(data)
            yield Write(path, position, data)
        case "pwrite64" | "pwritev":
            yield Write(path, int(last), data)
        case "pwritev2":
            yield Write(path, int(arguments.rsplit(", ", 2)[1]), data)
        case "ftruncate":
            yield Truncate(path, int(last))
        case "fsync" | "fdatasync":
            yield Sync(path)
        case "unlink" | "unlinkat":
            yield Unlink(path)
        case _:
            yield (Link if name.startswith("link") else Rename)(path, paths[1])


def _calls(log: Path) -> Iterator[tuple[float, str, str, int]]:
    """Yield time, name, arguments and result of the calls that succeeded, in the order of their ends."""
    begun: dict[str, str] = {}
    for line in log.read_text(errors="replace").splitlines():
        if not (found := _LINE.fullmatch(line)):
            continue
        process, time_s, text = found.groups()
        if text.endswith("<unfinished ...>"):
            begun[process] = text.removesuffix("<unfinished ...>").rstrip()
            continue
        if text.startswith("<... "):
            text = begun.pop(process, "") + text.partition(" resumed>")[2]
        if call := _CALL.match(text):
            yield float(time_s), call[1], call[2], int(call[3])
