"""State folders: the platform's default, and created where they are neither packaged nor committed."""

import logging
import os
import re
from pathlib import Path

from protocol.errors import ConfigError, StateError, StateRefused
from protocol.log import event
from protocol.storage.blobstore import state_errors, write_atomically

log = logging.getLogger(__name__)

IGNORE_FILE = ".gitignore"
"""The file in every folder with private keys, so that `git add .` does not add them."""

IGNORE_ALL = "*\n"

_DATABASES = {
    "aggregator": "aggregator.sqlite",
    "edge-client": "device.sqlite",
    "protofleet-sums": "operator.sqlite",
}
"""The database in the state folder of each program; two of them delete blobs that they do not need."""

_NETWORK = re.compile(r"(nfs|cifs|smb|9p|afs|fuse\.(sshfs|rclone|davfs|s3fs))[0-9]*$")
"""Types of file systems on which SQLite's locks and its log are not reliable."""

_INSTALLED = frozenset({"site-packages", "dist-packages"})


def default_state_folder(name: str) -> Path:
    """Return the default state folder: systemd's, or `name` in the user's state directory."""
    if service := os.environ.get("STATE_DIRECTORY"):
        return Path(service)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / name


def database_of(program: str, folder: Path) -> Path:
    """Return the database of a program (`aggregator`, `edge-client` or `protofleet-sums`) in its state folder.

    Raises:
        ConfigError: the folder has the database of another program.
        StateError: it cannot be read.
    """
    with state_errors(folder):
        owner = next((name for name, file in _DATABASES.items() if (folder / file).exists()), program)
    if owner != program:
        raise ConfigError(
            f"expected a state folder of `{program}`, got {folder}, which belongs to `{owner}`: give `{program}` "
            "another --state, and check PROTOFLEET_STATE, which all programs read"
        )
    return folder / _DATABASES[program]


def make_state_folder(folder: Path) -> None:
    """Create a state folder for its owner only, which git ignores, unless it exists.

    It holds private keys, submissions, and the secret that noise is derived from.

    Raises:
        ConfigError: it is among Python source files.
        StateRefused: a part of its path is a file.
        StateError: it cannot be written.
    """
    with state_errors(folder):
        is_in_file = any(each.is_file() for each in (folder, *folder.parents))
    if is_in_file:
        raise StateRefused(f"cannot use {folder}: Not a directory")
    refuse_source_folder(folder, option="--state")
    _refuse_other_owner(folder)
    if found := network_file_system(folder):
        text = "state on a network file system: use a local disk"
        event(log, logging.WARNING, text, folder=folder, type=found)
    with state_errors(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ignore = folder / IGNORE_FILE
        if not ignore.exists():
            write_atomically(ignore, IGNORE_ALL.encode())


def network_file_system(folder: Path, *, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the network file system that a folder is on, such as `nfs4`; empty for a local one.

    `mounts` lists the mounts as in proc(5); a system without the file has no answer.
    """
    place, found = folder.absolute().resolve(), ""
    deepest = -1
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, system = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount.split()[4])
        if place.is_relative_to(point) and len(Path(point).parts) >= deepest:
            deepest, found = len(Path(point).parts), system.split()[0]
    return found if _NETWORK.match(found) else ""


def refuse_source_folder(folder: Path, *, option: str) -> None:
    """Raise ConfigError for a folder for private files in a Python package or among source files.

    A wheel that is built there could contain the files, private keys included.
    """
    with state_errors(folder):
        place = folder.resolve()
        within = next((each for each in (place, *place.parents) if _is_package(each)), None)
        if within is None and any(place.glob("*.py")):
            within = place
    if within is not None:
        raise ConfigError(
            f"expected a folder outside of Python packages for private keys, got {folder}, in the source files of "
            f"{within}: give another {option}, and move files that are there already"
        )


def _refuse_other_owner(folder: Path) -> None:
    """Raise StateError if a state folder, or the folder it is created in, belongs to another user and is not writable.

    Docker creates the folder of a bind mount for root, and the image's program is another user's.
    """
    with state_errors(folder):
        place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
        owner, own = place.stat().st_uid, os.geteuid()
        if own not in {0, owner} and not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
            command = f"chown -R {own}" if place == folder.absolute() else f"install -d -o {own}"
            raise StateError(
                f"cannot write to {place}: it belongs to user {owner}, and this program runs as user {own}: "
                f"run `{command} {folder.absolute()}` as root, or give another --state"
            )


def _is_package(folder: Path) -> bool:
    return folder.name in _INSTALLED or (folder / "__init__.py").is_file()
