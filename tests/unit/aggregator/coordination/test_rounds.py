"""The life of a collection: when it closes, its members, and that no device is lost or counted twice."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.coordination.rounds import (
    Action,
    Entry,
    Event,
    Settings,
    State,
    SubmissionReceived,
    SubmissionVerdict,
    Ticked,
    Train,
    Trained,
    TrainingFailed,
    closes_at_s,
    step,
    waiting,
)

SETTINGS = Settings(quorum=3, deadline_s=100.0, retrain_after=2)


def _entry(name: str, sequence: int = 1, received_s: float = 0.0) -> Entry:
    return Entry(sequence=sequence, digest=f"{name}{sequence}".encode(), received_s=received_s)


def _submitted(device: str, sequence: int = 1, now_s: float = 0.0) -> SubmissionReceived:
    return SubmissionReceived(device, _entry(device, sequence, now_s))


def _run(
    events: list[Event], state: State | None = None, settings: Settings = SETTINGS
) -> tuple[State, list[Action]]:
    """The state after some events, and everything that was to be done."""
    state = state or State()
    done: list[Action] = []
    for event in events:
        state, actions = step(state, event, settings=settings)
        done += actions
    return state, done


def _trainings(actions: list[Action]) -> list[tuple[int, list[str]]]:
    """Version and members of each training that was begun."""
    return [
        (action.version, [f"{device}{entry.sequence}" for device, entry in action.members])
        for action in actions
        if isinstance(action, Train)
    ]


def _verdicts(actions: list[Action]) -> list[str]:
    return [action.verdict for action in actions if isinstance(action, SubmissionVerdict)]


def test_quorum_closes_the_first_collection() -> None:
    """With the third of three devices, and with all three as members."""
    state, actions = _run([_submitted("c"), _submitted("a"), Ticked(99)])
    assert _trainings(actions) == []
    _, actions = _run([_submitted("b")], state)
    assert _trainings(actions) == [(1, ["a1", "b1", "c1"])]


def test_a_device_counts_once_for_the_quorum() -> None:
    """However many duplicates and newer submissions it sends."""
    events: list[Event] = [_submitted("a", sequence) for sequence in (1, 1, 2, 3, 3, 2)]
    state, actions = _run(events)
    assert _trainings(actions) == []
    assert _verdicts(actions) == ["new", "duplicate", "new", "new", "duplicate", "superseded"]
    assert waiting(state, SETTINGS) == {"a": _entry("a", 3)}


def test_deadline_closes_with_the_devices_so_far() -> None:
    """It counts from the first waiting submission; an empty collection never closes."""
    state, actions = _run([Ticked(10**9)])
    assert _trainings(actions) == []
    assert closes_at_s(state, SETTINGS) is None
    state, actions = _run([_submitted("a", now_s=50), _submitted("b", now_s=120), Ticked(149.9)], state)
    assert _trainings(actions) == []
    assert closes_at_s(state, SETTINGS) == 150
    _, actions = _run([Ticked(150)], state)
    assert _trainings(actions) == [(1, ["a1", "b1"])]


def test_late_devices_are_in_the_next_head() -> None:
    """Submissions during a training are members of the next one."""
    first: list[Event] = [_submitted(device) for device in "abc"]
    state, _ = _run([*first, _submitted("d"), _submitted("e")])
    assert state.training is not None
    assert sorted(state.training) == ["a", "b", "c"]
    state, actions = _run([Trained(1), Ticked(1)], state)
    assert _trainings(actions) == [(2, ["a1", "b1", "c1", "d1", "e1"])]
    state, _ = _run([Trained(2)], state)
    assert waiting(state, SETTINGS) == {}


def test_retrain_after_counts_after_the_first_head() -> None:
    """New and renewed submissions count alike, repetitions do not."""
    state, _ = _run([*(_submitted(device) for device in "abc"), Trained(1)])
    state, actions = _run([_submitted("a"), _submitted("a", 2), Ticked(50)], state)
    assert _trainings(actions) == []
    _, actions = _run([_submitted("d")], state)
    assert _trainings(actions) == [(2, ["a2", "b1", "c1", "d1"])]


def test_late_device_waits_until_the_deadline() -> None:
    """Below `retrain_after`."""
    state, _ = _run([*(_submitted(device) for device in "abc"), Trained(1), _submitted("d", now_s=500)])
    assert _trainings(_run([Ticked(599)], state)[1]) == []
    assert _trainings(_run([Ticked(600)], state)[1]) == [(2, ["a1", "b1", "c1", "d1"])]


def test_at_most_one_training_at_a_time() -> None:
    """Whatever is submitted meanwhile."""
    _, actions = _run(
        [
            *(_submitted(device) for device in "abc"),
            *(_submitted(device, 2) for device in "abcdef"),
            Ticked(10**6),
        ]
    )
    assert len(_trainings(actions)) == 1


def test_failed_training_is_not_repeated_on_the_same() -> None:
    """Only on a changed submission or after a restart."""
    state, _ = _run([*(_submitted(device) for device in "abc"), TrainingFailed()])
    assert _trainings(_run([Ticked(10**6), _submitted("a"), Ticked(10**7)], state)[1]) == []
    assert _trainings(_run([_submitted("a", 2)], state)[1]) == [(1, ["a2", "b1", "c1"])]
    restarted = State(submissions=state.submissions)
    assert _trainings(_run([Ticked(0)], restarted)[1]) == [(1, ["a1", "b1", "c1"])]


def test_end_of_an_unknown_training_is_ignored() -> None:
    """The state does not change."""
    for event in (Trained(7), TrainingFailed()):
        assert _run([event]) == (State(), [])


def test_verdict_has_the_counted_entry() -> None:
    """So that the device can continue after its sequence number."""
    _, actions = _run([_submitted("a", 5), _submitted("a", 4)])
    assert actions[1] == SubmissionVerdict("a", b"a4", "superseded", _entry("a", 5))


@dataclass
class World:
    """What surrounds the round logic: a store, a clock, and trainings that end one way or the other."""

    settings: Settings
    state: State = field(default_factory=State)
    now_s: float = 0.0
    stored: dict[str, Entry] = field(default_factory=dict)
    heads: list[Mapping[str, Entry]] = field(default_factory=list)

    def feed(self, event: Event) -> None:
        """Let the logic take an event, and hold it to its promises."""
        before = self.state
        self.state, actions = step(before, event, settings=self.settings)
        answers = [action for action in actions if isinstance(action, SubmissionVerdict)]
        assert len(answers) == isinstance(event, SubmissionReceived)
        for answer in answers:
            if isinstance(event, SubmissionReceived) and answer.verdict == "new":
                self.stored[event.device] = event.entry
            assert answer.counted_entry == self.stored[answer.device]
        for action in actions:
            if isinstance(action, Train):
                assert before.training is None
                assert self.state.training == self.stored
                assert action.version == len(self.heads) + 1
                assert action.members == tuple(sorted(self.stored.items()))

    def submit(self, device: str, sequence: int, variant: int) -> None:
        """A device uploads."""
        digest = f"{device}{sequence}{variant}".encode()
        self.feed(SubmissionReceived(device, Entry(sequence, digest, self.now_s)))

    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds
        self.feed(Ticked(self.now_s))

    def end_training(self, *, good: bool) -> None:
        """The training, if there is one, ends."""
        if self.state.training is None:
            return
        if good:
            self.heads.append(self.state.training)
            self.feed(Trained(len(self.heads)))
        else:
            self.feed(TrainingFailed())

    def restart(self) -> None:
        """Only what a store holds is left: of a head's members the digests."""
        members = self.heads[-1] if self.heads else {}
        self.state = State(
            submissions=dict(self.stored),
            covered={device: replace(entry, sequence=0, received_s=0.0) for device, entry in members.items()},
            head_version=len(self.heads),
        )

    def settle(self) -> None:
        """From here on all goes well, for as long as something is to be done."""
        for _ in range(3):
            self.tick(self.settings.deadline_s)
            self.end_training(good=True)


