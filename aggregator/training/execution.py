"""The seam of all jobs: `execute` runs a job of any kind in a workspace.

An engine elsewhere has this function, too.

`python -m aggregator.training.execution FOLDER BLOBS ENGINE PIPE` runs the job
in FOLDER/job.json: its progress goes to stdout, and `result.json` is written last. The aggregator cancels the job,
or ends it at its time limit, with a signal: only that stops native code.
"""

import contextlib
import importlib
import json
import sys
from pathlib import Path

import msgspec

from aggregator.cluster_modules import ENGINES, cluster_module
from aggregator.storage.blobs import open_blobs
from aggregator.training.jobs import RESULT_FILE, Failure, Job, Kind, Result, Workspace, failure_of
from protocol.children import end_with
from protocol.errors import ProtofleetError
from protocol.storage.blobstore import write_atomically

JOB_FILE = "job.json"

OOM_SCORE = "500"
"""Score (at most 1000) of a job: Linux kills the process with the highest one first."""


def execute(job: Job, workspace: Workspace) -> Result:
    """Run a job in this process.

    Raises:
        ProtofleetError: the job cannot be done.
    """
    result: Result = importlib.import_module(job.module).run(job, workspace)
    return result


def main() -> None:
    """Run the job of the folder on the command line.

    When memory runs out, Linux kills the job, which is repeated, rather than the aggregator or the broker.
    """
    end_with(int(sys.argv[4]))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE, encoding="ascii")
    folder, blobs, engine = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    job: Job = msgspec.json.decode((folder / JOB_FILE).read_bytes(), type=Kind)
    result: Result | Failure
    try:
        run = execute if engine == "local" else cluster_module(ENGINES, engine).execute
        workspace = Workspace(open_blobs(blobs), folder, _write_progress)
        try:
            result = run(job, workspace)
        except ProtofleetError as error:
            result = failure_of(job, workspace.blobs, error)
        write_atomically(folder / RESULT_FILE, msgspec.json.encode(result))
    except ProtofleetError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)


def _write_progress(figures: dict[str, float | str]) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
