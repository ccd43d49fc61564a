"""The program of jobs with short limits: a checkpoint every 0.2 s instead of 30 s, 4 s a graph instead of 120 s.

An environment variable sets another limit of a graph.
"""

import functools
import os
import sys

from edge_client.graphs import onnx_model
from edge_client.job.program import main
from edge_client.kinds import round_submission
from edge_client.training.trainer import TrainingHooks
from protocol.children import connect

RUN_S = "PROTOFLEET_TEST_RUN_S"

if __name__ == "__main__":
    pipe = connect(sys.argv[1:])
    onnx_model.MAX_RUN_S = float(os.environ.get(RUN_S, "4"))
    round_submission.TrainingHooks = functools.partial(TrainingHooks, checkpoint_s=0.2)  # type: ignore[assignment, attr-defined]
    main(pipe)
