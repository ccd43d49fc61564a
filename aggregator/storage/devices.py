"""Known devices: their presence and reports, their refused messages, the quarantine, and forgotten devices."""

from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from aggregator.storage.device_keys import MAX_PINNED_DEVICES, DeviceKeys
from aggregator.storage.stored_values import EarlierRefusals
from protocol.storage.facts import Facts
from protocol.storage.tables import Tables
from protocol.wire.messages import DeviceInfo

MAX_REFUSALS = 1000
"""Pairs of device and reason in the table `refusals`."""

UNKNOWN_DEVICE = "?"
"""The device in `refusals` of messages that cannot be attributed to a device, or of one device too many."""

REVOKED = "its key was revoked"
"""The reason for quarantining a device whose submissions are refused before outlier detection."""

UnixSeconds = Annotated[float, Meta(description="Unix seconds.")]


@dataclass(frozen=True)
class DeviceRecord:
    """A device: its last presence, when it was heard of last (unix seconds), and its last report."""

    device: str
    state: str
    seen_s: float
    info: DeviceInfo | None


class Devices:
    """The tables `devices` and `epsilons`."""

    def __init__(self, database: Tables, keys: DeviceKeys) -> None:
        self._database = database
        self._keys = keys

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
            "INSERT INTO epsilons VALUES (?, ?) ON CONFLICT (device) DO UPDATE SET total = excluded.total "
            "WHERE excluded.total > epsilons.total",
            *(device, total),
        )

    def epsilons(self) -> dict[str, float]:
        return dict(self._database.read("SELECT device, total FROM epsilons"))


class Refusal(msgspec.Struct, frozen=True):
    """Messages of a device that the aggregator has refused."""

    device: str
    reason: str
    count: int
    detail: Annotated[str, Meta(description="Of the last one.")]


class Refusals:
    """The table `refusals`: refused messages, counted per device and reason."""

    def __init__(self, database: Tables, keys: DeviceKeys, facts: Facts) -> None:
        self._database = database
        self._keys = keys
        self._facts = facts

    def count(self, device: str, *, reason: str, detail: str, now_s: float) -> bool:
        """Count a refused message; returns True if it is the first of its device and reason.

        Clients can make up any number of device names: beyond `MAX_REFUSALS`, messages of devices that are not
        enrolled are counted under `UNKNOWN_DEVICE`.
        """
        if not self._has_room_for(device, reason):
            device = UNKNOWN_DEVICE
        rows = self._database.read(
            "INSERT INTO refusals VALUES (?, ?, 1, ?, ?) ON CONFLICT (device, reason) DO UPDATE SET "
            "count = refusals.count + 1, last_s = excluded.last_s, detail = excluded.detail RETURNING count",
            *(device, reason, now_s, detail),
        )
        return bool(rows[0][0] == 1)

    def all(self) -> list[Refusal]:
        rows = self._database.read(
            "SELECT device, reason, count, detail FROM refusals ORDER BY device, reason"
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

    def _has_room_for(self, device: str, reason: str) -> bool:
        known = self._keys.get(device)
        if known is not None and known.enrolled:
            return True
        return bool(
            self._database.read(
                "SELECT 1 FROM refusals WHERE device = ? AND reason = ? "
                "UNION ALL SELECT 1 WHERE (SELECT count(*) FROM refusals) < ?",
                *(device, reason, MAX_REFUSALS),
            )
        )


class QuarantinedDevice(msgspec.Struct, frozen=True):
    """A device that is or was quarantined: its prototypes are not trained on."""

    device: str
    reason: str
    since_s: UnixSeconds
    released_s: Annotated[UnixSeconds | None, Meta(description="When an operator released it.")]


class Quarantine:
    """The table `quarantine`."""

    def __init__(self, database: Tables) -> None:
        self._database = database

    def add(self, task: bytes, device: str, *, reason: str, now_s: float) -> None:
        """Quarantine a device, also one that was released."""
        self._database.write(
            "INSERT INTO quarantine (task, device, since_s, reason) VALUES (?, ?, ?, ?) ON CONFLICT (task, device) "
            "DO UPDATE SET reason = excluded.reason, released_s = NULL, "
            "since_s = CASE WHEN quarantine.released_s IS NULL THEN quarantine.since_s ELSE excluded.since_s END",
            *(task, device, now_s, reason),
        )

    def release(self, task: bytes, device: str, *, now_s: float) -> None:
        """Train on a device's prototypes whatever outlier detection finds, until it is quarantined again."""
        self._database.write(
            "UPDATE quarantine SET released_s = ? WHERE task = ? AND device = ? AND released_s IS NULL",
            *(now_s, task, device),
        )

    def delete(self, task: bytes, device: str) -> None:
        self._database.write("DELETE FROM quarantine WHERE task = ? AND device = ?", task, device)

    def delete_revocation(self, device: str) -> None:
        """Delete a device's entries, of all tasks, that were made because its key was revoked."""
        self._database.write("DELETE FROM quarantine WHERE device = ? AND reason = ?", device, REVOKED)

    def delete_findings(self, device: str) -> None:
        """Delete a device's entries, of all tasks, that were made because of what it has submitted."""
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


class ForgottenDevices:
    """The table `forgotten`."""

    def __init__(self, database: Tables) -> None:
        self._database = database

    def put(self, task: bytes, forgotten: ForgottenDevice) -> None:
        self._database.write(
            "INSERT INTO forgotten (task, device, head, since_s) VALUES (?, ?, ?, ?) ON CONFLICT (task, device) "
            "DO UPDATE SET head = CASE WHEN excluded.head > forgotten.head THEN excluded.head ELSE forgotten.head END, "
            "since_s = excluded.since_s",
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
