"""A task, its files and messages, and the state machine of a device with them, alone or in a simulated fleet."""

import random
from typing import Any

from edge_client.agent import events
from edge_client.agent.state import Mode, State
from edge_client.agent.state_machine import step
from edge_client.agent.uploads import QUERY_BYTES
from protocol.wire.codec import digest_of
from protocol.wire.messages import HeadManifest, HeadRef, Receipt, TaskManifest
from tests.support.simulation.fleet import World, item_of, reference

BACKBONE = bytes(range(256)) * 1200
HEAD = b"head" * 50_000
SUBMISSION = b"submission" * 30_000
EVALUATION = b"evaluation"
TASK, OTHER_TASK = b"t" * 32, b"u" * 32
MANIFEST = TaskManifest(
    fleet="default", algorithm="fedtc", classes=("a", "b"), backbones=(reference(BACKBONE, "backbone"),), alpha=0.99,
    batch_size=5, min_images=2, seed=0,
)  # fmt: skip
ITEM = item_of(SUBMISSION)
QUERY = events.SendFrames(ITEM, ((len(SUBMISSION) - QUERY_BYTES, len(SUBMISSION)),))
HEAD_MANIFEST = HeadManifest(
    task=TASK, current=HeadRef(version=1, head=reference(HEAD, "head"), devices=1, prototypes=1)
)
INSTALL = events.InstallHead(TASK, MANIFEST, HEAD_MANIFEST.current)


def begin(mode: Mode = Mode.ONCE, *, loss: float = 0.0, seed: int = 0, **more: Any) -> World:
    world = World(
        State(mode=mode), random.Random(seed), loss, submission=SUBMISSION, evaluation=EVALUATION,
        served={digest_of(data): data for data in (BACKBONE, HEAD)},
        greets=[events.TaskSeen(TASK, MANIFEST), HEAD_MANIFEST], **more,
    )  # fmt: skip
    world.pending = world.connect()
    return world


def play(state: State, *happened: events.Event, now_s: float = 0) -> tuple[State, list[events.Action]]:
    """Return the state after events, one second apart, and all actions."""
    actions: list[events.Action] = []
    for seconds, event in enumerate(happened):
        state, more = step(state, event, now_s=now_s + seconds)
        actions.extend(more)
    return state, actions


def uploading(mode: Mode = Mode.SERVICE) -> State:
    state = State(mode=mode, device="device", stored=frozenset({digest_of(BACKBONE)}), connected=True)
    return play(state, events.TaskSeen(TASK, MANIFEST), events.SubmissionBuilt(TASK, ITEM))[0]


def receipt(**fields: Any) -> Receipt:
    return Receipt(**{"digest": ITEM.digest, "status": "refused", **fields})
