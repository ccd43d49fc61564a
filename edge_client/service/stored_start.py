"""The state with which the device program starts: the stored one, without what the owner's limits now forbid."""

from functools import partial

from edge_client.config import Settings
from edge_client.core.state import Mode, State, StoredState, UploadItem
from edge_client.privacy.charges import is_within_limits, requires_privacy
from edge_client.privacy.policy import may_upload
from edge_client.store.device_state import DeviceState
from protocol.errors import MalformedMessage, StateError
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_MANIFEST_BYTES, TaskManifest


def stored_state(settings: Settings, store: DeviceState) -> State:
    """Return the state at the start; a head without an evaluation is installed again."""
    kept, reason = store.get(StoredState), ""
    if settings.mode is not Mode.DRY_RUN:
        _, reason = store.leave_failed_heads()
        store.outbox.drop_damaged()
        if requires_privacy(settings, store.ledger):
            drop_forbidden(store, settings)
    head, evaluated = store.heads_in_use().installed, kept.evaluated
    key = head.key if head else None
    reported = {evaluated, *(item.head for item in store.outbox.items())}
    return State(
        mode=settings.mode,
        device=settings.device_id,
        stored=frozenset(store.blobs.digests()),
        installed=key if key in reported else None,
        evaluated=key if key == evaluated else None,
        stored_task=kept.task,
        stored_round=kept.round,
        stored_build_problem=kept.problems.get("build", ""),
        head_problem=reason or kept.problems.get("head", ""),
    )


def _is_masked_for(store: DeviceState, item: UploadItem, second_operator: bytes | None) -> bool:
    """Return whether a submission's task has the second operator that the owner has named, or no one was named."""
    if item.kind != "submission" or second_operator is None:
        return True
    try:
        data = store.blobs.read(item.task)
        manifest = decode(data, TaskManifest, max_bytes=MAX_MANIFEST_BYTES)
    except (StateError, MalformedMessage):
        return False
    operator = manifest.second_operator
    return operator is not None and operator.sign_key == second_operator


def drop_forbidden(store: DeviceState, settings: Settings) -> None:
    """Delete what an earlier start has built, and the owner's limits of this start do not allow."""
    is_within = partial(is_within_limits, settings=settings, ledger=store.ledger)
    forbidden = [
        item
        for item in store.outbox.items()
        if not may_upload(store.outbox.payload(item) or b"", item.kind, is_within=is_within)
        or not _is_masked_for(store, item, settings.second_operator)
    ]
    text = "deleted items from the outbox that the owner's privacy limits do not allow to be uploaded"
    store.outbox.drop(forbidden, log_as=text)
