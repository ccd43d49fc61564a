"""The keys of devices: enrolled by an operator or pinned at first use, and revoked ones."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from aggregator.storage.changes import change
from aggregator.storage.stored_values import ClosedFleet
from protocol.storage.facts import Facts, Tables
from protocol.wire.messages import Reason

Value = TypeVar("Value")

MAX_PINNED_DEVICES = 10_000
"""Devices that an open fleet pins at first use: a client can make up any number of names."""

MAX_CACHED = 20_000
"""Answers of the database in memory, of which all are dropped for one more, for the same reason."""

_KEY = "SELECT public, enrolled, since_s, serial, revoked_s FROM keys WHERE device = ?"


@dataclass(frozen=True)
class Key:
    """A device's key."""

    public: bytes
    """32 bytes, Ed25519."""
    enrolled: bool
    """True if an operator enrolled it; False if it was pinned at first use."""
    since_s: float
    """Unix seconds."""
    serial: str = ""
    """Serial number of the device's certificate, in hex."""
    revoked_s: float | None = None
    """When it was revoked, unix seconds."""


def refusal_reason(known: Key | None, *, is_closed: bool, public: bytes | None = None) -> Reason | None:
    """Return the reason for refusing messages of a device whose key is `known`; None if they are accepted.

    `public` is the key that the message was signed with, if it was signed.
    """
    if known is not None and known.revoked_s is not None:
        return "revoked"
    if is_closed and (known is None or not known.enrolled):
        return "unknown_device"
    if known is not None and public not in (None, known.public):
        return "signature"
    return None


class DeviceKeys:
    """The tables `keys` and `revoked_certificates`, cached: keys are read with every frame and rarely change.

    Only the program that writes the tables may use one for long: the cache knows of no changes by others.
    """

    def __init__(self, database: Tables, facts: Facts) -> None:
        self._database = database
        self._facts = facts
        self._cache: dict[tuple[str, ...], Any] = {}

    def drop_cache(self) -> None:
        """Read everything again; call it after a rollback, or when another program has written."""
        self._cache.clear()

    def _read(self, sql: str, *values: str, kind: Callable[[list[tuple[Any, ...]]], Value]) -> Value:
        """Return what `kind` makes of the rows of a query: the same object until something was written."""
        if (sql, *values) not in self._cache:
            if len(self._cache) >= MAX_CACHED:
                self.drop_cache()
            self._cache[sql, *values] = kind(self._database.read(sql, *values))
        value: Value = self._cache[sql, *values]
        return value

    def get(self, device: str) -> Key | None:
        return self._read(_KEY, device, kind=_key)

    def all(self) -> dict[str, Key]:
        rows = self._database.read(
            "SELECT device, public, enrolled, since_s, serial, revoked_s FROM keys ORDER BY device"
        )
        return {device: Key(public, bool(enrolled), *rest) for device, public, enrolled, *rest in rows}

    def revoked(self) -> frozenset[str]:
        return self._read("SELECT device FROM keys WHERE revoked_s IS NOT NULL", kind=_devices)

    def enrolled(self) -> frozenset[str] | None:
        """Return the enrolled devices of a closed fleet; None for an open fleet."""
        query = "SELECT device FROM keys WHERE enrolled = 1 AND revoked_s IS NULL"
        return self._read(query, kind=_devices) if self.is_closed() else None

    def _write(self, sql: str, *values: object) -> None:
        self._database.write(sql, *values)
        self.drop_cache()

    def pin(self, device: str, public: bytes, *, now_s: float) -> bool:
        """Store the first key seen for a device; returns False if there are too many devices."""
        ((pinned,),) = self._database.read("SELECT count(*) FROM keys WHERE enrolled = 0")
        if pinned < MAX_PINNED_DEVICES:
            self._database.write(
                "INSERT INTO keys (device, public, enrolled, since_s) VALUES (?, ?, 0, ?) "
                "ON CONFLICT (device) DO NOTHING",
                *(device, public, now_s),
            )
        self._cache.pop((_KEY, device), None)  # no other answer depends on a pinned key
        known = self.get(device)
        return known is not None and known.public == public

    def valid(self) -> int:
        """Return the number of devices with a key that was not revoked."""
        ((count,),) = self._database.read("SELECT count(*) FROM keys WHERE revoked_s IS NULL")
        return int(count)

    def enroll(self, device: str, public: bytes, *, serial: str = "", now_s: float) -> None:
        """Store an enrolled device's key in place of its previous one."""
        with change(self._database):
            self._write(
                "INSERT INTO keys VALUES (?, ?, 1, ?, ?, NULL) ON CONFLICT (device) DO UPDATE SET "
                "public = excluded.public, enrolled = 1, since_s = excluded.since_s, serial = excluded.serial, "
                "revoked_s = NULL",
                *(device, public, now_s, serial),
            )

    def revoke(self, device: str, *, now_s: float) -> None:
        with change(self._database):
            self._write(
                "UPDATE keys SET revoked_s = ? WHERE device = ? AND revoked_s IS NULL", *(now_s, device)
            )

    def reset(self, device: str) -> bool:
        """Delete a pinned key, so that the next one is pinned; returns False if the device has no pinned key.

        An enrolled or revoked key stays.
        """
        known = self.get(device)
        if known is None or known.enrolled or known.revoked_s is not None:
            return False
        self._write("DELETE FROM keys WHERE device = ? AND enrolled = 0", device)
        return True

    def close_fleet(self) -> None:
        with change(self._database):
            self._facts.put(ClosedFleet(time.time()))
            self.drop_cache()

    def is_closed(self) -> bool:
        return self._read("SELECT 1 FROM facts WHERE name = ?", ClosedFleet.__name__, kind=bool)

    def revoke_certificate(self, serial: str, *, now_s: float) -> None:
        """Revoke a certificate by its serial number (hex); one that was revoked earlier keeps its time."""
        self._write("INSERT INTO revoked_certificates VALUES (?, ?) ON CONFLICT DO NOTHING", serial, now_s)

    def reinstate_certificate(self, serial: str) -> None:
        self._write("DELETE FROM revoked_certificates WHERE serial = ?", serial)

    def revoked_certificates(self) -> dict[str, float]:
        """Return the serial numbers (hex) of revoked certificates, each with when (unix seconds)."""
        return dict(self._database.read("SELECT serial, since_s FROM revoked_certificates"))


def _key(rows: list[tuple[Any, ...]]) -> Key | None:
    return Key(rows[0][0], bool(rows[0][1]), *rows[0][2:]) if rows else None


def _devices(rows: list[tuple[Any, ...]]) -> frozenset[str]:
    return frozenset(device for (device,) in rows)


def counts(keys: Collection[Key]) -> dict[str, int]:
    valid = [key for key in keys if key.revoked_s is None]
    enrolled = sum(key.enrolled for key in valid)
    return {"enrolled": enrolled, "first_use": len(valid) - enrolled, "revoked": len(keys) - len(valid)}
