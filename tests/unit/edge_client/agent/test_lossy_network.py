"""The state machine against a simulated aggregator and a lossy network."""

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.agent import events
from edge_client.agent.state import Mode
from protocol.wire.codec import digest_of
from tests.support.simulation.fleet import World
from tests.unit.edge_client.agent.device_events import BACKBONE, EVALUATION, SUBMISSION, begin

LIMITS = (None, 2_000_000, 20_000, 3_000)
"""Packet limits of brokers."""


def _check_end(world: World) -> None:
    """Check that the device exited with its submission and evaluation received once."""
    assert world.exit == events.Exit(0)
    assert sorted(world.taken) == sorted([digest_of(SUBMISSION), digest_of(EVALUATION)])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(1, 60), max_size=6),
    packets=st.lists(st.sampled_from(LIMITS), min_size=1, max_size=3),
    chunks=st.lists(st.sampled_from([61_440, 19_000, 4_321]), min_size=1, max_size=3),
    forgets=st.booleans(),
)
def test_transfers_resume_after_a_reconnect(
    seed: int, cuts: list[int], packets: list[int | None], chunks: list[int], *, forgets: bool
) -> None:
    """The new broker may have another packet limit, and the aggregator may have restarted."""
    world = begin(loss=0.1, seed=seed, packets=packets, chunks=chunks)
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
    loss=st.sampled_from([0.0, 0.1, 0.5]),
    crashes=st.lists(st.integers(1, 40), max_size=8),
    packets=st.lists(st.sampled_from(LIMITS), min_size=1, max_size=2),
    full_until_s=st.sampled_from([0.0, 100.0, 3_000.0]),
)
def test_message_loss_and_power_loss_at_any_action_are_recovered(
    seed: int, loss: float, crashes: list[int], packets: list[int | None], full_until_s: float
) -> None:
    """Also while the aggregator has no space; the submission and the evaluation count once."""
    world = begin(loss=loss, seed=seed, packets=packets, full_until_s=full_until_s, crashes=crashes)
    world.run()
    _check_end(world)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lost_after=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    crashes=st.lists(st.integers(1, 40), max_size=4),
)
def test_an_aggregator_without_state_receives_the_submission_again(
    seed: int, lost_after: list[int], crashes: list[int]
) -> None:
    world = begin(Mode.SERVICE, loss=0.1, seed=seed, crashes=crashes)
    for steps in lost_after:
        world.run(steps=steps)
        world.taken.clear()
        world.restart_aggregator()
    world.run(steps=4_000)
    assert world.taken.count(digest_of(SUBMISSION)) == 1
    assert world.state.uploads == ()


def test_a_download_resumes_at_the_bytes_on_disk() -> None:
    world = begin()
    world.disk[digest_of(BACKBONE)] = BACKBONE[:70_000]
    world.run()
    asked = [action for action in world.done if isinstance(action, events.RequestBlob)]
    assert asked[0] == events.RequestBlob(digest_of(BACKBONE), 70_000, len(BACKBONE) - 70_000)
