"""The life of a collection, pure: (state, event) -> (state, actions). No clock, no file, no network.

Without rounds, a collection is open while there are submissions that no head was trained on, of whatever age. With
rounds, it holds the submissions for the open round, whose number is the newest head's version: closing round r
makes head r + 1. It closes when

- everybody is there who can be expected,
- or a `grace_s` after `quorum` submissions were there (`retrain_after` once there is a head, without rounds),
- or `deadline_s` after the first of them came, if `min_devices` have come by then, or else as soon as they have.

Whoever comes late is in the next collection. The newest submission of a device is the one that counts, whatever the
order in which they arrived, so the same submissions give the same training set.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

Verdict = Literal["new", "duplicate", "superseded", "late", "unknown_round"]

_NOTHING: Mapping[str, "Entry"] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """When a collection closes.

    Args:
        quorum: devices that a collection waits for.
        deadline_s: seconds after the first waiting submission at which it closes regardless.
        retrain_after: without rounds, new or renewed submissions that make the next head.
        grace_s: seconds for the others, once the quorum is there.
        min_devices: devices without which it does not close, however late it is.
        staleness: rounds that a submission may be behind and still count.
        rounds: after which it is over; None for one collection after the other, without rounds.
        devices: the only ones that may take part, if there is such a list.
    """

    quorum: int
    deadline_s: float
    retrain_after: int = 1
    grace_s: float = 0.0
    min_devices: int = 1
    staleness: int = 0
    rounds: int | None = None
    devices: frozenset[str] | None = None


@dataclass(frozen=True)
class Entry:
    """A device's submission: what orders it, what names it, when it came (unix seconds), and for which round."""

    sequence: int
    digest: bytes
    received_s: float
    round: int = 0

    @property
    def rank(self) -> tuple[int, int, bytes]:
        """The greatest of a device's counts; where all else is equal, the digest, and not the order of arrival."""
        return self.round, self.sequence, self.digest


@dataclass(frozen=True)
class Standing:
    """What was decided about devices, as it stands now.

    Args:
        barred: their submissions do not count.
        readmitted: theirs count, also where the newest head was made without them.
        enrolled: nobody else's count; None where everybody's do.
    """

    barred: frozenset[str] = frozenset()
    readmitted: frozenset[str] = frozenset()
    enrolled: frozenset[str] | None = None

    def counts(self, device: str) -> bool:
        """Whether a device's submissions count."""
        return device not in self.barred and (self.enrolled is None or device in self.enrolled)


@dataclass(frozen=True)
class State:
    """Everything a decision depends on; it can be rebuilt from what the store holds.

    Args:
        submissions: the newest of each device.
        covered: those that the newest head was made of.
        training: those that a head is being made of now.
        failed: those that the last training failed on; without rounds it is not tried again on just the same.
        retry_s: with rounds, when it is tried again on just the same (unix seconds).
        head_version: of the newest head; 0 if there is none. It is the number of the open round as well.
        left_out: devices that `covered` has, whose submissions were judged and not taken into the head.
        standing: what was decided about devices.
    """

    submissions: Mapping[str, Entry] = field(default_factory=lambda: _NOTHING)
    covered: Mapping[str, Entry] = field(default_factory=lambda: _NOTHING)
    training: Mapping[str, Entry] | None = None
    failed: Mapping[str, Entry] | None = None
    retry_s: float = 0.0
    head_version: int = 0
    left_out: frozenset[str] = frozenset()
    standing: Standing = Standing()


@dataclass(frozen=True)
class Submitted:
    """A valid submission has come in."""

    device: str
    entry: Entry


@dataclass(frozen=True)
class Ticked:
    """Time has passed: it is `now_s` (unix seconds)."""

    now_s: float


@dataclass(frozen=True)
class Trained:
    """The training that was started has made a head, without the submissions of the devices in `left_out`."""

    version: int
    left_out: frozenset[str] = frozenset()


@dataclass(frozen=True)
class TrainingFailed:
    """The training that was started made none; it is `now_s` (unix seconds)."""

    now_s: float = 0.0


Event = Submitted | Ticked | Trained | TrainingFailed | Standing


@dataclass(frozen=True)
class Answer:
    """Tell a device what became of its submission; `standing` is the entry that counts now, if there is one."""

    device: str
    digest: bytes
    verdict: Verdict
    standing: Entry | None


@dataclass(frozen=True)
class Train:
    """Make head `version` of these submissions, in the order of the devices' names."""

    version: int
    members: tuple[tuple[str, Entry], ...]


Action = Answer | Train


def step(state: State, event: Event, *, settings: Settings) -> tuple[State, tuple[Action, ...]]:
    """Take one event. At most one training runs at a time, and no device is in it twice."""
    match event:
        case Submitted(device=device, entry=entry):
            state, answer = _submitted(state, device, entry, settings=settings)
            state, actions = _close(state, entry.received_s, settings)
            return state, (answer, *actions)
        case Trained(version=version, left_out=left_out) if state.training is not None:
            state = replace(
                state,
                covered=state.training,
                left_out=left_out,
                training=None,
                failed=None,
                head_version=version,
            )
        case TrainingFailed(now_s=now_s) if state.training is not None:
            retry_s = 0.0 if settings.rounds is None else now_s + settings.deadline_s
            state = replace(state, failed=state.training, training=None, retry_s=retry_s)
        case Standing():
            state = replace(state, standing=event)
        case Ticked(now_s=now_s):
            return _close(state, now_s, settings)
    return state, ()


