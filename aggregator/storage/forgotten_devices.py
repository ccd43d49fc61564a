"""Devices whose submissions an operator has deleted, and which heads learned from them before."""

from typing import Annotated

import msgspec
from msgspec import Meta

from aggregator.storage.devices import UnixSeconds
from protocol.storage.tables import Tables


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
        """Store that a device is forgotten in a task, perhaps again."""
        self._database.write(
            "INSERT INTO forgotten (task, device, head, since_s) VALUES (?, ?, ?, ?) ON CONFLICT (task, device) "
            "DO UPDATE SET head = CASE WHEN excluded.head > forgotten.head THEN excluded.head ELSE forgotten.head END, "
            "since_s = excluded.since_s",
            *(task, forgotten.device, forgotten.head, forgotten.since_s),
        )

    def all(self, task: bytes) -> list[ForgottenDevice]:
        """Return the devices that were forgotten in a task."""
        rows = self._database.read(
            "SELECT device, head, since_s FROM forgotten WHERE task = ? ORDER BY device", task
        )
        return [ForgottenDevice(*row) for row in rows]

    def newest_head(self, task: bytes) -> int:
        """Return the newest head of a task that a forgotten device may be part of; 0 if there is none."""
        ((head,),) = self._database.read("SELECT coalesce(max(head), 0) FROM forgotten WHERE task = ?", task)
        return int(head)
