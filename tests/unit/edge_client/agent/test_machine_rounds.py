"""The state machine in rounds, against a simulated aggregator that does not wait for the device."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aggregator.ingest.reassembly import Complete
from edge_client.agent import events
from edge_client.agent.downloads import BROADCAST_WAIT_S
from edge_client.agent.state import Mode, State
from edge_client.agent.state_machine import step
from protocol.wire.codec import digest_of
from protocol.wire.messages import (
    Frame,
    HeadManifest,
    HeadRef,
    Program,
    Reason,
    Receipt,
    RoundManifest,
    TaskManifest,
)
from protocol.wire.transfer import frames_of
from tests.support.simulated_fleet import World, item_of, reference

ROUNDS = 4
STALENESS = 1
TASK = b"t" * 32
GRAPHS = {name: f"the {name} graph ".encode() * 9_000 for name in ("init", "step", "project", "head")}
BACKBONE = b"backbone" * 40_000
TENSORS = tuple(bytes([number]) * 150_000 for number in range(ROUNDS + 1))
"""Of each round; the last are the last head's alone."""

MANIFEST = TaskManifest(
    fleet="default", algorithm="fedpcl", classes=("a", "b"), backbones=(reference(BACKBONE, "backbone"),), alpha=0.99,
    batch_size=5, min_images=2, seed=0,
    program=Program(
        **{name: reference(data, name) for name, data in GRAPHS.items()}, persistent=(), uploaded=(), batch_size=32
    ),
)  # fmt: skip
ITEM = item_of(b"submission", about="0")


def round_manifest(number: int) -> RoundManifest:
    tensors = reference(TENSORS[number], f"tensors-{number}")
    return RoundManifest(task=TASK, number=number, rounds=ROUNDS, epochs=1, tensors=tensors)


def head_manifest(number: int) -> HeadManifest:
    """Return the manifest of the head of a round."""
    head = HeadRef(
        version=number + 1,
        head=reference(GRAPHS["head"], "head"),
        devices=1,
        prototypes=1,
        round=number,
        tensors=reference(TENSORS[number + 1], f"tensors-{number + 1}"),
    )
    return HeadManifest(task=TASK, current=head)


