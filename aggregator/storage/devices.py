"""Known devices: their presence, their reports, and what they have spent on privacy."""

from dataclasses import dataclass

import msgspec

from aggregator.storage.keys import MAX_PINNED_DEVICES, DeviceKeys
from protocol.storage.facts import Tables
from protocol.wire.messages import MAX_RELEASED_KINDS, DeviceInfo, Released
from protocol.wire.privacy_record import kinds_of, record_of


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
        (stored, lost), own = self._stored_releases(device), kinds_of(reported)
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

    def releases(self, device: str) -> tuple[Released, ...]:
        """Return all releases that a device has ever reported."""
        return self._stored_releases(device)[0]

    def _stored_releases(self, device: str) -> tuple[tuple[Released, ...], int]:
        rows = self._database.read("SELECT releases, lost FROM epsilons WHERE device = ?", device)
        text, lost = rows[0] if rows else ("[]", 0)
        return self._database.decode(text, tuple[Released, ...]), lost

    def lost_releases(self) -> dict[str, int]:
        """Return how many of its releases the last report of a device lacks, for devices with such a report."""
        return dict(self._database.read("SELECT device, lost FROM epsilons WHERE lost > 0"))
