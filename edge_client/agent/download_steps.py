"""The state machine's downloads: which blob, its frames, and what follows from damage or a refusal."""

from dataclasses import replace

from edge_client.agent import downloads, events
from edge_client.agent.retry_delay import BROADCAST_WAIT_S, MAX_DAMAGED, retry_delay_s
from edge_client.agent.state import Download, State, head_key
from edge_client.agent.state_queries import current_head, is_broadcast, required_blobs, submission_blobs
from protocol.wire.messages import BlobRef, Frame, Receipt

Step = tuple[State, tuple[events.Action, ...]]


def is_running(state: State, digest: bytes) -> bool:
    """Return whether a blob is being downloaded."""
    return state.download is not None and state.download.blob.digest == digest


def choose(state: State, _now_s: float) -> Step:
    """Open the first required blob that is not stored."""
    missing = next((blob for blob in required_blobs(state) if blob.digest not in state.stored), None)
    if missing is None:
        return replace(state, download=None), ()
    if is_running(state, missing.digest):
        return state, ()
    return replace(state, download=Download(missing, offset=0, due_s=float("inf"))), (
        events.OpenDownload(missing),
    )


def request_due(state: State, now_s: float) -> Step:
    """Request the next window if it is due."""
    if state.download is None or not state.connected or not downloads.is_due(state.download, now_s=now_s):
        return state, ()
    download, requests = downloads.request(state.download, now_s=now_s)
    return replace(state, download=download), requests


def opened(state: State, digest: bytes, offset: int, now_s: float) -> State:
    """Continue at the bytes on disk; a broadcast counts as requested."""
    download = state.download
    if download is None or download.blob.digest != digest:
        return state
    broadcast = is_broadcast(state, digest)
    until, delay_s = (download.blob.size_bytes, BROADCAST_WAIT_S) if broadcast else (0, 0.0)
    download = replace(download, offset=offset, ahead=(), until=until, attempts=0, due_s=now_s + delay_s)
    return replace(state, download=download)


def receive(state: State, frame: Frame, now_s: float) -> Step:
    """Take a frame, and write the bytes that are next."""
    if state.download is None:
        return state, ()
    download, data = downloads.receive(state.download, frame, now_s=now_s)
    state = replace(state, download=download)
    if not data:
        return state, ()
    is_complete = download.offset == download.blob.size_bytes
    return state, (
        events.AppendBlob(frame.digest, data),
        *((events.FinishBlob(frame.digest),) if is_complete else ()),
    )


def finished(state: State, event: events.DownloadFinished, now_s: float) -> Step:
    """Take a verified blob; download a damaged one again, at most `MAX_DAMAGED` times."""
    if event.valid:
        return replace(state, stored=state.stored | {event.digest}), ()
    if state.download is None or state.download.blob.digest != event.digest:
        return state, ()
    damaged, blob = state.download.damaged + 1, state.download.blob
    state = replace(state, download=Download(blob, offset=0, damaged=damaged, due_s=now_s))
    if damaged < MAX_DAMAGED:
        return state, (events.Log(f"{blob.name} arrived damaged, downloading it again", error=True),)
    return _give_up(state, blob, f"{blob.name} arrived damaged {damaged} times: check the aggregator's state")


def refused(state: State, receipt: Receipt, now_s: float) -> Step:
    """Request again later: the aggregator may announce other blobs; exit if it does not know this device."""
    download = state.download
    if download is None:
        return state, ()
    attempts = download.attempts + 1
    # `until` marks it as in flight, so that it is not requested before it is due.
    until, due_s = download.blob.size_bytes, now_s + retry_delay_s(attempts)
    state = replace(state, download=replace(download, until=until, attempts=attempts, due_s=due_s))
    text = f"the aggregator refused to send {download.blob.name} ({receipt.reason}): {receipt.detail}"
    if receipt.reason in {"unknown_device", "revoked"}:
        return state, (events.Exit(1, text),)
    return state, (events.Log(text, error=True),) if attempts == 1 else ()


def _give_up(state: State, blob: BlobRef, text: str) -> Step:
    """Refuse a head that always arrives damaged; exit if it is any other blob."""
    head, task, manifest = current_head(state), state.task, state.manifest
    if head is None or task is None or manifest is None or blob in submission_blobs(state):
        return state, (events.Exit(1, text),)
    key, reason = head_key(head), f"head {head.version} refused, the previous head stays in use: {text}"
    state = replace(state, download=None, installing=key, refused=(key, reason))
    return state, (events.RefuseHead(task, manifest, head, text),)
