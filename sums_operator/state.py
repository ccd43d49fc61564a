"""The second operator's state folder: its key, those of its tasks, and the devices of each answered list."""

import json
import os
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from protocol.errors import ConfigError
from protocol.storage.blobstore import state_errors, write_atomically
from protocol.storage.database import Database
from protocol.storage.facts import Facts
from protocol.storage.folder_lock import FolderLock
from protocol.storage.keyfile import pem_of, read_key, read_or_make_key, write_private
from protocol.storage.state_folder import database_of, make_state_folder
from protocol.wire.signing import public_key, sign_seal_key
from sums_operator.checks import Reason

PROGRAM = "protofleet-sums"
FORMAT = 1
CARD = "operator.toml"
_SIGN_KEY, _SEAL_KEYS = "sign.key", "seal-keys"
_RESTORE = (
    f"make new keys with `{PROGRAM} init`; if they are lost, restore a backup made after the last answered list, or "
    "take another folder, and start a new task"
)

_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
-- Answered lists, by the sha256 of the request.
CREATE TABLE lists (
    id INTEGER PRIMARY KEY, request BLOB NOT NULL UNIQUE, task BLOB NOT NULL, seal_key BLOB NOT NULL,
    devices INTEGER NOT NULL, answered_s REAL NOT NULL
) STRICT;
-- The primary key is the guarantee: no submission is ever in two sums.
CREATE TABLE members (
    task BLOB NOT NULL, device TEXT NOT NULL, list INTEGER NOT NULL REFERENCES lists (id), PRIMARY KEY (task, device)
) STRICT, WITHOUT ROWID;
"""


class Refusal(msgspec.Struct, frozen=True):
    """Refused requests of one reason."""

    requests: int
    last_s: float
    """Time of the last one, in unix seconds."""
    problem: str
    """Why it was refused."""


class Refusals(msgspec.Struct, frozen=True):
    """Refused requests by reason, repetitions included."""

    by_reason: dict[Reason, Refusal] = {}


@dataclass(frozen=True)
class AnsweredList:
    """A list whose sum was opened."""

    request: str
    """The sha256 of the request, in hex."""
    task: str
    """The task, in hex."""
    devices: int
    answered_s: float
    """In unix seconds."""


@dataclass(frozen=True)
class Keys:
    """The second operator's private keys, 32 bytes each."""

    sign_key: bytes = field(repr=False)
    folder: Path
    """Of the files with the seal keys, each named by its public key in hex."""

    def public(self) -> dict[str, str]:
        """Return the long-lived public key in hex, by its name on the cards."""
        return {"sign_key": public_key(self.sign_key).hex()}

    def seal_key(self, public: bytes) -> bytes | None:
        """Return the private key of a public one; None without one. Raises ConfigError if it is damaged."""
        file = self.folder / f"{public.hex()}.key"
        return read_key(file, kind=X25519PrivateKey, advice=_RESTORE) if file.exists() else None

    def seal_keys(self) -> list[str]:
        """Return the public keys of the tasks that are not over, in hex, oldest first."""
        files = self.folder.glob("*.key")
        return [file.stem for file in sorted(files, key=lambda file: (file.stat().st_mtime, file.name))]


def make_operator(folder: Path) -> Path:
    """Create a state folder with a new key; returns the path of the card for the devices' owners.

    Raises:
        ConfigError: the folder has a key already, or belongs to another program.
        StateError: it cannot be written.
    """
    make_state_folder(folder)
    database, card = database_of(PROGRAM, folder), folder / CARD
    if card.exists():
        raise ConfigError(
            f"{folder} has a key already: `{PROGRAM} run` uses it; give another folder for a new one"
        )
    if not database.exists() and (folder / _SIGN_KEY).exists():
        raise ConfigError(f"{folder} has a key, but {database.name} is missing: {_RESTORE}")
    OperatorState(folder, is_new=True).close()  # before the key, which is never without it
    keys = Keys(read_or_make_key(folder / _SIGN_KEY), folder / _SEAL_KEYS)
    _write_card(card, keys.public())
    return card


def _write_card(card: Path, keys: Mapping[str, str]) -> None:
    lines = [f"format = {FORMAT}", *(f"{name} = {json.dumps(key)}" for name, key in keys.items())]
    write_atomically(card, "".join(f"{line}\n" for line in lines).encode())


def read_keys(folder: Path) -> Keys:
    """Return the keys in a state folder.

    Raises:
        ConfigError: there are none, or they are not those of the card.
    """
    try:
        card = tomllib.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {folder / CARD} ({error}): {_RESTORE}") from error
    keys = Keys(read_key(folder / _SIGN_KEY, advice=_RESTORE), folder / _SEAL_KEYS)
    if card != {"format": FORMAT, **keys.public()}:
        raise ConfigError(f"{folder / CARD} is not the card of the key beside it: {_RESTORE}")
    return keys


