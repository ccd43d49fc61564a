"""The heads that a device installs, refuses and reports."""

import pytest

from edge_client.core import events
from edge_client.core.state import Mode, State, head_key
from protocol.wire.canary_rank import canary_rank
from protocol.wire.codec import digest_of
from protocol.wire.messages import HeadManifest, HeadRef, Receipt
from protocol.wire.transfer import frames_of
from tests.support.simulation.fleet import item_of, reference
from tests.unit.edge_client.core.test_state_machine import (
    BACKBONE,
    EVALUATION,
    HEAD,
    HEAD_MANIFEST,
    INSTALL,
    MANIFEST,
    TASK,
    begin,
    play,
    uploading,
)


def test_a_refused_head_is_reported_and_not_installed_again() -> None:
    """The previous head stays in use until the aggregator restarts."""
    key, report = head_key(HEAD_MANIFEST.current), item_of(b"report", kind="evaluation")
    state, actions = play(uploading(), HEAD_MANIFEST, events.DownloadFinished(key, valid=True))
    assert INSTALL in actions
    state, actions = play(state, events.HeadInstalled(key, report, reason="it predicts NaN"), HEAD_MANIFEST)
    assert actions[0] == events.Log("it predicts NaN", error=True)
    assert (state.installed, state.uploads[-1].item) == (None, report)
    assert INSTALL not in actions
    assert INSTALL in play(state, events.AggregatorStarted())[1]


@pytest.mark.parametrize("blob", [BACKBONE, HEAD])
def test_wrong_frames_say_nothing_about_a_head(blob: bytes) -> None:
    """For 20 minutes only an attacker's frames arrive, without a request too, and forged starts of the aggregator.

    The device refuses nothing, reports the problem, backs off, and has the head five minutes after the attack.
    """
    digest, world = digest_of(blob), begin(Mode.SERVICE)
    world.served[digest] = b"x" * len(blob)
    first, *_ = frames_of(world.served[digest], digest=digest)
    world.tick = lambda: world.pending.extend([first, events.AggregatorStarted()])  # type: ignore[method-assign]
    while world.now_s < 1200 and world.exit is None:
        world.run(steps=1)
    appended = [each for each in world.done if isinstance(each, events.AppendBlob)]
    assert 5 < sum(each.blob.digest == digest and each.done == len(blob) for each in appended) < 12
    assert not any(isinstance(action, events.InstallHead | events.Exit) for action in world.done)
    assert world.state.refused is None
    assert "because the broker, another client on it, or the network" in world.state.download_problem
    world.served[digest] = blob
    world.tick = lambda: None  # type: ignore[method-assign]
    while world.now_s < 1501 and world.exit is None:
        world.run(steps=1)
    assert world.state.evaluated == head_key(HEAD_MANIFEST.current)
    assert world.state.download_problem == ""


def _rollout(*, below: int) -> HeadManifest:
    candidate = HeadRef(version=2, head=reference(b"candidate", "head"), devices=1, prototypes=1)
    current = HEAD_MANIFEST.current
    return HeadManifest(task=TASK, current=current, candidate=candidate, canary_rank_limit=below)


def test_only_canaries_install_the_candidate() -> None:
    """The device's rank for the candidate's version decides."""
    rank = canary_rank("device", 2)
    for below, version in ((rank + 1, 2), (rank, 1), (0, 1)):
        state, _ = play(uploading(), _rollout(below=below))
        head = state.current_head
        assert head is not None
        assert head.version == version
        assert head.head in state.required_blobs
        assert len(state.prediction_blobs) == 2


def test_a_canary_goes_back_to_the_current_head() -> None:
    """The manifest without a candidate decides."""
    stored = frozenset({digest_of(BACKBONE), digest_of(HEAD), digest_of(b"candidate")})
    state, _ = play(State(mode=Mode.SERVICE, device="device", stored=stored), events.TaskSeen(TASK, MANIFEST))
    for seen, version in ((_rollout(below=2**32), 2), (HEAD_MANIFEST, 1)):
        state, (install,) = play(state, seen)
        assert isinstance(install, events.InstallHead)
        assert (install.head.version, install.as_canary) == (version, version == 2)
        installed = events.HeadInstalled(head_key(install.head), item_of(b"report", kind="evaluation"))
        state, _ = play(state, installed)
        assert state.installed == head_key(install.head)


@pytest.mark.parametrize(("mode", "end"), [(Mode.SERVICE, []), (Mode.ONCE, [events.Exit(0)])])
def test_a_device_without_images_receives_heads(mode: Mode, end: list[events.Action]) -> None:
    """It logs this once, evaluates the head, and uploads nothing else; a dry run ends in an error."""
    none = events.SubmissionBuilt(TASK, None, reason="no image", may_pass=True, no_images=True)
    report = item_of(EVALUATION, kind="evaluation", about=head_key(HEAD_MANIFEST.current).hex())
    happened = (
        events.TaskSeen(TASK, MANIFEST), none, events.ImagesChanged(), none, HEAD_MANIFEST,
        events.HeadInstalled(head_key(HEAD_MANIFEST.current), report),
        Receipt(digest=report.digest, status="received"),
    )  # fmt: skip
    stored = frozenset({digest_of(BACKBONE), digest_of(HEAD)})
    state, actions = play(State(mode=mode, stored=stored), *happened)
    build = events.BuildSubmission(TASK, MANIFEST)
    assert actions == [build, events.Log("no image"), build, INSTALL, events.StoreReceipt(report), *end]
    assert state.evaluated == head_key(HEAD_MANIFEST.current)
    _, actions = play(State(mode=Mode.DRY_RUN, stored=stored), *happened[:2])
    assert actions == [build, events.Exit(1, "no image")]
