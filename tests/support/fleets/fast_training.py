"""A job that waits instead of training an adapter, and so does not import PyTorch."""

import hashlib
import itertools
import sys
import time
from types import ModuleType
from typing import Any

import numpy as np

from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.training import job_program

TRAINING_S = 4.0
"""About as long as with PyTorch."""


def _adapter(data: TrainingSet, **_: Any) -> tuple[tuple[Dense, ...], int]:
    """Return layers with the shapes that `train_adapter` makes; other prototypes make other values."""
    time.sleep(TRAINING_S)
    arrays = (data.centers, data.deviations, data.labels)
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).digest()
    random = np.random.default_rng(list(digest))
    sizes = itertools.pairwise((data.centers.shape[1], 1024, 512, data.num_classes))
    return tuple(
        Dense(random.normal(size=(outputs, inputs)).astype(np.float32), np.zeros(outputs, np.float32))
        for inputs, outputs in sizes
    ), 1


if __name__ == "__main__":
    adapter: Any = ModuleType("adapter")
    adapter.train_adapter = _adapter
    sys.modules["aggregator.algorithms.fedtc.adapter"] = adapter
    job_program.main()
