"""Known devices: their keys, presence and reports, their refused messages, the quarantine, and forgotten devices."""

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from aggregator.storage.changes import change
from aggregator.storage.stored_values import ClosedFleet, EarlierRefusals
from protocol.storage.facts import Facts, Tables
from protocol.wire.messages import MAX_RELEASED_KINDS, DeviceInfo, Reason, Released
from protocol.wire.privacy_record import kinds_of, record_of

Value = TypeVar("Value")

MAX_PINNED_DEVICES = 10_000
"""Devices that an open fleet pins at first use: a client can make up any number of names."""

MAX_CACHED = 20_000
"""Answers of the database in memory, of which all are dropped for one more, for the same reason."""

_KEY = "SELECT public, enrolled, since_s, serial, revoked_s FROM keys WHERE device = ?"

MAX_REFUSALS = 1000
"""Pairs of device and reason in the table `refusals`."""

UNKNOWN_DEVICE = "?"
"""The device in `refusals` of messages that cannot be attributed to a device, or of one device too many."""

REVOKED = "its key was revoked"
"""The reason for quarantining a device whose submissions are refused before outlier detection."""

UnixSeconds = Annotated[float, Meta(description="Unix seconds.")]


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


@dataclass(frozen=True)
class DeviceRecord:
    """A device: its last presence, when it was heard of last (unix seconds), and its last report."""

    device: str
    state: str
    seen_s: float
    info: DeviceInfo | None


@dataclass
class Devices:
    """The tables `devices` and `epsilons`."""

    _database: Tables
    _keys: DeviceKeys

    def has_room_for(self, device: str) -> bool:
        """Return True if a device is known or enrolled, or the number of devices is below its bound."""
        return bool(
            self._database.read(
                "SELECT 1 FROM devices WHERE device = ? UNION ALL SELECT 1 FROM keys WHERE device = ? AND enrolled = 1 "
                "UNION ALL SELECT 1 WHERE (SELECT count(*) FROM devices) < ?",
                *(device, device, MAX_PINNED_DEVICES),
            )
        )

    def put_presence(self, device: str, state: str, *, now_s: float) -> None:
        """Store a device's presence, whatever its epoch: a device replaces an old one on its topic itself."""
        self._database.write(
            "INSERT INTO devices (device, state, seen_s) VALUES (?, ?, ?) ON CONFLICT (device) "
            "DO UPDATE SET state = excluded.state, seen_s = excluded.seen_s",
            *(device, state, now_s),
        )

    def put_info(self, device: str, info: DeviceInfo, *, now_s: float) -> None:
        self._database.write(
            "INSERT INTO devices (device, seen_s, info) VALUES (?, ?, ?) ON CONFLICT (device) "
            "DO UPDATE SET info = excluded.info, seen_s = excluded.seen_s",
            *(device, now_s, msgspec.json.encode(info).decode()),
        )

    def delete_info(self, device: str) -> None:
        self._database.write("UPDATE devices SET info = 'null' WHERE device = ?", device)

    def reset_presence(self, device: str) -> None:
        """Forget a device's presence, which was signed with another key."""
        self._database.write("UPDATE devices SET state = 'unknown' WHERE device = ?", device)

    def all(self) -> list[DeviceRecord]:
        rows = self._database.read("SELECT device, state, seen_s, info FROM devices ORDER BY device")
        return [
            DeviceRecord(
                device, state, seen_s, self._database.decode(info, DeviceInfo) if info != "null" else None
            )
            for device, state, seen_s, info in rows
        ]

    def online(self) -> frozenset[str]:
        """Return the devices that are online and accepted: a revoked device cannot report that it goes offline."""
        accepted = "AND enrolled = 1" if self._keys.is_closed() else ""
        rows = self._database.read(
            "SELECT device FROM devices LEFT JOIN keys USING (device) "  # noqa: S608 - one of two texts
            f"WHERE state = 'online' AND revoked_s IS NULL {accepted}"
        )
        return frozenset(device for (device,) in rows)

    def raise_epsilon(self, device: str, total: float) -> None:
        """Store the greatest total epsilon that a device has reported, over all tasks."""
        self._database.write(
            "INSERT INTO epsilons (device, total) VALUES (?, ?) ON CONFLICT (device) "
            "DO UPDATE SET total = excluded.total WHERE excluded.total > epsilons.total",
            *(device, total),
        )

    def epsilons(self) -> dict[str, float]:
        return dict(self._database.read("SELECT device, total FROM epsilons WHERE total > 0"))

    def merge_releases(self, device: str, reported: tuple[Released, ...]) -> tuple[tuple[Released, ...], int]:
        """Store the releases that a device reports beside those that it has reported before.

        Returns all of them, and how many the report lacks. A device that has too many kinds of releases keeps those
        that are stored.
        """
        rows = self._database.read("SELECT releases, lost FROM epsilons WHERE device = ?", device)
        text, lost = rows[0] if rows else ("[]", 0)
        stored, own = self._database.decode(text, tuple[Released, ...]), kinds_of(reported)
        kinds = kinds_of(stored)
        merged, lacking = record_of(kinds | own), (kinds - own).total()
        if len(merged) > MAX_RELEASED_KINDS:
            merged = stored
        if (merged, lacking) != (stored, lost):
            self._database.write(
                "INSERT INTO epsilons (device, releases, lost) VALUES (?, ?, ?) ON CONFLICT (device) "
                "DO UPDATE SET releases = excluded.releases, lost = excluded.lost",
                *(device, msgspec.json.encode(merged).decode(), lacking),
            )
        return merged, lacking

    def lost_releases(self) -> dict[str, int]:
        """Return how many of its releases the last report of a device lacks, for devices with such a report."""
        return dict(self._database.read("SELECT device, lost FROM epsilons WHERE lost > 0"))


