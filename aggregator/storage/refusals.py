"""The refused messages of devices, counted."""

from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from aggregator.storage.stored_values import EarlierRefusals, UnixSeconds
from protocol.storage.facts import Facts, Tables

MAX_REFUSALS = 1000
"""Pairs of device and reason in the table `refusals`."""

UNKNOWN_DEVICE = "?"
"""The device in `refusals` of messages that cannot be attributed to a device, or of one device too many."""


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
