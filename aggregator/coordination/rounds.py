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
arrive, so the same submissions give the same training set. A submission takes constant time, whatever the number of
devices; a training, and a decision about devices, take time for each.

A failed training is repeated after a delay that grows with each failure, or at once with other submissions. One that
fails because submissions cannot be read any more is repeated at once without these.

Times are elapsed seconds, of a clock that is never set back.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from protocol.retry_delay import retry_delay_s

Verdict = Literal["new", "duplicate", "superseded", "late", "unknown_round"]

JUDGED_AGAIN_S = 3600.0

_NOTHING: Mapping[str, "Entry"] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """When a collection closes, as the module says."""

    quorum: int
    deadline_s: float
    retrain_after: int = 1
    grace_s: float = 0.0
    min_devices: int = 1
    staleness: int = 0
    """Rounds that a submission may be behind and still count."""
    rounds: int | None = None
    """Number of rounds; None for an endless sequence of collections without rounds."""
    devices: frozenset[str] | None = None
    """The only devices that may take part; None for any."""


@dataclass(frozen=True)
class Entry:
    """A device's submission: its sequence number, digest, time of arrival (elapsed seconds) and round."""

    sequence: int
    digest: bytes
    received_s: float
    round: int = 0

    @property
    def rank(self) -> tuple[int, int, bytes]:
        """The sort key: a device's greatest counts. The digest breaks ties, never the order of arrival."""
        return self.round, self.sequence, self.digest


@dataclass(frozen=True)
class DeviceDecisions:
    """Decisions about devices: quarantine, release, enrollment."""

    quarantined: frozenset[str] = frozenset()
    """Devices whose submissions do not count."""
    released: frozenset[str] = frozenset()
    """Devices whose submissions count even if the newest head excluded them."""
    enrolled: frozenset[str] | None = None
    """The only devices whose submissions count; None for any."""

    def counts(self, device: str) -> bool:
        """Return True if the device's submissions count."""
        return device not in self.quarantined and (self.enrolled is None or device in self.enrolled)


@dataclass(frozen=True)
class State:
    """Everything that a decision depends on; the store can restore it."""

    submissions: Mapping[str, Entry] = field(default_factory=lambda: _NOTHING)
    """The newest of each device."""
    covered: Mapping[str, Entry] = field(default_factory=lambda: _NOTHING)
    """Those that the newest head was made of."""
    training: Mapping[str, Entry] | None = None
    """Those that a head is being made of now."""
    failed: Mapping[str, Entry] | None = None
    """Those that the last training failed on."""
    retry_s: float = 0.0
    """When the same set is tried again (elapsed seconds); another set is tried at once."""
    failures: int = 0
    """Trainings that have failed since the newest head."""
    head_version: int = 0
    """Of the newest head, 0 if there is none; with rounds, also the number of the open round."""
    excluded: frozenset[str] = frozenset()
    """Devices in `covered` whose submissions the newest head was made without."""
    decisions: DeviceDecisions = DeviceDecisions()
    is_rate_limited: bool = False
    """So many heads were trained lately that only a revocation starts another training."""
    collection: "_Collection | None" = field(default=None, compare=False, repr=False)
    """Derived from the others."""


@dataclass(frozen=True)
class _Collection:
    """The open collection in figures, which a submission updates without looking at the other ones."""

    of: tuple[object, ...]
    """The fields of the state that they were derived from."""
    expected: frozenset[str] | None
    """Devices without which a round is not complete; None if it cannot be complete."""
    missing: int
    """Expected devices that have not submitted."""
    count: int
    """Devices that have submitted."""
    closes_s: float
    """It closes no earlier than that by the time (elapsed seconds); exactly then if `is_exact`."""
    is_exact: bool = True
    must_retrain: bool = False


@dataclass(frozen=True)
class SubmissionReceived:
    """A valid submission has arrived."""

    device: str
    entry: Entry


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


Event = SubmissionReceived | Ticked | Trained | TrainingFailed | SubmissionsLost | DeviceDecisions


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


Action = SubmissionVerdict | Train


def step(  # noqa: PLR0911 - one case per event
    state: State, event: Event, *, settings: Settings
) -> tuple[State, tuple[Action, ...]]:
    """Apply an event. At most one training runs at a time, and each device is in it at most once."""
    match event:
        case SubmissionReceived(device=device, entry=entry):
            state, verdict = _submitted(state, device, entry, settings=settings)
            actions: tuple[Action, ...] = ()
            if verdict.verdict == "new":
                state, actions = _close(state, entry.received_s, settings)
            return state, (verdict, *actions)
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


