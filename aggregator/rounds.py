"""The life of a collection, pure: (state, event) -> (state, actions). No clock, no file, no network.

A collection is open while there are submissions that no head was trained on. It closes, and training starts,
when `quorum` of them are there (`retrain_after` once there is a head), or `deadline_s` after the first of
them came. Whoever comes late is in the next collection. The newest submission of a device is the one that
counts, whatever the order in which they arrived, so the same submissions give the same training set.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

_NOTHING: Mapping[str, "Entry"] = MappingProxyType({})


@dataclass(frozen=True)
class Settings:
    """When a collection closes.

    Args:
        quorum: devices that the first head waits for.
        deadline_s: seconds after the first waiting submission at which it is trained on regardless.
        retrain_after: new or renewed submissions that make the next head.
    """

    quorum: int
    deadline_s: float
    retrain_after: int


@dataclass(frozen=True)
class Entry:
    """A device's submission: what orders it, what names it, and when it came (unix seconds)."""

    sequence: int
    digest: bytes
    received_s: float


@dataclass(frozen=True)
class State:
    """Everything a decision depends on; it can be rebuilt from what the store holds.

    Args:
        submissions: the newest of each device.
        covered: those that the newest head was trained on.
        training: those that a head is being trained on now.
        failed: those that the last training failed on; it is not tried again on just the same.
        head_version: of the newest head; 0 if there is none.
    """

    submissions: Mapping[str, Entry] = field(default_factory=lambda: _NOTHING)
    covered: Mapping[str, Entry] = field(default_factory=lambda: _NOTHING)
    training: Mapping[str, Entry] | None = None
    failed: Mapping[str, Entry] | None = None
    head_version: int = 0


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
    """The training that was started has made a head."""

    version: int


@dataclass(frozen=True)
class TrainingFailed:
    """The training that was started made none."""


Event = Submitted | Ticked | Trained | TrainingFailed


@dataclass(frozen=True)
class Answer:
    """Tell a device what became of its submission; `standing` is the entry that counts now."""

    device: str
    digest: bytes
    verdict: Literal["new", "duplicate", "superseded"]
    standing: Entry


@dataclass(frozen=True)
class Train:
    """Train head `version` on these submissions, in the order of the devices' names."""

    version: int
    members: tuple[tuple[str, Entry], ...]


Action = Answer | Train


def step(state: State, event: Event, *, settings: Settings) -> tuple[State, tuple[Action, ...]]:
    """Take one event. At most one training runs at a time, and no device is in it twice."""
    match event:
        case Submitted(device=device, entry=entry):
            state, answer = _submitted(state, device, entry)
            state, actions = _close(state, entry.received_s, settings)
            return state, (answer, *actions)
        case Trained(version=version) if state.training is not None:
            state = replace(state, covered=state.training, training=None, failed=None, head_version=version)
        case TrainingFailed() if state.training is not None:
            state = replace(state, failed=state.training, training=None)
        case Ticked(now_s=now_s):
            return _close(state, now_s, settings)
    return state, ()


def waiting(state: State) -> dict[str, Entry]:
    """The submissions that no head was trained on."""
    return {
        device: entry
        for device, entry in state.submissions.items()
        if (covered := state.covered.get(device)) is None or covered.digest != entry.digest
    }


def closes_at_s(state: State, settings: Settings) -> float | None:
    """When the open collection closes at the latest (unix seconds); None if none is open."""
    received = [entry.received_s for entry in waiting(state).values()]
    return min(received) + settings.deadline_s if received else None


def _submitted(state: State, device: str, entry: Entry) -> tuple[State, Answer]:
    standing = state.submissions.get(device)
    if standing is not None and standing.digest == entry.digest:
        return state, Answer(device, entry.digest, "duplicate", standing)
    # Two different submissions with one sequence: the digest decides, so that the order of arrival does not.
    if standing is not None and (standing.sequence, standing.digest) > (entry.sequence, entry.digest):
        return state, Answer(device, entry.digest, "superseded", standing)
    submissions = MappingProxyType({**state.submissions, device: entry})
    return replace(state, submissions=submissions), Answer(device, entry.digest, "new", entry)


def _close(state: State, now_s: float, settings: Settings) -> tuple[State, tuple[Action, ...]]:
    if state.training is not None or state.failed == state.submissions:
        return state, ()
    wanted = settings.retrain_after if state.head_version else settings.quorum
    closes_s = closes_at_s(state, settings)
    if closes_s is None or (len(waiting(state)) < wanted and now_s < closes_s):
        return state, ()
    members = tuple(sorted(state.submissions.items()))
    state = replace(state, training=state.submissions)
    return state, (Train(state.head_version + 1, members),)
