"""Events of the round logic, and its outcome in short."""

from dataclasses import dataclass

from aggregator.coordination.round_state import Entry, Settings, State
from aggregator.coordination.rounds import (
    Event,
    SubmissionsChanged,
    SubmissionVerdict,
    Ticked,
    Train,
    judged,
    step,
)


@dataclass(frozen=True)
class Submitted:
    """A device has submitted: it is judged, stored if it counts, and then the collection may close."""

    device: str
    entry: Entry


def entry(device: str, number: int = 0, *, sequence: int = 1, now_s: float = 0.0) -> Entry:
    """Return a device's submission for a round, with the digest `device round.sequence`."""
    return Entry(sequence, f"{device}{number}.{sequence}".encode(), now_s, number)


def submitted(device: str, number: int = 0, *, sequence: int = 1, now_s: float = 0.0) -> Submitted:
    """Return the event of a device's submission."""
    return Submitted(device, entry(device, number, sequence=sequence, now_s=now_s))


def submit(
    state: State, submission: Submitted, *, settings: Settings
) -> tuple[State, SubmissionVerdict, tuple[Train, ...]]:
    """Judge and apply a submission; return the verdict, and the training that it causes."""
    device, new = submission.device, submission.entry
    counted = state.submissions.get(device)
    verdict = judged(new, counted, head_version=state.head_version, settings=settings)
    if verdict.verdict != "new" or verdict.counted_entry is None:
        return state, verdict, ()
    changed = SubmissionsChanged({**state.submissions, device: verdict.counted_entry})
    state, _ = step(state, changed, settings=settings)
    state, trainings = step(state, Ticked(new.received_s), settings=settings)
    return state, verdict, trainings


def play(
    *events: Event | Submitted, settings: Settings, state: State | None = None
) -> tuple[State, list[tuple[int, list[str]]], list[str]]:
    """Apply events; return the state, version and digests of each training, and the verdicts."""
    state, trainings, verdicts = state or State(), list[Train](), list[str]()
    for event in events:
        if isinstance(event, Submitted):
            state, verdict, started = submit(state, event, settings=settings)
            verdicts.append(verdict.verdict)
        else:
            state, started = step(state, event, settings=settings)
        trainings += started
    members = [(each.version, [entry.digest.decode() for _, entry in each.members]) for each in trainings]
    return state, members, verdicts
