"""Steps of a rollout, as the running aggregator takes them, and a command without one."""

import logging
from collections.abc import Mapping

from aggregator.coordination import canary_rollout, rollout_state
from aggregator.coordination.rollout_state import without_forgotten
from aggregator.notices import HeadActivated, HeadRejected
from aggregator.storage.heads import CALIBRATED_FROM, HeadRecord
from aggregator.storage.store import Store
from protocol.log import event, notify

log = logging.getLogger(__name__)


def with_made_heads(
    state: rollout_state.State,
    heads: Mapping[int, HeadRecord],
    *,
    now_s: float,
    settings: rollout_state.Settings,
) -> rollout_state.Step:
    """Add the heads to a rollout that were made since the last decision, and return what follows."""
    actions: tuple[rollout_state.Action, ...] = ()
    for version, head in sorted(heads.items()):
        if version > state.newest:
            calibrates = int(head.metrics.get(CALIBRATED_FROM, 0))
            added = rollout_state.HeadAdded(version, now_s, calibrates=calibrates)
            state, done = canary_rollout.step(state, added, settings=settings)
            state = without_forgotten(state, state.forgotten)
            actions += done
    return state, actions


def log_action(store: Store, state: rollout_state.State, action: rollout_state.Action) -> None:
    """Log what follows from a decision, with the rollout after it."""
    match action:
        case rollout_state.Activate(version=version, reason=reason):
            path = store.folder / "head.onnx"
            event(log, logging.INFO, "head activated", version=version, reason=reason or None, file=path)
            notify(HeadActivated(version=version, reason=reason))
        case rollout_state.OfferToCanaries(trial=trial):
            devices = ",".join(trial.awaited[:10])
            event(log, logging.INFO, "head offered to canaries", version=trial.version, devices=devices)
        case rollout_state.Reject(version=version, reason=reason):
            current = state.current
            event(log, logging.WARNING, "head rejected", version=version, current=current, reason=reason)
            notify(HeadRejected(version=version, reason=reason))
