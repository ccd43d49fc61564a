"""Submissions that the intake has stored, without messages."""

from dataclasses import replace

from aggregator.coordination.round_state import Entry
from aggregator.coordination.rounds import SubmissionVerdict
from aggregator.heads.schedule import Schedule
from aggregator.intake.accepted_submissions import AcceptedSubmissions
from aggregator.server.store_view import IntakeHeads, StoreView
from aggregator.storage.submissions import SubmissionRecord
from protocol.wire.codec import digest_of, encode
from tests.support.messages.submissions import round_submission


def submit(training: Schedule, device: str, *, number: int = 0, sequence: int = 1) -> SubmissionVerdict:
    """Let a device submit to a round."""
    shapes, task = training._task.expectation.tensors, training._task.digest
    payload = encode(
        round_submission(task=task, number=number, sequence=sequence, shapes=shapes, seed=ord(device))
    )
    entry = Entry(sequence, digest_of(payload), training._store.clock.now_s(), number)
    return accept(training, SubmissionRecord(device, entry, len(payload), 10, 2, {0: 1, 2: 1}), payload)


def accept(training: Schedule, record: SubmissionRecord, payload: bytes) -> SubmissionVerdict:
    """Judge a submission as the intake does, and store it if it counts."""
    task, store = training._task, training._store
    view = StoreView(store, task)
    view.heads = IntakeHeads(training.version)
    before = view.submission(record.device)
    verdict = view.judge(record, before)
    if verdict.verdict == "new":
        accepted = AcceptedSubmissions(task.digest, task.file.settings, store)
        accepted.add(replace(record, entry=verdict.counted_entry or record.entry), payload)
        accepted.flush()
    return verdict


def retry(training: Schedule) -> None:
    """Let the delay after a failed training pass."""
    plan = training.plan
    assert plan is not None
    training._store.heads.put(replace(plan, retry_s=0.0))
