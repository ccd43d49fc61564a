"""`edge-client` with short limits: a checkpoint every 0.2 s instead of 30 s, 4 s a graph instead of 120 s.

An environment variable sets another limit of a graph.
"""

import functools
import os

from edge_client import cli
from edge_client.runtime import onnx_model
from edge_client.submission import round_submission
from edge_client.training.trainer import TrainingHooks

RUN_S = "PROTOFLEET_TEST_RUN_S"


def main() -> None:
    """Run `edge-client`."""
    onnx_model.MAX_RUN_S = float(os.environ.get(RUN_S, "4"))
    round_submission.TrainingHooks = functools.partial(TrainingHooks, checkpoint_s=0.2)  # type: ignore[assignment, attr-defined]
    cli.main()


if __name__ == "__main__":
    main()
