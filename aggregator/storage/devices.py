"""Known devices: their presence, what they report about themselves, and their refused messages."""

from dataclasses import dataclass

import msgspec

from aggregator.storage.device_keys import MAX_PINNED_DEVICES, DeviceKeys
from protocol.storage.database import Database
from protocol.wire.messages import DeviceInfo

MAX_REFUSALS = 1000
"""Pairs of device and reason in the table `refusals`."""

UNKNOWN_DEVICE = "?"
"""The device in `refusals` of messages that cannot be attributed to a device, or of one device too many."""


@dataclass(frozen=True)
class DeviceRecord:
    """A device: its last presence, when it was heard of last (unix seconds), and its last report."""

    device: str
    state: str
    seen_s: float
    info: DeviceInfo | None


class Devices:
    """The tables `devices` and `epsilons`."""

    def __init__(self, database: Database, keys: DeviceKeys) -> None:
        self._database = database
        self._keys = keys

    def has_room_for(self, device: str) -> bool:
        """Return True if a device is known or enrolled, or the number of devices is below its bound."""
        return bool(
            self._database.read(
                "SELECT 1 FROM devices WHERE device = ?1 UNION ALL SELECT 1 FROM keys WHERE device = ?1 AND enrolled "
                "UNION ALL SELECT 1 WHERE (SELECT count(*) FROM devices) < ?2",
                *(device, MAX_PINNED_DEVICES),
            )
        )

    def put_presence(self, device: str, *, state: str, epoch: int, now_s: float) -> None:
        """Store a device's presence, unless a later start of the device is known."""
        self._database.write(
            "INSERT INTO devices (device, state, epoch, seen_s) VALUES (?, ?, ?, ?) ON CONFLICT (device) "
            "DO UPDATE SET state = excluded.state, epoch = excluded.epoch, seen_s = excluded.seen_s "
            "WHERE excluded.epoch >= devices.epoch",
            *(device, state, epoch, now_s),
        )

    def put_info(self, device: str, info: DeviceInfo, *, now_s: float) -> None:
        """Store what a device reports about itself."""
        self._database.write(
            "INSERT INTO devices (device, seen_s, info) VALUES (?, ?, ?) ON CONFLICT (device) "
            "DO UPDATE SET info = excluded.info, seen_s = excluded.seen_s",
            *(device, now_s, msgspec.json.encode(info).decode()),
        )

    def reset_presence(self, device: str) -> None:
        """Accept any presence of a device next, whatever its epoch."""
        self._database.write("UPDATE devices SET state = 'unknown', epoch = 0 WHERE device = ?", device)

    def all(self) -> list[DeviceRecord]:
        """Return every known device."""
        rows = self._database.read("SELECT device, state, seen_s, info FROM devices ORDER BY device")
        return [
            DeviceRecord(device, state, seen_s, msgspec.json.decode(info, type=DeviceInfo | None))
            for device, state, seen_s, info in rows
        ]

    def online(self) -> frozenset[str]:
        """Return the devices that are online and accepted: a revoked device cannot report that it goes offline."""
        rows = self._database.read(
            "SELECT device, enrolled, revoked_s FROM devices LEFT JOIN keys USING (device) WHERE state = 'online'"
        )
        is_closed = self._keys.is_closed()
        return frozenset(
            device
            for device, enrolled, revoked_s in rows
            if revoked_s is None and (enrolled or not is_closed)
        )

    def raise_epsilon(self, device: str, total: float) -> None:
        """Store the greatest total epsilon that a device has reported, over all tasks."""
        self._database.write(
            "INSERT INTO epsilons VALUES (?, ?) ON CONFLICT (device) DO UPDATE SET total = max(total, excluded.total)",
            *(device, total),
        )

    def epsilons(self) -> dict[str, float]:
        """Return the greatest total epsilon reported by each device that has reported one."""
        return dict(self._database.read("SELECT device, total FROM epsilons"))


class Refusals:
    """The table `refusals`: refused messages, counted per device and reason."""

    def __init__(self, database: Database, keys: DeviceKeys) -> None:
        self._database = database
        self._keys = keys

    def count(self, device: str, *, reason: str, detail: str, now_s: float) -> bool:
        """Count a refused message; returns True if it is the first of its device and reason.

        Clients can make up any number of device names: beyond `MAX_REFUSALS`, messages of devices that are not
        enrolled are counted under `UNKNOWN_DEVICE`.
        """
        is_known = self._is_known(device, reason)
        if not (is_known or device == UNKNOWN_DEVICE or self._has_room_for(device)):
            device = UNKNOWN_DEVICE
            is_known = self._is_known(device, reason)
        self._database.write(
            "INSERT INTO refusals VALUES (?, ?, 1, ?, ?) ON CONFLICT (device, reason) "
            "DO UPDATE SET count = count + 1, last_s = excluded.last_s, detail = excluded.detail",
            *(device, reason, now_s, detail),
        )
        return not is_known

    def all(self) -> list[tuple[str, str, int, str]]:
        """Return device, reason, count and the last detail of all refused messages."""
        rows = self._database.read(
            "SELECT device, reason, count, detail FROM refusals ORDER BY device, reason"
        )
        return [(device, reason, count, detail) for device, reason, count, detail in rows]

    def _is_known(self, device: str, reason: str) -> bool:
        return bool(
            self._database.read("SELECT 1 FROM refusals WHERE device = ? AND reason = ?", device, reason)
        )

    def _has_room_for(self, device: str) -> bool:
        known = self._keys.get(device)
        if known is not None and known.enrolled:
            return True
        return int(self._database.read("SELECT count(*) FROM refusals")[0][0]) < MAX_REFUSALS