_settings = st.builds(
    Settings,
    quorum=st.integers(1, 5),
    deadline_s=st.sampled_from([1.0, 10.0]),
    retrain_after=st.integers(1, 4),
)
_submission = st.tuples(st.sampled_from("abcd"), st.integers(1, 3), st.integers(0, 1))
_happening = st.one_of(
    _submission,
    st.floats(0, 12),
    st.sampled_from(["trained", "failed", "restart"]),
)


@given(_settings, st.lists(_happening, max_size=40))
def test_every_run_ends_in_a_head_of_all_submissions(
    settings: Settings, happenings: list[tuple[str, int, int] | float | str]
) -> None:
    """For any order of arrivals, ticks, failures and restarts."""
    world = World(settings)
    for happening in happenings:
        match happening:
            case (str(device), int(sequence), int(variant)):
                world.submit(device, sequence, variant)
            case float(seconds):
                world.tick(seconds)
            case "restart":
                world.restart()
            case outcome:
                world.end_training(good=outcome == "trained")
    world.restart()
    world.settle()
    assert waiting(world.state, settings) == {}
    assert world.state.training is None
    assert closes_at_s(world.state, settings) is None
    assert (world.heads[-1] if world.heads else {}) == world.stored
    heads = len(world.heads)
    world.restart()
    world.settle()
    assert len(world.heads) == heads


@given(_settings, st.lists(_submission, min_size=1, max_size=12), st.data())
def test_order_of_arrival_does_not_matter(
    settings: Settings, submissions: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """The same submissions give the same training set: each device's newest."""
    newest = {
        device: max((sequence, variant) for each, sequence, variant in submissions if each == device)
        for device, _, _ in submissions
    }
    repeated = data.draw(st.lists(st.sampled_from(submissions), max_size=5))
    world = World(settings)
    for device, sequence, variant in data.draw(st.permutations(submissions + repeated)):
        world.submit(device, sequence, variant)
        world.end_training(good=True)
    world.settle()
    assert {device: entry.digest.decode() for device, entry in world.heads[-1].items()} == {
        device: f"{device}{sequence}{variant}" for device, (sequence, variant) in newest.items()
    }


@given(_settings, st.lists(_submission, max_size=12))
def test_states_are_immutable(settings: Settings, submissions: list[tuple[str, int, int]]) -> None:
    """A step returns a new state, whose mappings are read-only."""
    state = State()
    for device, sequence, variant in submissions:
        before = (dict(state.submissions), dict(state.covered), state.training)
        event = SubmissionReceived(device, Entry(sequence, f"{device}{sequence}{variant}".encode(), 0.0))
        after, _ = step(state, event, settings=settings)
        assert (dict(state.submissions), dict(state.covered), state.training) == before
        with pytest.raises(TypeError):
            after.submissions["x"] = event.entry  # type: ignore[index]  # that is the point
        state = after
