"""Rounds one after the other: when each closes, who counts in it, and that restarts and orders change nothing."""

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
    is_over,
    resumed,
    step,
    waiting,
)

SETTINGS = Settings(quorum=2, deadline_s=100.0, grace_s=10.0, min_devices=2, staleness=1, rounds=3)


def _submitted(device: str, number: int = 0, *, sequence: int = 1, now_s: float = 0.0) -> SubmissionReceived:
    return SubmissionReceived(device, Entry(sequence, f"{device}{number}.{sequence}".encode(), now_s, number))


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


def _closed(actions: list[Action]) -> list[tuple[int, list[str]]]:
    """Version and members of each round that closed."""
    return [
        (action.version, [entry.digest.decode() for _, entry in action.members])
        for action in actions
        if isinstance(action, Train)
    ]


def _verdicts(actions: list[Action]) -> list[str]:
    return [action.verdict for action in actions if isinstance(action, SubmissionVerdict)]


def _after_round_0(*devices: str) -> State:
    """Round 1 is open, and these devices were in round 0."""
    events: list[Event] = [*(_submitted(device) for device in devices), Ticked(100), Trained(1)]
    state, actions = _run(events)
    assert len(_closed(actions)) == 1
    return state


def test_a_quorum_closes_after_the_grace() -> None:
    """The others have `grace_s` from the submission that made the quorum full, and are in the round."""
    state, actions = _run([_submitted("a", now_s=1), _submitted("b", now_s=5), _submitted("c", now_s=14)])
    assert _closed(actions) == []
    assert closes_at_s(state, SETTINGS) == 15
    assert _closed(_run([Ticked(14.9)], state)[1]) == []
    assert _closed(_run([Ticked(15)], state)[1]) == [(1, ["a0.1", "b0.1", "c0.1"])]


def test_handing_in_again_puts_nothing_off() -> None:
    """The newest submission counts, with the time at which the device's first one for the round came."""
    state, _ = _run(
        [_submitted("a", now_s=1), _submitted("b", now_s=2), _submitted("b", sequence=2, now_s=9)]
    )
    assert closes_at_s(state, SETTINGS) == 12
    assert _closed(_run([Ticked(12)], state)[1]) == [(1, ["a0.1", "b0.2"])]
    state = _after_round_0("a", "b", "c")
    state, _ = _run([_submitted("a", 1, now_s=200), _submitted("b", 1, now_s=300)], state)
    assert closes_at_s(state, SETTINGS) == 300


def test_a_grace_does_not_reach_past_the_deadline() -> None:
    """A quorum that is full shortly before the deadline puts nothing off."""
    state, _ = _run([_submitted("a", now_s=1), _submitted("b", now_s=95)])
    assert closes_at_s(state, SETTINGS) == 101
    assert _closed(_run([Ticked(101)], state)[1]) == [(1, ["a0.1", "b0.1"])]


def test_a_round_does_not_wait_for_strangers() -> None:
    """Once everybody is back who was in the previous round, it closes without grace; otherwise it does not."""
    state = _after_round_0("a", "b", "c")
    state, actions = _run([_submitted("a", 1), _submitted("d", 1), _submitted("b", 1)], state)
    assert _closed(actions) == []
    _, actions = _run([_submitted("c", 1)], state)
    assert _closed(actions) == [(2, ["a1.1", "b1.1", "c1.1", "d1.1"])]


def test_everybody_of_before_is_no_quorum() -> None:
    """A round that closed at its deadline with one device does not let the next one close with that one alone."""
    settings = replace(SETTINGS, min_devices=1)
    state, _ = _run([_submitted("a"), Ticked(100), Trained(1), _submitted("a", 1)], None, settings)
    assert (state.head_version, state.training) == (1, None)


def test_a_round_of_listed_devices_closes_when_all_are_in() -> None:
    """The list says who can be expected, also in the first round, and whatever the quorum."""
    settings = replace(SETTINGS, devices=frozenset("ab"), quorum=9, min_devices=1)
    assert _closed(_run([_submitted("a")], None, settings)[1]) == []
    assert _closed(_run([_submitted("a"), _submitted("b")], None, settings)[1]) == [(1, ["a0.1", "b0.1"])]


def test_the_deadline_closes_with_enough_devices() -> None:
    """At the deadline it closes with `min_devices`; with fewer, as soon as they are there."""
    settings = replace(SETTINGS, quorum=3)
    state, actions = _run([_submitted("a", now_s=5), Ticked(10**6)], None, settings)
    assert _closed(actions) == []
    assert closes_at_s(state, settings) is None
    _, actions = _run([_submitted("b", now_s=10**6)], state, settings)
    assert _closed(actions) == [(1, ["a0.1", "b0.1"])]
    state, _ = _run([_submitted("a", now_s=5), _submitted("b", now_s=60)], None, settings)
    assert closes_at_s(state, settings) == 105
    assert _closed(_run([Ticked(104)], state, settings)[1]) == []
    assert _closed(_run([Ticked(105)], state, settings)[1]) == [(1, ["a0.1", "b0.1"])]


