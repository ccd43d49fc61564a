"""The actor of a job on a machine of a Ray cluster.

This module imports no numpy: OpenBLAS reads OMP_NUM_THREADS when numpy is imported, and Ray has set it to 1.
"""

import os
from collections.abc import Mapping
from typing import Any

from protocol import __version__
from protocol.errors import ProtofleetError


class JobActor:
    """Has a `ray_worker.Worker` once the variables are set."""

    def begin(self, version: str, variables: Mapping[str, str | None]) -> None:
        """Make the worker; raises ProtofleetError if this machine has another version of protofleet."""
        require_version(version)
        for name, value in variables.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        from aggregator.cluster.ray_worker import Worker

        self._worker = Worker()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*arguments)


def require_version(version: str) -> None:
    """Raise ProtofleetError unless this process, a worker of the cluster, runs the given version of protofleet."""
    if version != __version__:
        raise ProtofleetError(
            f"a Ray worker has protofleet {__version__}, expected {version}: install the same version on each machine"
        )
