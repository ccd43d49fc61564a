"""When a collection of submissions closes: a pure state machine, (state, event) -> (state, actions).

Without rounds, a collection is open while there are submissions, of any age, that no head was trained on. With
rounds, it holds the submissions to the open round, whose number is the version of the newest head: closing round r
makes head r + 1. A collection closes when

- with rounds, every device that can be expected has submitted,
- or `grace_s` has passed since `quorum` devices submitted (`retrain_after` once there is a head, without rounds),
- or `deadline_s` has passed since the first submission, if `min_devices` have submitted by then, else as soon as
  they have.

Without rounds, a device that the newest head excluded as an outlier closes a collection only `JUDGED_AGAIN_S` after
its last submission, to be judged again.

Later submissions belong to the next collection. The newest submission of a device counts, in whatever order they
arrive, so the same submissions give the same training set. `judged` decides that in constant time, whatever the number
of devices; what has changed then takes time for each device once.

A failed training is repeated after a delay that grows with each failure, or at once with other submissions. One that
fails because submissions cannot be read any more is repeated at once without these.

Times are elapsed seconds, of a clock that is never set back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from aggregator.coordination.round_state import (
    DeviceDecisions,
    Entry,
    Settings,
    State,
    collection_of,
    counting,
    is_due,
    is_of,
    still_counts,
)
from protocol.retry_delay import retry_delay_s

Verdict = Literal["new", "duplicate", "superseded", "late", "unknown_round"]


@dataclass(frozen=True)
class SubmissionsChanged:
    """Submissions were stored or deleted."""

    submissions: dict[str, Entry]
    """All that are stored now, which the state keeps."""


@dataclass(frozen=True)
class Ticked:
    """Time has passed: it is `now_s` (elapsed seconds)."""

    now_s: float


@dataclass(frozen=True)
class Trained:
    """The training has made a head, without the submissions of the devices in `excluded`."""

    version: int
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True)
class TrainingFailed:
    """The training has failed; it is `now_s` (elapsed seconds)."""

    now_s: float = 0.0


@dataclass(frozen=True)
class SubmissionsLost:
    """The training has ended without a head, because these devices' submissions cannot be read; it is `now_s`."""

    digests: Mapping[str, bytes]
    now_s: float = 0.0


Event = SubmissionsChanged | Ticked | Trained | TrainingFailed | SubmissionsLost | DeviceDecisions


@dataclass(frozen=True)
class SubmissionVerdict:
    """The outcome of a submission; `counted_entry` is the device's entry that counts now, if there is one."""

    verdict: Verdict
    counted_entry: Entry | None


@dataclass(frozen=True)
class Train:
    """Make head `version` of these submissions, ordered by device."""

    version: int
    members: tuple[tuple[str, Entry], ...]


def step(  # noqa: PLR0911 - one case per event
    state: State, event: Event, *, settings: Settings
) -> tuple[State, tuple[Train, ...]]:
    """Apply an event. At most one training runs at a time, and each device is in it at most once."""
    match event:
        case SubmissionsChanged(submissions=submissions):
            return replace(state, submissions=MappingProxyType(submissions)), ()
        case Ticked(now_s=now_s):
            return _close(state, now_s, settings)
        case Trained(version=version, excluded=excluded) if state.training is not None:
            covered = state.training
            state = replace(state, covered=covered, excluded=excluded, head_version=version)
            return replace(state, training=None, failed=None, failures=0), ()
        case TrainingFailed(now_s=now_s) if state.training is not None:
            retry_s = now_s + retry_delay_s(state.failures)
            failed, failures = state.training, state.failures + 1
            return replace(state, training=None, failed=failed, failures=failures, retry_s=retry_s), ()
        case SubmissionsLost(digests=lost, now_s=now_s):
            left = {
                device: entry
                for device, entry in state.submissions.items()
                if lost.get(device) != entry.digest
            }
            state = replace(state, submissions=MappingProxyType(left), training=None, failed=None)
            return _close(state, now_s, settings, again=True)
        case DeviceDecisions() if event != state.decisions:
            return replace(state, decisions=event), ()
    return state, ()


def resumed(state: State) -> tuple[Train, ...]:
    """Return the training that a restart interrupted, to be run again on the same submissions."""
    return () if state.training is None else (_train(state.head_version + 1, state.training),)


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


def _close(
    state: State, now_s: float, settings: Settings, *, again: bool = False
) -> tuple[State, tuple[Train, ...]]:
    """Close the collection if it is due, or `again` without submissions that were lost, if there are enough."""
    if state.training is not None:
        return state, ()
    collection = state.collection
    if collection is None or not is_of(collection, state, settings):
        collection = collection_of(state, settings)
    state = replace(state, collection=collection)
    is_again = again and collection.count >= max(settings.min_devices, 1)
    is_limited = state.is_rate_limited and not collection.must_retrain
    if not is_again and (is_limited or not is_due(collection, now_s, state, settings)):
        return state, ()
    members = dict(sorted(counting(state, settings).items()))
    if not members or (state.failed == members and now_s < state.retry_s):
        return state, ()
    state = replace(state, training=MappingProxyType(members))
    return state, (_train(state.head_version + 1, members),)


def _train(version: int, members: Mapping[str, Entry]) -> Train:
    return Train(version, tuple(sorted(members.items())))
