"""Quarantined devices: their prototypes are not trained on."""

from dataclasses import dataclass

from protocol.storage.database import Database

REVOKED = "its key was revoked"
"""The reason for quarantining a device whose submissions are refused before outlier detection."""


@dataclass(frozen=True)
class QuarantinedDevice:
    """A quarantined device; times are unix seconds.

    Args:
        reason: why it was quarantined.
        since_s: when.
        released_s: when an operator released it; None if it was not released.
    """

    reason: str
    since_s: float
    released_s: float | None = None


class Quarantine:
    """The table `quarantine`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, task: bytes, device: str, *, reason: str, now_s: float) -> None:
        """Quarantine a device, also one that was released."""
        self._database.write(
            "INSERT INTO quarantine (task, device, since_s, reason) VALUES (?, ?, ?, ?) ON CONFLICT (task, device) "
            "DO UPDATE SET reason = excluded.reason, released_s = NULL, "
            "since_s = CASE WHEN released_s IS NULL THEN since_s ELSE excluded.since_s END",
            *(task, device, now_s, reason),
        )

    def release(self, task: bytes, device: str, *, now_s: float) -> None:
        """Train on a device's prototypes whatever outlier detection finds, until it is quarantined again."""
        self._database.write(
            "UPDATE quarantine SET released_s = ? WHERE task = ? AND device = ? AND released_s IS NULL",
            *(now_s, task, device),
        )

    def delete(self, task: bytes, device: str) -> None:
        """Delete a device's entry."""
        self._database.write("DELETE FROM quarantine WHERE task = ? AND device = ?", task, device)

    def delete_revocation(self, device: str) -> None:
        """Delete a device's entries, of all tasks, that were made because its key was revoked."""
        self._database.write("DELETE FROM quarantine WHERE device = ? AND reason = ?", device, REVOKED)

    def all(self, task: bytes) -> dict[str, QuarantinedDevice]:
        """Return the devices that were quarantined, including those released since."""
        rows = self._database.read(
            "SELECT device, reason, since_s, released_s FROM quarantine WHERE task = ? ORDER BY device", task
        )
        return {device: QuarantinedDevice(*columns) for device, *columns in rows}
