"""Whose keys the aggregator believes: a table of the store, and what follows from it. The decision is pure."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from protocol.wire.messages import Reason

MAX_STRANGERS = 10_000
"""Names that an open fleet takes of who comes: anybody can make up any number of them."""


@dataclass(frozen=True)
class Key:
    """What is known of a device's key."""

    public: bytes
    """32 bytes, Ed25519."""
    enrolled: bool
    """By an operator; else it is the first one that came under the device's name."""
    since_s: float
    """Unix seconds."""
    serial: str = ""
    """Of the certificate that goes with it, in hex."""
    revoked_s: float | None = None
    """Since when it counts no more, unix seconds."""


def why_not(known: Key | None, *, is_closed: bool, public: bytes | None = None) -> Reason | None:
    """Why a device is not heard; None if it is.

    Args:
        known: what is known of its key.
        is_closed: only those are heard who were enrolled.
        public: the key that it comes with, where it comes with one.
    """
    if known is not None and known.revoked_s is not None:
        return "revoked"
    if is_closed and (known is None or not known.enrolled):
        return "unknown_device"
    if known is not None and public not in (None, known.public):
        return "signature"
    return None


class Keys:
    """The table `keys`, and whether the fleet is closed.

    Args:
        read: the store's own.
        write: likewise.
    """

    def __init__(self, read: Callable[..., list[tuple[Any, ...]]], write: Callable[..., None]) -> None:
        self._read = read
        self._write_now = write
        self._seen: dict[str, Key] = {}
        self._sets: dict[str, frozenset[str]] = {}
        self._is_closed: bool | None = None
        self._version = -1
        self._is_held = False

    def key_of(self, device: str) -> Key | None:
        """What is known of a device's key; another process may have changed it a moment ago."""
        self._look_for_changes()
        if device not in self._seen:
            rows = self._read(
                "SELECT public, enrolled, since_s, serial, revoked_s FROM keys WHERE device = ?", device
            )
            for public, enrolled, since_s, serial, revoked_s in rows:
                self._seen[device] = Key(public, bool(enrolled), since_s, serial, revoked_s)
        return self._seen.get(device)

    def look_again(self) -> None:
        """Read everything anew: what was written last may have been undone."""
        self._seen.clear()
        self._sets.clear()
        self._is_closed = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within a transaction, where nobody else can write: look once, as this is asked for with every frame."""
        self._look_for_changes()
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def _look_for_changes(self) -> None:
        """Read everything anew if another process has written."""
        if self._is_held:
            return
        ((version,),) = self._read("PRAGMA data_version")
        if version != self._version:
            self._version = version
            self.look_again()

    def _write(self, sql: str, *values: Any) -> None:
        self._write_now(sql, *values)
        self.look_again()

    def all(self) -> dict[str, Key]:
        """What is known of every device's key."""
        rows = self._read(
            "SELECT device, public, enrolled, since_s, serial, revoked_s FROM keys ORDER BY device"
        )
        return {device: Key(public, bool(enrolled), *rest) for device, public, enrolled, *rest in rows}

    def revoked(self) -> frozenset[str]:
        """The devices whose keys were revoked."""
        return self._names("revoked_s IS NOT NULL")

    def enrolled(self) -> frozenset[str] | None:
        """The devices that a closed fleet has; None in an open one."""
        return self._names("enrolled AND revoked_s IS NULL") if self.is_closed() else None

    def _names(self, which: str) -> frozenset[str]:
        """The devices of some keys; this is asked for all the time, and changes hardly ever."""
        self._look_for_changes()
        if which not in self._sets:
            rows = self._read(f"SELECT device FROM keys WHERE {which}")  # noqa: S608 - ours
            self._sets[which] = frozenset(device for (device,) in rows)
        return self._sets[which]

    def pin_key(self, device: str, public: bytes, *, now_s: float) -> bool:
        """Keep the first key that came under a name; returns whether there was room for it."""
        self._write(
            "INSERT INTO keys (device, public, enrolled, since_s) SELECT ?, ?, 0, ? "
            "WHERE (SELECT count(*) FROM keys WHERE enrolled = 0) < ? ON CONFLICT (device) DO NOTHING",
            device, public, now_s, MAX_STRANGERS,
        )  # fmt: skip
        known = self.key_of(device)
        return known is not None and known.public == public

    def enrol_key(self, device: str, public: bytes, *, serial: str = "", now_s: float) -> None:
        """Believe this key of a device, in the place of any other one it had."""
        self._write("INSERT OR REPLACE INTO keys VALUES (?, ?, 1, ?, ?, NULL)", device, public, now_s, serial)

    def revoke_key(self, device: str, *, now_s: float) -> bool:
        """Believe a device's key no more; returns whether it had one."""
        known = self.key_of(device)
        if known is not None and known.revoked_s is None:
            self._write("UPDATE keys SET revoked_s = ? WHERE device = ?", now_s, device)
        return known is not None

    def forget_key(self, device: str) -> bool:
        """Take the next key that comes under a name of an open fleet for its own; returns whether it had one.

        An enrolled key, or one that was revoked, stays.
        """
        known = self.key_of(device)
        if known is None or known.enrolled or known.revoked_s is not None:
            return False
        self._write("DELETE FROM keys WHERE device = ? AND enrolled = 0", device)
        return True

    def close_fleet(self) -> None:
        """From now on, only enrolled keys count."""
        self._write("INSERT OR REPLACE INTO facts VALUES ('closed', '1')")

    def is_closed(self) -> bool:
        """Whether only enrolled keys count."""
        self._look_for_changes()
        if self._is_closed is None:
            self._is_closed = bool(self._read("SELECT 1 FROM facts WHERE key = 'closed' AND value = '1'"))
        return self._is_closed


def counts(keys: Collection[Key]) -> dict[str, int]:
    """How many are enrolled, taken at first use, and revoked."""
    valid = [key for key in keys if key.revoked_s is None]
    enrolled = sum(key.enrolled for key in valid)
    return {"enrolled": enrolled, "first_use": len(valid) - enrolled, "revoked": len(keys) - len(valid)}
