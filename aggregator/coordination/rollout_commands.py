"""An operator's commands about heads: roll back to an earlier one, or promote the candidate. Pure."""

from dataclasses import replace

from aggregator.coordination.rollout_events import Activate, HeadCommand, RefuseCommand, Step
from aggregator.coordination.rollout_state import RETAINED_HEADS, State, activated


def commanded(state: State, command: HeadCommand) -> Step:
    """Carry out a command, or refuse it."""
    version = command.version
    if command.kind == "promote":
        if state.trial is None:
            return state, (RefuseCommand("there is no candidate to promote"),)
        if version not in (None, state.trial.version):
            return state, (RefuseCommand(f"head {version} is no longer the candidate"),)
    version = named_head(state, command)
    reason = _objection(state, command, version)
    if reason or version is None:
        return state, (RefuseCommand(reason),)
    if command.kind == "promote":
        state = replace(activated(state, version), is_watched=False)
        return state, (Activate(version, "promoted by an operator"),)
    return _rolled_back(state, version), (Activate(version, "rolled back by an operator"),)


def named_head(state: State, command: HeadCommand) -> int | None:
    """Return the head that a command is about: without a version the candidate, or the head before the current one."""
    if command.version is not None:
        return command.version
    if command.kind == "promote":
        return state.trial.version if state.trial is not None else None
    return state.earlier[-1] if state.earlier else None


def _objection(state: State, command: HeadCommand, version: int | None) -> str:
    """Return why a command cannot be carried out; empty if it can."""
    known = ", ".join(map(str, sorted(command.heads)[-10:])) or "none"
    if version is None:
        return f"no other head was current before: name one of the existing heads ({known})"
    if version not in command.heads or version > state.newest:
        return f"there is no head {version}; there are {known}"
    if version == state.current:
        return f"head {version} is current already"
    if command.kind == "rollback" and state.trial is not None and version == state.trial.version:
        return f"head {version} is the candidate: give it to all devices with `aggregator promote`"
    if not command.heads[version]:
        return f"head {version} cannot be used any more: its files were deleted"
    return ""


def _rolled_back(state: State, version: int) -> State:
    """Return the state with the candidate and the current head rejected; the next rollback goes further back."""
    rejected, reason = dict(state.rejected), f"rolled back to head {version}"
    if state.trial is not None:
        rejected[state.trial.version] = reason
    if version < state.current:
        rejected[state.current] = reason
    if version in state.earlier:
        earlier = state.earlier[: len(state.earlier) - 1 - state.earlier[::-1].index(version)]
    else:
        earlier = (*state.earlier, state.current)[-RETAINED_HEADS:]
    rejected.pop(version, None)
    return replace(state, current=version, earlier=earlier, is_watched=False, trial=None, rejected=rejected)
