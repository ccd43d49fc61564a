"""What a device's state calls for: which head, round and blobs its next decisions are about. Pure."""

from edge_client.agent.state import Mode, State, head_key
from protocol.wire.canary import canary_rank
from protocol.wire.messages import BlobRef, HeadRef, RoundManifest


def current_head(state: State) -> HeadRef | None:
    """The head that this device is to use: a canary's is the candidate, where there is one."""
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
    """Whether the head that this device is to use is a candidate."""
    head = current_head(state)
    return head is not None and state.head is not None and head == state.head.candidate


def is_refused(state: State, head: HeadRef) -> bool:
    """Whether this device has refused a head."""
    return state.refused is not None and state.refused[0] == head_key(head)


def current_round(state: State) -> RoundManifest | None:
    """The current task's round, also once all of them are over."""
    if state.round is None or state.manifest is None or state.manifest.program is None:
        return None
    return state.round if state.round.task == state.task else None


def open_round(state: State) -> RoundManifest | None:
    """The current task's round, if it has rounds that are not over."""
    seen = current_round(state)
    return seen if seen is not None and seen.number < seen.rounds else None


def needed_to_work(state: State) -> tuple[BlobRef, ...]:
    """What a submission is made with; first what is on its way to the whole fleet.

    The program's head is among it, so that a head can be taken into use as soon as its round is over.
    """
    if state.manifest is None:
        return ()
    program, seen = state.manifest.program, current_round(state)
    graphs = (program.init, program.step, program.project, program.head) if program else ()
    return (*((seen.tensors,) if seen else ()), *state.manifest.backbones, *graphs)


def needed_to_predict(state: State) -> tuple[BlobRef, ...]:
    """What the head that is to be used is run with; nothing if it was refused."""
    head = current_head(state)
    if head is None or state.manifest is None or state.mode is Mode.DRY_RUN or is_refused(state, head):
        return ()
    program = state.manifest.program
    graphs = (program.init,) if program else ()
    return (*state.manifest.backbones, *graphs, head.head, *((head.tensors,) if head.tensors else ()))


def needed(state: State) -> tuple[BlobRef, ...]:
    """Every blob that the current task, its round and its newest head are worked with; in order of urgency."""
    return (*needed_to_work(state), *needed_to_predict(state))


def can_work(state: State) -> bool:
    """Whether all is there that the next submission is made with, or there is none to make any more."""
    if state.manifest is None or (state.manifest.program is not None and current_round(state) is None):
        return False
    return all(blob.digest in state.stored for blob in needed_to_work(state))


def is_cast(state: State, digest: bytes) -> bool:
    """Whether a blob is sent to the whole fleet."""
    seen, head = current_round(state), current_head(state)
    tensors = (seen.tensors if seen else None, head.tensors if head else None)
    return any(blob is not None and blob.digest == digest for blob in tensors)


def is_over(state: State) -> bool:
    """Whether the current task has rounds, and all of them are over."""
    seen = current_round(state)
    return seen is not None and seen.number >= seen.rounds
