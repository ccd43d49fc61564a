"""System calls of a program on its files, and what it sends, as strace has recorded them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.system.injection.strace import Strace
from tests.system.power_loss import disk

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

    operations: list[tuple[float, disk.Operation]] = field(default_factory=list)
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
) -> Iterator[disk.Operation]:
    """Yield what a call has done; `positions` are those of open files, None for files that are appended to."""
    path, last = paths[0], arguments.rsplit(", ", 1)[-1]
    match name:
        case "openat":
            positions[handle, path] = None if "O_APPEND" in arguments else 0
            if "O_CREAT" in arguments or "O_TRUNC" in arguments:
                yield disk.Create(path, "O_TRUNC" in arguments)
        case "mkdir" | "mkdirat":
            yield disk.MakeFolder(path)
        case "write" | "writev":
            position = positions.setdefault((handle, path), 0)
            positions[handle, path] = None if position is None else position + len(data)
            yield disk.Write(path, position, data)
        case "pwrite64" | "pwritev":
            yield disk.Write(path, int(last), data)
        case "pwritev2":
            yield disk.Write(path, int(arguments.rsplit(", ", 2)[1]), data)
        case "ftruncate":
            yield disk.Truncate(path, int(last))
        case "fsync" | "fdatasync":
            yield disk.Sync(path)
        case "unlink" | "unlinkat":
            yield disk.Unlink(path)
        case _:
            yield (disk.Link if name.startswith("link") else disk.Rename)(path, paths[1])


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
