"""Selectors: the head, round and blobs that a device's state calls for."""

from edge_client.agent.state import Mode, State, head_key
from protocol.wire.canary_rank import canary_rank
from protocol.wire.messages import BlobRef, HeadRef, RoundManifest


def current_head(state: State) -> HeadRef | None:
    """Return the head that this device is to use: the candidate if it is a canary."""
    seen = state.head
    if seen is None or seen.task != state.task:
        return None
    if (
        seen.candidate is not None
        and canary_rank(state.device, seen.candidate.version) < seen.canary_rank_limit
    ):
        return seen.candidate
    return seen.current


def is_canary(state: State) -> bool:
    """Return whether the head that this device is to use is a candidate."""
    head = current_head(state)
    return head is not None and state.head is not None and head == state.head.candidate


def is_refused(state: State, head: HeadRef) -> bool:
    """Return whether this device has refused a head."""
    return state.refused is not None and state.refused[0] == head_key(head)


def current_round(state: State) -> RoundManifest | None:
    """Return the current task's round, also after the last one."""
    if state.round is None or state.manifest is None or state.manifest.program is None:
        return None
    return state.round if state.round.task == state.task else None


def open_round(state: State) -> RoundManifest | None:
    """Return the current task's round if its rounds are not over."""
    seen = current_round(state)
    return seen if seen is not None and seen.number < seen.rounds else None


def are_rounds_over(state: State) -> bool:
    """Return whether the current task has rounds and all of them are over."""
    seen = current_round(state)
    return seen is not None and seen.number >= seen.rounds


def submission_blobs(state: State) -> tuple[BlobRef, ...]:
    """Return the blobs for building a submission, broadcast ones first.

    They include the program's head, so that a head can be installed as soon as its round is over.
    """
    if state.manifest is None:
        return ()
    program, seen = state.manifest.program, current_round(state)
    graphs = (program.init, program.step, program.project, program.head) if program else ()
    return (*((seen.tensors,) if seen else ()), *state.manifest.backbones, *graphs)


def prediction_blobs(state: State) -> tuple[BlobRef, ...]:
    """Return the blobs for running the head that is to be used; none if it was refused."""
    head = current_head(state)
    if head is None or state.manifest is None or state.mode is Mode.DRY_RUN or is_refused(state, head):
        return ()
    program = state.manifest.program
    graphs = (program.init,) if program else ()
    return (*state.manifest.backbones, *graphs, head.head, *((head.tensors,) if head.tensors else ()))


def required_blobs(state: State) -> tuple[BlobRef, ...]:
    """Return every blob that the current task, its round and its newest head need, most urgent first."""
    return (*submission_blobs(state), *prediction_blobs(state))


def can_build(state: State) -> bool:
    """Return whether every blob for the next submission is stored."""
    if state.manifest is None or (state.manifest.program is not None and current_round(state) is None):
        return False
    return all(blob.digest in state.stored for blob in submission_blobs(state))


def is_broadcast(state: State, digest: bytes) -> bool:
    """Return whether a blob is sent to the whole fleet."""
    seen, head = current_round(state), current_head(state)
    tensors = (seen.tensors if seen else None, head.tensors if head else None)
    return any(blob is not None and blob.digest == digest for blob in tensors)
