"""The life of a device, against a simulated aggregator on a network that loses what it likes."""

import itertools
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.agent import events, selectors
from edge_client.agent.backoff import MAX_DAMAGED, MAX_DELAY_S
from edge_client.agent.machine import step
from edge_client.agent.state import Mode, State, head_key
from edge_client.agent.upload_item import UploadItem
from edge_client.agent.uploads import QUERY_BYTES
from protocol.wire.canary import canary_rank
from protocol.wire.codec import digest_of
from protocol.wire.messages import HeadManifest, HeadRef, Receipt, TaskManifest
from tests.support.simulated_fleet import World, item_of, reference

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
ITEM = item_of(SUBMISSION)
QUESTION = events.SendFrames(ITEM, ((len(SUBMISSION) - QUERY_BYTES, len(SUBMISSION)),))
"""The last bytes of the submission, which ask what is missing."""

HEAD_MANIFEST = HeadManifest(
    task=TASK,
    current=HeadRef(version=1, head=reference(HEAD, "head"), devices=1, prototypes=1),
)


LIMITS = (None, 2_000_000, 20_000, 3_000)
"""What brokers say of their largest packet; the last is one for a toy."""


def replace_task(manifest: TaskManifest) -> TaskManifest:
    """Another task on the same backbone."""
    return msgspec.structs.replace(manifest, seed=manifest.seed + 1)


def _begin(mode: Mode = Mode.ONCE, *, loss: float = 0.0, seed: int = 0, **more: Any) -> World:
    world = World(
        State(mode=mode), random.Random(seed), loss, submission=SUBMISSION, evaluation=EVALUATION,
        served={digest_of(data): data for data in (BACKBONE, HEAD)},
        greets=[events.TaskSeen(TASK, MANIFEST), events.HeadSeen(HEAD_MANIFEST)], **more,
    )  # fmt: skip
    world.pending = world.connect()
    return world


def _check_end(world: World) -> None:
    """The device has done what it was started for, and everything has counted once."""
    assert world.exit == events.Exit(0)
    assert sorted(world.taken) == sorted([digest_of(SUBMISSION), digest_of(EVALUATION)])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), loss=st.floats(0, 0.5))
def test_every_loss_is_made_up_for(seed: int, loss: float) -> None:
    """However many messages get lost or doubled, the device ends with its submission and evaluation counted once."""
    world = _begin(loss=loss, seed=seed)
    world.run()
    _check_end(world)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(1, 60), max_size=6),
    packets=st.lists(st.sampled_from(LIMITS), min_size=1, max_size=3),
    chunks=st.lists(st.sampled_from([61_440, 19_000, 4_321]), min_size=1, max_size=3),
    forgets=st.booleans(),
)
def test_a_cut_at_any_moment_is_resumed(
    seed: int, cuts: list[int], packets: list[int | None], chunks: list[int], *, forgets: bool
) -> None:
    """A connection that ends and comes back, to a broker that takes other sizes, delays and loses nothing."""
    world = _begin(loss=0.1, seed=seed, packets=packets, chunks=chunks)
    for cut in cuts:
        world.run(steps=cut)
        if world.exit is None:
            world.cut()
        if world.exit is None and forgets:
            world.restart_aggregator()
    world.run()
    _check_end(world)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    crashes=st.lists(st.integers(1, 40), max_size=8),
    packets=st.lists(st.sampled_from(LIMITS), min_size=1, max_size=2),
    full_until_s=st.sampled_from([0.0, 100.0, 3_000.0]),
)
def test_the_power_may_go_at_any_moment(
    seed: int, loss: float, crashes: list[int], packets: list[int | None], full_until_s: float
) -> None:
    """Between any two actions, also while the aggregator has no space: the submission counts, and once."""
    world = _begin(loss=loss, seed=seed, packets=packets, full_until_s=full_until_s, crashes=crashes)
    world.run()
    _check_end(world)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lost_after=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    crashes=st.lists(st.integers(1, 40), max_size=4),
)
def test_an_aggregator_that_lost_everything_gets_it_again(
    seed: int, lost_after: list[int], crashes: list[int]
) -> None:
    """Whenever it comes back with nothing, it has the submission in the end, and counts it once."""
    world = _begin(Mode.SERVICE, loss=0.1, seed=seed, crashes=crashes)
    for steps in lost_after:
        world.run(steps=steps)
        world.taken.clear()
        world.restart_aggregator()
    world.run(steps=4_000)
    assert world.taken.count(digest_of(SUBMISSION)) == 1
    assert world.state.uploads == ()