def resumed(state: State) -> tuple[Train, ...]:
    """The training that a restart has cut off, to be started again on the very same submissions."""
    return () if state.training is None else (_train(state.head_version + 1, state.training),)


def is_over(state: State, settings: Settings) -> bool:
    """Whether all rounds have closed."""
    return settings.rounds is not None and state.head_version >= settings.rounds


def waiting(state: State, settings: Settings) -> dict[str, Entry]:
    """The submissions that no head was made of; with rounds, those for the open round."""
    here = counting(state, settings)
    if settings.rounds is not None:
        return {device: entry for device, entry in here.items() if entry.round == state.head_version}
    readmitted = state.left_out & state.standing.readmitted
    return {
        device: entry
        for device, entry in here.items()
        if (covered := state.covered.get(device)) is None
        or covered.digest != entry.digest
        or device in readmitted
    }


def closes_at_s(state: State, settings: Settings) -> float | None:
    """When the open collection closes at the latest, as things stand (unix seconds); None if it waits for devices."""
    received = sorted(entry.received_s for entry in waiting(state, settings).values())
    if len(received) < max(settings.min_devices, 1):
        return None
    deadline_s = received[0] + settings.deadline_s
    wanted = _wanted(state, settings)
    if len(received) < wanted or not settings.grace_s:
        return deadline_s
    return min(deadline_s, received[wanted - 1] + settings.grace_s)


def still_counts(entry: Entry, state: State, settings: Settings) -> bool:
    """Whether a submission may be part of the open collection or a later one."""
    return settings.rounds is None or (
        entry.round >= state.head_version - settings.staleness and not is_over(state, settings)
    )


def counting(state: State, settings: Settings) -> dict[str, Entry]:
    """The submissions that the open collection would close with."""
    return {
        device: entry
        for device, entry in state.submissions.items()
        if still_counts(entry, state, settings) and state.standing.counts(device)
    }


def _wanted(state: State, settings: Settings) -> int:
    return settings.retrain_after if state.head_version and settings.rounds is None else settings.quorum


def _submitted(state: State, device: str, entry: Entry, *, settings: Settings) -> tuple[State, Answer]:
    standing = state.submissions.get(device)
    if standing is not None and standing.digest == entry.digest:
        return state, Answer(device, entry.digest, "duplicate", standing)
    if not still_counts(entry, state, settings):
        return state, Answer(device, entry.digest, "late", standing)
    if settings.rounds is not None and entry.round > state.head_version:
        return state, Answer(device, entry.digest, "unknown_round", standing)
    if standing is not None and standing.rank > entry.rank:
        verdict: Verdict = "superseded" if standing.round == entry.round else "late"
        return state, Answer(device, entry.digest, verdict, standing)
    if settings.rounds is not None and standing is not None and standing.round == entry.round:
        # A device that uploads again does not put off the grace or the deadline of its round.
        entry = replace(entry, received_s=standing.received_s)
    submissions = MappingProxyType({**state.submissions, device: entry})
    return replace(state, submissions=submissions), Answer(device, entry.digest, "new", entry)


def _close(state: State, now_s: float, settings: Settings) -> tuple[State, tuple[Action, ...]]:
    if state.training is not None or not _is_due(state, now_s, settings):
        return state, ()
    members = counting(state, settings)
    if not members:
        return state, ()
    if state.failed == members and (settings.rounds is None or now_s < state.retry_s):
        return state, ()
    state = replace(state, training=MappingProxyType(members))
    return state, (_train(state.head_version + 1, members),)


def _train(version: int, members: Mapping[str, Entry]) -> Train:
    return Train(version, tuple(sorted(members.items())))


def _is_due(state: State, now_s: float, settings: Settings) -> bool:
    here = waiting(state, settings)
    if _are_all_here(here, state, settings) or _must_go(state, settings):
        return True
    if len(here) >= _wanted(state, settings) and not settings.grace_s:
        return True  # whatever a clock says that was set back
    closes_s = closes_at_s(state, settings)
    return closes_s is not None and now_s >= closes_s


def _must_go(state: State, settings: Settings) -> bool:
    """Whether the newest head was made of what does not count any more; a round goes on to the next one anyway."""
    barred = state.standing.barred - state.left_out
    return settings.rounds is None and not barred.isdisjoint(state.covered)


def _are_all_here(here: Mapping[str, Entry], state: State, settings: Settings) -> bool:
    """Whether nobody else can be expected: no device that is listed, or else that was in the previous round."""
    if settings.rounds is None:
        return False
    if settings.devices is not None:
        return settings.devices - state.standing.barred <= here.keys()
    awaited = {device for device in state.covered if state.standing.counts(device)}
    return len(here) >= settings.quorum and len(state.covered) > 0 and awaited <= here.keys()
