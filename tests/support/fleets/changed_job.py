"""The program of jobs, changed by environment variables.

One sets the limit of a graph, in seconds. With the other one, a job stops at the first checkpoint of a training.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from edge_client.graphs import onnx_model
from edge_client.job.program import main
from edge_client.kinds import round_submission
from edge_client.training.trainer import Checkpoint, TrainingHooks
from protocol.children import connect

RUN_S = "PROTOFLEET_TEST_RUN_S"
STOPS = "PROTOFLEET_TEST_STOPS_AT_CHECKPOINT"


def _hooks(*, on_checkpoint: Callable[[Checkpoint], None], **others: Any) -> TrainingHooks:
    def stop(checkpoint: Checkpoint) -> None:
        on_checkpoint(checkpoint)
        os.kill(os.getpid(), signal.SIGSTOP)

    return TrainingHooks(on_checkpoint=stop, checkpoint_s=0.0, **others)


if __name__ == "__main__":
    pipe = connect(sys.argv[1:])
    if RUN_S in os.environ:
        onnx_model.MAX_RUN_S = float(os.environ[RUN_S])
    if STOPS in os.environ:
        round_submission.TrainingHooks = _hooks  # type: ignore[assignment, attr-defined]
    main(pipe)
