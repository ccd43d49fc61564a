"""A device's state as a job in this process has it, and the commit of what the job changes."""

import shutil

import msgspec

from edge_client.core.state import Kind, UploadItem
from edge_client.store.device_state import DeviceState
from edge_client.store.job_folder import LAST_SUBMISSION, Built, Result
from edge_client.store.job_state import JobState


def job_state(state: DeviceState, *, above: int = 0) -> JobState:
    """Return the state for a new job, which has the device's secret and its newest submission."""
    own = state.folder / "jobs" / "test"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    if (last := state.outbox.newest_submission()) is not None:
        state.outbox.write(last, own / LAST_SUBMISSION)
    return JobState(state.folder, own, state.snapshot(above=above), secret=state.secret())


def commit(state: DeviceState, job: JobState, *facts: msgspec.Struct) -> None:
    """Store what a job has changed, and facts."""
    state.commit(job.own, Result(outcome=Built(item=job.changes.item), changes=job.changes), *facts)
    shutil.rmtree(job.own)


def keep_item(
    state: DeviceState,
    payload: bytes,
    *facts: msgspec.Struct,
    kind: Kind = "submission",
    task: bytes = b"t" * 32,
    about: str = "",
) -> UploadItem:
    """Put an item into the outbox, and store facts with it."""
    job = job_state(state)
    item = job.leave(kind, payload, task=task, about=about)
    commit(state, job, *facts)
    return item