def make_task(folder: Path, card: Path) -> str:
    """Make a seal key for one task, and write its card for the task file; returns the public key in hex.

    Raises:
        ConfigError: the card exists already, or the folder has no key.
        StateError: it cannot be written.
    """
    keys = read_keys(folder)
    if card.exists():
        raise ConfigError(f"{card} exists already: each task has a seal key of its own; give another name")
    made = X25519PrivateKey.generate()
    public = made.public_key().public_bytes_raw()
    write_private(keys.folder / f"{public.hex()}.key", pem_of(made))
    signature = sign_seal_key(public, key=keys.sign_key)
    names = {"seal_key": public.hex(), "seal_key_signature": signature.hex(), **keys.public()}
    _write_card(card, names)
    return public.hex()


def end_task(folder: Path, start: str) -> str:
    """Overwrite and delete the seal key of a task, whose public key in hex begins so; returns the public key in hex.

    Raises:
        ConfigError: there is not exactly one such key.
        StateError: it cannot be deleted.
    """
    keys = read_keys(folder)
    found = [public for public in keys.seal_keys() if public.startswith(start.lower())]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} seal keys in {folder} begin with {start!r}: `{PROGRAM} status` shows them"
        )
    file = keys.folder / f"{found[0]}.key"
    with state_errors(file):
        with file.open("r+b") as opened:
            opened.write(bytes(file.stat().st_size))
            opened.flush()
            os.fsync(opened.fileno())
        file.unlink()
    return found[0]


class OperatorState:
    """The record of answered and refused requests.

    Args:
        folder: as `make_operator` created it.
        is_new: create the database.
        read_only: open it beside a running program.

    Raises:
        ConfigError: there is no database: without it, lists that overlap answered ones would be opened.
        StateError: it cannot be used, or the program runs on the folder already.
    """

    def __init__(self, folder: Path, *, is_new: bool = False, read_only: bool = False) -> None:
        file = database_of(PROGRAM, folder)
        if not is_new and not file.exists():
            raise ConfigError(f"{file} is missing: {_RESTORE}")
        self._database = Database(
            file,
            program=f"{PROGRAM} run",
            migrations=(_SCHEMA,),
            read_only=read_only,
            lock=None if read_only else FolderLock(folder),
            holds_lock=not read_only,
            advice=_RESTORE,
        )
        self._facts = Facts(self._database)

    def is_answered(self, request: bytes) -> bool:
        return bool(self._database.read("SELECT 1 FROM lists WHERE request = ?", request))

    def already_summed(self, task: bytes, devices: Sequence[str]) -> str | None:
        """Return the first device whose submission for a task is in an answered list."""
        query = "SELECT 1 FROM members WHERE task = ? AND device = ?"
        return next((device for device in devices if self._database.read(query, task, device)), None)

    def is_of_another(self, seal_key: bytes, task: bytes) -> bool:
        """Return whether a list of another task was opened with a seal key (32 bytes, public)."""
        query = "SELECT 1 FROM lists WHERE seal_key = ? AND task != ? LIMIT 1"
        return bool(self._database.read(query, seal_key, task))

    def add(self, request: bytes, *, task: bytes, seal_key: bytes, devices: Sequence[str]) -> None:
        """Store a list durably, before its sum is published; raises StateError if a device is in another one."""
        with self._database.transaction() as database:
            listed = database.execute(
                "INSERT INTO lists (request, task, seal_key, devices, answered_s) VALUES (?, ?, ?, ?, ?)",
                (request, task, seal_key, len(devices), time.time()),
            ).lastrowid
            rows = ((task, device, listed) for device in devices)
            database.executemany("INSERT INTO members VALUES (?, ?, ?)", rows)

    def count_refusal(self, reason: Reason, problem: str) -> None:
        by_reason = self.refusals()
        before = by_reason[reason].requests if reason in by_reason else 0
        refusal = Refusal(before + 1, time.time(), problem)
        self._facts.put(Refusals({**by_reason, reason: refusal}))

    def refusals(self) -> dict[Reason, Refusal]:
        return (self._facts.get(Refusals) or Refusals()).by_reason

    def answered(self) -> list[AnsweredList]:
        """Return the answered lists, oldest first."""
        rows = self._database.read("SELECT request, task, devices, answered_s FROM lists ORDER BY id")
        return [AnsweredList(request.hex(), task.hex(), *rest) for request, task, *rest in rows]

    def close(self) -> None:
        self._database.close()
