"""Submissions that count for the next head, counted by the database."""

import math
from collections.abc import Collection as Names
from dataclasses import dataclass
from typing import Any

from aggregator.coordination.collection import Collection, wanted_devices
from aggregator.coordination.round_state import Settings, is_over
from aggregator.storage.quarantine import REVOKED
from protocol.storage.facts import Tables

_REVOKED = (
    "SELECT device FROM keys WHERE revoked_s IS NOT NULL UNION ALL "
    "SELECT device FROM quarantine WHERE task = ? AND reason = ? AND released_s IS NULL"
)
_IS_ENROLLED = (
    "EXISTS (SELECT 1 FROM keys AS known WHERE known.device = submissions.device AND enrolled = 1 "
    "AND revoked_s IS NULL)"
)
_QUARANTINED = "SELECT device FROM quarantine WHERE task = ? AND released_s IS NULL"


@dataclass(frozen=True)
class CountedSubmissions:
    """Counts the submissions to a task that count for its next head.

    Args:
        is_closed: only the submissions of enrolled devices count.
    """

    database: Tables
    task: bytes
    settings: Settings
    is_closed: bool

    def read(
        self, version: int, up_to: int, *, expected: Names[str] | None = None, must_retrain: bool = False
    ) -> Collection:
        """Return the open collection in figures.

        Args:
            version: of the newest head; 0 without one.
            up_to: the number of the last change that the newest head covers.
            expected: the devices without which a round is not complete.
            must_retrain: the newest head was made of submissions that no longer count.
        """
        settings = self.settings
        if is_over(version, settings):
            return Collection(version=version)
        waiting: tuple[Any, ...] = "round = ?", version
        if settings.rounds is None:
            waiting = f"changed > ? AND device NOT IN ({_QUARANTINED})", up_to, self.task
        ((count, first_s),) = self._read("count(*), min(received_s)", *waiting)
        last, wanted = list[tuple[Any, ...]](), wanted_devices(version, settings)
        if count >= wanted:
            in_order = f"{waiting[0]} ORDER BY received_s LIMIT 1 OFFSET {wanted - 1}"
            last = self._read("received_s", in_order, *waiting[1:])
        outlier_s = missing = None
        if settings.rounds is None and version:
            again = f"changed > ? AND device IN ({_QUARANTINED})", up_to, self.task
            ((outlier_s,),) = self._read("min(received_s)", *again)
        if expected is not None:
            submitted = {device for (device,) in self._read("device", *waiting)}
            missing = len(set(expected) - submitted)
        return Collection(
            version=version,
            count=count,
            first_s=math.inf if first_s is None else first_s,
            wanted_s=last[0][0] if last else math.inf,
            outlier_s=math.inf if outlier_s is None else outlier_s,
            missing=missing,
            must_retrain=must_retrain,
        )

    def members(self, version: int) -> dict[str, bytes]:
        """Return the digests of the submissions that the next head is made of, by device in order."""
        if is_over(version, self.settings):
            return {}
        oldest = 0 if self.settings.rounds is None else version - self.settings.staleness
        return dict(self._read("device, digest", "round >= ? ORDER BY device", oldest))

    def _read(self, columns: str, condition: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return columns of the submissions that count and meet a condition."""
        counts = f"device NOT IN ({_REVOKED})" + (f" AND {_IS_ENROLLED}" if self.is_closed else "")
        return self.database.read(
            f"SELECT {columns} FROM submissions WHERE task = ? AND {counts} AND {condition}",  # noqa: S608 - of this class
            *(self.task, self.task, REVOKED, *values),
        )
