"""Which receiver receives which shards: fixed by an operator, or divided among those that are alive."""

import hashlib
import logging
import time
from collections.abc import Collection, Mapping

from aggregator.intake.intake_status import Intake
from aggregator.storage.programs import ReceiverRecord
from aggregator.storage.store import Store
from protocol.log import event
from protocol.wire.topics import SHARDS

log = logging.getLogger(__name__)

REPORT_S = 2.0
"""Seconds between two reports of a receiver."""

DEAD_S = 10.0
"""Seconds without a report after which the other receivers divide a receiver's shards."""

FORGET_S = 3600.0
"""Seconds without a report after which another receiver deletes a receiver's row."""


def divided(shards: Collection[int], names: Collection[str]) -> dict[str, frozenset[int]]:
    """Return each receiver's shards, by rendezvous hashing: another receiver changes the owner of few shards."""

    def owner(shard: int) -> str:
        return max(names, key=lambda name: hashlib.sha256(f"{shard}/{name}".encode()).digest())

    owners = {shard: owner(shard) for shard in shards} if names else {}
    return {name: frozenset(shard for shard in owners if owners[shard] == name) for name in names}


class ShardAssignment:
    """The shards of this receiver, which reports itself in the store and watches the other receivers there.

    Each receiver measures by its own clock how long another one has not reported. For some seconds two may have the
    same shard, or none has it: a submission that is received twice counts once, and devices upload again.
    """

    def __init__(self, store: Store, name: str, *, fixed: frozenset[int] | None) -> None:
        self._store = store
        self._name = name
        self._fixed = fixed
        self._seen: dict[str, tuple[int, float]] = {}
        """The number of reports of each receiver, and when it was another one."""
        self._report_s = 0.0
        self._reports: int | None = None
        """The number of reports under this name, after this receiver's last one."""
        self._is_name_shared = False
        self.shards = fixed if fixed is not None else frozenset[int]()

    def resume(self) -> None:
        """Go on after a time without `tick`, in which it has not seen what the other receivers have reported."""
        if time.monotonic() > self._report_s + DEAD_S:
            self._seen.clear()

    def tick(self, intake: Intake) -> None:
        """Report if it is time, and find out which receivers are alive; raises StateError."""
        now_s = time.monotonic()
        if now_s < self._report_s:
            return
        self._report_s = now_s + REPORT_S
        known, self._reports = self._reports, None  # if a report fails, it may have been stored all the same
        self._store.receivers.report(self._record(intake))
        stored = self._store.receivers.all()
        # One of the same name that ends deletes the row.
        reports, _ = stored.setdefault(self._name, (1, self._record(intake)))
        if known is not None and reports > known + 1:
            self._warn_of_same_name()
        for name, (count, _) in stored.items():
            if self._seen.get(name, (-1, 0.0))[0] != count:
                self._seen[name] = (count, now_s)
            elif now_s > self._seen[name][1] + FORGET_S:
                self._store.receivers.delete(name)
        alive = {
            name: record
            for name, (_, record) in stored.items()
            if name == self._name or now_s < self._seen[name][1] + DEAD_S
        }
        if (shards := self._own(alive)) != self.shards:
            self.shards = shards
            self._store.receivers.report(self._record(intake))
            reports += 1
        self._reports = reports

    def _warn_of_same_name(self) -> None:
        if not self._is_name_shared:
            self._is_name_shared = True
            text = (
                "another receiver has the same name, and receives the same shards: give each its own --name"
            )
            event(log, logging.WARNING, text, receiver=self._name)

    def _own(self, alive: Mapping[str, ReceiverRecord]) -> frozenset[int]:
        if self._fixed is not None:
            return self._fixed
        taken = {shard for record in alive.values() if record.is_fixed for shard in record.shards}
        names = [name for name, record in alive.items() if not record.is_fixed]
        return divided([shard for shard in range(SHARDS) if shard not in taken], names)[self._name]

    def _record(self, intake: Intake) -> ReceiverRecord:
        return ReceiverRecord(
            name=self._name,
            shards=tuple(sorted(self.shards)),
            is_fixed=self._fixed is not None,
            seen_s=time.time(),
            stopped_s=intake.stopped_s,
            reason=intake.reason,
        )

    def end(self) -> None:
        """Let the other receivers divide this one's shards now; raises StateError."""
        self._store.receivers.delete(self._name)