def test_a_submission_counts_until_it_is_too_old() -> None:
    """A device that says nothing in round 1 is carried over into it, but not into round 2."""
    state = _after_round_0("a", "b", "c")
    state, actions = _run([_submitted("a", 1), _submitted("b", 1), Ticked(10), Trained(2)], state)
    assert _closed(actions) == [(2, ["a1.1", "b1.1", "c0.1"])]
    _, actions = _run([_submitted("a", 2), _submitted("b", 2), Ticked(10)], state)
    assert _closed(actions) == [(3, ["a2.1", "b2.1"])]


def test_who_comes_while_a_round_is_pooled_is_in_the_next() -> None:
    """It is taken, and counts there by its age, unless the device uploads for that round as well."""
    state, _ = _run([_submitted("a"), _submitted("b"), Ticked(10), _submitted("c"), _submitted("d")])
    state, actions = _run([Trained(1), _submitted("d", 1), _submitted("a", 1), _submitted("b", 1)], state)
    assert set(_verdicts(actions)) == {"new"}
    assert _closed(actions) == [(2, ["a1.1", "b1.1", "c0.1", "d1.1"])]


def test_what_is_too_old_or_too_new_is_refused() -> None:
    """Late: older than `staleness`, or older than what the device has uploaded; a round to come is unknown."""
    state = _after_round_0("a", "b")
    _, actions = _run([_submitted("c", 0), _submitted("a", 2), _submitted("a", 0, sequence=9)], state)
    assert _verdicts(actions) == ["new", "unknown_round", "new"]
    state, _ = _run([_submitted("a", 1), _submitted("b", 1), Trained(2)], state)
    state, actions = _run([_submitted("d", 0), _submitted("d", 1), _submitted("d", 2)], state)
    assert _verdicts(actions) == ["late", "new", "new"]
    _, actions = _run(
        [_submitted("d", 1, sequence=8), _submitted("d", 2), _submitted("d", 2, sequence=0)], state
    )
    assert _verdicts(actions) == ["late", "duplicate", "superseded"]


def test_after_the_last_round_everything_is_late() -> None:
    """Nothing closes any more, and no deadline runs; what stands already is still known."""
    state = _after_round_0("a", "b")
    for number in (1, 2):
        state, _ = _run([_submitted("a", number), _submitted("b", number), Trained(number + 1)], state)
    assert is_over(state, SETTINGS)
    state, actions = _run([_submitted("c", number) for number in range(5)], state)
    assert _verdicts(actions) == ["late"] * 5
    _, actions = _run([_submitted("a", 2), Ticked(10**9)], state)
    assert (_verdicts(actions), _closed(actions)) == (["duplicate"], [])
    assert (waiting(state, SETTINGS), closes_at_s(state, SETTINGS)) == ({}, None)


def test_fewer_rounds_than_there_have_been() -> None:
    """Where an operator lowers their number, the round that was open stays as it is."""
    state, _ = _run([_submitted("a", 1), _submitted("b", 1)], _after_round_0("a", "b", "c"))
    settings = replace(SETTINGS, rounds=1)
    assert _closed(_run([Ticked(10**9)], state, settings)[1]) == []
    assert waiting(state, settings) == {}


def test_a_round_that_failed_is_tried_again() -> None:
    """At once when a submission changes, and otherwise a deadline later: a full disk must not end the rounds."""
    state, _ = _run([_submitted("a"), _submitted("b"), Ticked(10), TrainingFailed(20)])
    assert _closed(_run([Ticked(119)], state)[1]) == []
    assert _closed(_run([Ticked(120)], state)[1]) == [(1, ["a0.1", "b0.1"])]
    assert _closed(_run([_submitted("c", now_s=21)], state)[1]) == [(1, ["a0.1", "b0.1", "c0.1"])]


