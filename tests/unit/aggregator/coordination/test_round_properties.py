"""The round logic for any order of submissions, ticks, trainings, failures and restarts, with rounds and without."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.coordination.round_state import Entry, Settings, State, closes_at_s, is_over, waiting
from aggregator.coordination.rounds import (
    Event,
    SubmissionsLost,
    Ticked,
    Train,
    Trained,
    TrainingFailed,
    resumed,
    step,
)
from protocol.retry_delay import MAX_DELAY_S
from tests.unit.aggregator.coordination.round_events import Submitted, submit, submitted

Happening = tuple[str, int, int] | float | str


@dataclass
class World:
    """A clock and a store around the round logic, and the invariants of each step."""

    settings: Settings
    state: State = field(default_factory=State)
    now_s: float = 0.0
    stored: dict[str, Entry] = field(default_factory=dict)
    training: Mapping[str, Entry] | None = None
    pending: Mapping[str, Entry] | None = None
    """The members of the last training, if it has not made a head."""
    heads: list[dict[str, Entry]] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)

    def feed(self, event: Event) -> None:
        before = self.state
        self.state, trainings = step(before, event, settings=self.settings)
        self._start(trainings, is_free=before.training is None or isinstance(event, SubmissionsLost))

    def take(self, event: Submitted) -> None:
        is_free = self.state.training is None
        self.state, verdict, trainings = submit(self.state, event, settings=self.settings)
        self.verdicts.append(verdict.verdict)
        if verdict.verdict == "new" and verdict.counted_entry is not None:
            self.stored[event.device] = verdict.counted_entry
        assert verdict.counted_entry == self.stored.get(event.device)
        self._start(trainings, is_free=is_free)

    def _start(self, trainings: tuple[Train, ...], *, is_free: bool) -> None:
        for each in trainings:
            assert is_free
            self._check(each)
            assert list(self.state.training or ()) == [device for device, _ in each.members]
            self.training = self.pending = dict(each.members)

    def _check(self, train: Train) -> None:
        """A round closes once, with each device that counts once."""
        assert train.version == len(self.heads) + 1
        counting = dict(self.stored)
        if self.settings.rounds is not None:
            assert train.version <= self.settings.rounds
            oldest = len(self.heads) - self.settings.staleness
            counting = {device: entry for device, entry in counting.items() if entry.round >= oldest}
            new = [entry for _, entry in train.members if entry.round == len(self.heads)]
            assert len(new) >= self.settings.min_devices
        assert train.members == tuple(sorted(counting.items()))

    def submit(self, device: str, number: int, sequence: int = 1) -> None:
        if (
            self.settings.rounds is None
        ):  # then the number distinguishes submissions of the same sequence number
            digest = f"{device}{number}.{sequence}".encode()
            self.take(Submitted(device, Entry(sequence, digest, self.now_s)))
        else:
            self.take(submitted(device, number, sequence=sequence, now_s=self.now_s))

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(Ticked(self.now_s))

    def end_training(self, *, succeeds: bool = True) -> None:
        training, self.training = self.training, None
        if training is None:
            return
        if succeeds:
            self.pending = None
            self.heads.append(dict(training))
            self.feed(Trained(len(self.heads)))
        else:
            self.feed(TrainingFailed(self.now_s))

    def lose(self) -> None:
        """Find while training that a member's submission cannot be read."""
        training, self.training, self.pending = self.training, None, None
        if not training:
            return
        device, entry = next(iter(training.items()))
        if self.stored.get(device) == entry:
            del self.stored[device]
        self.feed(SubmissionsLost({device: entry.digest}, self.now_s))

    def restart(self) -> None:
        """Restore what is stored: of a head's members only the digests. A failed training is repeated."""
        self.training = self.pending
        members = self.heads[-1] if self.heads else {}
        self.state = State(
            submissions=dict(self.stored),
            covered={device: Entry(0, entry.digest, 0.0) for device, entry in members.items()},
            training=self.training,
            head_version=len(self.heads),
            failures=self.state.failures,
        )
        again = [dict(train.members) for train in resumed(self.state)]
        assert again == ([self.training] if self.training else [])

    def happen(self, happening: Happening, *, restarts: bool = True) -> None:
        match happening:
            case (str(device), int(number), int(sequence)):
                self.submit(device, number, sequence)
            case float(seconds):
                self.tick(seconds)
            case "trained" | "failed":
                self.end_training(succeeds=happening == "trained")
            case "lost":
                self.lose()
            case _ if restarts:
                self.restart()


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
_without_rounds = st.builds(
    Settings,
    quorum=st.integers(1, 5),
    deadline_s=st.sampled_from([1.0, 10.0]),
    retrain_after=st.integers(1, 4),
)
_submission = st.tuples(st.sampled_from("abcd"), st.integers(0, 4), st.integers(1, 2))
_calm = st.one_of(_submission, st.floats(0, 12), st.sampled_from(["trained", "restart"]))
_rough = st.one_of(_calm, st.sampled_from(["failed", "lost"]))