@pytest.mark.parametrize("number", range(1, 30))
def test_a_crash_after_each_single_action(number: int) -> None:
    """The life that nothing else happens in, cut off after each of its actions."""
    world = _begin(crashes=[number])
    world.run()
    _check_end(world)


def test_nothing_is_sent_before_there_is_a_connection() -> None:
    """Without a broker the device makes its submission and keeps it."""
    state = State(mode=Mode.SERVICE, stored=frozenset({digest_of(BACKBONE)}))
    state, actions = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    assert actions == (events.BuildSubmission(TASK, MANIFEST),)
    state, actions = step(state, events.SubmissionBuilt(TASK, ITEM), now_s=1)
    assert actions == ()
    state, actions = step(state, events.Connected(), now_s=2)
    assert actions == (events.Announce(), QUESTION)


def test_a_download_goes_on_where_it_ended() -> None:
    """What is on the disk already is not asked for again."""
    world = _begin()
    world.disk[digest_of(BACKBONE)] = BACKBONE[:70_000]
    world.run()
    asked = [action for action in world.done if isinstance(action, events.RequestBlob)]
    assert asked[0] == events.RequestBlob(digest_of(BACKBONE), 70_000, len(BACKBONE) - 70_000)


def test_damaged_blob_is_fetched_again_and_then_given_up() -> None:
    """A blob that keeps arriving with another digest ends the program with a line about it."""
    state, _ = step(State(mode=Mode.SERVICE), events.TaskSeen(TASK, MANIFEST), now_s=0)
    said: list[events.Action] = []
    for _ in range(MAX_DAMAGED):
        state, actions = step(state, events.DownloadFinished(digest_of(BACKBONE), valid=False), now_s=0)
        said.extend(actions)
    assert isinstance(said[0], events.Log)
    assert isinstance(said[-1], events.Exit)
    assert said[-1].code == 1


def _handing_in(mode: Mode = Mode.SERVICE) -> State:
    state = State(mode=mode, stored=frozenset({digest_of(BACKBONE)}), connected=True)
    state, _ = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    state, _ = step(state, events.SubmissionBuilt(TASK, ITEM), now_s=0)
    return state


def test_superseded_submission_is_made_again_with_a_greater_sequence() -> None:
    """A device that lost its count is told the standing one and goes above it."""
    receipt = Receipt(digest=digest_of(SUBMISSION), status="refused", reason="superseded", sequence=41)
    _, actions = step(_handing_in(), events.ReceiptSeen(receipt), now_s=0)
    assert actions == (events.BuildSubmission(TASK, MANIFEST, above=41),)


@pytest.mark.parametrize("sequence", [2**63 - 1, 2**63 - 2, 2**62])
def test_no_receipt_uses_up_a_devices_numbers(sequence: int) -> None:
    """Whoever says that such a one stands: a device that went above it could never upload again."""
    receipt = Receipt(
        digest=digest_of(SUBMISSION),
        status="refused",
        reason="superseded",
        sequence=sequence,
        detail="stands",
    )
    state, actions = step(_handing_in(), events.ReceiptSeen(receipt), now_s=0)
    (told,) = actions
    assert isinstance(told, events.Log)
    assert (told.error, state.uploads) == (True, ())