class Refusal(msgspec.Struct, frozen=True):
    """Messages of a device that the aggregator has refused."""

    device: str
    reason: str
    count: int
    detail: Annotated[str, Meta(description="Of the last one.")]
    last_s: UnixSeconds


@dataclass
class Refusals:
    """The table `refusals`: refused messages, counted per device and reason."""

    _database: Tables
    _facts: Facts

    def count(self, device: str, *, reason: str, detail: str, now_s: float) -> bool:
        """Count a refused message; returns True if it is the first of its device and reason.

        Clients can make up any number of device names: beyond `MAX_REFUSALS`, messages of devices that are not
        enrolled are counted under `UNKNOWN_DEVICE`.
        """
        has_room = self._database.read(
            "SELECT 1 FROM keys WHERE device = ? AND enrolled = 1 "
            "UNION ALL SELECT 1 FROM refusals WHERE device = ? AND reason = ? "
            "UNION ALL SELECT 1 WHERE (SELECT count(*) FROM refusals) < ?",
            *(device, device, reason, MAX_REFUSALS),
        )
        if not has_room:
            device = UNKNOWN_DEVICE
        rows = self._database.read(
            "INSERT INTO refusals VALUES (?, ?, 1, ?, ?) ON CONFLICT (device, reason) DO UPDATE SET "
            "count = refusals.count + 1, last_s = excluded.last_s, detail = excluded.detail RETURNING count",
            *(device, reason, now_s, detail),
        )
        return bool(rows[0][0] == 1)

    def all(self) -> list[Refusal]:
        rows = self._database.read(
            "SELECT device, reason, count, detail, last_s FROM refusals ORDER BY device, reason"
        )
        return [Refusal(*row) for row in rows]

    def reset(self, device: str) -> None:
        """Delete a device's refused messages; `earlier` counts them from then on."""
        rows = self._database.read("DELETE FROM refusals WHERE device = ? RETURNING reason, count", device)
        if rows:
            self._facts.put(EarlierRefusals(Counter(self.earlier()) + Counter(dict(rows))))

    def earlier(self) -> dict[str, int]:
        """Return the number of deleted refused messages by reason."""
        stored = self._facts.get(EarlierRefusals)
        return stored.counts if stored is not None else {}