def is_over(state: State, settings: Settings) -> bool:
    """Return True if all rounds have closed."""
    return settings.rounds is not None and state.head_version >= settings.rounds


def waiting(state: State, settings: Settings) -> dict[str, Entry]:
    """Return the submissions that no head was made of; with rounds, those to the open round."""
    return {
        device: entry
        for device, entry in state.submissions.items()
        if _is_waiting(device, entry, state, settings)
    }


def closes_at_s(state: State, settings: Settings) -> float | None:
    """Return when the open collection closes at the latest (elapsed seconds); None if it waits for more devices."""
    received = sorted(entry.received_s for entry in waiting(state, settings).values())
    times = [
        state.submissions[device].received_s + JUDGED_AGAIN_S
        for device in state.excluded
        if device in state.submissions and _is_changed_outlier(device, state, settings)
    ]
    if len(received) >= max(settings.min_devices, 1):
        times.append(received[0] + settings.deadline_s)
        wanted = _wanted(state, settings)
        if len(received) >= wanted and settings.grace_s:
            times.append(received[wanted - 1] + settings.grace_s)
    return min(times, default=None)


def still_counts(entry: Entry, state: State, settings: Settings) -> bool:
    """Return True if a submission may be part of the open collection or a later one."""
    return settings.rounds is None or (
        entry.round >= state.head_version - settings.staleness and not is_over(state, settings)
    )


def counting(state: State, settings: Settings) -> dict[str, Entry]:
    """Return the submissions that the open collection would close with now."""
    return {
        device: entry
        for device, entry in state.submissions.items()
        if _counts(device, entry, state, settings)
    }


def _counts(device: str, entry: Entry, state: State, settings: Settings) -> bool:
    return still_counts(entry, state, settings) and state.decisions.counts(device)


def _is_waiting(device: str, entry: Entry, state: State, settings: Settings) -> bool:
    if not _counts(device, entry, state, settings):
        return False
    if settings.rounds is not None:
        return entry.round == state.head_version
    if device in state.excluded:  # the next training judges it again, but it does not cause one by itself
        return device in state.decisions.released
    return _is_changed(device, entry, state)


def _is_changed(device: str, entry: Entry, state: State) -> bool:
    covered = state.covered.get(device)
    return covered is None or covered.digest != entry.digest


def _is_changed_outlier(device: str, state: State, settings: Settings) -> bool:
    """Return True if a device that the newest head excluded has submitted something else since."""
    entry = state.submissions[device]
    return (
        device in state.excluded - state.decisions.released
        and _counts(device, entry, state, settings)
        and _is_changed(device, entry, state)
    )


def _wanted(state: State, settings: Settings) -> int:
    return settings.retrain_after if state.head_version and settings.rounds is None else settings.quorum


def _submitted(
    state: State, device: str, entry: Entry, *, settings: Settings
) -> tuple[State, SubmissionVerdict]:
    counted = state.submissions.get(device)

    def unchanged(verdict: Verdict) -> tuple[State, SubmissionVerdict]:
        return state, SubmissionVerdict(verdict, counted)

    if counted is not None and counted.digest == entry.digest:
        return unchanged("duplicate")
    if not still_counts(entry, state, settings):
        return unchanged("late")
    if settings.rounds is not None and entry.round > state.head_version:
        return unchanged("unknown_round")
    if counted is not None and counted.rank > entry.rank:
        return unchanged("superseded" if counted.round == entry.round else "late")
    if settings.rounds is not None and counted is not None and counted.round == entry.round:
        # A device that submits again does not postpone the grace period or the deadline of its round.
        entry = replace(entry, received_s=counted.received_s)
    changed = replace(state, submissions=_with_item(state.submissions, device, entry))
    collection = state.collection
    if collection is not None and _is_of(collection, state, settings):
        was_waiting = counted is not None and _is_waiting(device, counted, state, settings)
        collection = _updated(collection, changed, device, was_waiting=was_waiting, settings=settings)
    return replace(changed, collection=collection), SubmissionVerdict("new", entry)


def _with_item(submissions: Mapping[str, Entry], device: str, entry: Entry) -> Mapping[str, Entry]:
    """Return a copy with one entry changed, which shares the other entries with the original."""
    from rpds import HashTrieMap  # commands that only read the state need no package of the extra

    return HashTrieMap.convert(submissions).insert(device, entry)


