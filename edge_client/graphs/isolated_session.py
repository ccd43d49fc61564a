"""An ONNX Runtime session that has a process of its own for each run, in which no image has been before.

Operators of ONNX Runtime may leave a part of their output as they found the memory (three did in 1.31, for tensors
without values), and a graph can compute with what is there: images and keys, in a program that handles them.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edge_client.graphs.forked_runs import ForkedRuns, packed, serve, unpacked
from edge_client.graphs.session import open_session


class IsolatedSession(ForkedRuns):
    """Runs a graph that was validated, on the CPU; `file` is its path or its bytes."""

    def __init__(self, file: Path | bytes) -> None:
        super().__init__(__name__, file)

    def run(
        self, names: Sequence[str], feeds: Mapping[str, NDArray[Any]], options: Any
    ) -> list[NDArray[Any]]:
        """Return the named outputs, as `InferenceSession.run` does; options and errors as for `answer`."""
        return unpacked(self.answer((list(names), dict(feeds)), options))


def _load(file: Path | bytes) -> Callable[[Any], bytes]:
    # A fork has no other thread; denormal numbers take longer, and time would reveal images.
    session, _, _ = open_session(file, provider="cpu", threads=1, flush_denormals=True)
    return lambda request: packed(session.run(*request))


if __name__ == "__main__":
    serve(int(sys.argv[1]), _load)
