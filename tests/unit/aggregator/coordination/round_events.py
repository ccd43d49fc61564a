"""Events of the round logic, and its outcome in short."""

from aggregator.coordination.round_state import Entry, Settings, State
from aggregator.coordination.rounds import Action, Event, SubmissionReceived, SubmissionVerdict, Train, step


def entry(device: str, number: int = 0, *, sequence: int = 1, now_s: float = 0.0) -> Entry:
    """Return a device's submission for a round, with the digest `device round.sequence`."""
    return Entry(sequence, f"{device}{number}.{sequence}".encode(), now_s, number)


def submitted(device: str, number: int = 0, *, sequence: int = 1, now_s: float = 0.0) -> SubmissionReceived:
    """Return the event of a device's submission."""
    return SubmissionReceived(device, entry(device, number, sequence=sequence, now_s=now_s))


def play(
    *events: Event, settings: Settings, state: State | None = None
) -> tuple[State, list[tuple[int, list[str]]], list[str]]:
    """Apply events; return the state, version and digests of each training, and the verdicts."""
    state, actions = state or State(), list[Action]()
    for event in events:
        state, done = step(state, event, settings=settings)
        actions += done
    trainings = [
        (action.version, [each.digest.decode() for _, each in action.members])
        for action in actions
        if isinstance(action, Train)
    ]
    return state, trainings, [action.verdict for action in actions if isinstance(action, SubmissionVerdict)]