@pytest.mark.parametrize(("mode", "kind"), [(Mode.ONCE, events.Exit), (Mode.SERVICE, events.Log)])
def test_refusal_reaches_a_person(mode: Mode, kind: type[events.Action]) -> None:
    """A submission refused for what it is ends a single run, and is told by a service that goes on."""
    receipt = Receipt(
        digest=digest_of(SUBMISSION), status="refused", reason="shape", detail="expected (m, 8)"
    )
    state, actions = step(_handing_in(mode), events.ReceiptSeen(receipt), now_s=0)
    assert isinstance(actions[0], kind)
    assert "expected (m, 8)" in str(actions[0])
    assert state.uploads == ()


def test_new_images_replace_what_was_not_sent_yet() -> None:
    """A newer submission takes the place of an older one that has no receipt yet."""
    state, actions = step(_handing_in(), events.ImagesChanged(), now_s=1)
    assert actions == (events.BuildSubmission(TASK, MANIFEST),)
    newer = item_of(b"newer")
    state, actions = step(state, events.SubmissionBuilt(TASK, newer), now_s=2)
    assert [upload.digest for upload in state.uploads] == [newer.digest]
    assert actions == (events.SendFrames(newer, ((0, newer.size_bytes),)),)


def test_new_task_ends_the_old_ones_transfers() -> None:
    """Another task means another submission, and nothing of the old one is sent any more."""
    state, actions = step(_handing_in(), events.TaskSeen(b"u" * 32, MANIFEST), now_s=1)
    assert state.uploads == ()
    assert events.BuildSubmission(b"u" * 32, MANIFEST) in actions
    state, actions = step(state, events.SubmissionBuilt(TASK, ITEM), now_s=2)
    assert actions == ()


def _report(world: World, head: HeadRef) -> UploadItem:
    """Put why a head is refused in the outbox."""
    return world.keep("evaluation", b"report", about=head_key(head).hex())


def test_a_refused_head_is_told_and_not_tried_again() -> None:
    """The aggregator hears of it, the old head stays in use, and the device does not go round in circles."""
    state = _handing_in()
    state, _ = step(state, events.HeadSeen(HEAD_MANIFEST), now_s=0)
    state, actions = step(
        state, events.DownloadFinished(HEAD_MANIFEST.current.head.digest, valid=True), now_s=0
    )
    assert events.InstallHead(TASK, MANIFEST, HEAD_MANIFEST.current) in actions
    report = item_of(b"report", kind="evaluation")
    refused = events.HeadInstalled(HEAD_MANIFEST.current.head.digest, report, reason="it predicts NaN")
    state, actions = step(state, refused, now_s=0)
    assert actions[0] == events.Log("it predicts NaN", error=True)
    assert state.installed is None
    assert state.uploads[-1].item == report
    state, actions = step(state, events.HeadSeen(HEAD_MANIFEST), now_s=1)
    assert not [action for action in actions if isinstance(action, events.InstallHead)]
    _, actions = step(state, events.AggregatorStarted(), now_s=2)
    assert events.InstallHead(TASK, MANIFEST, HEAD_MANIFEST.current) in actions


def test_a_single_run_reports_a_refused_head_before_it_ends() -> None:
    """It ends with an error and the reason, once the aggregator knows."""
    world = _begin(loss=0.3)
    world.install = lambda install: world.pending.append(  # type: ignore[method-assign]
        events.HeadInstalled(head_key(install.head), _report(world, install.head), reason="it predicts NaN")
    )
    world.run()
    assert world.exit == events.Exit(1, "it predicts NaN")
    assert sorted(set(world.taken)) == sorted([digest_of(SUBMISSION), digest_of(b"report")])


