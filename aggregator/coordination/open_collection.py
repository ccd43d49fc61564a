"""The open collection in figures, by which `aggregator.coordination.rounds` decides whether it closes. Pure."""

import math
from collections.abc import Mapping

from aggregator.coordination.round_state import (
    Entry,
    OpenCollection,
    Settings,
    State,
    changed_outliers,
    waiting,
    wanted_devices,
)

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
    """Return the figures of the open collection."""
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
    """Return True if the collection closes now."""
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
