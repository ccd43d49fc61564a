"""What a device remembers over a restart: a few facts and its outbox in SQLite, and blobs beside them."""

import os
import platform
import re
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec

from edge_client.storage.database import Database
from edge_client.storage.outbox import DEFAULT_MB, MIB, Outbox
from edge_client.storage.privacy_ledger import Ledger
from protocol.errors import StateError
from protocol.storage.blobstore import BlobStore, state_errors
from protocol.storage.folder_lock import FolderLock
from protocol.wire.codec import digest_of
from protocol.wire.topics import is_name

SECRET_BYTES = 32


def default_device_id(folder: Path) -> str:
    """A name for this machine and this state directory that stays the same: host name and a short digest."""
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        machine = ""
    key = f"{machine or uuid.getnode()}:{folder.resolve()}"
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", platform.node()).strip("-")[:40] or "device"
    return f"{host}-{digest_of(key.encode()).hex()[:8]}"


def default_folder(fleet: str) -> Path:
    """Where a device keeps its state if nobody says otherwise: systemd's choice, or the user's state folder."""
    if service := os.environ.get("STATE_DIRECTORY"):
        return Path(service)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "protofleet" / fleet


class InstalledHead(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a head in use; digests are in hex."""

    head: str
    version: int
    task: str = ""
    backbones: tuple[str, ...]
    classes: tuple[str, ...]
    round: int | None = None
    """The round that it is from, where there are rounds."""
    tensors: str = ""
    """What the round binds to it; empty if nothing is bound."""
    local_model: str = ""
    """What the device itself binds to it."""
    feature_size: int = 0
    """Where something is bound, L, of all backbones together."""
    correct: int = 0
    """Held-out images that it got right when it came."""
    total: int = 0

    @property
    def key(self) -> str:
        """What tells it from the head before, as `life.head_key` does."""
        return self.tensors or self.head


class DeviceState:
    """A device's state directory.

    Args:
        folder: made if it is not there.
        read_only: for looking at it while the device program runs.
        outbox_bytes: what submissions may take on the disk.

    Raises:
        StateError: it cannot be used, there is nothing in it to read, or another version wrote it.
    """

    def __init__(
        self, folder: Path, *, read_only: bool = False, outbox_bytes: int = DEFAULT_MB * MIB
    ) -> None:
        self.folder = folder
        file = folder / "device.sqlite"
        if read_only and not file.is_file():
            raise StateError(f"no device state in {folder}: run edge-client first, or give its --state")
        if not read_only:
            with state_errors(folder):
                # It has keys, and the secret that noise hangs on.
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.blobs = BlobStore(folder / "blobs")
        self.keeping = threading.Lock()
        """Held from putting a blob until a fact names it, and while those that nothing names are deleted."""
        self._lock = FolderLock(folder)
        self._file = file
        self._database = Database(file, read_only=read_only)
        self.ledger = Ledger(self._database, folder / "releases")
        self.outbox = Outbox(self._database, limit_bytes=outbox_bytes)

    def get(self, key: str, default: Any = None) -> Any:
        """A fact, as the JSON value it was set to."""
        return self._database.get(key, default)

    def set(self, **facts: Any) -> None:
        """Keep facts, all of them or none."""
        self._database.set(**facts)

    def installed(self) -> InstalledHead | None:
        """The head in use, if there is one.

        Raises:
            StateError: another version of the program wrote it.
        """
        return self._head("installed")

    def previous(self) -> InstalledHead | None:
        """The head that was in use before that one, if there was one.

        Raises:
            StateError: another version of the program wrote it.
        """
        return self._head("previous")

    def _head(self, key: str) -> InstalledHead | None:
        kept = self.get(key)
        try:
            return None if kept is None else msgspec.convert(kept, InstalledHead)
        except msgspec.ValidationError as error:
            raise StateError(
                f"another edge-client wrote {self._file} ({error}): use another --state"
            ) from error

    def secret(self, *, keep: bool = True) -> bytes:
        """32 random bytes that shuffles and noise hang on, made where this state has none; `keep` keeps them."""
        kept = bytes.fromhex(self.get("secret", ""))
        if len(kept) == SECRET_BYTES:
            return kept
        made = os.urandom(SECRET_BYTES)
        if keep:
            self.set(secret=made.hex())
        return made

    def next_number(self, key: str, *, above: int = 0) -> int:
        """A number greater than every one given before under this key, and than `above`.

        It follows the clock, so that it grows even where the state was lost in between.
        """
        number = max(int(self.get(key, 0)), above, int(time.time()) - 1) + 1
        self.set(**{key: number})
        return number

    def device_id(self, wanted: str | None) -> str:
        """The device's name: the wanted one, else the one it had, else one made from the machine.

        Raises:
            StateError: the wanted one cannot be a name.
        """
        name = str(wanted or self.get("device_id") or default_device_id(self.folder))
        if not is_name(name):
            raise StateError(
                f"{name!r} cannot name a device: expected 1 to 64 letters, digits, '-' or '_'; set --device-id"
            )
        if name != self.get("device_id"):
            self.set(device_id=name)
        return name

    def lock(self) -> None:
        """Keep other device programs out of this folder for as long as this process lives.

        Raises:
            StateError: another one is at work in it.
        """
        if not self._lock.take():
            raise StateError(
                f"another edge-client is at work in {self.folder}: stop it, or give this one its own --state"
            )

    def is_locked(self) -> bool:
        """Whether another device program is at work in this folder."""
        return self._lock.is_taken()
