"""Devices whose submissions do not count: quarantined ones, and those that were forgotten."""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from aggregator.storage.changes import change
from aggregator.storage.stored_values import UnixSeconds
from protocol.storage.facts import Tables

REVOKED = "its key was revoked"
"""The reason for quarantining a device whose submissions are refused before outlier detection."""


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
