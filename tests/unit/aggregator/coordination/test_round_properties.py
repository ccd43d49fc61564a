"""Decisions for any order of submissions, ticks, trainings, failures and restarts, with rounds and without."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import settings as configured
from hypothesis import strategies as st

from aggregator.coordination.round_state import Entry, Settings, is_over
from protocol.retry_delay import MAX_DELAY_S
from tests.unit.aggregator.coordination.round_events import (
    Lost,
    Submitted,
    Ticked,
    Trained,
    TrainingFailed,
    World,
    new_world,
    submitted,
)

Happening = tuple[str, int, int] | float | str


@dataclass
class Checked:
    """A world, and the invariants of each step."""

    world: World
    heads: list[list[str]] = field(default_factory=list)
    """Digests of the submissions that each head is of."""

    @property
    def submissions(self) -> Mapping[str, Entry]:
        return self.world.submissions

    def submit(self, device: str, number: int, sequence: int = 1) -> None:
        now_s, is_round = self.world.now_s, self.world.settings.rounds is not None
        event = submitted(device, number, sequence=sequence, now_s=now_s)
        if not is_round:  # then the number distinguishes submissions of the same sequence number
            event = Submitted(device, replace(event.entry, round=0))
        self._happen(event)

    def tick(self, seconds: float) -> None:
        self._happen(Ticked(self.world.now_s + seconds))

    def _happen(self, event: Submitted | Ticked) -> None:
        before, is_free = len(self.world.trainings), not self.world.is_training
        self.world.happen(event)
        for training in self.world.trainings[before:]:
            assert is_free
            self._check(*training)

    def _check(self, version: int, digests: list[str]) -> None:
        """A round closes once, with each device that counts once."""
        settings = self.world.settings
        assert version == len(self.heads) + 1
        counting = sorted(self.submissions.items())
        if settings.rounds is not None:
            assert version <= settings.rounds
            oldest = len(self.heads) - settings.staleness
            counting = [(device, entry) for device, entry in counting if entry.round >= oldest]
            assert sum(entry.round == len(self.heads) for _, entry in counting) >= settings.min_devices
        plan = self.world.plan
        if plan is not None and not plan.failures:  # a failed one is repeated of the same submissions
            assert digests == [entry.digest.decode() for _, entry in counting]

    def end_training(self, *, succeeds: bool = True) -> None:
        if not self.world.is_training:
            return
        if succeeds:
            self.heads.append(self.world.trainings[-1][1])
            self.world.happen(Trained())
        else:
            self.world.happen(TrainingFailed(self.world.now_s))

    def lose(self) -> None:
        """Find while training that a member's submission cannot be read."""
        plan = self.world.plan
        if plan is not None and self.world.is_training:
            device = next(iter(self.world.store.members(plan)))
            self.world.happen(Lost([device] if device in self.submissions else []))

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
                self.world.restart()


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
few = configured(deadline=None, max_examples=40)


@few
@given(_settings, st.lists(_rough, max_size=30))
def test_all_rounds_close(settings: Settings, happenings: list[Happening]) -> None:
    """Once enough devices submit in every round, each gives a head; later submissions are late."""
    with new_world(settings) as world:
        checked = Checked(world)
        for happening in happenings:
            checked.happen(happening)
        for _ in range(settings.rounds or 0):
            for device in "abcd"[: settings.min_devices]:
                checked.submit(device, len(checked.heads), sequence=3)
            checked.tick(settings.deadline_s)
            checked.tick(MAX_DELAY_S)
            checked.end_training()
        assert len(checked.heads) == settings.rounds
        assert is_over(world.version, settings)
        world.verdicts.clear()
        checked.submit("e", len(checked.heads) - 1)
        checked.tick(10**9)
        assert (world.verdicts, world.plan) == (["late"], None)


@few
@given(_without_rounds, st.lists(_rough, max_size=30))
def test_last_head_is_of_all_submissions(settings: Settings, happenings: list[Happening]) -> None:
    """Without rounds, once deadline and retry delay have passed; then no more is trained, also after a restart."""
    with new_world(settings) as world:
        checked = Checked(world)
        for happening in happenings:
            checked.happen(happening)
        heads = 0
        for restarts in range(2):
            heads = len(checked.heads)
            if restarts:
                world.restart()
            for _ in range(3):
                checked.tick(max(settings.deadline_s, MAX_DELAY_S))
                checked.end_training()
            assert (world.waiting, world.plan, world.closes_at_s) == (0, None, None)
            last = set(checked.heads[-1] if checked.heads else ())
            # A head stays until a device whose newer submission was lost submits again.
            assert {entry.digest.decode() for entry in world.submissions.values()} <= last
            assert len(last) == len(world.submissions) or "lost" in happenings
        assert len(checked.heads) == heads


@few
@given(st.one_of(_settings, _without_rounds), st.lists(_calm, max_size=30))
def test_restarts_change_nothing(settings: Settings, happenings: list[Happening]) -> None:
    """Verdicts, members of each round and the open round are the same with restarts and without."""
    with new_world(settings) as one, new_world(settings) as other:
        steady, restarted = Checked(one), Checked(other)
        for happening in happenings:
            steady.happen(happening, restarts=False)
            restarted.happen(happening)
        assert other.verdicts == one.verdicts
        assert (restarted.heads, other.trainings) == (steady.heads, one.trainings)
        assert other.closes_at_s == one.closes_at_s


@few
@given(_settings, st.integers(0, 3), st.lists(_submission, min_size=1, max_size=12), st.data())
def test_order_of_arrival_does_not_matter_in_a_round(
    settings: Settings, number: int, submissions: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    settings = replace(settings, rounds=number + 1, grace_s=3.0, devices=None)
    repeated = data.draw(st.lists(st.sampled_from(submissions), max_size=5))
    members = []
    for order in (submissions, data.draw(st.permutations(submissions + repeated))):
        with new_world(replace(settings, quorum=1, grace_s=0.0, min_devices=1)) as world:
            checked = Checked(world)
            for before in range(number):
                checked.submit("z", before)
                checked.end_training()
            world.store.submissions.delete("z")
            world.settings = settings
            for submission in order:
                checked.submit(*submission)
            checked.tick(settings.deadline_s)
            entries = [entry.digest.decode() for _, entry in sorted(world.submissions.items())]
            members.append((world.trainings[number:], [] if world.trainings[number:] else entries))
    assert members[0] == members[1]


@few
@given(_without_rounds, st.lists(_submission, min_size=1, max_size=12), st.data())
def test_order_of_arrival_does_not_matter_without_rounds(
    settings: Settings, submissions: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """The last head is of each device's newest submission, also with trainings in between."""
    newest: dict[str, tuple[int, int]] = {}
    for device, number, sequence in submissions:
        newest[device] = max(newest.get(device, (0, 0)), (sequence, number))
    repeated = data.draw(st.lists(st.sampled_from(submissions), max_size=5))
    with new_world(settings) as world:
        checked = Checked(world)
        for submission in data.draw(st.permutations(submissions + repeated)):
            checked.submit(*submission)
            checked.end_training()
        for _ in range(2):
            checked.tick(settings.deadline_s)
            checked.end_training()
        assert sorted(checked.heads[-1]) == sorted(
            f"{device}{number}.{sequence}" for device, (sequence, number) in newest.items()
        )