@dataclass
class World:
    """What surrounds the round logic: a clock, and a store that outlives it."""

    settings: Settings
    state: State = field(default_factory=State)
    now_s: float = 0.0
    stored: dict[str, Entry] = field(default_factory=dict)
    closing: Mapping[str, Entry] | None = None
    heads: list[dict[str, Entry]] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)

    def feed(self, event: Event) -> None:
        """Let the logic take an event, store what it decides, and hold it to its promises."""
        before = self.state
        self.state, actions = step(before, event, settings=self.settings)
        for action in actions:
            if isinstance(action, SubmissionVerdict):
                self.verdicts.append(action.verdict)
                if action.verdict == "new" and action.counted_entry is not None:
                    self.stored[action.device] = action.counted_entry
            else:
                assert before.training is None
                self._look_at(action)
                self.closing = dict(action.members)

    def _look_at(self, train: Train) -> None:
        """A round closes once, no device is in it twice, and all that count are."""
        oldest = len(self.heads) - self.settings.staleness
        assert train.version == len(self.heads) + 1 <= (self.settings.rounds or 0)
        assert len({device for device, _ in train.members}) == len(train.members)
        assert dict(train.members) == {
            device: entry for device, entry in self.stored.items() if entry.round >= oldest
        }
        fresh = [entry for _, entry in train.members if entry.round == len(self.heads)]
        assert len(fresh) >= self.settings.min_devices

    def submit(self, device: str, number: int, sequence: int = 1) -> None:
        """A device uploads for a round."""
        digest = f"{device}{number}.{sequence}".encode()
        self.feed(SubmissionReceived(device, Entry(sequence, digest, self.now_s, number)))

    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds
        self.feed(Ticked(self.now_s))

    def pool(self) -> None:
        """What is being pooled, if anything is, becomes a head."""
        if self.closing is not None:
            self.heads.append(dict(self.closing))
            self.closing = None
            self.feed(Trained(len(self.heads)))

    def fail(self) -> None:
        """What is being pooled, if anything is, comes to nothing."""
        if self.closing is not None:
            self.closing = None
            self.feed(TrainingFailed(self.now_s))

    def restart(self) -> None:
        """Only what is stored is left: of a head's members the digests."""
        members = self.heads[-1] if self.heads else {}
        self.state = State(
            submissions=dict(self.stored),
            covered={device: Entry(0, entry.digest, 0.0) for device, entry in members.items()},
            training=self.closing,
            head_version=len(self.heads),
        )
        again = resumed(self.state)
        assert [dict(train.members) for train in again] == ([self.closing] if self.closing else [])

    def happen(self, happening: "Happening", *, restarts: bool = True) -> None:
        """One thing of many that may happen."""
        match happening:
            case (str(device), int(number), int(sequence)):
                self.submit(device, number, sequence)
            case float(seconds):
                self.tick(seconds)
            case "pool":
                self.pool()
            case "fail":
                self.fail()
            case _ if restarts:
                self.restart()


Happening = tuple[str, int, int] | float | str

_settings = st.builds(
    Settings,
    quorum=st.integers(2, 4),
    deadline_s=st.sampled_from([5.0, 20.0]),
    grace_s=st.sampled_from([0.0, 3.0]),
    min_devices=st.integers(1, 2),
    staleness=st.integers(0, 2),
    rounds=st.integers(1, 4),
    devices=st.sampled_from([None, frozenset("abcd")]),
)
_submission = st.tuples(st.sampled_from("abcd"), st.integers(0, 4), st.integers(1, 2))
_calm = st.one_of(_submission, st.floats(0, 12), st.sampled_from(["pool", "restart"]))
_rough = st.one_of(_calm, st.just("fail"))


@given(_settings, st.lists(_rough, max_size=40))
def test_every_run_ends(settings: Settings, happenings: list[Happening]) -> None:
    """Whatever has happened: once enough devices come in every round, all rounds close, each with a head."""
    world = World(settings)
    for happening in happenings:
        world.happen(happening)
    for _ in range(settings.rounds or 0):
        for device in "abcd"[: settings.min_devices]:
            world.submit(device, len(world.heads), sequence=3)
        world.tick(settings.deadline_s)
        world.tick(settings.deadline_s)
        world.pool()
    assert len(world.heads) == settings.rounds
    assert is_over(world.state, settings)
    world.verdicts.clear()
    world.submit("e", len(world.heads) - 1)
    world.tick(10**9)
    assert (world.verdicts, world.closing) == (["late"], None)


@given(_settings, st.lists(_calm, max_size=40))
def test_a_restart_changes_nothing(settings: Settings, happenings: list[Happening]) -> None:
    """What was answered, who was in which round and what is open are the same with restarts and without."""
    steady, shaken = World(settings), World(settings)
    for happening in happenings:
        steady.happen(happening, restarts=False)
        shaken.happen(happening)
        assert shaken.verdicts == steady.verdicts
        assert (shaken.heads, shaken.closing) == (steady.heads, steady.closing)
        assert closes_at_s(shaken.state, settings) == closes_at_s(steady.state, settings)


@given(
    _settings,
    st.integers(0, 3),
    st.lists(_submission, min_size=1, max_size=12),
    st.data(),
)
def test_the_order_of_arrival_does_not_matter(
    settings: Settings, number: int, submissions: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """The same submissions before the close, however shuffled and repeated, are the same round."""
    settings = replace(settings, rounds=number + 1, grace_s=3.0, devices=None)
    repeated = data.draw(st.lists(st.sampled_from(submissions), max_size=5))
    members = []
    for order in (submissions, data.draw(st.permutations(submissions + repeated))):
        world = World(settings, state=State(head_version=number), heads=[{} for _ in range(number)])
        for submission in order:
            world.submit(*submission)
        world.tick(settings.deadline_s)
        found = world.closing if world.closing is not None else world.stored
        members.append({device: (entry.round, entry.digest) for device, entry in found.items()})
    assert members[0] == members[1]


@given(_settings, st.lists(_rough, max_size=20))
def test_a_state_is_never_changed(settings: Settings, happenings: list[Happening]) -> None:
    """A step gives a new state, whose members cannot be changed from outside."""
    world = World(settings)
    for happening in happenings:
        before, submissions = world.state, dict(world.state.submissions)
        world.happen(happening, restarts=False)
        assert dict(before.submissions) == submissions
        if world.state.training is not None:
            with pytest.raises(TypeError):
                world.state.training["x"] = Entry(1, b"", 0.0)  # type: ignore[index]  # that is the point
