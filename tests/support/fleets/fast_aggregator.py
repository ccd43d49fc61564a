"""`aggregator` whose trainings wait instead of training an adapter, and so do not import PyTorch.

`python -m tests.support.fleets.fast_aggregator FOLDER BLOBS ENGINE` is such a training, and with two arguments the
program `serve`.
"""

import hashlib
import itertools
import sys
import time
from types import ModuleType
from typing import Any

import numpy as np

from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.server.program import ServeSettings, run
from aggregator.supervised import run_program
from aggregator.training import execution, job_processes

TRAINING_S = 4.0
"""About as long as with PyTorch."""


def main() -> None:
    """Run `aggregator`."""
    from aggregator import cli
    from aggregator.cli import programs

    programs.SERVE = __name__
    cli.main()


def _adapter(data: TrainingSet, **_: Any) -> tuple[tuple[Dense, ...], int]:
    """Return layers as large as those of `train_adapter`; other prototypes make others."""
    time.sleep(TRAINING_S)
    arrays = (data.centers, data.deviations, data.labels)
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).digest()
    random = np.random.default_rng(list(digest))
    sizes = itertools.pairwise((data.centers.shape[1], 1024, 512, data.num_classes))
    return tuple(
        Dense(random.normal(size=(outputs, inputs)).astype(np.float32), np.zeros(outputs, np.float32))
        for inputs, outputs in sizes
    ), 1


if __name__ == "__main__" and len(sys.argv) == 3:
    job_processes.PROGRAM = "tests.support.fleets.fast_aggregator"
    run_program(ServeSettings, run)
if __name__ == "__main__":
    adapter: Any = ModuleType("adapter")
    adapter.train_adapter = _adapter
    sys.modules["aggregator.algorithms.fedtc.adapter"] = adapter
    execution.main()