@given(_settings, st.lists(_rough, max_size=40))
def test_all_rounds_close(settings: Settings, happenings: list[Happening]) -> None:
    """Once enough devices submit in every round, each gives a head; later submissions are late."""
    world = World(settings)
    for happening in happenings:
        world.happen(happening)
    for _ in range(settings.rounds or 0):
        for device in "abcd"[: settings.min_devices]:
            world.submit(device, len(world.heads), sequence=3)
        world.tick(settings.deadline_s)
        world.tick(MAX_DELAY_S)
        world.end_training()
    assert len(world.heads) == settings.rounds
    assert is_over(world.state.head_version, settings)
    world.verdicts.clear()
    world.submit("e", len(world.heads) - 1)
    world.tick(10**9)
    assert (world.verdicts, world.training) == (["late"], None)


@given(_without_rounds, st.lists(_rough, max_size=40))
def test_last_head_is_of_all_submissions(settings: Settings, happenings: list[Happening]) -> None:
    """Without rounds, once deadline and retry delay have passed; then no more is trained, also after a restart."""
    world = World(settings)
    for happening in happenings:
        world.happen(happening)
    heads = 0
    for restarts in range(2):
        heads = len(world.heads)
        if restarts:
            world.restart()
        for _ in range(3):
            world.tick(max(settings.deadline_s, MAX_DELAY_S))
            world.end_training()
        # The failures of a training whose submissions are all lost stay until the next head.
        assert world.state.failures == 0 or "lost" in happenings
        assert (waiting(world.state, settings), world.state.training) == ({}, None)
        assert closes_at_s(world.state, settings) is None
        last = world.heads[-1] if world.heads else {}
        # A head stays until a device whose newer submission was lost submits again.
        assert {device: entry for device, entry in last.items() if device in world.stored} == world.stored
        assert last.keys() == world.stored.keys() or "lost" in happenings
    assert len(world.heads) == heads


@given(st.one_of(_settings, _without_rounds), st.lists(_calm, max_size=40))
def test_restarts_change_nothing(settings: Settings, happenings: list[Happening]) -> None:
    """Verdicts, members of each round and the open round are the same with restarts and without."""
    steady, restarted = World(settings), World(settings)
    for happening in happenings:
        steady.happen(happening, restarts=False)
        restarted.happen(happening)
        assert restarted.verdicts == steady.verdicts
        assert (restarted.heads, restarted.training) == (steady.heads, steady.training)
        assert closes_at_s(restarted.state, settings) == closes_at_s(steady.state, settings)


@given(_settings, st.integers(0, 3), st.lists(_submission, min_size=1, max_size=12), st.data())
def test_order_of_arrival_does_not_matter_in_a_round(
    settings: Settings, number: int, submissions: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    settings = replace(settings, rounds=number + 1, grace_s=3.0, devices=None)
    repeated = data.draw(st.lists(st.sampled_from(submissions), max_size=5))
    members = []
    for order in (submissions, data.draw(st.permutations(submissions + repeated))):
        world = World(settings, state=State(head_version=number), heads=[{} for _ in range(number)])
        for submission in order:
            world.submit(*submission)
        world.tick(settings.deadline_s)
        found = world.training if world.training is not None else world.stored
        members.append({device: (entry.round, entry.digest) for device, entry in found.items()})
    assert members[0] == members[1]


@given(_without_rounds, st.lists(_submission, min_size=1, max_size=12), st.data())
def test_order_of_arrival_does_not_matter_without_rounds(
    settings: Settings, submissions: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """The last head is of each device's newest submission, also with trainings in between."""
    newest: dict[str, tuple[int, int]] = {}
    for device, number, sequence in submissions:
        newest[device] = max(newest.get(device, (0, 0)), (sequence, number))
    repeated = data.draw(st.lists(st.sampled_from(submissions), max_size=5))
    world = World(settings)
    for submission in data.draw(st.permutations(submissions + repeated)):
        world.submit(*submission)
        world.end_training()
    for _ in range(2):
        world.tick(settings.deadline_s)
        world.end_training()
    assert {device: entry.digest.decode() for device, entry in world.heads[-1].items()} == {
        device: f"{device}{number}.{sequence}" for device, (sequence, number) in newest.items()
    }


@given(st.one_of(_settings, _without_rounds), st.lists(_rough, max_size=20))
def test_states_are_immutable(settings: Settings, happenings: list[Happening]) -> None:
    """A step returns a new state, whose mappings are read-only."""
    world = World(settings)
    for happening in happenings:
        before, submissions = world.state, dict(world.state.submissions)
        world.happen(happening, restarts=False)
        assert dict(before.submissions) == submissions
        for mapping in (world.state.submissions, world.state.training or State().covered):
            with pytest.raises(TypeError):
                mapping["x"] = Entry(1, b"", 0.0)  # type: ignore[index]  # that is the point
