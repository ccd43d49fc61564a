"""An ONNX Runtime session on the CPU that runs the parts of a batch at the same time, on one thread each.

Threads that share each operator wait for one another at its end, and a large batch leaves the caches between operators.
benchmarks/reports/benchmarks.md has the figures.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_PART = 4
"""Images of a part; more were slower."""


class ConcurrentSession:
    """Runs a session of one thread in `threads` threads; all inputs and outputs have the batch as their first axis."""

    def __init__(self, session: Any, *, threads: int) -> None:
        self._session = session
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="backbone")

    def get_inputs(self) -> list[Any]:
        """Return the inputs, as `InferenceSession` does."""
        return list(self._session.get_inputs())

    def get_outputs(self) -> list[Any]:
        """Return the outputs, likewise."""
        return list(self._session.get_outputs())

    def run(
        self, names: Sequence[str], feeds: Mapping[str, NDArray[Any]], options: Any
    ) -> list[NDArray[Any]]:
        """Return the named outputs, as `InferenceSession.run` does; `options.terminate` ends all runs.

        Raises:
            Exception: that of the first part that fails, when no part runs any more.
        """
        count = min(map(len, feeds.values()))
        size = max(1, min(MAX_PART, -(-count // self._threads)))
        if count <= size:
            return list(self._session.run(names, dict(feeds), options))
        parts = [
            {name: array[start : start + size] for name, array in feeds.items()}
            for start in range(0, count, size)
        ]
        runs = [self._pool.submit(self._session.run, names, part, options) for part in parts]
        wait(runs)
        return [np.concatenate(outputs) for outputs in zip(*(run.result() for run in runs), strict=True)]
