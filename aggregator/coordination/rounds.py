"""The verdict about a submission, by its device's earlier one and the newest head. Pure.

The newest submission of a device counts, in whatever order they arrive. It is decided in constant time, whatever the
number of devices.
"""

from dataclasses import dataclass, replace
from typing import Literal

from aggregator.coordination.round_state import Entry, Settings, still_counts

Verdict = Literal["new", "duplicate", "superseded", "late", "unknown_round"]


@dataclass(frozen=True)
class SubmissionVerdict:
    """The outcome of a submission; `counted_entry` is the device's entry that counts now, if there is one."""

    verdict: Verdict
    counted_entry: Entry | None


def judged(
    entry: Entry, counted: Entry | None, *, head_version: int, settings: Settings
) -> SubmissionVerdict:
    """Judge a device's submission by its own entry that has counted until now, and the newest head.

    Other devices and decisions about this one do not matter. The entry of a new submission is the one to store.
    """
    is_same_round = counted is not None and counted.round == entry.round
    verdict: Verdict = "new"
    if counted is not None and counted.digest == entry.digest:
        verdict = "duplicate"
    elif not still_counts(entry, head_version, settings):
        verdict = "late"
    elif settings.rounds is not None and entry.round > head_version:
        verdict = "unknown_round"
    elif counted is not None and counted.rank > entry.rank:
        verdict = "superseded" if is_same_round else "late"
    if verdict != "new":
        return SubmissionVerdict(verdict, counted)
    if settings.rounds is not None and counted is not None and is_same_round:
        # A device that submits again does not postpone the grace period or the deadline of its round.
        entry = replace(entry, received_s=counted.received_s)
    return SubmissionVerdict("new", entry)
