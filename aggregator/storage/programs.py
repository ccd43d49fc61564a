"""Programs beside the aggregator: the receivers of uploads."""

from typing import Annotated

import msgspec
from msgspec import Meta

from aggregator.storage.devices import UnixSeconds
from protocol.storage.facts import Tables


class ReceiverRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A program that receives uploads, as it has reported itself last."""

    name: str
    shards: Annotated[tuple[int, ...], Meta(description="Shards of uploads that it receives.")]
    is_fixed: Annotated[bool, Meta(description="False if the receivers divide the shards.")]
    seen_s: Annotated[UnixSeconds, Meta(description="The last report, by the receiver's clock.")]
    stopped_s: Annotated[UnixSeconds | None, Meta(description="Since when uploads cannot be stored.")] = None
    reason: str = ""


class Receivers:
    """The table `receivers`."""

    def __init__(self, database: Tables) -> None:
        self._database = database

    def report(self, record: ReceiverRecord) -> None:
        self._database.write(
            "INSERT INTO receivers VALUES (?, 1, ?) ON CONFLICT (name) "
            "DO UPDATE SET reports = receivers.reports + 1, record = excluded.record",
            *(record.name, msgspec.json.encode(record).decode()),
        )

    def all(self) -> dict[str, tuple[int, ReceiverRecord]]:
        rows = self._database.read("SELECT name, reports, record FROM receivers ORDER BY name")
        return {
            name: (reports, self._database.decode(record, ReceiverRecord)) for name, reports, record in rows
        }

    def delete(self, name: str) -> None:
        self._database.write("DELETE FROM receivers WHERE name = ?", name)