def test_a_head_that_does_not_come_whole_is_refused() -> None:
    """The device gives it up, says so, and goes on with what it has; the next head is taken."""
    good = HeadRef(version=2, head=reference(b"good head", "head"), devices=1, prototypes=1)
    world = _begin(Mode.SERVICE)
    world.served[digest_of(HEAD)] = HEAD[:-1] + b"x"
    refused: list[events.RefuseHead] = []
    perform = world.perform

    def performed(action: events.Action) -> None:
        if isinstance(action, events.FinishBlob):
            perform(action)
            world.disk.pop(action.digest)
        elif isinstance(action, events.RefuseHead):
            refused.append(action)
            report = _report(world, action.head)
            world.pending.append(events.HeadInstalled(head_key(action.head), report, "damaged"))
        else:
            perform(action)

    world.perform = performed  # type: ignore[method-assign]
    world.run(steps=400)
    assert [action.head.version for action in refused] == [1]
    assert digest_of(b"report") in world.taken
    world.served[digest_of(b"good head")] = b"good head"
    world.pending.append(events.HeadSeen(HeadManifest(task=TASK, current=good)))
    world.run(steps=400)
    assert world.state.installed == head_key(good)
    assert (len(refused), world.exit) == (1, None)


def _rollout(*, below: int) -> HeadManifest:
    candidate = HeadRef(version=2, head=reference(b"candidate", "head"), devices=1, prototypes=1)
    return HeadManifest(
        task=TASK, current=HEAD_MANIFEST.current, candidate=candidate, canary_rank_limit=below
    )


def test_canaries_take_the_candidate_and_others_do_not() -> None:
    """Which of the two a device takes depends on its rank for the candidate's version."""
    rank = canary_rank("device", 2)
    for below, version in ((rank + 1, 2), (rank, 1), (0, 1)):
        state = replace(_handing_in(), device="device")
        state, _ = step(state, events.HeadSeen(_rollout(below=below)), now_s=0)
        head = selectors.current_head(state)
        assert head is not None
        assert head.version == version
        assert head.head in selectors.required_blobs(state)
        assert len(selectors.prediction_blobs(state)) == 2


def test_a_canary_goes_back_when_it_is_told_to() -> None:
    """The manifest goes back to the current head, and the device follows it."""
    stored = frozenset({digest_of(BACKBONE), digest_of(HEAD), digest_of(b"candidate")})
    state = State(mode=Mode.SERVICE, device="device", stored=stored)
    state, _ = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    for seen, version in ((_rollout(below=2**32), 2), (HEAD_MANIFEST, 1)):
        state, actions = step(state, events.HeadSeen(seen), now_s=0)
        (install,) = [action for action in actions if isinstance(action, events.InstallHead)]
        assert install.head.version == version
        report = item_of(b"report", kind="evaluation")
        state, _ = step(state, events.HeadInstalled(head_key(install.head), report), now_s=0)
        assert state.installed == head_key(install.head)


def test_dry_run_announces_and_sends_nothing() -> None:
    """A dry run fetches what it needs, makes its submission, and exits without handing anything in."""
    world = _begin(Mode.DRY_RUN)
    world.run()
    assert world.exit == events.Exit(0)
    sent = (events.Announce, events.SendFrames)
    assert not [action for action in world.done if isinstance(action, sent)]


def test_silence_is_met_with_growing_patience() -> None:
    """A device whose aggregator is away asks ever more rarely, and at once when it comes back."""
    state = _handing_in()
    asked: list[int] = []
    for second in range(1, 2000):
        state, actions = step(state, events.Drained(), now_s=second)
        asked.extend(second for action in actions if isinstance(action, events.SendFrames))
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert pauses == sorted(pauses)
    assert pauses[-1] >= MAX_DELAY_S
    _, actions = step(state, events.AggregatorStarted(), now_s=2000)
    assert [type(action) for action in actions] == [events.SendFrames]