def _close(
    state: State, now_s: float, settings: Settings, *, again: bool = False
) -> tuple[State, tuple[Action, ...]]:
    """Close the collection if it is due, or `again` without submissions that were lost, if there are enough."""
    if state.training is not None:
        return state, ()
    collection = state.collection
    is_known = collection is not None and _is_of(collection, state, settings)
    if collection is None or not is_known or (now_s >= collection.closes_s and not collection.is_exact):
        collection = _collection(state, settings)
    state = replace(state, collection=collection)
    is_again = again and collection.count >= max(settings.min_devices, 1)
    is_limited = state.is_rate_limited and not collection.must_retrain
    if not is_again and (is_limited or not _is_due(collection, now_s, state, settings)):
        return state, ()
    members = dict(sorted(counting(state, settings).items()))
    if not members or (state.failed == members and now_s < state.retry_s):
        return state, ()
    state = replace(state, training=MappingProxyType(members))
    return state, (_train(state.head_version + 1, members),)


def _train(version: int, members: Mapping[str, Entry]) -> Train:
    return Train(version, tuple(sorted(members.items())))


def _is_due(collection: _Collection, now_s: float, state: State, settings: Settings) -> bool:
    if collection.must_retrain or now_s >= collection.closes_s:
        return True
    # Whatever the time.
    has_quorum = collection.count >= _wanted(state, settings) and not settings.grace_s
    return has_quorum or _is_complete(collection, settings)


def _is_complete(collection: _Collection, settings: Settings) -> bool:
    """Return True if no further device can be expected."""
    needed = settings.quorum if settings.devices is None else 0
    return collection.expected is not None and not collection.missing and collection.count >= needed


def _collection(state: State, settings: Settings) -> _Collection:
    """Return the figures of the open collection."""
    submitted, expected = waiting(state, settings), _expected(state, settings)
    closes_s = closes_at_s(state, settings)
    quarantined = state.decisions.quarantined - state.excluded
    return _Collection(
        of=_sources(state, settings),
        expected=expected,
        missing=0 if expected is None else len(expected - submitted.keys()),
        count=len(submitted),
        closes_s=math.inf if closes_s is None else closes_s,
        # The newest head was made of submissions that no longer count; a round is followed by another one anyway.
        must_retrain=settings.rounds is None and not quarantined.isdisjoint(state.covered),
    )


def _updated(
    collection: _Collection, state: State, device: str, *, was_waiting: bool, settings: Settings
) -> _Collection:
    """Return the figures after a device's submission, which the state has already, from those before it."""
    entry = state.submissions[device]
    is_waiting = _is_waiting(device, entry, state, settings)
    added = is_waiting - was_waiting
    count, least, wanted = collection.count + added, max(settings.min_devices, 1), _wanted(state, settings)
    closes_s = collection.closes_s
    if any(collection.count < threshold <= count for threshold in (least, wanted)):
        closes_s = -math.inf
    elif is_waiting and count >= least:
        # Never too late; other submissions may make the exact time later.
        delay_s = min(settings.deadline_s, settings.grace_s or math.inf if count >= wanted else math.inf)
        closes_s = min(closes_s, entry.received_s + delay_s)
    elif _is_changed_outlier(device, state, settings):
        closes_s = min(closes_s, entry.received_s + JUDGED_AGAIN_S)
    is_expected = device in (collection.expected or ())
    return replace(
        collection,
        of=_sources(state, settings),
        count=count,
        missing=collection.missing - (added if is_expected else 0),
        closes_s=closes_s,
        is_exact=False,
    )


def _sources(state: State, settings: Settings) -> tuple[object, ...]:
    return (
        state.submissions,
        state.covered,
        state.decisions,
        state.excluded,
        state.head_version,
        settings,
    )


def _is_of(collection: _Collection, state: State, settings: Settings) -> bool:
    return all(one is other for one, other in zip(collection.of, _sources(state, settings), strict=True))


def _expected(state: State, settings: Settings) -> frozenset[str] | None:
    """Return the devices that a round waits for: those listed, else those in the previous round."""
    if settings.rounds is None:
        return None
    if settings.devices is not None:
        return settings.devices - state.decisions.quarantined
    return frozenset(filter(state.decisions.counts, state.covered)) if state.covered else None