@dataclass
class RoundsWorld(World):
    """A fleet whose rounds close in their own time, and a device program with one worker thread.

    Args:
        lasts_s: how long each round is open.
        joins_s: when the device connects first.
        works_s: the longest duration of a job.
        failing: rounds whose submission cannot be built, and whether a later one may succeed.
        counts: sequence of the submission that the aggregator has for a round.
        whole: tensors that arrived as a broadcast without a gap.
    """

    lasts_s: tuple[float, ...] = (60.0,) * ROUNDS
    joins_s: float = 0.0
    works_s: float = 5.0
    failing: Mapping[int, bool] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    number: int = 0
    closes_s: float = 0.0
    seen: int | None = None
    jobs: list[tuple[float, events.BuildSubmission | events.InstallHead]] = field(default_factory=list)
    sequence: int = 0
    whole: set[bytes] = field(default_factory=set)
    counted: list[int] = field(default_factory=list)
    begun: list[tuple[int, int | None]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.closes_s = self.lasts_s[0]
        self.served = {digest_of(data): data for data in (*GRAPHS.values(), BACKBONE)}
        self.served[digest_of(TENSORS[0])] = TENSORS[0]

    # The fleet.

    def tick(self) -> None:
        if self.number < ROUNDS and self.now_s >= self.closes_s:
            self.number += 1
            self.closes_s = self.now_s + self.lasts_s[min(self.number, ROUNDS - 1)]
            for data in TENSORS[max(self.number - 1, 0) : self.number + 1]:
                self.served[digest_of(data)] = data
            if self.number >= 2:
                self.served.pop(digest_of(TENSORS[self.number - 2]), None)
            if self.state.connected:
                self.announce()
        if not self.state.connected and self.now_s >= self.joins_s:
            self.packet_bytes = self.random.choice(self.packets)
            self.pending.append(events.Connected(self.packet_bytes))
            self.pending.append(events.TaskSeen(TASK, MANIFEST))
            self.announce(cast=False)
        if self.jobs and self.now_s >= self.jobs[0][0]:
            self.finish(self.jobs.pop(0)[1])

    def announce(self, *, cast: bool = True) -> None:
        self.pending.append(round_manifest(self.number))
        if cast:
            self.cast(TENSORS[self.number])
        if self.number:
            self.pending.append(head_manifest(self.number - 1))

    def cast(self, data: bytes) -> None:
        digest = digest_of(data)
        sent = list(frames_of(data, digest=digest))
        frames = [frame for frame in sent if self.arrives()]
        frames += [frame for frame in frames if not self.arrives()]
        if not self.arrives():
            self.random.shuffle(frames)
        before = {event.digest for event in self.pending if isinstance(event, Frame)}
        self.pending.extend(frames)
        asked = any(
            isinstance(action, events.RequestBlob) and action.digest == digest for action in self.done
        )
        # A gap in frames sent before, which are not processed yet, is still to be requested.
        if frames[: len(sent)] == sent and not asked and digest not in before:
            self.whole.add(digest)

    def receive(self, complete: Complete) -> Receipt:
        kind, *numbers = complete.payload.split()
        number, sequence = map(int, numbers)
        if kind == b"submission":
            reason = self.verdict(number, sequence)
            if reason is not None:
                newest = self.counts.get(number, 0)
                return Receipt(digest=complete.digest, status="refused", reason=reason, sequence=newest)
            self.counts[number] = sequence
            self.counted.append(number)
        return super().receive(complete)

    def verdict(self, number: int, sequence: int) -> Reason | None:
        if self.number >= ROUNDS or number < self.number - STALENESS:
            return "late"
        if number > self.number:
            return "unknown_round"
        return "superseded" if sequence < self.counts.get(number, 0) else None

    def restart_aggregator(self) -> None:
        super().restart_aggregator()
        started = self.pending.pop()
        if self.state.connected:
            self.pending.append(events.TaskSeen(TASK, MANIFEST))
            self.announce()
            self.pending.append(started)

    # The device program.

    def take(self, event: events.Event) -> None:
        if isinstance(event, RoundManifest):
            self.seen = event.number
        super().take(event)

    def build(self, build: events.BuildSubmission) -> None:
        assert build.round is not None
        assert all(blob.digest in self.state.stored for blob in self.state.submission_blobs)
        self.begun.append((build.round.number, self.seen))
        self.jobs.append((self.now_s + self.random.uniform(0, self.works_s), build))

    def install(self, install: events.InstallHead) -> None:
        self.jobs.append((self.now_s + self.random.uniform(0, self.works_s), install))

    def finish(self, job: events.BuildSubmission | events.InstallHead) -> None:
        if isinstance(job, events.InstallHead):
            self.evaluation = b"evaluation %d 0" % job.head.version
            super().install(job)
            return
        assert job.round is not None
        number = job.round.number
        if number != self.seen:
            return
        if number in self.failing:
            self.failed.append(number)
            may_pass = self.failing[number]
            self.pending.append(events.SubmissionBuilt(job.task, None, number, "no", may_pass=may_pass))
            return
        newest = self.newest_submission()
        if newest is None or newest.about != str(number) or job.above:
            self.sequence = max(self.sequence, job.above) + 1
            payload = b"submission %d %d".ljust(100_000) % (number, self.sequence)
            newest = self.keep("submission", payload, task=job.task, about=str(number))
        self.pending.append(events.SubmissionBuilt(job.task, newest, number))

    def cut(self) -> None:
        kept = (
            events.OutboxSeen | events.DownloadOpened | events.DownloadFinished | events.SubmissionBuilt
            | events.HeadInstalled
        )  # fmt: skip
        self.whole -= {event.digest for event in self.pending if isinstance(event, Frame)}
        self.pending = [event for event in self.pending if isinstance(event, kept)]
        self.joins_s = self.now_s + self.random.uniform(1, 60)
        self.pending.append(events.Disconnected())

    def restart(self) -> None:
        self.cut()
        was = self.state
        super().restart()
        self.pending.clear()
        self.jobs.clear()
        self.seen = None
        if was.task is not None:
            self.pending.append(events.TaskSeen(TASK, MANIFEST, recalled=True))
        if was.round is not None:
            self.pending.append(was.round)


@dataclass(frozen=True)
class Mishap:
    after: int
    kind: str


open_for_s = st.tuples(*[st.floats(1, 120)] * ROUNDS)
mishaps = st.lists(
    st.builds(Mishap, st.integers(1, 120), st.sampled_from(["cut", "restart", "restart_aggregator"])),
    max_size=6,
)


def live(world: RoundsWorld, happens: list[Mishap]) -> None:
    for mishap in happens:
        world.run(steps=mishap.after)
        if world.exit is None:
            getattr(world, mishap.kind)()
    world.run()


def begin(mode: Mode = Mode.ONCE, *, seed: int = 0, loss: float = 0.0, **more: object) -> RoundsWorld:
    return RoundsWorld(State(mode=mode), random.Random(seed), loss, **more)  # type: ignore[arg-type]


def check_laws(world: RoundsWorld) -> None:
    assert len(world.counted) == len(set(world.counted)), "one submission a round"
    assert all(number == seen for number, seen in world.begun), (
        "no work for an older round than the newest seen"
    )
    requests = {action.digest for action in world.done if isinstance(action, events.RequestBlob)}
    assert not requests & world.whole, "what came to the whole fleet was not asked for again"


@settings(max_examples=100, deadline=None)
@example(
    seed=80,
    loss=0.3,
    lasts_s=(2.0, 31.0, 2.0, 1.0),
    joins_s=0.0,
    works_s=0.0,
    happens=[Mishap(50, "cut"), Mishap(43, "restart_aggregator")],
    more={"crashes": [], "packets": [None], "full_until_s": 0.0},
)
@given(
    seed=st.integers(0, 10**6),
    loss=st.sampled_from([0.0, 0.05, 0.3, 0.5]),
    lasts_s=open_for_s,
    joins_s=st.floats(0, 300),
    works_s=st.floats(0, 100),
    happens=mishaps,
    more=st.fixed_dictionaries(
        {
            "crashes": st.lists(st.integers(1, 60), max_size=4),
            "packets": st.lists(st.sampled_from([None, 20_000, 3_000]), min_size=1, max_size=2),
            "full_until_s": st.sampled_from([0.0, 0.0, 150.0]),
        }
    ),
)
def test_a_single_run_ends_with_the_last_rounds_head(
    seed: int,
    loss: float,
    lasts_s: tuple[float, ...],
    joins_s: float,
    works_s: float,
    happens: list[Mishap],
    more: dict[str, Any],
) -> None:
    """Whatever is lost, cut, full or restarted."""
    world = begin(seed=seed, loss=loss, lasts_s=lasts_s, joins_s=joins_s, works_s=works_s, **more)
    live(world, happens)
    assert world.exit == events.Exit(0)
    assert world.state.evaluated == digest_of(TENSORS[ROUNDS])
    check_laws(world)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6), lasts_s=open_for_s, failing=st.dictionaries(st.integers(0, 3), st.just(True))
)
def test_a_service_continues_after_failed_rounds(
    seed: int, lasts_s: tuple[float, ...], failing: dict[int, bool]
) -> None:
    """It joins the other rounds, and has the last head."""
    world = begin(Mode.SERVICE, seed=seed, loss=0.1, lasts_s=lasts_s, failing=failing)
    world.run(steps=1_500)
    assert world.exit is None
    assert world.state.evaluated == digest_of(TENSORS[ROUNDS])
    assert not set(world.counted) & set(failing)
    told = [action for action in world.done if action == events.Log("no", error=True)]
    assert len(told) == len(world.failed)
    check_laws(world)