def test_a_blob_that_is_refused_is_asked_for_ever_more_rarely() -> None:
    """An aggregator that has no such blob is not asked again at once, and the person is told once."""
    state = State(mode=Mode.SERVICE, connected=True)
    state, _ = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    refusal = Receipt(digest=digest_of(BACKBONE), status="refused", reason="unknown_blob", detail="none")
    asked, told = [], 0
    state, actions = step(state, events.DownloadOpened(digest_of(BACKBONE), 0), now_s=0)
    for second in range(1, 3000):
        if any(isinstance(action, events.RequestBlob) for action in actions):
            asked.append(second)
            state, actions = step(state, events.ReceiptSeen(refusal), now_s=second)
            told += sum(isinstance(action, events.Log) for action in actions)
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


def test_a_recalled_task_that_fails_is_no_reason_to_end() -> None:
    """A service whose remembered task cannot be worked on stays until it has heard whether there is a better one."""
    better = replace_task(MANIFEST)
    state = replace(State(mode=Mode.SERVICE), stored=frozenset({MANIFEST.backbones[0].digest}))
    state, _ = step(state, events.TaskSeen(TASK, MANIFEST, recalled=True), now_s=0)
    state, actions = step(state, events.SubmissionBuilt(TASK, None, reason="no such class"), now_s=1)
    assert actions == (events.Log("no such class", error=True),)
    state, actions = step(state, events.TaskSeen(b"u" * 32, better), now_s=2)
    assert events.BuildSubmission(b"u" * 32, better) in actions
    _, actions = step(state, events.SubmissionBuilt(b"u" * 32, None, reason="no such class"), now_s=3)
    assert actions == (events.Exit(1, "no such class"),)


def test_a_recalled_task_is_begun_and_not_trusted_to_be_the_fleets() -> None:
    """A single run works on the task it knew, and does not end before the broker has said which task it is."""
    stored = frozenset({digest_of(BACKBONE), HEAD_MANIFEST.current.head.digest})
    done = HEAD_MANIFEST.current.head.digest
    state = State(mode=Mode.ONCE, stored=stored, installed=done, evaluated=done)
    state, actions = step(state, events.TaskSeen(TASK, MANIFEST, recalled=True), now_s=0)
    assert actions == (events.BuildSubmission(TASK, MANIFEST),)
    state, _ = step(state, events.SubmissionBuilt(TASK, replace(ITEM, received=True)), now_s=0)
    state, actions = step(state, events.HeadSeen(HEAD_MANIFEST), now_s=0)
    assert actions == ()
    _, actions = step(state, events.TaskSeen(b"u" * 32, MANIFEST), now_s=0)
    assert actions == (events.BuildSubmission(b"u" * 32, MANIFEST),)
    _, actions = step(state, events.TaskSeen(TASK, MANIFEST), now_s=0)
    assert actions == (events.Exit(0),)


def test_what_met_no_aggregator_is_asked_again_once_it_is_back() -> None:
    """After a broker's restart a device may be there first; it does not wait for its patience to end."""
    state, actions = step(_handing_in(), events.Ticked(), now_s=1)
    assert actions == ()
    state, actions = step(state, events.AggregatorReconnected(), now_s=2)
    assert actions == (QUESTION,)
    _, actions = step(state, events.Ticked(), now_s=3)
    assert actions == ()


def test_an_aggregator_that_lost_its_state_gets_the_submission_again() -> None:
    """Whenever the aggregator starts, the device asks whether its submission stands, and sends it if not."""
    state, _ = step(
        _handing_in(), events.ReceiptSeen(Receipt(digest=digest_of(SUBMISSION), status="received")), now_s=1
    )
    assert state.uploads == ()
    state, actions = step(state, events.AggregatorStarted(), now_s=2)
    assert actions == (QUESTION,)
    missing = Receipt(digest=digest_of(SUBMISSION), status="missing", missing=((0, 9),))
    _, actions = step(state, events.ReceiptSeen(missing), now_s=3)
    assert actions == (events.SendFrames(ITEM, ((0, 9), *QUESTION.ranges)),)
    _, actions = step(
        state, events.ReceiptSeen(Receipt(digest=digest_of(SUBMISSION), status="received")), now_s=3
    )
    assert actions == (events.StoreReceipt(ITEM),)
