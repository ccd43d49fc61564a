"""The state of collections of submissions, and which submissions of it count. Pure.

Without rounds, a submission waits until a head is trained on it. With rounds, it belongs to the round of its number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_NOTHING: Mapping[str, "Entry"] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a task that close its collections or rounds."""

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
    forgotten: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Devices whose submissions were deleted, and the newest head that may have learned from each."""

    def counts(self, device: str) -> bool:
        return device not in self.quarantined and (self.enrolled is None or device in self.enrolled)


@dataclass(frozen=True)
class OpenCollection:
    """The open collection in figures."""

    sources: tuple[object, ...]
    """The objects that they were derived from: they are of a state that has the same ones."""
    expected: frozenset[str] | None
    """Devices without which a round is not complete; None if it cannot be complete."""
    missing: int
    """Expected devices that have not submitted."""
    count: int
    """Devices that have submitted."""
    closes_s: float
    """The time (elapsed seconds) at which it closes."""
    must_retrain: bool = False


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
    """The version of the newest head, 0 if there is none; with rounds, also the number of the open round."""
    excluded: frozenset[str] = frozenset()
    """Devices in `covered` whose submissions the newest head was made without."""
    decisions: DeviceDecisions = DeviceDecisions()
    is_rate_limited: bool = False
    """True if so many heads were trained lately that only a revocation starts another training."""
    collection: OpenCollection | None = field(default=None, compare=False, repr=False)
    """Derived from the others."""


def is_over(head_version: int, settings: Settings) -> bool:
    """Return True if all rounds have closed, the newest head being `head_version`."""
    return settings.rounds is not None and head_version >= settings.rounds


def still_counts(entry: Entry, head_version: int, settings: Settings) -> bool:
    """Return True if a submission may be part of the open collection or a later one."""
    return settings.rounds is None or (
        entry.round >= head_version - settings.staleness and not is_over(head_version, settings)
    )


def counting(state: State, settings: Settings) -> dict[str, Entry]:
    """Return the submissions that the open collection would close with now."""
    counts, version = state.decisions.counts, state.head_version
    return {
        device: entry
        for device, entry in state.submissions.items()
        if counts(device) and still_counts(entry, version, settings)
    }


def waiting(state: State, settings: Settings) -> dict[str, Entry]:
    """Return the submissions that no head was made of; with rounds, those to the open round."""
    counts = counting(state, settings)
    if settings.rounds is not None:
        return {device: entry for device, entry in counts.items() if entry.round == state.head_version}
    # The next training judges an outlier again, but it does not cause one by itself.
    return {
        device: entry
        for device, entry in counts.items()
        if (device in state.decisions.released if device in state.excluded else _is_changed(device, state))
    }


def changed_outliers(state: State, settings: Settings) -> list[Entry]:
    """Return the new submissions of devices that the newest head excluded, without those that wait."""
    counts = counting(state, settings)
    return [
        counts[device]
        for device in state.excluded - state.decisions.released
        if device in counts and _is_changed(device, state)
    ]


def _is_changed(device: str, state: State) -> bool:
    covered = state.covered.get(device)
    return covered is None or covered.digest != state.submissions[device].digest


def wanted_devices(state: State, settings: Settings) -> int:
    """Return the number of devices with which the open collection closes, or its grace period begins."""
    return settings.retrain_after if state.head_version and settings.rounds is None else settings.quorum


JUDGED_AGAIN_S = 3600.0


def closes_at_s(state: State, settings: Settings) -> float | None:
    """Return when the open collection closes at the latest (elapsed seconds); None if it waits for more devices."""
    return _closes_at_s(waiting(state, settings), state, settings)


def _closes_at_s(submitted: Mapping[str, Entry], state: State, settings: Settings) -> float | None:
    times = []
    if state.excluded:
        times += [entry.received_s + JUDGED_AGAIN_S for entry in changed_outliers(state, settings)]
    if len(submitted) >= max(settings.min_devices, 1):
        received = sorted(entry.received_s for entry in submitted.values())
        times.append(received[0] + settings.deadline_s)
        wanted = wanted_devices(state, settings)
        if len(received) >= wanted and settings.grace_s:
            times.append(received[wanted - 1] + settings.grace_s)
    return min(times, default=None)


def collection_of(state: State, settings: Settings) -> OpenCollection:
    submitted, expected = waiting(state, settings), _expected_devices(state, settings)
    closes_s = _closes_at_s(submitted, state, settings)
    quarantined = state.decisions.quarantined - state.excluded
    forgotten = {device for device, head in state.decisions.forgotten.items() if head >= state.head_version}
    return OpenCollection(
        sources=_sources(state, settings),
        expected=expected,
        missing=0 if expected is None else len(expected - submitted.keys()),
        count=len(submitted),
        closes_s=math.inf if closes_s is None else closes_s,
        # The newest head was made of submissions that no longer count; a round is followed by another one anyway.
        must_retrain=settings.rounds is None and not (quarantined | forgotten).isdisjoint(state.covered),
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


def is_of(collection: OpenCollection, state: State, settings: Settings) -> bool:
    """Return True if the figures are of this state."""
    return all(one is other for one, other in zip(collection.sources, _sources(state, settings), strict=True))


def is_due(collection: OpenCollection, now_s: float, state: State, settings: Settings) -> bool:
    if collection.must_retrain or now_s >= collection.closes_s:
        return True
    # Whatever the time.
    has_quorum = collection.count >= wanted_devices(state, settings) and not settings.grace_s
    return has_quorum or _is_complete(collection, settings)


def _is_complete(collection: OpenCollection, settings: Settings) -> bool:
    """Return True if no further device can be expected."""
    needed = settings.quorum if settings.devices is None else 0
    return collection.expected is not None and not collection.missing and collection.count >= needed


def _expected_devices(state: State, settings: Settings) -> frozenset[str] | None:
    """Return the devices that a round waits for: those listed, else those in the previous round."""
    if settings.rounds is None:
        return None
    if settings.devices is not None:
        return settings.devices - state.decisions.quarantined
    return frozenset(filter(state.decisions.counts, state.covered)) if state.covered else None