@pytest.mark.parametrize(("mode", "may_pass"), [(Mode.ONCE, True), (Mode.ONCE, False), (Mode.SERVICE, False)])
def test_a_first_failure_ends_the_program(mode: Mode, *, may_pass: bool) -> None:
    """Unless it may pass in a later round of a service."""
    world = begin(mode, failing={0: may_pass})
    world.run(steps=1_500)
    assert world.exit == events.Exit(1, "no")


def test_a_later_failure_is_logged_and_the_next_round_joined() -> None:
    """After a submission, no failure ends a service."""
    world = begin(Mode.SERVICE, failing={1: False})
    world.run(steps=1_500)
    assert (world.exit, world.counted) == (None, [0, 2, 3])
    assert events.Log("no", error=True) in world.done


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), before=st.dictionaries(st.integers(0, 3), st.integers(1, 99)))
def test_a_superseded_round_submission_is_renumbered(seed: int, before: dict[int, int]) -> None:
    """It is uploaded again for the same round."""
    world = begin(seed=seed, counts=dict(before))
    world.run()
    assert world.exit == events.Exit(0)
    assert world.counted == [0, 1, 2, 3]
    assert all(world.counts[number] >= sequence for number, sequence in before.items())


@pytest.mark.parametrize(("joins_s", "rounds"), [(150, [2, 3]), (1_000, [])])
def test_a_late_device_joins_the_open_round(joins_s: float, rounds: list[int]) -> None:
    """It does not train the rounds it missed, and after the last one installs its head only."""
    world = begin(joins_s=joins_s)
    world.run()
    assert world.exit == events.Exit(0)
    assert (world.begun, world.counted) == ([(number, number) for number in rounds], rounds)
    last = [action.head.round for action in world.done if isinstance(action, events.InstallHead)][-1]
    assert last == ROUNDS - 1


