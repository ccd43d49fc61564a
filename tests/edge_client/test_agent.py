"""The life of a device, against a simulated aggregator on a network that loses what it likes."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client import agent, events
from edge_client.agent import step
from edge_client.life import Mode, State
from protocol.codec import digest_of
from protocol.messages import HeadManifest, HeadRef, Receipt, TaskManifest
from tests.edge_client.world import World, reference

BACKBONE = bytes(range(256)) * 1200
HEAD = b"head" * 50_000
SUBMISSION = b"submission" * 30_000
EVALUATION = b"evaluation"


MANIFEST = TaskManifest(
    fleet="default",
    algorithm="fedtc",
    classes=("a", "b"),
    backbones=(reference(BACKBONE, "backbone"),),
    alpha=0.99,
    batch_size=5,
    min_images=2,
    seed=0,
)
TASK = b"t" * 32
HEAD_MANIFEST = HeadManifest(
    task=TASK,
    release=1,
    current=HeadRef(version=1, head=reference(HEAD, "head"), devices=1, prototypes=1),
)


def _begin(mode: Mode = Mode.ONCE, *, loss: float = 0.0, seed: int = 0) -> World:
    world = World(
        State(mode=mode), random.Random(seed), loss, submission=SUBMISSION, evaluation=EVALUATION,
        served={digest_of(data): data for data in (BACKBONE, HEAD)},
    )  # fmt: skip
    world.pending = [
        events.Connected(),
        events.TaskSeen(TASK, MANIFEST),
        events.HeadSeen(HEAD_MANIFEST),
    ]
    return world


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), loss=st.floats(0, 0.5))
def test_every_loss_is_made_up_for(seed: int, loss: float) -> None:
    """However many messages get lost, the device ends with its submission and evaluation counted once each."""
    world = _begin(loss=loss, seed=seed)
    world.run()
    assert world.exit == events.Exit(0)
    assert sorted(world.taken) == sorted([digest_of(SUBMISSION), digest_of(EVALUATION)])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(1, 60), max_size=6))
def test_a_cut_at_any_moment_is_resumed(seed: int, cuts: list[int]) -> None:
    """A connection that ends and comes back at any moment delays, and loses nothing."""
    world = _begin(loss=0.1, seed=seed)
    for cut in cuts:
        world.run(steps=cut)
        if world.exit is None:
            world.pending.extend([events.Disconnected(), events.Connected()])
    world.run()
    assert world.exit == events.Exit(0)
    assert sorted(world.taken) == sorted([digest_of(SUBMISSION), digest_of(EVALUATION)])


def test_nothing_is_sent_before_there_is_a_connection() -> None:
    """Without a broker the device makes its submission and keeps it."""
    state = State(mode=Mode.SERVICE, stored=frozenset({digest_of(BACKBONE)}))
    state, actions = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    assert actions == (events.Build(TASK, MANIFEST),)
    state, actions = step(state, events.Built(TASK, digest_of(SUBMISSION)), now_s=1)
    assert actions == ()
    state, actions = step(state, events.Connected(), now_s=2)
    assert actions == (events.Announce(), events.SendTail(digest_of(SUBMISSION)))


def test_a_download_goes_on_where_it_ended() -> None:
    """What is on the disk already is not asked for again."""
    world = _begin()
    world.disk[digest_of(BACKBONE)] = BACKBONE[:70_000]
    world.run()
    asked = [action for action in world.done if isinstance(action, events.Request)]
    assert asked[0] == events.Request(digest_of(BACKBONE), 70_000, len(BACKBONE) - 70_000)


def test_damaged_blob_is_fetched_again_and_then_given_up() -> None:
    """A blob that keeps arriving with another digest ends the program with a line about it."""
    state, _ = step(State(mode=Mode.SERVICE), events.TaskSeen(TASK, MANIFEST), now_s=0)
    said: list[events.Action] = []
    for _ in range(agent.MAX_BROKEN):
        state, actions = step(state, events.DownloadEnded(digest_of(BACKBONE), good=False), now_s=0)
        said.extend(actions)
    assert isinstance(said[0], events.Tell)
    assert isinstance(said[-1], events.Exit)
    assert said[-1].code == 1


def _handing_in(mode: Mode = Mode.SERVICE) -> State:
    state = State(mode=mode, stored=frozenset({digest_of(BACKBONE)}), connected=True)
    state, _ = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    state, _ = step(state, events.Built(TASK, digest_of(SUBMISSION)), now_s=0)
    return state


def test_superseded_submission_is_made_again_with_a_greater_sequence() -> None:
    """A device that lost its count is told the standing one and goes above it."""
    receipt = Receipt(digest=digest_of(SUBMISSION), status="refused", reason="superseded", sequence=41)
    _, actions = step(_handing_in(), events.ReceiptSeen(receipt), now_s=0)
    assert actions == (events.Build(TASK, MANIFEST, above=41),)


@pytest.mark.parametrize(("mode", "kind"), [(Mode.ONCE, events.Exit), (Mode.SERVICE, events.Tell)])
def test_refusal_reaches_a_person(mode: Mode, kind: type[events.Action]) -> None:
    """A submission refused for what it is ends a single run, and is told by a service that goes on."""
    receipt = Receipt(
        digest=digest_of(SUBMISSION), status="refused", reason="shape", detail="expected (m, 8)"
    )
    state, actions = step(_handing_in(mode), events.ReceiptSeen(receipt), now_s=0)
    assert isinstance(actions[0], kind)
    assert "expected (m, 8)" in str(actions[0])
    assert state.uploads == ()


def test_new_pictures_replace_what_was_not_sent_yet() -> None:
    """A newer submission takes the place of an older one that has no receipt yet."""
    state, actions = step(_handing_in(), events.PicturesChanged(), now_s=1)
    assert actions == (events.Build(TASK, MANIFEST),)
    state, actions = step(state, events.Built(TASK, b"n" * 32), now_s=2)
    assert [upload.digest for upload in state.uploads] == [b"n" * 32]
    assert actions == (events.SendTail(b"n" * 32),)


def test_new_task_ends_the_old_ones_transfers() -> None:
    """Another task means another submission, and nothing of the old one is sent any more."""
    state, actions = step(_handing_in(), events.TaskSeen(b"u" * 32, MANIFEST), now_s=1)
    assert state.uploads == ()
    assert events.Build(b"u" * 32, MANIFEST) in actions
    state, actions = step(state, events.Built(TASK, digest_of(SUBMISSION)), now_s=2)
    assert actions == ()


def test_a_refused_head_is_told_and_not_tried_again() -> None:
    """The old head stays in use, and the device does not go round in circles."""
    state = _handing_in()
    state, _ = step(state, events.HeadSeen(HEAD_MANIFEST), now_s=0)
    state, actions = step(state, events.DownloadEnded(HEAD_MANIFEST.current.head.digest, good=True), now_s=0)
    assert events.Install(TASK, MANIFEST, HEAD_MANIFEST.current) in actions
    refused = events.Installed(HEAD_MANIFEST.current.head.digest, None, reason="it predicts NaN")
    state, actions = step(state, refused, now_s=0)
    assert actions == (events.Tell("it predicts NaN", error=True),)
    _, actions = step(state, events.HeadSeen(HEAD_MANIFEST), now_s=1)
    assert actions == ()


def test_dry_run_announces_and_sends_nothing() -> None:
    """A dry run fetches what it needs, makes its submission, and exits without handing anything in."""
    world = _begin(Mode.DRY_RUN)
    world.run()
    assert world.exit == events.Exit(0)
    sent = (events.Announce, events.SendTail, events.SendRanges)
    assert not [action for action in world.done if isinstance(action, sent)]


def test_silence_is_met_with_growing_patience() -> None:
    """A device whose aggregator is away asks ever more rarely, and at once when it comes back."""
    state = _handing_in()
    asked: list[int] = []
    for second in range(1, 2000):
        state, actions = step(state, events.Drained(), now_s=second)
        asked.extend(second for action in actions if isinstance(action, events.SendTail))
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert pauses == sorted(pauses)
    assert pauses[-1] >= agent.LAST_PATIENCE_S
    _, actions = step(state, events.AggregatorStarted(), now_s=2000)
    assert [type(action) for action in actions] == [events.SendTail]


def test_a_blob_that_is_refused_is_asked_for_ever_more_rarely() -> None:
    """An aggregator that has no such blob is not asked again at once, and the person is told once."""
    state = State(mode=Mode.SERVICE, connected=True)
    state, _ = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    refusal = Receipt(digest=digest_of(BACKBONE), status="refused", reason="unknown_blob", detail="none")
    asked, told = [], 0
    state, actions = step(state, events.DownloadStarts(digest_of(BACKBONE), 0), now_s=0)
    for second in range(1, 3000):
        if any(isinstance(action, events.Request) for action in actions):
            asked.append(second)
            state, actions = step(state, events.ReceiptSeen(refusal), now_s=second)
            told += sum(isinstance(action, events.Tell) for action in actions)
        state, actions = step(state, events.Ticked(), now_s=second)
    assert told == 1
    assert 5 < len(asked) < 20


def test_an_unwanted_device_ends_and_says_so() -> None:
    """A device that the fleet does not know is told, instead of asking for ever."""
    state = State(mode=Mode.SERVICE, connected=True)
    state, _ = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    refusal = Receipt(digest=digest_of(BACKBONE), status="refused", reason="unknown_device", detail="who?")
    _, actions = step(state, events.ReceiptSeen(refusal), now_s=1)
    assert isinstance(actions[0], events.Exit)
    assert "who?" in actions[0].text


def test_a_recalled_task_is_begun_and_not_trusted_to_be_the_fleets() -> None:
    """A single run works on the task it knew, and does not end before the broker has said which task it is."""
    stored = frozenset({digest_of(BACKBONE), HEAD_MANIFEST.current.head.digest})
    done = HEAD_MANIFEST.current.head.digest
    state = State(mode=Mode.ONCE, stored=stored, installed=done, evaluated=done)
    state, actions = step(state, events.TaskSeen(TASK, MANIFEST, recalled=True), now_s=0)
    assert actions == (events.Build(TASK, MANIFEST),)
    state, _ = step(state, events.Built(TASK, digest_of(SUBMISSION), receipted=True), now_s=0)
    state, actions = step(state, events.HeadSeen(HEAD_MANIFEST), now_s=0)
    assert actions == ()
    _, actions = step(state, events.TaskSeen(b"u" * 32, MANIFEST), now_s=0)
    assert actions == (events.Build(b"u" * 32, MANIFEST),)
    _, actions = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    assert actions == (events.Exit(0),)


def test_an_aggregator_that_lost_its_state_gets_the_submission_again() -> None:
    """Whenever the aggregator starts, the device asks whether its submission stands, and sends it if not."""
    state, _ = step(
        _handing_in(), events.ReceiptSeen(Receipt(digest=digest_of(SUBMISSION), status="received")), now_s=1
    )
    assert state.uploads == ()
    state, actions = step(state, events.AggregatorStarted(), now_s=2)
    assert actions == (events.SendTail(digest_of(SUBMISSION)),)
    missing = Receipt(digest=digest_of(SUBMISSION), status="missing", missing=((0, 9),))
    _, actions = step(state, events.ReceiptSeen(missing), now_s=3)
    assert actions == (events.SendRanges(digest_of(SUBMISSION), ((0, 9),)),)
    _, actions = step(
        state, events.ReceiptSeen(Receipt(digest=digest_of(SUBMISSION), status="received")), now_s=3
    )
    assert actions == (events.KeepReceipt(digest_of(SUBMISSION), None),)
