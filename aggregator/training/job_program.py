"""The program of a job: `job.json` in its folder says what it computes, and `result.json` is written last.

Its progress goes to the pipe of its service, and its standard error to `training.log`.
"""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from aggregator.job_processes import JobOrder
from protocol.children import connect

LOG_FILE = "training.log"

OOM_SCORE = 500
"""Of at most 1000: Linux kills the process with the highest one first, a job before the aggregator or the broker."""


def main() -> None:
    """Run the job that the service names."""
    pipe = connect(sys.argv[1:], oom_score=OOM_SCORE)
    # Spinning threads made training 11 times slower beside other programs. OpenMP reads it when numpy is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    order = msgspec.msgpack.decode(pipe.recv_bytes(), type=JobOrder, dec_hook=_path)
    with (order.folder / LOG_FILE).open("wb") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    from aggregator.training.execution import run_in_folder

    run_in_folder(order, report=lambda figures: pipe.send_bytes(msgspec.msgpack.encode(figures)))


def _path(_kind: type, text: Any) -> Path:
    return Path(text)


if __name__ == "__main__":
    main()