def test_a_broadcast_that_does_not_arrive_is_requested() -> None:
    """After a short wait."""
    digest, tensors = digest_of(TENSORS[1]), round_manifest(1).tensors
    state, actions = step(uploaded(), round_manifest(1), now_s=0)
    assert actions == (events.OpenDownload(tensors),)
    for event, now_s in ((events.DownloadOpened(digest, 0), 0.0), (events.Ticked(), BROADCAST_WAIT_S - 0.1)):
        state, actions = step(state, event, now_s=now_s)
        assert actions == ()
    _, actions = step(state, events.Ticked(), now_s=BROADCAST_WAIT_S)
    assert actions == (events.RequestBlob(digest, 0, len(TENSORS[1])),)


@pytest.mark.parametrize("lasts_s", [60.0, 7.0])
def test_a_dry_run_trains_once_and_sends_nothing(lasts_s: float) -> None:
    """It exits after the first round that it could have joined."""
    world = begin(Mode.DRY_RUN, lasts_s=(lasts_s,) * (ROUNDS - 1) + (60.0,))
    world.run()
    assert world.exit == events.Exit(0)
    sent = events.SendFrames | events.InstallHead
    assert not [action for action in world.done if isinstance(action, sent)]
    assert world.counted == []


def test_a_dry_run_after_the_last_round_exits_with_the_reason() -> None:
    """Nothing would be uploaded."""
    world = begin(Mode.DRY_RUN, joins_s=1_000)
    world.run()
    assert world.exit == events.Exit(1, "all rounds are over: nothing is left to upload")


def uploaded() -> State:
    """Return a single run that is uploading its submission for round 0."""
    stored = frozenset(digest_of(data) for data in (*GRAPHS.values(), BACKBONE, TENSORS[0]))
    state = State(mode=Mode.ONCE, stored=stored, connected=True)
    for event in (
        events.TaskSeen(TASK, MANIFEST),
        round_manifest(0),
        events.SubmissionBuilt(TASK, ITEM, 0),
    ):
        state, _ = step(state, event, now_s=0)
    assert [upload.item for upload in state.uploads] == [ITEM]
    return state


@pytest.mark.parametrize("reason", ["late", "unknown_round"])
def test_a_late_submission_is_dropped(reason: Reason) -> None:
    """It is logged, and the next round is awaited."""
    receipt = Receipt(digest=ITEM.digest, status="refused", reason=reason)
    state, actions = step(uploaded(), receipt, now_s=1)
    assert [type(action) for action in actions] == [events.Log]
    assert state.uploads == ()
    state = replace(state, stored=state.stored | {digest_of(TENSORS[1])})
    _, actions = step(state, round_manifest(1), now_s=2)
    assert actions == (events.BuildSubmission(TASK, MANIFEST, round_manifest(1)),)


def test_a_superseded_submission_of_an_old_round_is_not_built_again() -> None:
    """The newer round's submission is built once its tensors are stored."""
    state, _ = step(uploaded(), round_manifest(1), now_s=1)
    receipt = Receipt(digest=ITEM.digest, status="refused", reason="superseded", sequence=41)
    state, actions = step(state, receipt, now_s=1)
    assert not [action for action in actions if isinstance(action, events.BuildSubmission)]
    state, actions = step(state, events.DownloadFinished(digest_of(TENSORS[1]), valid=True), now_s=2)
    assert actions == (events.BuildSubmission(TASK, MANIFEST, round_manifest(1)),)