class QuarantinedDevice(msgspec.Struct, frozen=True):
    """A device that is or was quarantined: its prototypes are not trained on."""

    device: str
    reason: str
    since_s: UnixSeconds
    released_s: Annotated[UnixSeconds | None, Meta(description="When an operator released it.")]


@dataclass
class Quarantine:
    """The table `quarantine`."""

    _database: Tables

    def add(self, task: bytes, device: str, *, reason: str, now_s: float) -> None:
        """Quarantine a device, also one that was released."""
        with change(self._database):
            self._database.write(
                "INSERT INTO quarantine (task, device, since_s, reason) VALUES (?, ?, ?, ?) ON CONFLICT (task, device) "
                "DO UPDATE SET reason = excluded.reason, released_s = NULL, "
                "since_s = CASE WHEN quarantine.released_s IS NULL THEN quarantine.since_s ELSE excluded.since_s END",
                *(task, device, now_s, reason),
            )

    def release(self, task: bytes, device: str, *, now_s: float) -> None:
        """Train on a device's prototypes whatever outlier detection finds, until it is quarantined again."""
        with change(self._database):
            self._database.write(
                "UPDATE quarantine SET released_s = ? WHERE task = ? AND device = ? AND released_s IS NULL",
                *(now_s, task, device),
            )

    def delete(self, task: bytes, device: str) -> None:
        with change(self._database):
            self._database.write("DELETE FROM quarantine WHERE task = ? AND device = ?", task, device)

    def delete_revocation(self, device: str) -> None:
        """Delete a device's entries, of all tasks, that were made because its key was revoked."""
        with change(self._database):
            self._database.write("DELETE FROM quarantine WHERE device = ? AND reason = ?", device, REVOKED)

    def delete_findings(self, device: str) -> None:
        """Delete a device's entries, of all tasks, that were made because of what it has submitted."""
        with change(self._database):
            self._database.write("DELETE FROM quarantine WHERE device = ? AND reason != ?", device, REVOKED)

    def all(self, task: bytes) -> dict[str, QuarantinedDevice]:
        rows = self._database.read(
            "SELECT device, reason, since_s, released_s FROM quarantine WHERE task = ? ORDER BY device", task
        )
        return {row[0]: QuarantinedDevice(*row) for row in rows}


class ForgottenDevice(msgspec.Struct, frozen=True):
    """A device whose stored submissions were deleted by `aggregator forget`."""

    device: str
    head: Annotated[
        int,
        Meta(
            description="The newest head that may have learned from it; 0 if there is none, or with rounds."
        ),
    ]
    since_s: UnixSeconds


@dataclass
class ForgottenDevices:
    """The table `forgotten`."""

    _database: Tables

    def put(self, task: bytes, forgotten: ForgottenDevice) -> None:
        with change(self._database):
            self._database.write(
                "INSERT INTO forgotten (task, device, head, since_s) VALUES (?, ?, ?, ?) ON CONFLICT (task, device) "
                "DO UPDATE SET since_s = excluded.since_s, "
                "head = CASE WHEN excluded.head > forgotten.head THEN excluded.head ELSE forgotten.head END",
                *(task, forgotten.device, forgotten.head, forgotten.since_s),
            )

    def all(self, task: bytes) -> list[ForgottenDevice]:
        rows = self._database.read(
            "SELECT device, head, since_s FROM forgotten WHERE task = ? ORDER BY device", task
        )
        return [ForgottenDevice(*row) for row in rows]

    def newest_head(self, task: bytes) -> int:
        """Return the newest head of a task that a forgotten device may be part of; 0 if there is none."""
        ((head,),) = self._database.read("SELECT coalesce(max(head), 0) FROM forgotten WHERE task = ?", task)
        return int(head)
