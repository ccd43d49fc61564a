"""Submissions that the intake has stored, without messages."""

from dataclasses import replace

from aggregator.coordination.rounds import SubmissionVerdict
from aggregator.heads.schedule import Schedule
from aggregator.intake.accepted_submissions import AcceptedSubmissions
from aggregator.server.store_view import StoreView
from aggregator.storage.stored_values import IntakeHeads
from aggregator.storage.submissions import SubmissionRecord


def accept(training: Schedule, record: SubmissionRecord, payload: bytes) -> SubmissionVerdict:
    """Judge a submission as the intake does, and store it if it counts."""
    task, store = training._task.intake, training._store
    view = StoreView(store, task)
    view.heads = IntakeHeads(task.digest, training.state.head_version, frozenset(), frozenset())
    before = view.submission(record.device)
    verdict = view.judge(record, before)
    if verdict.verdict == "new":
        accepted = AcceptedSubmissions(task.digest, task.settings, store)
        accepted.add(replace(record, entry=verdict.counted_entry or record.entry), payload, replaced=before)
        accepted.count_unused()
        accepted.flush()
    return verdict
