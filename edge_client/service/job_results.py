"""The results of jobs, committed to the device's state in one transaction, and the events that follow."""

import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from edge_client.core import events
from edge_client.core.state import MAX_DAMAGED, MissingSpace
from edge_client.core.state import Job as Name
from edge_client.service.build_report import BuildReporter
from edge_client.service.job_processes import Wanted, log_line
from edge_client.service.suspects import Suspects
from edge_client.store.device_state import DeviceState
from edge_client.store.disk_space import DiskAlmostFull
from edge_client.store.job_folder import RESULT_FILE, Built, Installed, Problem, Result, Shown
from edge_client.store.stored_values import SubmissionReport
from protocol.errors import StateError
from protocol.log import event
from protocol.storage.blobstore import state_errors

log = logging.getLogger(__name__)

ShowDryRun = Callable[[Shown], None]
"""Takes what a dry run would upload."""


class JobResults:
    """Takes results over: in a dry run, `show` takes what would be uploaded, and nothing is stored."""

    def __init__(
        self, data: Path, store: DeviceState, suspects: Suspects, *, show: ShowDryRun | None
    ) -> None:
        self._store, self._suspects, self._show = store, suspects, show
        self._reporter = BuildReporter(data)
        self._lost: Counter[bytes] = Counter()

    def take(self, job: Wanted, folder: Path) -> events.Event:
        """Commit the result in a job's folder.

        Raises:
            MsgspecError: it is malformed.
            StateError: neither blobs nor space help, or the disk fails.
        """
        with state_errors(folder):
            data = (folder / RESULT_FILE).read_bytes()
        result, action = msgspec.json.decode(data, type=Result), job.action
        outcome = result.outcome
        if isinstance(outcome, Problem):
            return self.failed(outcome, job.name)
        try:
            if isinstance(outcome, Built) and isinstance(action, events.BuildSubmission):
                self._store_built(action, folder, result, outcome)
                return events.SubmissionBuilt(
                    action.task,
                    outcome.item,
                    None if action.round is None else action.round.number,
                    outcome.reason,
                    may_pass=outcome.may_pass,
                    no_images=outcome.no_images,
                    retries=outcome.retries,
                )
            if isinstance(outcome, Installed) and self._show is None:
                self._store.commit(folder, result)
                log_line(result.line)
                return events.HeadInstalled(outcome.head, outcome.report, outcome.reason)
        except DiskAlmostFull as error:
            return events.SpaceMissing(error.missing, job.name)
        raise StateError("a job left the result of another one")

    def failed(self, problem: Problem, name: Name) -> events.BlobsMissing | events.SpaceMissing:
        """Return the event that a job is repeated with a blob or with space; raises StateError if neither helps."""
        if problem.space:
            space = MissingSpace(Path(os.fsdecode(problem.folder)), problem.space, problem.text)
            return events.SpaceMissing(space, name)
        if not problem.lost:
            raise StateError(problem.text)
        self._lost[problem.lost] += 1
        if self._lost[problem.lost] > MAX_DAMAGED:
            raise StateError(problem.text)
        text = "blob missing or damaged on disk, downloaded or made again: check the disk"
        event(log, logging.ERROR, text, error=problem.text)
        self._store.blobs.is_whole(problem.lost)  # deletes a damaged one
        return events.BlobsMissing(frozenset({problem.lost}), name)

    def _store_built(
        self, action: events.BuildSubmission, folder: Path, result: Result, built: Built
    ) -> None:
        store = self._store
        report = self._reporter.report(
            built,
            task=action.task,
            manifest=action.manifest,
            last=store.outbox.newest_submission(),
            before=store.get(SubmissionReport),
        )
        if self._show is not None:
            if result.shown is not None:
                self._show(result.shown)
            return
        store.commit(folder, result, *filter(None, [report]))
        if report is not None:
            self._suspects.clear()
        log_line(result.line)
