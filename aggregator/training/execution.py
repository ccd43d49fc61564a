"""The seam of all jobs: `execute` runs a job of any kind in a workspace. An engine elsewhere has this function, too."""

import importlib
import sys

import msgspec

from aggregator.cluster_modules import ENGINES, cluster_module
from aggregator.job_processes import JobOrder
from aggregator.storage.blobs import open_blobs
from aggregator.training.jobs import (
    JOB_FILE,
    RESULT_FILE,
    Failure,
    Job,
    Kind,
    Report,
    Result,
    Workspace,
    failure_of,
)
from protocol.errors import ProtofleetError
from protocol.storage.blobstore import write_atomically


def execute(job: Job, workspace: Workspace) -> Result:
    """Run a job in this process.

    Raises:
        ProtofleetError: the job cannot be done.
    """
    result: Result = importlib.import_module(job.module).run(job, workspace)
    return result


def run_in_folder(order: JobOrder, *, report: Report) -> None:
    """Run the job of a folder, and write `result.json`; exit with status 1 if none can be written."""
    folder = order.folder
    result: Result | Failure
    try:
        job: Job = msgspec.json.decode((folder / JOB_FILE).read_bytes(), type=Kind)
        run = execute if order.engine == "local" else cluster_module(ENGINES, order.engine).execute
        workspace = Workspace(open_blobs(order.blobs), folder, report)
        try:
            result = run(job, workspace)
        except ProtofleetError as error:
            result = failure_of(job, workspace.blobs, error)
        write_atomically(folder / RESULT_FILE, msgspec.json.encode(result))
    except ProtofleetError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
